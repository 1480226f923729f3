// Helpers for UTF-8.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace exportable_cache {

/// U+FFFD, the replacement for invalid bytes.
inline constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";

/// Append a code point. Invalid ones (a lone surrogate, a number past U+10FFFF) become U+FFFD.
void append_utf8(std::string& text, uint32_t code);

/// Classification of the first bytes of a text.
struct Utf8Prefix {
  enum Kind {
    kCharacter,   // a whole character of `size` bytes
    kIncomplete,  // all `size` bytes are the beginning of a character
    kInvalid,     // `size` bytes that cannot begin a character
  } kind;
  size_t size;
};

/// Classify the beginning of non-empty `bytes`. Invalid bytes are grouped as Unicode recommends (table 3-7 and "maximal subparts"),
/// as in Python's and Rust's lossy decoders.
Utf8Prefix utf8_prefix(std::string_view bytes);

/// The offset of the first byte that belongs to no character, or the length of a text that is UTF-8.
size_t valid_utf8(std::string_view bytes);

}  // namespace exportable_cache
