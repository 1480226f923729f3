// How much a cache holds, and how far it can be taken back. The rules are those of exportable_cache/cache/policies.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <exportable_cache/manifest.h>

namespace exportable_cache {

/// How many of the newest tokens can be taken back, and what keeps older ones from it.
struct Rollback {
  int64_t tokens;
  const char* reason;
};

/// The limits of a cache of several layers.
class CacheLimits {
 public:
  /// Error kBundle if a layer has a policy whose rules are not known here, or lacks the sizes they need.
  static Result<CacheLimits> make(const std::vector<LayerSpec>& layers);

  /// Tokens the cache can hold in all, or nothing where no layer keeps all of them.
  std::optional<int64_t> max_length() const { return max_length_; }

  /// What can be taken back without having lost a token that is still needed.
  ///
  /// `length` is what the cache holds now, `max_len_ever` the most it ever held since it was empty: what came after `length`
  /// was overwritten.
  Rollback max_rollback(int64_t length, int64_t max_len_ever) const;

 private:
  // The newest tokens of a layer, `slots` of them after the first ones that it may keep besides.
  struct Ring {
    int64_t capacity;
    int64_t slots;
    int64_t window;
  };

  std::optional<int64_t> max_length_;
  std::vector<Ring> rings_;
  bool keeps_states_ = false;  // which sum up all that was seen
};

}  // namespace exportable_cache
