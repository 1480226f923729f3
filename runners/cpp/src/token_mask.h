// The tokens that may come next.
#pragma once

#include <vector>

#include <exportable_cache/allowed_tokens.h>

namespace exportable_cache {

class TokenMask {
 public:
  /// `allow` is empty where every token may come, and outlives this.
  TokenMask(const AllowTokens& allow, size_t vocabulary);

  /// Whether the answer goes on, after the tokens chosen so far. Error kInput if none may come; otherwise what `allow` says.
  Result<bool> ask(std::span<const int64_t> tokens);

  /// For `Sampler::choose`.
  std::span<const uint32_t> words() const { return words_; }

 private:
  const AllowTokens& allow_;
  size_t vocabulary_;
  std::vector<uint32_t> words_;
};

}  // namespace exportable_cache
