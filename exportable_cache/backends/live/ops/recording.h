// Calls of a step, noted while it runs, to be run again: then nothing is between them.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace {

// Most arguments of a function that Inductor has generated; one of fewer is called with zeros behind them.
constexpr int kMostArguments = 32;

struct Recording {
  std::vector<std::function<void()>> calls;
  // Whether all that it did is among them.
  bool is_whole = true;
};

// A function of pointers and integers of 64 bits, whose registers and stack the caller sees to.
struct Call {
  void* function;
  int64_t of[kMostArguments];

  void operator()() const { call(std::make_index_sequence<kMostArguments>()); }
  template <size_t... I>
  void call(std::index_sequence<I...>) const {
    reinterpret_cast<void (*)(decltype(of[I] + 0)...)>(function)(of[I]...);
  }
};

// Of this thread, nullptr for none.
thread_local Recording* recording = nullptr;

// Runs a call that has copies of all it needs, and notes it.
template <class F>
void run_noted(const F& call) {
  call();
  if (recording != nullptr) recording->calls.push_back(call);
}

// Something was done that is not noted.
inline void not_noted() {
  if (recording != nullptr) recording->is_whole = false;
}

}  // namespace

extern "C" {

__attribute__((used)) inline void* exportable_cache_recording() { return new Recording; }

__attribute__((used)) inline void exportable_cache_end(void* ended) { delete static_cast<Recording*>(ended); }

// Has this thread's calls of this library noted in a recording, nullptr for no longer.
__attribute__((used)) inline void exportable_cache_note(void* into) { recording = static_cast<Recording*>(into); }

__attribute__((used)) inline bool exportable_cache_is_whole(void* of) { return static_cast<Recording*>(of)->is_whole; }

// Adds a function of pointers and integers of 64 bits.
__attribute__((used)) inline void exportable_cache_add(void* to, void* function, const int64_t* arguments,
                                                       int64_t count) {
  Call call{};
  call.function = function;
  for (int64_t i = 0; i < count; ++i) call.of[i] = arguments[i];
  static_cast<Recording*>(to)->calls.push_back(call);
}

// Runs all of it again; false if a call failed.
__attribute__((used)) inline bool exportable_cache_run(void* again) {
  try {
    for (const auto& call : static_cast<Recording*>(again)->calls) call();
    return true;
  } catch (...) {
    return false;
  }
}

}  // extern "C"
