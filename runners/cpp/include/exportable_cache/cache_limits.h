// Capacity of a cache, and its limits of rollback. The rules are those of exportable_cache/cache/policies.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <exportable_cache/manifest.h>

namespace exportable_cache {

/// Number of newest tokens that can be rolled back, and the reason of the limit.
struct Rollback {
  int64_t tokens;
  const char* reason;
};

/// The limits of a cache of several layers.
class CacheLimits {
 public:
  /// Error kBundle if a layer has an unknown policy, or lacks the sizes that the policy needs.
  static Result<CacheLimits> make(const std::vector<LayerSpec>& layers);

  /// The limit of cached tokens, or nothing if no layer stores all of them.
  std::optional<int64_t> max_length() const { return max_length_; }

  /// Number of tokens that can be rolled back without losing one that is still needed.
  ///
  /// `length` is the number of cached tokens, `max_len_ever` their maximum since the cache was empty: slots after `length` were
  /// overwritten.
  Rollback max_rollback(int64_t length, int64_t max_len_ever) const;

  /// Number of tokens that can be dropped from position `first` on; below 1 if none can. The newest tokens of a window stay if
  /// there are tokens before `first`, because a ring has lost those.
  int64_t max_dropped(int64_t length, int64_t max_len_ever, int64_t first) const;

  /// `max_len_ever` after `count` tokens from position `first` on are dropped.
  int64_t ever_after(int64_t max_len_ever, int64_t first, int64_t count) const;

 private:
  // The newest tokens of a layer, in `slots` slots after the first tokens that it may store as well.
  struct Ring {
    int64_t capacity;
    int64_t slots;
    int64_t window;
  };

  std::optional<int64_t> max_length_;
  std::vector<Ring> rings_;
  bool keeps_states_ = false;  // states that sum up all tokens
};

}  // namespace exportable_cache
