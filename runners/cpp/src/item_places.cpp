#include "item_places.h"

#include <algorithm>

namespace exportable_cache {
namespace {

// The kind of item of each token, -1 for text.
std::vector<int64_t> kinds_of(const std::vector<ItemSpec>& kinds, std::span<const int64_t> tokens, bool seen_only) {
  std::vector<int64_t> found(tokens.size(), -1);
  for (size_t index = 0; index < tokens.size(); ++index) {
    for (size_t kind = 0; kind < kinds.size(); ++kind) {
      if (tokens[index] == kinds[kind].token_id && (!seen_only || !kinds[kind].sees.empty())) found[index] = static_cast<int64_t>(kind);
    }
  }
  return found;
}

struct Stretch {
  size_t start;
  size_t end;
};

// Runs of non-negative values; with `by_value`, of equal values.
std::vector<Stretch> stretches_of(const std::vector<int64_t>& values, bool by_value) {
  std::vector<Stretch> found;
  for (size_t index = 0; index < values.size(); ++index) {
    if (values[index] < 0) continue;
    const bool goes_on = index > 0 && values[index - 1] >= 0 && (!by_value || values[index - 1] == values[index]);
    if (goes_on) {
      found.back().end = index + 1;
    } else {
      found.push_back({index, index + 1});
    }
  }
  return found;
}

std::vector<int64_t> image_ids_of(const std::vector<ItemSpec>& kinds, std::span<const int64_t> tokens) {
  const std::vector<int64_t> seen = kinds_of(kinds, tokens, true);
  std::vector<int64_t> ids(tokens.size(), -1);
  const std::vector<Stretch> stretches = stretches_of(seen, false);
  const bool sees_prompt = std::any_of(kinds.begin(), kinds.end(), [](const ItemSpec& kind) { return kind.sees == "prompt"; });
  if (sees_prompt && !stretches.empty()) {
    std::fill(ids.begin(), ids.end(), 0);
    return ids;
  }
  for (size_t number = 0; number < stretches.size(); ++number) {
    std::fill(ids.begin() + static_cast<int64_t>(stretches[number].start), ids.begin() + static_cast<int64_t>(stretches[number].end),
              static_cast<int64_t>(number));
  }
  return ids;
}

// Sizes of a prompt's chunks, none of which ends inside an item.
Result<std::vector<int64_t>> whole_chunks(const std::vector<int64_t>& ids, int64_t longest) {
  const auto length = static_cast<int64_t>(ids.size());
  const auto is_inside = [&ids](int64_t index) {
    const auto at = static_cast<size_t>(index);
    return ids[at] >= 0 && ids[at] == ids[at - 1];
  };
  std::vector<int64_t> sizes;
  for (int64_t start = 0; start < length;) {
    int64_t end = std::min(start + longest, length);
    while (start < end && end < length && is_inside(end)) --end;
    if (end == start) {
      int64_t stop = start + 1;
      while (stop < length && is_inside(stop)) ++stop;
      return fail(ErrorCode::kInput, "the image at token ", start, " of the prompt takes ", stop - start,
                  " tokens, which see each other and so go through in one step, and a step takes at most ", longest,
                  "; export with prefill_chunk=", stop - start, " or more");
    }
    sizes.push_back(end - start);
    start = end;
  }
  return sizes;
}

}  // namespace

Result<ItemPlaces> places_of(const std::vector<ItemSpec>& kinds, const EmbedsSpec& embeds, std::span<const int64_t> tokens,
                             int64_t longest) {
  ItemPlaces places;
  const std::vector<int64_t> of_kind = kinds_of(kinds, tokens, false);
  if (embeds.sees_items) {
    places.image_ids = image_ids_of(kinds, tokens);
    Result<std::vector<int64_t>> sizes = whole_chunks(places.image_ids, longest);
    if (!sizes.ok()) return sizes.error();
    places.sizes = std::move(*sizes);
    for (const Stretch& stretch : stretches_of(of_kind, false)) {
      places.placed.push_back({static_cast<int64_t>(stretch.start), static_cast<int64_t>(stretch.end), 0});
    }
  }
  if (embeds.axes == 0) return places;
  const auto length = static_cast<int64_t>(tokens.size());
  for (const Stretch& stretch : stretches_of(of_kind, true)) {
    const ItemSpec& kind = kinds[static_cast<size_t>(of_kind[stretch.start])];
    const auto count = static_cast<int64_t>(stretch.end - stretch.start);
    if (count % kind.tokens != 0) {
      return fail(ErrorCode::kInput, count, " tokens of id ", kind.token_id, " follow each other, ", kind.method, " gives ",
                  kind.tokens, " embeddings of one item, whose positions belong together: build the prompt with the model's own ",
                  "processor");
    }
  }
  places.placed.clear();
  places.position_ids.resize(static_cast<size_t>(embeds.axes * length));
  int64_t position = 0;
  for (int64_t index = 0; index < length;) {
    const int64_t found = of_kind[static_cast<size_t>(index)];
    const ItemSpec* kind = found < 0 ? nullptr : &kinds[static_cast<size_t>(found)];
    const int64_t count = kind == nullptr ? 1 : kind->tokens;
    for (int64_t axis = 0; axis < embeds.axes; ++axis) {
      for (int64_t token = 0; token < count; ++token) {
        const bool has_pattern = kind != nullptr && !kind->positions.empty();
        const int64_t offset = has_pattern ? kind->positions[static_cast<size_t>(axis)][static_cast<size_t>(token)] : token;
        places.position_ids[static_cast<size_t>(axis * length + index + token)] = position + offset;
      }
    }
    position += kind == nullptr ? 1 : kind->positions.empty() ? count : kind->advance;
    index += count;
    if (kind != nullptr) places.placed.push_back({index - count, index, position - index});
  }
  return places;
}

int64_t rope_delta(std::span<const Placed> placed, int64_t length) {
  for (auto item = placed.rbegin(); item != placed.rend(); ++item) {
    if (item->end <= length) return item->delta;
  }
  return 0;
}

Status check_cut(std::span<const Placed> placed, int64_t length) {
  for (const Placed& item : placed) {
    if (item.start < length && length < item.end) {
      return fail(ErrorCode::kInput, "cannot rewind to ", length, " tokens, which is inside the image at ", item.start, " to ",
                  item.end - 1, "; take back all of it, or none");
    }
  }
  return {};
}

bool can_be(const std::vector<ItemSpec>& kinds, const EmbedsSpec& embeds, std::span<const Placed> placed, int64_t length) {
  if (!placed.empty() && embeds.axes == 0 && !embeds.sees_items) return false;
  int64_t end = 0, delta = 0;
  for (const Placed& item : placed) {
    if (item.start < end || item.start >= length || item.end <= item.start) return false;
    // Steps without axes have no offsets; with axes, all items of a kind have the same.
    const int64_t tokens = item.end - item.start;
    const bool is_known = embeds.axes == 0 ? item.delta == 0 : std::any_of(kinds.begin(), kinds.end(), [&](const ItemSpec& kind) {
      return kind.tokens == tokens && item.delta == delta + (kind.positions.empty() ? 0 : kind.advance - kind.tokens);
    });
    if (!is_known) return false;
    end = item.end;
    delta = item.delta;
  }
  return true;
}

}  // namespace exportable_cache
