// The mask of allowed tokens.
#pragma once

#include <vector>

#include <exportable_cache/allowed_tokens.h>

namespace exportable_cache {

class TokenMask {
 public:
  /// `allow` is empty if every token is allowed, and must outlive this.
  TokenMask(const AllowTokens& allow, size_t vocabulary);

  /// True if the response continues after the tokens chosen so far. Error kInput if no token is allowed, or the error of `allow`.
  Result<bool> ask(std::span<const int64_t> tokens);

  /// For `Sampler::choose`.
  std::span<const uint32_t> words() const { return words_; }

 private:
  const AllowTokens& allow_;
  size_t vocabulary_;
  std::vector<uint32_t> words_;
};

}  // namespace exportable_cache
