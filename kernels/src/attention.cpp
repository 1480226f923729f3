// Splitting of attention into tasks, and merging of the parts of one row.
#include "attention.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "hwy/aligned_allocator.h"
#include "half.h"
#include "piece.h"
#include "sequence.h"

namespace exportable_cache::kernels {
namespace {

// Bytes of keys and values that one thread reads in the time that others take to wake up.
constexpr int64_t kSerialBytes = 96 * 1024;
// Tasks per thread, so that other threads help one that starts late.
constexpr int64_t kTasksPerThread = 4;
// Least number of keys per task, because merging takes as long as a few keys.
constexpr int64_t kLeastKeys = 4 * kBlock;

int64_t ceiling(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Scratch memory that only grows, because every layer of every step needs it.
float* scratch_memory(size_t size) {
  thread_local hwy::AlignedFreeUniquePtr<float[]> memory;
  thread_local size_t held = 0;
  if (held < size) {
    memory = hwy::AllocateAligned<float>(size);
    held = memory ? size : 0;
  }
  return memory.get();
}

int64_t bits_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat32: return 32;
    case Dtype::kInt8: return 8;
    case Dtype::kInt4: return 4;
    default: return 16;
  }
}

// Tasks of a call: `row_blocks` times `splits` for every key head.
struct Plan {
  int64_t rows = 0;        // per key head
  int64_t block_rows = 0;  // per task
  int64_t row_blocks = 1;
  int64_t keys = 0;  // of the longest batch row
  int64_t splits = 1;
  int64_t split_keys = 0;  // keys per split
  bool serial = false;
};

Plan plan_of(const Attention& a, int64_t threads) {
  Plan plan;
  plan.rows = a.queries * a.groups;
  plan.row_blocks = std::max<int64_t>(1, ceiling(plan.rows, kRows));
  plan.block_rows = ceiling(plan.rows, plan.row_blocks);
  if (plan.row_blocks > 1) plan.block_rows = ceiling(plan.block_rows, kTileRows) * kTileRows;
  plan.row_blocks = std::max<int64_t>(1, ceiling(plan.rows, plan.block_rows));
  for (int64_t row = 0; row < a.batch; ++row) plan.keys = std::max(plan.keys, sequence_of(a, row).keys);
  const int64_t heads = a.batch * a.kv_heads, tasks = heads * plan.row_blocks;
  const int64_t bytes = heads * plan.keys * (a.key_dim + a.value_dim) * bits_of(a.stored_dtype) / 8;
  plan.serial = threads <= 1 || bytes * ceiling(plan.rows, kFewRows) < kSerialBytes;
  if (!plan.serial && tasks < kTasksPerThread * threads) {
    plan.splits =
        std::clamp<int64_t>(ceiling(kTasksPerThread * threads, tasks), 1, std::max<int64_t>(1, plan.keys / kLeastKeys));
  }
  plan.split_keys = ceiling(ceiling(plan.keys, plan.splits), kBlock) * kBlock;
  plan.splits = std::max<int64_t>(1, plan.split_keys ? ceiling(plan.keys, plan.split_keys) : 1);
  return plan;
}

struct Work {
  const Attention& attention;
  const Plan& plan;
  float* partials;

  Piece piece(size_t index) const {
    const auto i = static_cast<int64_t>(index);
    const int64_t split = i % plan.splits, block = i / plan.splits % plan.row_blocks;
    const int64_t head = i / plan.splits / plan.row_blocks;
    Piece piece;
    piece.batch = head / attention.kv_heads;
    piece.kv_head = head % attention.kv_heads;
    piece.first_row = block * plan.block_rows;
    piece.rows = std::min(plan.block_rows, plan.rows - piece.first_row);
    piece.first_key = split * plan.split_keys;
    piece.end_key = std::min(plan.keys, piece.first_key + plan.split_keys);
    if (partials) piece.partial = partials + i * plan.block_rows * partial_stride(attention.value_dim);
    return piece;
  }
};

void run_task(void* context, size_t index) {
  const Work& work = *static_cast<const Work*>(context);
  attend_piece(work.attention, work.piece(index), scratch_memory(scratch_size(work.attention)));
}

// The rows of the pieces [first, first + splits), which are parts of the same rows.
void merge(const Work& work, size_t first, float* sum) {
  const int64_t dim = work.attention.value_dim, stride = partial_stride(dim);
  const Piece whole = work.piece(first);
  for (int64_t row = 0; row < whole.rows; ++row) {
    float top = -std::numeric_limits<float>::infinity();
    for (int64_t split = 0; split < work.plan.splits; ++split) {
      const float part = work.piece(first + split).partial[row * stride];
      // Not std::max, because it would lose a NaN.
      if (!(part <= top)) top = part;
    }
    float total = 0.0f;
    std::memset(sum, 0, sizeof(float) * dim);
    for (int64_t split = 0; split < work.plan.splits; ++split) {
      const float* part = work.piece(first + split).partial + row * stride;
      if (part[1] == 0.0f) continue;
      const float weight = std::exp(part[0] - top);
      total += weight * part[1];
      for (int64_t i = 0; i < dim; ++i) sum[i] += weight * part[kPad + i];
    }
    write_row(work.attention, whole, row, sum, total == 0.0f ? 0.0f : 1.0f / total);
  }
}

}  // namespace

void write_row(const Attention& a, const Piece& piece, int64_t row, const float* values, float factor) {
  const int64_t token = (piece.first_row + row) / a.groups, group = (piece.first_row + row) % a.groups;
  const int64_t at = piece.batch * a.out.batch_stride + token * a.out.token_stride +
                     (piece.kv_head * a.groups + group) * a.out.head_stride;
  switch (a.query_dtype) {
    case Dtype::kFloat32: {
      float* out = static_cast<float*>(a.out.data) + at;
      for (int64_t i = 0; i < a.value_dim; ++i) out[i] = values[i] * factor;
      break;
    }
    case Dtype::kFloat16: {
      auto* out = static_cast<uint16_t*>(a.out.data) + at;
      for (int64_t i = 0; i < a.value_dim; ++i) out[i] = float16_of_float(values[i] * factor);
      break;
    }
    default: {
      auto* out = static_cast<uint16_t*>(a.out.data) + at;
      for (int64_t i = 0; i < a.value_dim; ++i) out[i] = bfloat16_of_float(values[i] * factor);
    }
  }
}

void attend(const Attention& a, const Threads& threads) {
  const Plan plan = plan_of(a, static_cast<int64_t>(threads.count));
  const size_t tasks = static_cast<size_t>(a.batch * a.kv_heads * plan.row_blocks * plan.splits);
  if (tasks == 0 || plan.rows == 0) return;
  std::vector<float> partials;
  if (plan.splits > 1) partials.resize(tasks * plan.block_rows * partial_stride(a.value_dim));
  Work work{a, plan, plan.splits > 1 ? partials.data() : nullptr};
  if (plan.serial || tasks == 1) {
    for (size_t index = 0; index < tasks; ++index) run_task(&work, index);
  } else {
    threads.run(tasks, run_task, &work);
  }
  if (plan.splits > 1) {
    std::vector<float> sum(a.value_dim);
    for (size_t first = 0; first < tasks; first += plan.splits) merge(work, first, sum.data());
  }
}

}  // namespace exportable_cache::kernels
