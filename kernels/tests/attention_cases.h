// Test cases of attention: shapes, dtypes, kinds of slots, lengths.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <random>
#include <string>
#include <vector>

#include "../src/attention.h"

using namespace exportable_cache::kernels;

// Which slots are overwritten, and which earlier positions a query sees.
enum class Kind { kEverything, kFull, kRing, kRingWithSlack, kFirstAndRing, kChunk };
constexpr int kKinds = 6;
enum class Added { kNothing, kPerKey, kPerHead, kMask };

struct Case {
  int64_t batch, kv_heads, groups, queries, dim, value_dim;
  int64_t others;  // new tokens before the queries
  int64_t length;  // of the first row; each further row is three shorter, if it can be
  int64_t window;  // of rings, and of chunks
  Dtype query_dtype, stored_dtype;
  Kind kind;
  bool beside;  // true if the slots do not hold the queries' tokens yet
  Added added;
  bool capped, sinks;
  size_t threads;
  bool heads_as_batch;

  bool turns() const { return kind != Kind::kEverything && kind != Kind::kFull; }
  int64_t length_of(int64_t row) const { return std::max<int64_t>(0, length - 3 * row); }
  int64_t tokens() const { return others + queries; }
  int64_t first() const { return kind == Kind::kFirstAndRing ? 4 : 0; }
  int64_t slots() const {
    if (!turns()) return length + tokens();
    return first() + window + (kind == Kind::kRingWithSlack ? 5 : 0);
  }
  int64_t slot_of(int64_t position) const {
    if (!turns() || position < first()) return position;
    return first() + (position - first()) % (slots() - first());
  }
  bool sees(int64_t query, int64_t key) const {
    if (kind == Kind::kEverything) return true;
    if (key > query) return false;
    if (kind == Kind::kFull || key < first()) return true;
    return kind == Kind::kChunk ? key / window == query / window : key > query - window;
  }

  std::string text() const {
    char line[300];
    std::snprintf(line, sizeof line,
                  "batch %d heads %dx%d queries %d of %d after %d dim %d/%d dtypes %d/%d kind %d window %d added %d threads "
                  "%zu%s%s%s%s",
                  int(batch), int(kv_heads), int(groups), int(queries), int(tokens()), int(length), int(dim), int(value_dim),
                  int(query_dtype), int(stored_dtype), int(kind), int(window), int(added), threads,
                  beside ? " beside" : "", capped ? " capped" : "", sinks ? " sinks" : "",
                  heads_as_batch ? " heads as batch" : "");
    return line;
  }
};

// A case for every kind, stored dtype and way of adding, with everything else random.
inline std::vector<Case> cases() {
  std::mt19937 random(11);
  const auto one_of = [&](std::initializer_list<int64_t> choices) { return choices.begin()[random() % choices.size()]; };
  std::vector<Case> made;
  for (int kind = 0; kind < kKinds; ++kind)
    for (int dtype = 0; dtype < 5; ++dtype)
      for (int added = 0; added < 4; ++added)
        for (int again = 0; again < 4; ++again) {
          Case c{};
          c.kind = static_cast<Kind>(kind), c.stored_dtype = static_cast<Dtype>(dtype);
          c.added = static_cast<Added>(added);
          c.dim = c.value_dim = one_of({8, 16, 24, 64, 80, 128});
          if (again == 1) c.value_dim = one_of({12, 16, 40, 64});
          const bool same = c.stored_dtype == Dtype::kFloat16 || c.stored_dtype == Dtype::kBFloat16;
          c.query_dtype = same && random() % 2 ? c.stored_dtype : Dtype::kFloat32;
          c.queries = one_of({1, 1, 2, 7, 50});
          c.length = one_of({0, 2, 5, 62, 63, 64, 198, 400});
          // One long case of each kind, which is split by the filled length; it has one key head.
          c.batch = again == 3 ? 1 : one_of({1, 1, 2, 3}), c.kv_heads = again == 3 ? 1 : 2;
          if (again == 3) c.length = one_of({1029, 1500}), c.queries = one_of({1, 2, 9});
          c.groups = one_of({1, 2, 3, 4, 5});
          c.window = again == 3 ? 1100 : one_of({7, 16, 64, 70, 130});
          c.beside = c.kind != Kind::kEverything && (c.turns() || random() % 2);
          // One token may overwrite the one that leaves the window before attention.
          if (c.turns() && c.queries == 1 && random() % 3 == 0) c.beside = false;
          if (c.turns() ? c.beside : true) c.others = one_of({0, 0, 0, 3, 11});
          c.capped = random() % 3 == 0, c.sinks = random() % 3 == 0;
          c.threads = again == 3 || random() % 3 == 0 ? 3 : 1;
          c.heads_as_batch = random() % 2;
          made.push_back(c);
        }
  return made;
}
