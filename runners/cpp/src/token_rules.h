// Applies a checkpoint's generation settings to the logits of one row.
#pragma once

#include <map>
#include <optional>
#include <span>
#include <vector>

#include <exportable_cache/manifest.h>

namespace exportable_cache {

/// Start of a row's generation.
struct RowStart {
  int64_t held = 0;                 // tokens in the cache before the prompt
  int64_t prompt = 0;               // tokens of the prompt
  std::optional<int64_t> limit{};   // the limit of new tokens
  Sampling sampling{};              // its penalties and additions
  std::vector<int64_t> encoded{};   // input of the encoder, or the prompt of a decoder-only model; empty if that is not text
};

/// The limit of new tokens: the requested one, otherwise the checkpoint's. Error kInput if its limit of all tokens is reached.
Result<std::optional<int64_t>> limit_of(const Manifest& manifest, std::optional<int64_t> asked, int64_t tokens);

class TokenRules {
 public:
  /// `manifest` must outlive this.
  TokenRules(const Manifest& manifest, RowStart start);

  /// Logits after the settings, valid until the next call, in the order of `GenerationMixin._get_logits_processor` of transformers.
  /// `tokens` are the prompt's and those chosen so far; `mask` is that of `Sampler::choose`. The mask takes precedence: settings that
  /// would leave none of its tokens are ignored. Additions follow the settings of the checkpoint.
  ///
  /// Error kInput if no token is left.
  Result<std::span<const float>> apply(std::span<const float> logits, std::span<const int64_t> tokens, std::span<const uint32_t> mask);

 private:
  void bias(std::span<const int64_t> tokens);
  // Add `logit_bias` and the penalties for tokens that were generated.
  void add(std::span<const int64_t> tokens);
  void repeat(std::span<const int64_t> tokens, double penalty);
  void ban_ngrams(std::span<const int64_t> tokens, std::span<const int64_t> text, int64_t size);
  void ban(int64_t token);
  void ban_ends();
  void only(std::span<const int64_t> tokens);
  void decay(int64_t length);

  const Manifest& manifest_;
  RowStart start_;
  bool adds_;                          // the sampling has additions
  std::map<int64_t, double> added_;    // `logit_bias`
  std::map<int64_t, int64_t> counts_;  // of generated tokens
  size_t counted_;                     // tokens of the context that are in `counts_`, or of the prompt
  std::vector<float> scores_;
  std::vector<bool> seen_;
};

}  // namespace exportable_cache
