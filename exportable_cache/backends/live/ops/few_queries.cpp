// Attention of few query tokens, as decode steps have them, over the keys and values of a static cache.
//
// A step is limited by how fast memory delivers keys and values. So the mask is evaluated first: keys that no query of
// a head sees are not read, because their weights are 0, and the remaining blocks are divided evenly among all threads.
#include "blocks.h"

namespace {

// Head dimensions are multiples of this.
constexpr int kUnit = 16;

// The arguments of one call.
struct Attention : Question {
  int64_t dim, value_dim;
  float scale, softcap;  // softcap 0: none
  View query, key, value;
  View sink;              // [batch, heads, queries]: scores of attention sinks, nullptr: none
  void* out;              // [batch, heads, queries, value_dim]
  const Block* blocks;    // the blocks to read
  const int64_t* starts;  // [batch * kv_heads + 1]: the first block of each head
  int64_t pieces;         // number of pieces, with equal numbers of blocks
  float* partial;         // [pieces, 2, rows, value_dim + 2]: partial results of a piece for its first and last head

  int64_t count() const { return starts[batch * kv_heads]; }
  int64_t first_of(int64_t piece) const { return count() * piece / pieces; }
  float* part(int64_t piece, bool last) const { return partial + (piece * 2 + last) * rows() * (value_dim + 2); }
};

// Running softmax of the rows of a head (flash decoding).
struct Running {
  float* query;   // [rows, dim], scaled
  float* scores;  // [rows, kBlock]; weights after `weigh`
  float* sums;    // [rows, value_dim]
  float* top;     // [rows]: maximum score so far
  float* total;   // [rows]: sum of the weights so far
};

template <class M>
EC_INLINE void add_mask(float* scores, const typename M::Stored* mask, int64_t count) {
  if constexpr (!std::is_same_v<M, NoMask>) {
    int64_t t = 0;
    for (; t + kLanes <= count; t += kLanes) {
      const Vector sum = loaded<Vector>(scores + t) + M::vector(mask + t);
      std::memcpy(scores + t, &sum, sizeof sum);
    }
    for (; t < count; ++t) scores[t] += M::one(mask[t]);
  }
  std::fill(scores + count, scores + kBlock, kNothing);
}

// Consecutive blocks, processed by one thread.
template <class T, class M>
struct Piece {
  using Stored = typename T::Stored;
  const Attention& a;
  Running run;

  void attend(int64_t piece) {
    const int64_t first = a.first_of(piece), end = a.first_of(piece + 1);
    for (int64_t i = first; i < end; ++i) {
      const Block& block = a.blocks[i];
      if (i == first || block.head != a.blocks[i - 1].head) begin(block.head, a.starts[block.head] >= first);
      pass(block, i + 1 < end ? a.blocks[i + 1] : Block{block.head, block.first, 0});
      if (i + 1 == end || a.blocks[i + 1].head != block.head) {
        const bool is_whole = a.starts[block.head] >= first && a.starts[block.head + 1] <= end;
        if (is_whole) write(block.head);
        else keep(a.part(piece, block.head != a.blocks[first].head));
      }
    }
  }

  // Number of floats of scratch memory.
  static int64_t needed(const Attention& a) { return a.rows() * (a.dim + kBlock + a.value_dim + 2) + 4 * kLine; }

  Piece(const Attention& attention, float* scratch) : a(attention) {
    const auto take = [&](int64_t count) {
      float* taken = scratch;
      scratch += (count + kUnit - 1) / kUnit * kUnit;
      return taken;
    };
    const int64_t rows = a.rows();
    run.query = take(rows * a.dim), run.scores = take(rows * kBlock), run.sums = take(rows * a.value_dim);
    run.top = take(rows), run.total = take(rows);
  }

  // Writes the weighted mean of the values of a row.
  static void write_row(const Attention& a, int64_t row, const float* sums, float total) {
    const float by = total == 0.0f ? 0.0f : 1.0f / total;
    const int64_t first = row * a.value_dim;
    for (int64_t i = 0; i < a.value_dim; ++i) {
      if constexpr (std::is_same_v<T, Float32>) static_cast<float*>(a.out)[first + i] = sums[i] * by;
      else static_cast<uint16_t*>(a.out)[first + i] = to_bfloat16(sums[i] * by);
    }
  }

 private:
  void begin(int64_t head, bool is_start) {
    const int64_t rows = a.rows();
    std::fill_n(run.sums, rows * a.value_dim, 0.0f);
    std::fill_n(run.top, rows, kNothing);
    std::fill_n(run.total, rows, 0.0f);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t b = head / a.kv_heads, h = head % a.kv_heads * a.groups + r / a.queries, q = r % a.queries;
      if (is_start && a.sink.data != nullptr) {
        run.top[r] = Addend<T>::one(*a.sink.at<Stored>(b, h, q)), run.total[r] = 1.0f;
      }
      const Stored* query = a.query.at<Stored>(b, h, q);
      for (int64_t i = 0; i < a.dim; i += kLanes) {
        const Vector scaled = T::vector(query + i) * a.scale;
        std::memcpy(run.query + r * a.dim + i, &scaled, sizeof scaled);
      }
    }
  }

  const Stored* keys(const Block& block) const {
    return a.key.at<Stored>(block.head / a.kv_heads, block.head % a.kv_heads, block.first);
  }
  const Stored* values(const Block& block) const {
    return a.value.at<Stored>(block.head / a.kv_heads, block.head % a.kv_heads, block.first);
  }

  void pass(const Block& block, const Block& next) {
    const int64_t rows = a.rows(), count = block.count;
    const Ahead keys_ahead = Ahead::of(keys(next), a.key.token, a.dim, next.count);
    const Ahead values_ahead = Ahead::of(values(next), a.value.token, a.value_dim, next.count);
    for_tiles(rows, [&](int64_t r, auto tile) __attribute__((always_inline)) {
      scores_of<T, tile>(run.query + r * a.dim, a.dim, keys(block), a.key.token, count, r ? Ahead() : keys_ahead,
                         run.scores + r * kBlock);
    });
    const int64_t b = block.head / a.kv_heads, first_head = block.head % a.kv_heads * a.groups;
    for (int64_t r = 0; r < rows; ++r) {
      float* scores = run.scores + r * kBlock;
      const auto* mask = a.mask.template at<typename M::Stored>(b, first_head + r / a.queries, r % a.queries);
      if (a.softcap != 0.0f) cap(scores, a.softcap);
      add_mask<M>(scores, mask + block.first, count);
      weigh(scores, run.top + r, run.total + r, run.sums + r * a.value_dim, a.value_dim);
    }
    for_tiles(rows, [&](int64_t r, auto tile) __attribute__((always_inline)) {
      sums_of<T, tile>(run.scores + r * kBlock, values(block), a.value.token, count, r ? Ahead() : values_ahead,
                       run.sums + r * a.value_dim, a.value_dim);
    });
  }

  void write(int64_t head) {
    for (int64_t r = 0; r < a.rows(); ++r) {
      write_row(a, head * a.rows() + r, run.sums + r * a.value_dim, run.total[r]);
    }
  }

  void keep(float* part) const {
    for (int64_t r = 0; r < a.rows(); ++r, part += a.value_dim + 2) {
      part[0] = run.top[r], part[1] = run.total[r];
      std::copy_n(run.sums + r * a.value_dim, a.value_dim, part + 2);
    }
  }
};

// Combines the partial results of heads that several pieces share.
template <class T, class M>
void join(const Attention& a) {
  std::vector<float> sums(a.value_dim);
  int64_t done = -1;
  for (int64_t piece = 1; piece < a.pieces; ++piece) {
    const int64_t border = a.first_of(piece), head = a.blocks[border].head;
    if (a.starts[head] == border || head == done) continue;
    done = head;
    // The pieces from piece - 1 to last have a part of this head.
    int64_t last = piece;
    while (a.first_of(last + 1) < a.starts[head + 1]) ++last;
    for (int64_t r = 0; r < a.rows(); ++r) {
      const auto part = [&](int64_t p) {
        return a.part(p, a.blocks[a.first_of(p)].head != head) + r * (a.value_dim + 2);
      };
      float top = kNothing, total = 0.0f;
      for (int64_t p = piece - 1; p <= last; ++p) top = std::max(top, part(p)[0]);
      std::fill(sums.begin(), sums.end(), 0.0f);
      for (int64_t p = piece - 1; p <= last; ++p) {
        const float* one = part(p);
        const float by = one[0] == kNothing ? 0.0f : std::exp(one[0] - top);
        total += one[1] * by;
        for (int64_t i = 0; i < a.value_dim; ++i) sums[i] += one[2 + i] * by;
      }
      Piece<T, M>::write_row(a, head * a.rows() + r, sums.data(), total);
    }
  }
}

template <class T, class M>
void some_pieces(int64_t begin, int64_t end, void* context) {
  thread_local Scratch scratch;
  const Attention& a = *static_cast<const Attention*>(context);
  for (; begin < end; ++begin) Piece<T, M>(a, scratch.numbers(Piece<T, M>::needed(a))).attend(begin);
}

template <class T, class M>
void run(Attention& a) {
  thread_local std::vector<Block> blocks;
  thread_local std::vector<int64_t> starts;
  SeenKeys<M>(a, blocks, starts);
  a.blocks = blocks.data(), a.starts = starts.data();
  uint32_t threads;
  STABLE_TORCH_ERROR_CODE_CHECK(torch_get_num_threads(&threads));
  const int64_t bytes = a.count() * kBlock * (a.dim + a.value_dim) * int64_t{sizeof(typename T::Stored)};
  a.pieces = std::min({int64_t{threads}, a.count(), bytes / kWorthAThread + 1});
  thread_local Scratch partial;
  a.partial = partial.numbers(a.pieces * 2 * a.rows() * (a.value_dim + 2));
  STABLE_TORCH_ERROR_CODE_CHECK(torch_parallel_for(0, a.pieces, 1, some_pieces<T, M>, &a));
  if (a.pieces > 1) join<T, M>(a);
}

template <class T>
void run(Attention& a, const std::optional<Tensor>& mask) {
  if (!mask.has_value()) return run<T, NoMask>(a);
  const ScalarType type = mask->scalar_type();
  if (type == ScalarType::Bool) return run<T, Flags>(a);
  if (type == ScalarType::Float) return run<T, Addend<Float32>>(a);
  STD_TORCH_CHECK(type == ScalarType::BFloat16, "few_queries_attention: a mask of bool, float32 or bfloat16");
  run<T, Addend<BFloat16>>(a);
}

View view(const Tensor& tensor) {
  const auto stride = [&](int64_t d) { return tensor.size(d) == 1 ? 0 : tensor.stride(d); };
  return {tensor.data_ptr(), stride(0), stride(1), stride(2)};
}

// Returns the tensor with a contiguous last dimension.
Tensor with_whole_rows(const Tensor& tensor) {
  STD_TORCH_CHECK(tensor.dim() == 4, "few_queries_attention: tensors are [batch, heads, tokens, dim]");
  return tensor.size(3) == 1 || tensor.stride(3) == 1 ? tensor : without_gaps(tensor);
}

Tensor few_queries_attention(const Tensor& queries, const Tensor& keys, const Tensor& values,
                             const std::optional<Tensor>& addend, std::optional<double> scale,
                             std::optional<double> softcap, const std::optional<Tensor>& sinks) {
  const Tensor query = with_whole_rows(queries), key = with_whole_rows(keys), value = with_whole_rows(values);
  const ScalarType type = query.scalar_type();
  STD_TORCH_CHECK((type == ScalarType::Float || type == ScalarType::BFloat16) && key.scalar_type() == type &&
                      value.scalar_type() == type,
                  "few_queries_attention: queries, keys and values in float32, or all in bfloat16");
  Attention a{};
  a.batch = query.size(0), a.kv_heads = key.size(1), a.queries = query.size(2), a.keys = key.size(2);
  a.dim = query.size(3), a.value_dim = value.size(3), a.groups = a.kv_heads ? query.size(1) / a.kv_heads : 0;
  STD_TORCH_CHECK(key.size(0) == a.batch && value.size(0) == a.batch && value.size(1) == a.kv_heads &&
                      value.size(2) == a.keys && key.size(3) == a.dim && a.groups * a.kv_heads == query.size(1),
                  "few_queries_attention: keys and values of each query's batch and head");
  STD_TORCH_CHECK(a.keys > 0 && a.dim > 0 && a.dim % kUnit == 0 && a.value_dim % kUnit == 0,
                  "few_queries_attention: at least one key, and sizes of heads that are multiples of ", kUnit);
  a.scale = static_cast<float>(scale.has_value() ? *scale : 1.0 / std::sqrt(static_cast<double>(a.dim)));
  a.softcap = static_cast<float>(softcap.value_or(0.0));
  a.query = view(query), a.key = view(key), a.value = view(value);
  const auto fits = [&](const Tensor& tensor) {
    const auto serves = [&](int64_t d) { return tensor.size(d) == 1 || tensor.size(d) == query.size(d); };
    return serves(0) && serves(1) && serves(2);
  };
  std::optional<Tensor> mask;
  if (addend.has_value()) {
    mask = with_whole_rows(*addend);
    STD_TORCH_CHECK(fits(*mask) && mask->size(3) == a.keys,
                    "few_queries_attention: a mask is [batch or 1, heads or 1, queries or 1, keys]");
    a.mask = view(*mask);
  }
  if (sinks.has_value()) {
    STD_TORCH_CHECK(sinks->dim() == 4 && sinks->scalar_type() == type && fits(*sinks) && sinks->size(3) == 1,
                    "few_queries_attention: sinks are [batch or 1, heads or 1, queries or 1, 1], in the queries' dtype");
    a.sink = view(*sinks);
  }
  const Tensor out = empty(query, {a.batch, query.size(1), a.queries, a.value_dim});
  a.out = out.data_ptr();
  if (out.numel() == 0) return out;
  if (type == ScalarType::Float) run<Float32>(a, mask);
  else run<BFloat16>(a, mask);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(exportable_cache, library) {
  library.def(
      "few_queries_attention(Tensor query, Tensor key, Tensor value, Tensor? mask=None, float? scale=None, "
      "float? softcap=None, Tensor? sinks=None) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(exportable_cache, CPU, library) {
  library.impl("few_queries_attention", TORCH_BOX(&few_queries_attention));
}
