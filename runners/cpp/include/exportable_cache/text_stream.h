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
/// The strings are looked for in the text with special tokens, which `hide` takes, and in the text without them.
class StopStrings {
 public:
  /// `strings` are not empty; there may be none.
  explicit StopStrings(std::vector<std::string> strings);

  /// The text that may be given out now that `piece` follows; it replaces what `look_ahead` took since the last piece.
  std::string push(std::string_view piece);

  /// Take in the name of a special token, which is not given out. Returns the text in front of a string that it completes.
  std::string hide(std::string_view name);

  /// Stop where text that follows, but may still change, completes a string. Returns the text in front of it, or "".
  std::string look_ahead(std::string_view text);

  /// Text that could have begun a string and did not.
  std::string finish();

  /// Whether a string was completed.
  bool stopped() const { return stopped_; }

 private:
  // Adds text, given out or hidden, to what the strings are looked for in.
  void add(std::string_view text, bool is_shown);
  // Ends the text in front of a string that is complete with the newest bytes of what may still change.
  std::string stop_ahead(size_t added);
  // Gives out what can belong to no string, or ends the text in front of one.
  std::string settle();

  std::vector<std::string> strings_;
  size_t longest_ = 0;
  std::string held_;
  // The held text with special tokens, and for each of its bytes the number of bytes of `held_` in front of it.
  std::string full_;
  std::vector<size_t> shown_;
  // Taken by `look_ahead`, the same with special tokens and what is in front of each of its bytes, and these tokens alone.
  std::string unsettled_;
  std::string unsettled_full_;
  std::vector<size_t> unsettled_shown_;
  std::string hidden_later_;
  bool stopped_ = false;
};

}  // namespace exportable_cache
