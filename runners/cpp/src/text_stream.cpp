#include <exportable_cache/text_stream.h>

#include <algorithm>
#include <utility>

#include "utf8.h"

namespace exportable_cache {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

// Length of the longest end of `text` that begins `string` without completing it.
size_t overlap(std::string_view text, std::string_view string) {
  for (size_t size = std::min(text.size(), string.size() - 1); size > 0; --size) {
    if (text.ends_with(string.substr(0, size))) return size;
  }
  return 0;
}

}  // namespace

std::string Utf8Stream::push(std::string_view bytes) {
  held_ += bytes;
  std::string text;
  std::string_view rest = held_;
  while (!rest.empty()) {
    const Utf8Prefix prefix = utf8_prefix(rest);
    if (prefix.kind == Utf8Prefix::kIncomplete) break;
    text += prefix.kind == Utf8Prefix::kCharacter ? rest.substr(0, prefix.size) : kReplacement;
    rest.remove_prefix(prefix.size);
  }
  held_ = std::string(rest);
  return text;
}

std::string Utf8Stream::finish() {
  return std::exchange(held_, {}).empty() ? std::string() : std::string(kReplacement);
}

std::string StopStrings::push(std::string_view piece) {
  std::string text = std::exchange(held_, {}).append(piece);
  size_t found = std::string::npos;
  size_t kept = 0;
  for (const std::string& string : strings_) {
    found = std::min(found, text.find(string));
    kept = std::max(kept, overlap(text, string));
  }
  stopped_ = found != std::string::npos;
  if (!stopped_) {
    found = text.size() - kept;
    held_ = text.substr(found);
  }
  text.resize(found);
  return text;
}

std::string StopStrings::finish() { return std::exchange(held_, {}); }

}  // namespace exportable_cache
