#include "checks.h"

#include <algorithm>
#include <cmath>

namespace exportable_cache {
namespace {

bool contains(const std::vector<int64_t>& tokens, int64_t token) {
  return std::find(tokens.begin(), tokens.end(), token) != tokens.end();
}

}  // namespace

Status check_tokens(std::span<const int64_t> tokens, const Manifest& manifest, const std::string& name) {
  if (tokens.empty()) return fail(ErrorCode::kInput, name, ": the prompt is empty; pass at least one token");
  for (size_t index = 0; index < tokens.size(); ++index) {
    if (tokens[index] < 0 || tokens[index] >= manifest.vocab_size) {
      return fail(ErrorCode::kInput, name, "[", index, "] is token id ", tokens[index], ", outside the vocabulary of 0 to ",
                  manifest.vocab_size - 1, "; tokenize with the model's own tokenizer");
    }
  }
  return {};
}

Status check_room(std::optional<int64_t> limit, int64_t held, int64_t tokens, std::optional<int64_t> max_new_tokens) {
  if (!limit) return {};
  const int64_t room = *limit - held;
  if (tokens > *limit) {
    return fail(ErrorCode::kCacheFull, "the cache holds ", held, " of at most ", *limit, " tokens, ", tokens,
                " more do not fit; shorten the prompt, or export with max_cache_len of at least ", held + tokens);
  }
  if (tokens > room) {
    return fail(ErrorCode::kCacheFull, "the cache holds ", held, " of at most ", *limit, " tokens, ", tokens,
                " more do not fit; reset() the session, rewind() it, or export with a larger max_cache_len");
  }
  // The last new token is not fed, so it needs no slot.
  if (max_new_tokens && *max_new_tokens > room - tokens + 1) {
    return fail(ErrorCode::kCacheFull, "the cache holds ", held, " of at most ", *limit, " tokens: after a prompt of ", tokens,
                " tokens max_new_tokens may be at most ", room - tokens + 1, ", got ", *max_new_tokens,
                "; lower it, leave it out to stop when the cache is full, or export with a larger max_cache_len");
  }
  return {};
}

Status check_options(const GenerateOptions& options, const Manifest& manifest) {
  if (options.max_new_tokens && *options.max_new_tokens < 1) {
    return fail(ErrorCode::kInput, "max_new_tokens is ", *options.max_new_tokens,
                "; it must be at least 1, or left out for as many as fit");
  }
  if (options.alternatives < 0) return fail(ErrorCode::kInput, "alternatives is ", options.alternatives, "; it must be at least 0");
  for (const int64_t token : options.stop_tokens) {
    if (token < 0 || token >= manifest.vocab_size) {
      return fail(ErrorCode::kInput, "stop token ", token, " is outside the vocabulary of 0 to ", manifest.vocab_size - 1);
    }
  }
  for (const auto& [token, value] : options.sampling.logit_bias) {
    if (token < 0 || token >= manifest.vocab_size || !std::isfinite(static_cast<float>(value))) {
      return fail(ErrorCode::kInput, "logit_bias must be numbers for token ids from 0 to ", manifest.vocab_size - 1, ", got ", value, " for ", token);
    }
  }
  for (const int64_t token : options.sampling.counted_tokens) {
    if (token < 0 || token >= manifest.vocab_size) {
      return fail(ErrorCode::kInput, "counted token ", token, " is outside the vocabulary of 0 to ", manifest.vocab_size - 1);
    }
  }
  for (const std::string& string : options.stop_strings) {
    if (string.empty()) return fail(ErrorCode::kInput, "a stop string is empty; pass strings of at least one character");
  }
  return {};
}

bool is_end(int64_t token, const Manifest& manifest, const GenerateOptions& options) {
  return contains(manifest.end_tokens, token) || contains(options.stop_tokens, token);
}

}  // namespace exportable_cache
