#include "utf8.h"

namespace exportable_cache {

void append_utf8(std::string& text, uint32_t code) {
  if (code > 0x10FFFF || (code >= 0xD800 && code <= 0xDFFF)) code = 0xFFFD;
  const auto byte = [&text](uint32_t value) { text += static_cast<char>(value); };
  if (code < 0x80) {
    byte(code);
  } else if (code < 0x800) {
    byte(0xC0 | code >> 6);
    byte(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    byte(0xE0 | code >> 12);
    byte(0x80 | (code >> 6 & 0x3F));
    byte(0x80 | (code & 0x3F));
  } else {
    byte(0xF0 | code >> 18);
    byte(0x80 | (code >> 12 & 0x3F));
    byte(0x80 | (code >> 6 & 0x3F));
    byte(0x80 | (code & 0x3F));
  }
}

Utf8Prefix utf8_prefix(std::string_view bytes) {
  const auto at = [&bytes](size_t index) { return static_cast<unsigned char>(bytes[index]); };
  const unsigned char lead = at(0);
  if (lead < 0x80) return {Utf8Prefix::kCharacter, 1};
  if (lead < 0xC2 || lead > 0xF4) return {Utf8Prefix::kInvalid, 1};
  const size_t length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  // The second byte's range excludes overlong forms, surrogates and what lies past U+10FFFF.
  const unsigned char lowest = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  const unsigned char highest = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  for (size_t index = 1; index < length; ++index) {
    if (index == bytes.size()) return {Utf8Prefix::kIncomplete, index};
    const bool second = index == 1;
    if (at(index) < (second ? lowest : 0x80) || at(index) > (second ? highest : 0xBF)) return {Utf8Prefix::kInvalid, index};
  }
  return {Utf8Prefix::kCharacter, length};
}

size_t valid_utf8(std::string_view bytes) {
  size_t valid = 0;
  while (valid < bytes.size()) {
    const Utf8Prefix front = utf8_prefix(bytes.substr(valid));
    if (front.kind != Utf8Prefix::kCharacter) break;
    valid += front.size;
  }
  return valid;
}

}  // namespace exportable_cache
