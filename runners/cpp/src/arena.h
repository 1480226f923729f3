// Memory of caches and intermediate results.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace exportable_cache {

// Zeroed memory that is only allocated when written to, so the unfilled part of a cache takes none.
class Arena {
 public:
  explicit Arena(size_t size) : size_(std::max<size_t>(size, 1)) {
    void* address = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (address != MAP_FAILED) data_ = static_cast<uint8_t*>(address);
  }
  ~Arena() {
    if (data_ != nullptr) ::munmap(data_, size_);
  }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Zero the memory again, without writing to it.
  void clear() const { (void)::madvise(data_, size_, MADV_DONTNEED); }

  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  uint8_t* data_ = nullptr;
  size_t size_;
};

}  // namespace exportable_cache
