// Streaming text: whole characters only, and stop strings that are never returned.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace exportable_cache {

/// Bytes in, whole UTF-8 characters out. An incomplete character is held back, and invalid bytes become U+FFFD. The pieces join to
/// the lossy decoding of all bytes.
class Utf8Stream {
 public:
  /// The characters that `bytes` complete, possibly none.
  std::string push(std::string_view bytes);

  /// The bytes still held back, as one U+FFFD, or nothing.
  std::string finish();

 private:
  std::string held_;
};

/// Ends a text at the first of some strings, no part of which is returned.
///
/// `StopStrings({"END"})` returns "x" for "xE", nothing for "N", and "EN" again with "y" for "y"; for "D" instead it stops.
/// The strings are searched in the text with special tokens, which `hide` takes, and in the text without them.
class StopStrings {
 public:
  /// `strings` must not contain an empty string.
  explicit StopStrings(std::vector<std::string> strings);

  /// The text that is certain after `piece`; `piece` replaces the text of `look_ahead` since the last piece.
  std::string push(std::string_view piece);

  /// Take the name of a special token, which is not returned. Returns the text before a string that it completes.
  std::string hide(std::string_view name);

  /// Stop if following text, which may still change, completes a string. Returns the text before the string, or "".
  std::string look_ahead(std::string_view text);

  /// Text that could have begun a string and did not.
  std::string finish();

  /// True if a string was completed.
  bool stopped() const { return stopped_; }

 private:
  // Append text, returned or hidden, to the searched text.
  void add(std::string_view text, bool is_shown);
  // End the text before a string that the newest bytes of the changeable text complete.
  std::string stop_ahead(size_t added);
  // Return text that can be part of no string, or end the text before one.
  std::string settle();

  std::vector<std::string> strings_;
  size_t longest_ = 0;
  std::string held_;
  // The held text with special tokens, and for each of its bytes the number of bytes of `held_` before it.
  std::string full_;
  std::vector<size_t> shown_;
  // The text of `look_ahead` with special tokens, the number of bytes before each of its bytes, and its tokens alone.
  std::string unsettled_;
  std::string unsettled_full_;
  std::vector<size_t> unsettled_shown_;
  std::string hidden_later_;
  bool stopped_ = false;
};

}  // namespace exportable_cache
