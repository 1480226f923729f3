// SHA-256 (FIPS 180-4), for files that Python wrote with such a checksum.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace exportable_cache {

/// SHA-256 of bytes that are added in parts.
class Sha256 {
 public:
  void add(std::string_view bytes);

  /// The digest in hexadecimal digits. Call it once, after all bytes.
  std::string hex();

 private:
  void add_block(const unsigned char* block);

  std::array<uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::string rest_;  // bytes of an incomplete block
  uint64_t size_ = 0;
};

}  // namespace exportable_cache
