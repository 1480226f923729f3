// Choosing the next token from its logits.
#pragma once

#include <cstdint>
#include <optional>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include <exportable_cache/result.h>

namespace exportable_cache {

/// How tokens are chosen. The default is greedy.
struct Sampling {
  double temperature = 0;          // divisor of the logits; 0 takes the most probable token
  std::optional<int64_t> top_k{};  // sample from the k most probable tokens; of a call, 0 is all, also if the checkpoint has a limit
  std::optional<double> top_p{};   // sample from the fewest most probable tokens whose probabilities reach p, after top_k
  std::optional<uint64_t> seed{};  // of the draws; without one they differ from run to run
  std::optional<double> min_p{};   // sample from tokens at least min_p times as probable as the most probable one, after top_p
  /// Replaces that of the checkpoint: above 1, tokens of the prompt and of the generation so far become less likely.
  std::optional<double> repetition_penalty{};
  /// Additions to the logits, as OpenAI's API has them: a number for each token id; less `presence_penalty` for tokens that were
  /// generated, and less `frequency_penalty` for each time. Tokens of the prompt do not count, except `counted_tokens`, which an
  /// earlier call generated.
  std::vector<std::pair<int64_t, double>> logit_bias{};
  double presence_penalty = 0;
  double frequency_penalty = 0;
  std::vector<int64_t> counted_tokens{};
  /// Sample as the checkpoint's generation_config says, where it has do_sample: a temperature of 0 and limits that are left out are
  /// its values. See `GenerationSettings::sampling_for`.
  bool from_checkpoint = false;
};

/// Samples tokens. The same seed, logits and order of calls give the same tokens on every platform with IEEE floats, because the
/// standard fixes the output of std::mt19937_64, and its bits are converted to a number here.
class Sampler {
 public:
  /// Error kInput if a value is out of range, or top_k, top_p or min_p is given for greedy decoding.
  static Result<Sampler> make(const Sampling& sampling);

  /// The next token, from logits [vocab]. Greedy decoding takes the first of equally large logits.
  ///
  /// `mask`, if not empty, has bit b of word w for token 32 w + b: tokens with a zero bit are left out, and at least one bit is set.
  int64_t choose(std::span<const float> logits, std::span<const uint32_t> mask = {});

 private:
  explicit Sampler(const Sampling& sampling);

  Sampling sampling_;
  std::mt19937_64 generator_;
  std::vector<std::pair<double, int64_t>> candidates_;  // weight and token; kept to reuse its memory
};

}  // namespace exportable_cache
