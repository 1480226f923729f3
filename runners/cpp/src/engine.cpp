#include "engine.h"

#include <executorch/runtime/core/error.h>

namespace exportable_cache {

std::string describe(executorch::runtime::Error error) {
  std::ostringstream text;
  text << executorch::runtime::to_string(error) << " (0x" << std::hex << static_cast<uint32_t>(error) << ")";
  return text.str();
}

Error no_such_method(const std::string& path, const std::string& method, const std::vector<std::string>& found) {
  std::string names;
  for (const std::string& name : found) names += (names.empty() ? "" : ", ") + name;
  return fail(ErrorCode::kBundle, path, " has no method '", method, "' but ", names.empty() ? "none" : names,
              "; it is not the program of this manifest: copy the bundle again");
}

Error cannot_load(const std::string& what, executorch::runtime::Error error) {
  return fail(ErrorCode::kBundle, "ExecuTorch cannot load ", what, ": ", describe(error),
              "; link the kernels and backends it was exported for, or export the model again");
}

}  // namespace exportable_cache
