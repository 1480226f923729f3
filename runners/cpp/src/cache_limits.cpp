#include <exportable_cache/cache_limits.h>

#include <algorithm>
#include <string>

namespace exportable_cache {
namespace {

// By class name; a class that is not here may have other rules, so it is refused.
enum class Kind { kFull, kRing, kUnknown };

Kind kind_of(const LayerSpec& layer) {
  if (layer.class_name == "FullLayer" || layer.class_name == "FusedFullLayer") return Kind::kFull;
  if ((layer.class_name == "RingLayer" || layer.class_name == "SinkLayer") && layer.window) return Kind::kRing;
  return Kind::kUnknown;
}

}  // namespace

Result<CacheLimits> CacheLimits::make(std::vector<LayerSpec> layers) {
  for (size_t index = 0; index < layers.size(); ++index) {
    if (kind_of(layers[index]) == Kind::kUnknown) {
      return fail(ErrorCode::kBundle, "layer ", index, " is a ", layers[index].class_name,
                  ", this library knows FullLayer, FusedFullLayer, RingLayer and SinkLayer; build that of the release that wrote it");
    }
  }
  return CacheLimits(std::move(layers));
}

std::optional<int64_t> CacheLimits::max_length() const {
  std::optional<int64_t> limit;
  for (const LayerSpec& layer : layers_) {
    if (kind_of(layer) == Kind::kFull) limit = std::min(limit.value_or(layer.capacity), layer.capacity);
  }
  return limit;
}

int64_t CacheLimits::max_rollback(int64_t length, int64_t high_water) const {
  int64_t allowed = length;
  for (const LayerSpec& layer : layers_) {
    if (kind_of(layer) != Kind::kRing || high_water <= layer.capacity) continue;
    // Past the sinks, positions up to high_water - 1 - ring are overwritten; the next query needs those from its own
    // position - window + 1 on.
    const int64_t ring = layer.capacity - layer.sinks;
    const int64_t oldest = high_water - 1 - ring + *layer.window;
    allowed = std::min(allowed, std::max<int64_t>(0, length - oldest));
  }
  return allowed;
}

}  // namespace exportable_cache
