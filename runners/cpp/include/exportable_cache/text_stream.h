// Streaming text: whole characters only, and stop strings that are never given out.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace exportable_cache {

/// Bytes in, whole UTF-8 characters out. Bytes that do not make a character yet are held back; those that never will become
/// U+FFFD. The pieces join to the lossy decoding of all bytes.
class Utf8Stream {
 public:
  /// The characters that `bytes` complete, possibly none.
  std::string push(std::string_view bytes);

  /// What is still held back, as one U+FFFD, or nothing.
  std::string finish();

 private:
  std::string held_;
};

/// Ends a text at the first of some strings, which is never given out, not even in part.
///
/// `StopStrings({"END"})` gives "x" for "xE", nothing for "N", and "EN" back with "y" for "y"; on "D" instead it stops.
class StopStrings {
 public:
  /// `strings` are not empty; there may be none.
  explicit StopStrings(std::vector<std::string> strings) : strings_(std::move(strings)) {}

  /// The text that may be given out now that `piece` follows.
  std::string push(std::string_view piece);

  /// Text that could have begun a string and did not.
  std::string finish();

  /// Whether a string was completed.
  bool stopped() const { return stopped_; }

 private:
  std::vector<std::string> strings_;
  std::string held_;
  bool stopped_ = false;
};

}  // namespace exportable_cache
