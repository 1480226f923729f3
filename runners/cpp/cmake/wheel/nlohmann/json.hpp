// A declaration for the headers of the pytorch-tokenizers wheel, which name this type and do not come with it. Its functions that
// take one are called inside its library only.
#pragma once

namespace nlohmann {
class json;
}  // namespace nlohmann
