// The functions of ExecuTorch's thread pool that kernels/ and runners/cpp call, because the wheel of 1.5 does not ship the header. They
// are exported by libexecutorch_threadpool.so, unchanged since 1.4.1; the wheel of 1.4.1 has the header, which takes precedence.
#pragma once

#include <cstddef>
#include <cstdint>

#include <executorch/runtime/core/function_ref.h>

namespace executorch::extension::threadpool {

// An incomplete type, which only `get_threadpool` creates.
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
