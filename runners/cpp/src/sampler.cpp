#include <exportable_cache/sampler.h>

#include <algorithm>
#include <cmath>
#include <functional>

namespace exportable_cache {

Result<Sampler> Sampler::make(const Sampling& sampling) {
  if (!std::isfinite(sampling.temperature) || sampling.temperature < 0) {
    return fail(ErrorCode::kInput, "temperature is ", sampling.temperature, "; it must be a number of at least 0 (0 is greedy)");
  }
  if (sampling.top_k && *sampling.top_k < 1) {
    return fail(ErrorCode::kInput, "top_k is ", *sampling.top_k, "; it must be at least 1, or left out for all tokens");
  }
  if (sampling.top_p && !(*sampling.top_p > 0 && *sampling.top_p <= 1)) {
    return fail(ErrorCode::kInput, "top_p is ", *sampling.top_p, "; it must be above 0 and at most 1, or left out for all tokens");
  }
  if (sampling.min_p && !(*sampling.min_p >= 0 && *sampling.min_p <= 1)) {
    return fail(ErrorCode::kInput, "min_p is ", *sampling.min_p, "; it must be from 0 to 1, or left out for all tokens");
  }
  if (sampling.repetition_penalty && !(std::isfinite(*sampling.repetition_penalty) && *sampling.repetition_penalty > 0)) {
    return fail(ErrorCode::kInput, "repetition_penalty is ", *sampling.repetition_penalty,
                "; it must be a number above 0 (1 changes nothing)");
  }
  if (!std::isfinite(sampling.presence_penalty) || !std::isfinite(sampling.frequency_penalty)) {
    return fail(ErrorCode::kInput, "presence_penalty and frequency_penalty must be numbers, got ", sampling.presence_penalty, " and ",
                sampling.frequency_penalty, "; 0 changes nothing");
  }
  if (sampling.temperature == 0 && (sampling.top_k || sampling.top_p || sampling.min_p)) {
    return fail(ErrorCode::kInput, "temperature is 0, which is greedy and ignores top_k, top_p and min_p; ",
                "pass a temperature above 0, or leave them out");
  }
  return Sampler(sampling);
}

Sampler::Sampler(const Sampling& sampling)
    : sampling_(sampling), generator_(sampling.seed ? *sampling.seed : std::random_device{}()) {}

int64_t Sampler::choose(std::span<const float> logits, std::span<const uint32_t> mask) {
  const auto may_come = [mask](size_t token) { return mask.empty() || (mask[token / 32] >> (token % 32) & 1) != 0; };
  size_t largest = 0;
  while (!may_come(largest)) ++largest;
  for (size_t token = largest + 1; token < logits.size(); ++token) {
    if (logits[largest] < logits[token] && may_come(token)) largest = token;
  }
  if (sampling_.temperature == 0) return static_cast<int64_t>(largest);

  candidates_.clear();
  for (size_t token = 0; token < logits.size(); ++token) {
    if (!may_come(token)) continue;
    // In double, with the largest logit at zero, so that no temperature above 0 overflows and the largest keeps a weight of 1.
    const double difference = static_cast<double>(logits[token]) - static_cast<double>(logits[largest]);
    candidates_.emplace_back(difference == 0 ? 1.0 : std::exp(difference / sampling_.temperature), static_cast<int64_t>(token));
  }
  const auto heavier = [](const auto& left, const auto& right) {
    return left.first != right.first ? left.first > right.first : left.second < right.second;
  };
  if (sampling_.top_k && *sampling_.top_k < static_cast<int64_t>(candidates_.size())) {
    std::nth_element(candidates_.begin(), candidates_.begin() + *sampling_.top_k, candidates_.end(), heavier);
    candidates_.resize(*sampling_.top_k);
  }
  if (sampling_.top_p || sampling_.top_k) std::sort(candidates_.begin(), candidates_.end(), heavier);

  double total = 0;
  for (const auto& [weight, token] : candidates_) total += weight;
  if (sampling_.top_p) {
    // A token stays while those before it have not reached top_p, so the first always stays.
    double before = 0;
    size_t kept = 0;
    while (kept < candidates_.size() && before < *sampling_.top_p * total) before += candidates_[kept++].first;
    candidates_.resize(kept);
    total = before;
  }
  if (sampling_.min_p) {
    // The largest weight is 1.
    std::erase_if(candidates_, [least = *sampling_.min_p](const auto& one) { return one.first < least; });
    total = 0;
    for (const auto& [weight, token] : candidates_) total += weight;
  }
  // 53 random bits as a number in [0, 1), because std::uniform_real_distribution differs between standard libraries.
  double left = static_cast<double>(generator_() >> 11) * 0x1p-53 * total;
  auto chosen = static_cast<int64_t>(largest);  // used if rounding leaves a remainder past the last weight
  for (const auto& [weight, token] : candidates_) {
    if (weight == 0) continue;
    chosen = token;
    if (left < weight) break;
    left -= weight;
  }
  return chosen;
}

}  // namespace exportable_cache
