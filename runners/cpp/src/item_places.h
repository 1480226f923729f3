// Positions of a prompt's items, and the resulting inputs of its steps: positions of several axes, and items that stay whole.
//
// The rules are those of exportable_cache/session/images.py.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <exportable_cache/items.h>

namespace exportable_cache {

/// Inputs of a prompt's steps, counted from its first token.
struct ItemPlaces {
  std::vector<int64_t> sizes;         // tokens of each step, if that is constrained
  std::vector<int64_t> position_ids;  // [axes, length], if there are axes
  std::vector<int64_t> image_ids;     // [length], if attention depends on items: an index per run of item tokens, -1 for text
  std::vector<Placed> placed;
};

/// Compute them for a prompt of ids.
///
/// Error kInput if an item is longer than a step of `longest`, or consecutive placeholders are not whole items.
Result<ItemPlaces> places_of(const std::vector<ItemSpec>& kinds, const EmbedsSpec& embeds, std::span<const int64_t> tokens,
                             int64_t longest);

/// Offset from a position in the cache to the rotary position of the next token, after `length` tokens.
int64_t rope_delta(std::span<const Placed> placed, int64_t length);

/// Error kInput if a cut to `length` tokens splits an item, because part of an item is not a valid prompt.
Status check_cut(std::span<const Placed> placed, int64_t length);

/// True if prompts of `length` tokens can have produced these.
bool can_be(const std::vector<ItemSpec>& kinds, const EmbedsSpec& embeds, std::span<const Placed> placed, int64_t length);

}  // namespace exportable_cache
