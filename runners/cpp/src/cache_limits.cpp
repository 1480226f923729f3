#include <exportable_cache/cache_limits.h>

#include <algorithm>
#include <iterator>
#include <string>

namespace exportable_cache {
namespace {

struct Rules {
  const char* policy;
  bool keeps_all;     // stores `capacity` tokens
  bool keeps_newest;  // stores those of a window
};

// Unknown policies may have other rules, so they are refused.
constexpr Rules kRules[] = {
    {"full", true, false}, {"ring", false, true}, {"sinks", false, true}, {"recurrent", false, false}, {"none", false, false},
    {"cross", false, false},  // of the encoder's tokens, which stay
};

}  // namespace

Result<CacheLimits> CacheLimits::make(const std::vector<LayerSpec>& layers) {
  CacheLimits limits;
  for (size_t index = 0; index < layers.size(); ++index) {
    const LayerSpec& layer = layers[index];
    const Rules* rules = std::find_if(std::begin(kRules), std::end(kRules),
                                      [&layer](const Rules& candidate) { return layer.policy == candidate.policy; });
    if (rules == std::end(kRules)) {
      std::string known;
      for (const Rules& candidate : kRules) known += (known.empty() ? "" : ", ") + std::string(candidate.policy);
      return fail(ErrorCode::kBundle, "layer ", index, " has the policy ", layer.policy, ", this library knows ", known,
                  "; build that of the release that wrote it");
    }
    if ((rules->keeps_all && !layer.capacity) || (rules->keeps_newest && !layer.window)) {
      return fail(ErrorCode::kBundle, "layer ", index, " has the policy ", layer.policy, " without its ",
                  rules->keeps_all ? "capacity" : "window", "; export the model again");
    }
    if (rules->keeps_all) limits.max_length_ = std::min(limits.max_length_.value_or(*layer.capacity), *layer.capacity);
    if (rules->keeps_newest) {
      const int64_t slots = *layer.window + layer.rollback_slots;
      limits.rings_.push_back({layer.sinks + slots, slots, *layer.window});
    }
    limits.keeps_states_ = limits.keeps_states_ || layer.has_states;
  }
  return limits;
}

Rollback CacheLimits::max_rollback(int64_t length, int64_t max_len_ever) const {
  // The state before the newest token is lost.
  if (keeps_states_) return {0, "a layer's state sums up all that was seen"};
  int64_t allowed = length;
  for (const Ring& ring : rings_) {
    if (max_len_ever <= ring.capacity) continue;
    // After the first tokens, positions up to max_len_ever - 1 - slots are overwritten; the next query needs those from
    // position - window + 1 on.
    allowed = std::min(allowed, std::max<int64_t>(0, length - (max_len_ever - 1 - ring.slots + ring.window)));
  }
  return {allowed, "the sliding window has overwritten older ones"};
}

int64_t CacheLimits::max_dropped(int64_t length, int64_t max_len_ever, int64_t first) const {
  int64_t stays = 0;
  for (const Ring& ring : rings_) {
    if (first > 0 && max_len_ever > ring.capacity) stays = std::max(stays, ring.window - 1);
  }
  return length - first - stays;
}

int64_t CacheLimits::ever_after(int64_t max_len_ever, int64_t first, int64_t count) const {
  int64_t ever = max_len_ever - count;
  for (const Ring& ring : rings_) {
    if (first > 0 && max_len_ever > ring.capacity) ever = std::max(ever, first + ring.slots);
  }
  return ever;
}

}  // namespace exportable_cache
