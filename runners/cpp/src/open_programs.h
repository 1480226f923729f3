// Number of open programs in this process, which use ExecuTorch's thread pool.
#pragma once

#include <atomic>
#include <cstdint>

namespace exportable_cache {

class OpenProgram {
 public:
  OpenProgram() { ++count_; }
  ~OpenProgram() { --count_; }
  OpenProgram(const OpenProgram&) = delete;
  OpenProgram& operator=(const OpenProgram&) = delete;

  static bool any() { return count_ > 0; }

 private:
  inline static std::atomic<int64_t> count_{0};
};

}  // namespace exportable_cache
