#include "log_probs.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace exportable_cache {

void LogProbs::give(std::span<const float> logits, int64_t token, const GenerateOptions& options) {
  const double largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit) - largest);
  const double total = largest + std::log(sum);
  const auto count = static_cast<ptrdiff_t>(std::min<size_t>(static_cast<size_t>(options.alternatives), logits.size()));
  order_.resize(count == 0 ? 0 : logits.size());
  std::iota(order_.begin(), order_.end(), int64_t{0});
  std::partial_sort(order_.begin(), order_.begin() + count, order_.end(), [logits](int64_t left, int64_t right) {
    return logits[left] != logits[right] ? logits[left] > logits[right] : left < right;
  });
  best_.clear();
  for (ptrdiff_t index = 0; index < count; ++index) best_.push_back(static_cast<double>(logits[order_[index]]) - total);
  options.on_logprobs(static_cast<double>(logits[token]) - total, std::span<const int64_t>(order_).first(count), best_);
}

}  // namespace exportable_cache
