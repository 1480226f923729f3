// Finds the keys that the queries of a step see according to the mask, which attention must read.
#pragma once

#include "vectors.h"

#include <limits>
#include <type_traits>

namespace {

// Number of keys in a block.
constexpr int64_t kBlock = 64;
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// A tensor [batch, heads, tokens, dim] with a contiguous last dimension; strides in elements, 0 for broadcasting.
struct View {
  const void* data = nullptr;
  int64_t batch = 0, head = 0, token = 0;

  template <class T>
  EC_INLINE const T* at(int64_t b, int64_t h, int64_t t) const {
    return static_cast<const T*>(data) + b * batch + h * head + t * token;
  }
};

// Sizes and mask of a step. Rows are the queries of all heads that share a key head.
struct Question {
  int64_t batch, kv_heads, groups, queries, keys;
  View mask;  // [batch, heads, queries, keys]

  int64_t rows() const { return groups * queries; }
};

// Keys [first, first + count) of a key head. Heads are numbered across the batch.
struct Block {
  int32_t head, first, count;
};

// Types of masks: which values hide a key, and what is added to scores.
template <class T>
struct Addend {
  using Stored = typename T::Stored;
  EC_INLINE static float one(Stored number) {
    if constexpr (std::is_same_v<T, Float32>) return number;
    else return of_bfloat16(number);
  }
  EC_INLINE static Vector vector(const Stored* p) { return T::vector(p); }
  // The lowest finite value hides a key like minus infinity. NaN does not, so that it reaches the output.
  EC_INLINE static bool hides(Stored number) { return one(number) <= kLowest; }
  EC_INLINE static bool hides(const Stored* numbers, int64_t count) {
    Integers shown{};
    int64_t t = 0;
    for (; t + kLanes <= count; t += kLanes) shown |= ~(vector(numbers + t) <= kLowest);
    bool any = false;
    EC_UNROLL for (int i = 0; i < kLanes; ++i) any |= shown[i] != 0;
    for (; t < count; ++t) any |= !hides(numbers[t]);
    return !any;
  }

 private:
  static constexpr float kLowest = std::is_same_v<T, Float32> ? -3.4028234663852886e38f : -3.3895313892515355e38f;
};

struct Flags {
  using Stored = uint8_t;
  EC_INLINE static float one(Stored flag) { return flag ? 0.0f : kNothing; }
  EC_INLINE static Vector vector(const Stored* p) {
    Vector v;
    EC_UNROLL for (int i = 0; i < kLanes; ++i) v[i] = one(p[i]);
    return v;
  }
  EC_INLINE static bool hides(Stored flag) { return flag == 0; }
  EC_INLINE static bool hides(const Stored* flags, int64_t count) {
    uint64_t any = 0;
    int64_t t = 0;
    for (; t + 8 <= count; t += 8) any |= loaded<uint64_t>(flags + t);
    for (; t < count; ++t) any |= flags[t];
    return any == 0;
  }
};

struct NoMask {
  using Stored = uint8_t;
  EC_INLINE static bool hides(Stored) { return false; }
  EC_INLINE static bool hides(const Stored*, int64_t) { return false; }
};

// Collects the blocks of keys that any row of a head sees, in the order of the heads.
template <class M>
class SeenKeys {
 public:
  using Stored = typename M::Stored;

  // Writes the blocks, and for each head the index of its first block, followed by the number of blocks.
  SeenKeys(const Question& question, std::vector<Block>& blocks, std::vector<int64_t>& starts)
      : q_(question), blocks_(blocks), starts_(starts) {
    blocks_.clear(), starts_.assign(1, 0);
    for (int64_t b = 0; b < q_.batch; ++b) {
      for (int64_t h = 0; h < q_.kv_heads; ++h) {
        add_head(static_cast<int32_t>(b * q_.kv_heads + h), q_.mask.template at<Stored>(b, h * q_.groups, 0));
        starts_.push_back(static_cast<int64_t>(blocks_.size()));
      }
    }
  }

 private:
  void add_head(int32_t head, const Stored* mask) {
    const int64_t first = starts_.back();
    if (head > 0 && mask == last_) {
      for (int64_t i = starts_[head - 1]; i < first; ++i) add(head, blocks_[i].first, blocks_[i].count);
    } else if (!add_seen(head, mask)) {
      // A row without visible keys has equal scores everywhere and gets the mean of all values, so all are read.
      blocks_.resize(first);
      for (int64_t t = 0; t < q_.keys; t += kBlock) add(head, t, std::min(kBlock, q_.keys - t));
    }
    last_ = mask;
  }

  void add(int32_t head, int64_t first, int64_t count) {
    blocks_.push_back({head, static_cast<int32_t>(first), static_cast<int32_t>(count)});
  }

  // Returns true if each row sees a key.
  bool add_seen(int32_t head, const Stored* mask) {
    if constexpr (std::is_same_v<M, NoMask>) return false;
    // A mask that rows share is read once.
    const int64_t groups = q_.mask.head == 0 ? 1 : q_.groups, queries = q_.mask.token == 0 ? 1 : q_.queries;
    const int64_t rows = groups * queries;
    const auto row = [&](int64_t r) { return mask + r / queries * q_.mask.head + r % queries * q_.mask.token; };
    const auto is_hidden = [&](int64_t key) {
      for (int64_t r = 0; r < rows; ++r) {
        if (!M::hides(row(r)[key])) return false;
      }
      return true;
    };
    shown_.assign(rows, 0);
    for (int64_t first = 0; first < q_.keys; first += kBlock) {
      int64_t begin = first, end = std::min(first + kBlock, q_.keys);
      bool any = false;
      for (int64_t r = 0; r < rows; ++r) {
        const bool shown = !M::hides(row(r) + begin, end - begin);
        shown_[r] |= shown, any |= shown;
      }
      if (!any) continue;
      while (is_hidden(begin)) ++begin;
      while (is_hidden(end - 1)) --end;
      add(head, begin, end - begin);
    }
    return std::find(shown_.begin(), shown_.end(), 0) == shown_.end();
  }

  const Question& q_;
  std::vector<Block>& blocks_;
  std::vector<int64_t>& starts_;
  const Stored* last_ = nullptr;
  std::vector<char> shown_;
};

}  // namespace
