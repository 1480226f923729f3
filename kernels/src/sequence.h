// The keys of one batch row in the order of their positions, and the range of them that a query sees.
//
// An index counts them: first those in the kept slots, then those of the ring, whose oldest may be in its middle, then those
// that the slots do not hold yet. A query sees the kept keys up to its own position, and one range.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention.h"

namespace exportable_cache::kernels {

// Keys that are contiguous in memory.
struct Stretch {
  const Stored* from = nullptr;
  int64_t first_row = 0;  // in `from`
  int64_t position = 0;   // of the first key
  int64_t count = 0;
};

struct Range {
  int64_t begin = 0;
  int64_t end = 0;
};

struct Sequence {
  Stretch stretches[5];
  int64_t first_query = 0;  // position
  int64_t kept = 0;      // keys of positions below the number of kept slots
  int64_t position = 0;  // of the first key after those
  int64_t keys = 0;

  int64_t index_of(int64_t at) const { return at < kept ? at : kept + std::max<int64_t>(0, at - position); }
};

inline Sequence sequence_of(const Attention& a, int64_t batch) {
  Sequence s;
  const int64_t all = a.length[batch * a.length_stride] + a.tokens;
  const int64_t fresh = a.fresh.key.data ? a.tokens : 0, held = all - fresh;
  s.first_query = all - a.queries;
  const int64_t in_kept = std::min(held, a.kept), ring = a.slots - a.kept, turning = std::min(held - in_kept, ring);
  s.stretches[0] = {&a.stored, 0, 0, in_kept};
  if (turning > 0) {
    const int64_t oldest = held - turning, at = (oldest - a.kept) % ring, until_end = std::min(turning, ring - at);
    s.stretches[1] = {&a.stored, a.kept + at, oldest, until_end};
    s.stretches[2] = {&a.stored, a.kept, oldest + until_end, turning - until_end};
  }
  const int64_t to_keep = std::clamp<int64_t>(a.kept - held, 0, fresh);
  s.stretches[3] = {&a.fresh, 0, held, to_keep};
  s.stretches[4] = {&a.fresh, to_keep, held + to_keep, fresh - to_keep};
  s.kept = in_kept + to_keep;
  s.position = held + to_keep - turning;
  for (const Stretch& stretch : s.stretches) s.keys += stretch.count;
  return s;
}

// The range of a query token, by index; it also sees the kept keys before the range's end.
inline Range seen_by(const Attention& a, const Sequence& s, int64_t query) {
  if (!a.causal) return {0, s.keys};
  const int64_t position = s.first_query + query;
  int64_t first = 0;
  if (a.window > 0) first = std::max<int64_t>(0, position - a.window + 1);
  if (a.chunk > 0) first = position / a.chunk * a.chunk;
  return {s.index_of(first), s.index_of(position) + 1};
}

}  // namespace exportable_cache::kernels
