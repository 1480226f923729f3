// Where the items of a prompt lie, and what its steps take for that: positions of several axes, items that stay whole.
//
// The rules are those of exportable_cache/session/inputs/image.py.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <exportable_cache/items.h>

namespace exportable_cache {

/// Of a prompt, counted from its first token.
struct ItemPlaces {
  std::vector<int64_t> sizes;         // tokens of each step, where that is not free
  std::vector<int64_t> position_ids;  // [axes, length], where there are axes
  std::vector<int64_t> image_ids;     // [length], where items are seen: a number per stretch of them, -1 on text
  std::vector<Placed> placed;
};

/// Find them for a prompt of ids.
///
/// Error kInput if an item is longer than a step of `longest`, or placeholders in a row are not of whole items.
Result<ItemPlaces> places_of(const std::vector<ItemSpec>& kinds, const EmbedsSpec& embeds, std::span<const int64_t> tokens,
                             int64_t longest);

/// What is added to a position in the cache to get the rotary one of the next token, after `length` tokens.
int64_t rope_delta(std::span<const Placed> placed, int64_t length);

/// Error kInput if a cut to `length` tokens goes through an item: its tokens are no prompt by themselves.
Status check_cut(std::span<const Placed> placed, int64_t length);

/// Whether prompts of `length` tokens can have left these.
bool can_be(const std::vector<ItemSpec>& kinds, const EmbedsSpec& embeds, std::span<const Placed> placed, int64_t length);

}  // namespace exportable_cache
