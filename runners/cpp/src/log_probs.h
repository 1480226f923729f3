// Log probabilities of the tokens of a generation.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <exportable_cache/session.h>

namespace exportable_cache {

class LogProbs {
 public:
  /// Call `options.on_logprobs` for a token, from its logits [vocab]. Of equally probable tokens the first comes first.
  void give(std::span<const float> logits, int64_t token, const GenerateOptions& options);

 private:
  std::vector<int64_t> order_;
  std::vector<double> best_;
};

}  // namespace exportable_cache
