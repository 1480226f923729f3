// Splitting of a linear layer's products into tasks, and the products of one task.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "attention.h"
#include "float_linear.h"
#include "linear.h"

namespace exportable_cache::kernels {

// Work of one thread in the time that others take to wake up.
constexpr int64_t kWorthAThread = 1 << 17;
constexpr int64_t kTasksOfThread = 4;

// Blocks of outputs, and rows.
struct Tile {
  int64_t first_block, last_block, first_row, last_row;
};

// Rows of a 4-bit layer's task, whose activations stay in a core's cache while its blocks are multiplied.
constexpr int64_t kTaskRows = 128;
// Blocks of a 4-bit layer that some targets multiply together.
constexpr int64_t kTogether = 2;
// Bytes of a float layer's task's rows, which stay in a core's L2 cache while its blocks are multiplied.
constexpr int64_t kTaskBytes = 512 * 1024;

// Rows of a float layer's task: a multiple of every tile's rows.
inline int64_t float_task_rows(int64_t inputs) { return std::max<int64_t>(1, kTaskBytes / 4 / inputs / 24) * 24; }

constexpr size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

// Quantized rows of activations.
struct Rounded {
  int8_t* numbers;  // [rows, inputs]
  int32_t* sums;    // [rows, runs]: contribution of the weights' offset of 8 to a run, to be subtracted
  float* scale;     // [rows]
  float* zero;      // [rows]: the integer that represents 0
};

// Bytes of quantized rows, and their parts in scratch memory, which must be aligned to 64.
size_t rounded_bytes(int64_t rows, int64_t inputs);
Rounded rounded_in(int64_t rows, int64_t inputs, void* scratch);

// Quantizes float32 [inputs] to a row.
void round_linear_row(const float* source, int64_t inputs, const Rounded& rounded, int64_t row);

// The products of one task. The tile's rows are those of `rounded` or of the layer's source, and of its output.
void multiply_linear_tile(const Linear& linear, const Rounded& rounded, const Tile& tile);
void multiply_linear_tile(const FloatLinear& linear, const Tile& tile);
void multiply_linear_tile(const Float16Linear& linear, const Tile& tile);
void multiply_linear_tile(const BFloat16Linear& linear, const Tile& tile);
void multiply_linear_tile(const GroupedLinear& linear, const Tile& tile);
void multiply_linear_tile(const Grouped16Linear& linear, const Tile& tile);

// Tiles of all outputs and rows of a layer, or of a few layers with the same rows: `task_rows` rows, and a multiple of
// `together` of the layer's blocks. All layers have `all_blocks` together.
class Tiles {
 public:
  Tiles() = default;
  Tiles(int64_t rows, int64_t outputs, int64_t task_rows, int64_t together, int64_t all_blocks, const Threads& threads)
      : rows_(rows), task_rows_(task_rows), blocks_(blocks_of(outputs)) {
    row_tasks_ = (rows + task_rows - 1) / task_rows;
    const int64_t wanted = std::max<int64_t>(1, static_cast<int64_t>(threads.count) * kTasksOfThread / row_tasks_);
    // The nearest number, because five tasks of 16 blocks would be three and two, and ten of 8 are five and five.
    blocks_of_task_ = std::max<int64_t>(1, (2 * all_blocks / (wanted * together) + 1) / 2) * together;
  }

  int64_t count() const { return (blocks_ + blocks_of_task_ - 1) / blocks_of_task_ * row_tasks_; }

  Tile operator[](int64_t index) const {
    const int64_t block = index / row_tasks_ * blocks_of_task_, row = index % row_tasks_ * task_rows_;
    return {block, std::min(block + blocks_of_task_, blocks_), row, std::min(row + task_rows_, rows_)};
  }

 private:
  int64_t rows_ = 0, task_rows_ = 1, blocks_ = 0, row_tasks_ = 1, blocks_of_task_ = 1;
};

// Tasks of layers with the same rows, layer by layer.
template <class L>
class TilesOfLayers {
 public:
  TilesOfLayers(const L* layers, size_t count, int64_t task_rows, int64_t together, const Threads& threads)
      : layers_(layers), count_(count) {
    int64_t all = 0;
    for (size_t i = 0; i < count; ++i) all += blocks_of(layers[i].outputs);
    for (size_t i = 0; i < count; ++i) {
      tiles_[i] = Tiles(layers[i].rows, layers[i].outputs, task_rows, together, all, threads);
    }
  }

  int64_t count() const {
    int64_t all = 0;
    for (size_t i = 0; i < count_; ++i) all += tiles_[i].count();
    return all;
  }

  // Calls `multiply` with the layer and the tile of a task.
  template <class F>
  void run(int64_t task, const F& multiply) const {
    size_t layer = 0;
    for (; task >= tiles_[layer].count(); ++layer) task -= tiles_[layer].count();
    multiply(layers_[layer], tiles_[layer][task]);
  }

  bool is_worth_threads() const {
    int64_t products = 0;
    for (size_t i = 0; i < count_; ++i) products += layers_[i].rows * layers_[i].inputs * layers_[i].outputs;
    return products > kWorthAThread;
  }

 private:
  const L* layers_;
  size_t count_;
  Tiles tiles_[kMostLayers];
};

inline void run_tasks(const Threads& threads, int64_t count, void (*task)(void*, size_t), void* work, bool worth_it) {
  if (worth_it && threads.run != nullptr && threads.count > 1 && count > 1) {
    threads.run(static_cast<size_t>(count), task, work);
    return;
  }
  for (int64_t i = 0; i < count; ++i) task(work, static_cast<size_t>(i));
}

}  // namespace exportable_cache::kernels
