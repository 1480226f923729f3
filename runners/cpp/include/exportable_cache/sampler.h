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
  std::optional<int64_t> top_k{};  // draw from the k most probable tokens
  std::optional<double> top_p{};   // draw from the fewest most probable tokens that reach p, after top_k
  std::optional<uint64_t> seed{};  // of the draws; without one they differ from run to run
};

/// Draws tokens. The same seed, logits and order of calls give the same tokens on every platform with IEEE floats: the
/// generator is std::mt19937_64, whose output the standard fixes, and its bits are turned into a number here.
class Sampler {
 public:
  /// Error kInput if a value is out of range, or top_k or top_p is given where nothing is drawn.
  static Result<Sampler> make(const Sampling& sampling);

  /// The next token, from logits [vocab]. The first of equally large logits wins where nothing is drawn.
  ///
  /// `mask`, if not empty, has bit b of word w for token 32 w + b: those of zero are left out, and at least one is not.
  int64_t choose(std::span<const float> logits, std::span<const uint32_t> mask = {});

 private:
  explicit Sampler(const Sampling& sampling);

  Sampling sampling_;
  std::mt19937_64 generator_;
  std::vector<std::pair<double, int64_t>> candidates_;  // weight and token; kept for its memory
};

}  // namespace exportable_cache
