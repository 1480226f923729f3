// Two small helpers around UTF-8.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace exportable_cache {

/// U+FFFD, which stands for bytes that are no character.
inline constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";

/// Append a code point. What is none (a lone surrogate, a number past U+10FFFF) becomes U+FFFD.
void append_utf8(std::string& text, uint32_t code);

/// What the bytes from the front of a text are.
struct Utf8Prefix {
  enum Kind {
    kCharacter,   // a whole character of `size` bytes
    kIncomplete,  // all `size` bytes there are begin a character
    kInvalid,     // `size` bytes that can begin none
  } kind;
  size_t size;
};

/// Look at the front of `bytes`, which are at least one. Invalid bytes are grouped as Unicode recommends (table 3-7 and
/// "maximal subparts"), which is how Python's and Rust's lossy decoders count them.
Utf8Prefix utf8_prefix(std::string_view bytes);

/// Where the first byte is that belongs to no character, or the length of a text that is UTF-8.
size_t valid_utf8(std::string_view bytes);

}  // namespace exportable_cache
