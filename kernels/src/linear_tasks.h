// How the products of a linear layer are cut into tasks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "attention.h"
#include "linear.h"

namespace exportable_cache::kernels {

// What one thread computes in the time that others take to wake.
constexpr int64_t kWorthAThread = 1 << 17;
constexpr int64_t kTasksOfThread = 4;

// Blocks of outputs, and rows.
struct Tile {
  int64_t first_block, last_block, first_row, last_row;
};

// Tiles of all outputs and rows: `task_rows` rows, and a multiple of `together` blocks.
class Tiles {
 public:
  Tiles(int64_t rows, int64_t outputs, int64_t task_rows, int64_t together, const Threads& threads)
      : rows_(rows), task_rows_(task_rows), blocks_(blocks_of(outputs)) {
    row_tasks_ = (rows + task_rows - 1) / task_rows;
    const int64_t wanted = std::max<int64_t>(1, static_cast<int64_t>(threads.count) * kTasksOfThread / row_tasks_);
    blocks_of_task_ = std::max<int64_t>(1, (blocks_ + wanted * together - 1) / (wanted * together)) * together;
  }

  int64_t count() const { return (blocks_ + blocks_of_task_ - 1) / blocks_of_task_ * row_tasks_; }

  Tile operator[](int64_t index) const {
    const int64_t block = index / row_tasks_ * blocks_of_task_, row = index % row_tasks_ * task_rows_;
    return {block, std::min(block + blocks_of_task_, blocks_), row, std::min(row + task_rows_, rows_)};
  }

 private:
  int64_t rows_, task_rows_, blocks_, row_tasks_ = 0, blocks_of_task_ = 0;
};

inline void run_tasks(const Threads& threads, int64_t count, void (*task)(void*, size_t), void* work, bool worth_it) {
  if (worth_it && threads.run != nullptr && threads.count > 1 && count > 1) {
    threads.run(static_cast<size_t>(count), task, work);
    return;
  }
  for (int64_t i = 0; i < count; ++i) task(work, static_cast<size_t>(i));
}

}  // namespace exportable_cache::kernels
