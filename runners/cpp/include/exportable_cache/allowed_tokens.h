// Constrained generation: a callback through which the caller's grammar or JSON schema library limits the next token.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include <exportable_cache/result.h>

namespace exportable_cache {

/// Called once before each choice, with the tokens chosen so far, without the prompt, and a mask of zeros: sets bit b of word w if
/// token 32 w + b is allowed. The mask has the format of llguidance and XGrammar. Returns false if the response is complete, which
/// ends the generation; an error makes it fail.
using AllowTokens = std::function<Result<bool>(std::span<const int64_t> tokens, std::span<uint32_t> mask)>;

}  // namespace exportable_cache
