// Images, video and sound for the next prompt: what was added for it, item by item, as the encoders take it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include <exportable_cache/manifest.h>
#include <exportable_cache/result.h>

namespace exportable_cache {

/// What the model's processor gives beside token ids, one tensor of it: `{"pixel_values", {2, 3, 336, 336}, pixels}`.
struct Input {
  std::string name;
  std::vector<int64_t> shape;  // of all items joined, as the processor joins them
  std::variant<std::vector<float>, std::vector<int64_t>> values;  // the last dimension innermost
};

/// What was added and not fed yet.
class Items {
 public:
  explicit Items(std::vector<ItemSpec> specs) : held_(specs.size()), specs_(std::move(specs)) {
    for (size_t index = 0; index < specs_.size(); ++index) held_[index].inputs.resize(specs_[index].inputs.size());
  }

  /// Check a tensor and hold it; one of a name that is held already brings further items.
  ///
  /// Error kInput if no encoder takes the name, it has another shape or dtype, or it is the grid, size or mask of other items
  /// than the program was made for. Nothing has changed then.
  Status add(const Input& input);

  /// Forget all of them.
  void clear();

  /// Whether the prompt has a placeholder for each embedding of what is held, and no others.
  ///
  /// Error kInput if not, or if something is missing of an item.
  Status check(std::span<const int64_t> tokens) const;

  bool is_empty() const;
  const std::vector<ItemSpec>& specs() const { return specs_; }

  /// Items of a kind, once `check` has passed.
  size_t count(size_t kind) const { return held_[kind].inputs.front().size(); }
  /// What an input takes for one of them, in its dtype.
  const std::vector<uint8_t>& bytes(size_t kind, size_t input, size_t item) const { return held_[kind].inputs[input][item]; }

 private:
  struct Held {
    std::vector<std::vector<std::vector<uint8_t>>> inputs;  // by input, by item
    std::vector<std::pair<std::string, size_t>> fixed;      // of how many items a fixed value was given
  };

  Status add_main(size_t kind, size_t index, const Input& input);
  Status add_fixed(size_t kind, const FixedSpec& fixed, const Input& input);

  std::vector<Held> held_;
  std::vector<ItemSpec> specs_;
};

/// An item among the tokens that are held, of models whose items stay whole or count as other positions than tokens.
struct Placed {
  int64_t start = 0;  // position of its first token in the cache
  int64_t end = 0;    // position after its last
  int64_t delta = 0;  // what is added to positions in the cache after it to get rotary ones
};

}  // namespace exportable_cache
