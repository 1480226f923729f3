// Results with a message. Nothing in this library throws, because devices build ExecuTorch with -fno-exceptions.
#pragma once

#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

namespace exportable_cache {

enum class ErrorCode {
  kInput,      // invalid argument: token out of range, empty prompt, position that skips ahead, ...
  kCacheFull,  // not enough slots for the tokens
  kBundle,     // the bundle is missing, damaged, or not supported by this library
  kRuntime,    // ExecuTorch reported an error while it ran the program
};

/// "input", "cache_full", "bundle" or "runtime".
const char* to_string(ErrorCode code);

/// The message: the value, the limit and the remedy.
struct Error {
  ErrorCode code;
  std::string message;
};

/// Escape characters that control a terminal or reverse text, because messages quote files of unknown authors.
inline std::string shown(std::string_view text) {
  const auto at = [text](size_t index) { return index < text.size() ? static_cast<unsigned char>(text[index]) : 0u; };
  std::string found;
  for (size_t index = 0; index < text.size();) {
    const unsigned first = at(index), second = at(index + 1), third = at(index + 2);
    size_t obeyed = 0;  // bytes of the character, if it is one of these
    if ((first < 0x20 && first != '\n' && first != '\t') || first == 0x7F) obeyed = 1;
    if (first == 0xC2 && second >= 0x80 && second < 0xA0) obeyed = 2;                      // U+0080 to U+009F
    if (first == 0xE2 && second == 0x80 && third >= 0xA8 && third <= 0xAE) obeyed = 3;  // U+2028 to U+202E
    if (first == 0xE2 && second == 0x81 && third >= 0xA6 && third <= 0xA9) obeyed = 3;  // U+2066 to U+2069
    if (obeyed == 0) found += text[index++];
    for (; obeyed > 0; --obeyed, ++index) {
      found += "\\x";
      found += "0123456789abcdef"[at(index) / 16];
      found += "0123456789abcdef"[at(index) % 16];
    }
  }
  return found;
}

/// An error whose message joins its arguments: `fail(ErrorCode::kInput, "got ", 3)`.
template <class... Parts>
Error fail(ErrorCode code, const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  return Error{code, shown(message.str())};
}

/// Success, or an error.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Error error) : error_(std::move(error)) {}

  bool ok() const { return !error_.has_value(); }
  /// Valid only if `ok()` is false.
  const Error& error() const { return *error_; }

 private:
  std::optional<Error> error_;
};

/// A value, or an error.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : content_(std::in_place_index<0>, std::move(value)) {}
  Result(Error error) : content_(std::in_place_index<1>, std::move(error)) {}

  bool ok() const { return content_.index() == 0; }
  /// Valid only if `ok()` is true.
  T& operator*() { return *std::get_if<0>(&content_); }
  const T& operator*() const { return *std::get_if<0>(&content_); }
  T* operator->() { return std::get_if<0>(&content_); }
  const T* operator->() const { return std::get_if<0>(&content_); }
  /// Valid only if `ok()` is false.
  const Error& error() const { return *std::get_if<1>(&content_); }

 private:
  std::variant<T, Error> content_;
};

}  // namespace exportable_cache
