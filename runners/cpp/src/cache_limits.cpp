#include <exportable_cache/cache_limits.h>

#include <algorithm>
#include <iterator>
#include <string>

namespace exportable_cache {
namespace {

struct Rules {
  const char* class_name;
  bool keeps_all;     // `capacity` tokens and no more
  bool keeps_newest;  // those of a window
  bool keeps_states;  // of linear attention or convolutions
};

// A class that is not here may have other rules, so it is refused.
constexpr Rules kRules[] = {
    {"FullLayer", true, false, false},
    {"FusedFullLayer", true, false, false},
    {"QuantizedFullLayer", true, false, false},
    {"FusedQuantizedFullLayer", true, false, false},
    {"IndexedLayer", true, false, false},
    {"RingLayer", false, true, false},
    {"FusedRingLayer", false, true, false},
    {"QuantizedRingLayer", false, true, false},
    {"FusedQuantizedRingLayer", false, true, false},
    {"SinkLayer", false, true, false},
    {"QuantizedSinkLayer", false, true, false},
    {"LinearLayer", false, false, true},
    {"HybridFullLayer", true, false, true},
    {"HybridRingLayer", false, true, true},
    {"DummyLayer", false, false, false},
};

}  // namespace

Result<CacheLimits> CacheLimits::make(const std::vector<LayerSpec>& layers) {
  CacheLimits limits;
  for (size_t index = 0; index < layers.size(); ++index) {
    const LayerSpec& layer = layers[index];
    const Rules* rules = std::find_if(std::begin(kRules), std::end(kRules),
                                      [&layer](const Rules& candidate) { return layer.class_name == candidate.class_name; });
    if (rules == std::end(kRules)) {
      std::string known;
      for (const Rules& candidate : kRules) known += (known.empty() ? "" : ", ") + std::string(candidate.class_name);
      return fail(ErrorCode::kBundle, "layer ", index, " is a ", layer.class_name, ", this library knows ", known,
                  "; build that of the release that wrote it");
    }
    const bool sized = layer.capacity && (!rules->keeps_newest || layer.window);
    if ((rules->keeps_all || rules->keeps_newest) && !sized) {
      return fail(ErrorCode::kBundle, "layer ", index, " is a ", layer.class_name, " without its ",
                  layer.capacity ? "window" : "capacity", "; export the model again");
    }
    if (rules->keeps_all) limits.max_length_ = std::min(limits.max_length_.value_or(*layer.capacity), *layer.capacity);
    if (rules->keeps_newest) limits.rings_.push_back({*layer.capacity, *layer.capacity - layer.sinks, *layer.window});
    limits.keeps_states_ = limits.keeps_states_ || rules->keeps_states;
  }
  return limits;
}

Rollback CacheLimits::max_rollback(int64_t length, int64_t high_water) const {
  // What it was before the newest token is gone.
  if (keeps_states_) return {0, "a layer's state sums up all that was seen"};
  int64_t allowed = length;
  for (const Ring& ring : rings_) {
    if (high_water <= ring.capacity) continue;
    // Past the first tokens, positions up to high_water - 1 - slots are overwritten; the next query needs those from its own
    // position - window + 1 on.
    allowed = std::min(allowed, std::max<int64_t>(0, length - (high_water - 1 - ring.slots + ring.window)));
  }
  return {allowed, "the sliding window has overwritten older ones"};
}

}  // namespace exportable_cache
