#include <exportable_cache/threads.h>

#include <executorch/extension/threadpool/threadpool.h>

#include "open_programs.h"

namespace exportable_cache {
namespace {

// A mistyped number would start threads until memory is exhausted.
constexpr int64_t kMostThreads = 512;

}  // namespace

int64_t threads() {
  const auto* const pool = executorch::extension::threadpool::get_threadpool();
  return pool == nullptr ? 1 : static_cast<int64_t>(pool->get_thread_count());
}

Status set_threads(int64_t count) {
  if (count < 1 || count > kMostThreads) {
    return fail(ErrorCode::kInput, "threads is ", count, "; it must be from 1 to ", kMostThreads);
  }
  if (count == threads()) return {};
  if (OpenProgram::any()) {
    return fail(ErrorCode::kInput, "threads is ", count, ", but sessions of this process are open that compute in ", threads(),
                "; close them first, or set it before the first is opened");
  }
  auto* const pool = executorch::extension::threadpool::get_threadpool();
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
  // Unsafe while the pool is in use, but this library does not use it now.
  const bool done = pool != nullptr && pool->_unsafe_reset_threadpool(static_cast<uint32_t>(count));
#pragma GCC diagnostic pop
  if (!done) return fail(ErrorCode::kRuntime, "ExecuTorch could not make a pool of ", count, " threads; it has ", threads());
  return {};
}

}  // namespace exportable_cache
