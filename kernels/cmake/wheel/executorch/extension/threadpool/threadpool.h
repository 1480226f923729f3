// Of ExecuTorch's thread pool, whose header the wheel of 1.5 does not ship, what kernels/ and runners/cpp call. The functions are
// those of its library libexecutorch_threadpool.so, the same as in 1.4.1, whose wheel has the header: this one is found after it.
#pragma once

#include <cstddef>
#include <cstdint>

#include <executorch/runtime/core/function_ref.h>

namespace executorch::extension::threadpool {

// Only its address is known here: it is made by `get_threadpool` and nowhere else.
class ThreadPool final {
 public:
  ThreadPool() = delete;
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  size_t get_thread_count() const;
  bool _unsafe_reset_threadpool(uint32_t num_threads);
  void run(runtime::FunctionRef<void(size_t)> fn, size_t range);
};

ThreadPool* get_threadpool();

}  // namespace executorch::extension::threadpool
