// Thread pool of a test.
#pragma once

#include <thread>
#include <vector>

#include "../src/attention.h"

namespace exportable_cache::kernels {

inline size_t thread_count = 1;

inline void run_threads(size_t count, void (*task)(void*, size_t), void* context) {
  std::vector<std::thread> threads;
  for (size_t first = 0; first < thread_count; ++first) {
    threads.emplace_back([=] {
      for (size_t i = first; i < count; i += thread_count) task(context, i);
    });
  }
  for (auto& thread : threads) thread.join();
}

// This many threads, for one call at a time.
inline Threads threads_of(size_t count) {
  thread_count = count;
  return {count, run_threads};
}

}  // namespace exportable_cache::kernels
