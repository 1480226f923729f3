// Images, video and audio for the next prompt, item by item, as the encoders take them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include <exportable_cache/manifest.h>
#include <exportable_cache/result.h>

namespace exportable_cache {

/// One tensor of the model's processor, other than token ids: `{"pixel_values", {2, 3, 336, 336}, pixels}`.
struct Input {
  std::string name;
  std::vector<int64_t> shape;  // of all items joined, as the processor joins them
  std::variant<std::vector<float>, std::vector<int64_t>> values;  // the last dimension innermost
};

/// Items that were added and not fed yet.
class Items {
 public:
  explicit Items(std::vector<ItemSpec> specs) : held_(specs.size()), specs_(std::move(specs)) {
    for (size_t index = 0; index < specs_.size(); ++index) held_[index].inputs.resize(specs_[index].inputs.size());
  }

  /// Check and add a tensor; a second one of the same name adds further items.
  ///
  /// Error kInput if no encoder takes the name, its shape or dtype is another, or it is a grid, size or mask of items that the
  /// program was not made for. Nothing changes then.
  Status add(const Input& input);

  /// Drop all items.
  void clear();

  /// Check that the prompt has exactly one placeholder per embedding.
  ///
  /// Error kInput if not, or if a tensor of an item is missing.
  Status check(std::span<const int64_t> tokens) const;

  bool is_empty() const;
  const std::vector<ItemSpec>& specs() const { return specs_; }

  /// Items of a kind, after `check` has passed.
  size_t count(size_t kind) const { return held_[kind].inputs.front().size(); }
  /// The values of an input for one of them, in the input's dtype.
  const std::vector<uint8_t>& bytes(size_t kind, size_t input, size_t item) const { return held_[kind].inputs[input][item]; }

 private:
  struct Held {
    std::vector<std::vector<std::vector<uint8_t>>> inputs;  // by input, by item
    std::vector<std::pair<std::string, size_t>> fixed;      // number of items for which a fixed value was given
  };

  Status add_main(size_t kind, size_t index, const Input& input);
  Status add_fixed(size_t kind, const FixedSpec& fixed, const Input& input);

  std::vector<Held> held_;
  std::vector<ItemSpec> specs_;
};

/// A cached item, for models whose items must stay whole or advance positions by another number than their tokens.
struct Placed {
  int64_t start = 0;  // position of its first token in the cache
  int64_t end = 0;    // position after its last
  int64_t delta = 0;  // offset from positions in the cache after it to rotary positions
};

}  // namespace exportable_cache
