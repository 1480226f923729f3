// Thread pool of a benchmark.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include "attention.h"

// Like the runtime's: threads spin for a while, and take the next task when they are done with one.
class Pool {
 public:
  explicit Pool(size_t threads) {
    for (size_t i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
  }
  ~Pool() {
    run(0, nullptr, nullptr, true);
    for (std::thread& worker : workers_) worker.join();
  }

  void run(size_t count, void (*task)(void*, size_t), void* context, bool last = false) {
    task_ = task, context_ = context, count_ = count, last_ = last;
    next_.store(0), working_.store(static_cast<int>(workers_.size()));
    call_.fetch_add(1, std::memory_order_release);
    take();
    while (working_.load(std::memory_order_acquire) > 0) {}
  }

 private:
  void take() {
    for (size_t i; (i = next_.fetch_add(1)) < count_;) task_(context_, i);
  }
  void work() {
    for (uint64_t seen = 0;;) {
      while (call_.load(std::memory_order_acquire) == seen) {}
      ++seen;
      const bool last = last_;
      take();
      working_.fetch_sub(1, std::memory_order_release);
      if (last) return;
    }
  }

  std::vector<std::thread> workers_;
  void (*task_)(void*, size_t) = nullptr;
  void* context_ = nullptr;
  size_t count_ = 0;
  bool last_ = false;
  std::atomic<uint64_t> call_{0};
  std::atomic<size_t> next_{0};
  std::atomic<int> working_{0};
};

inline Pool* pool = nullptr;

// The tasks refer to `own`; only one such pool may exist at a time.
inline exportable_cache::kernels::Threads threads_of(Pool& own, size_t count) {
  pool = &own;
  return {count, [](size_t n, void (*task)(void*, size_t), void* context) { pool->run(n, task, context); }};
}
