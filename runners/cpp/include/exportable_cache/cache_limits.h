// How much a cache holds, and how far it can be taken back. The rules are those of exportable_cache/layers.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <exportable_cache/manifest.h>

namespace exportable_cache {

/// The limits of a cache of several layers.
class CacheLimits {
 public:
  /// Error kBundle if a layer is of a class whose rules are not known here.
  static Result<CacheLimits> make(std::vector<LayerSpec> layers);

  /// Tokens the cache can hold in all, or nothing where only rings keep state.
  std::optional<int64_t> max_length() const;

  /// How many of the newest tokens can be taken back without having lost one that is still needed.
  ///
  /// `length` is what the cache holds now, `high_water` the most it ever held since it was empty: what came after `length`
  /// was overwritten.
  int64_t max_rollback(int64_t length, int64_t high_water) const;

 private:
  explicit CacheLimits(std::vector<LayerSpec> layers) : layers_(std::move(layers)) {}

  std::vector<LayerSpec> layers_;
};

}  // namespace exportable_cache
