#include "token_mask.h"

#include <algorithm>

namespace exportable_cache {

TokenMask::TokenMask(const AllowTokens& allow, size_t vocabulary)
    : allow_(allow), vocabulary_(vocabulary), words_(allow ? (vocabulary + 31) / 32 : 0) {}

Result<bool> TokenMask::ask(std::span<const int64_t> tokens) {
  if (!allow_) return true;
  std::fill(words_.begin(), words_.end(), 0);
  const Result<bool> goes_on = allow_(tokens, words_);
  if (!goes_on.ok() || !*goes_on) return goes_on;
  // Bits past the vocabulary are cleared.
  if (vocabulary_ % 32 != 0) words_.back() &= (uint32_t{1} << vocabulary_ % 32) - 1;
  if (std::any_of(words_.begin(), words_.end(), [](uint32_t word) { return word != 0; })) return true;
  return fail(ErrorCode::kInput, "allowed_tokens allows none of ", vocabulary_, " tokens after ", tokens.size(),
              " new ones; allow an end token, or return false to end the response");
}

}  // namespace exportable_cache
