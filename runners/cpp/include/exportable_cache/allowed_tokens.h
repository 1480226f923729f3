// A say in what comes next: how a grammar or a JSON schema, which whoever calls follows by a library of theirs, binds an answer.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include <exportable_cache/result.h>

namespace exportable_cache {

/// Called once before each choice, with the tokens chosen so far, the prompt not among them, and a mask of zeros: sets bit b of word
/// w where token 32 w + b may come next. This is the mask of llguidance and XGrammar. False where the answer is whole, which ends
/// the generation; an error fails it.
using AllowTokens = std::function<Result<bool>(std::span<const int64_t> tokens, std::span<uint32_t> mask)>;

}  // namespace exportable_cache
