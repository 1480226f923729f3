#include "thread_pool.h"

#include <atomic>

#ifndef EXPORTABLE_CACHE_KERNELS_SERIAL
#include <executorch/extension/threadpool/threadpool.h>
#endif

namespace exportable_cache::kernels {

#ifdef EXPORTABLE_CACHE_KERNELS_SERIAL
Threads runtime_threads() { return {}; }
#else
namespace {

void run(size_t count, void (*task)(void* context, size_t index), void* context) {
  executorch::extension::threadpool::get_threadpool()->run([&](size_t index) { task(context, index); }, count);
}

}  // namespace

Threads runtime_threads() {
  auto* const pool = executorch::extension::threadpool::get_threadpool();
  return pool == nullptr ? Threads{} : Threads{pool->get_thread_count(), run};
}
#endif

namespace {
std::atomic<int64_t> calls{0};
}  // namespace

void attend_in_runtime(const Attention& attention) {
  attend(attention, runtime_threads());
  calls.fetch_add(1, std::memory_order_relaxed);
}

int64_t attention_calls() { return calls.load(std::memory_order_relaxed); }

}  // namespace exportable_cache::kernels
