// Results that carry a message. Nothing in this library throws: devices build ExecuTorch with -fno-exceptions.
#pragma once

#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <variant>

namespace exportable_cache {

enum class ErrorCode {
  kInput,      // a wrong argument: token out of range, empty prompt, position that skips ahead, ...
  kCacheFull,  // there are no slots for the tokens
  kBundle,     // the bundle is missing, damaged, or not one this library runs
  kRuntime,    // ExecuTorch reported an error while it ran the program
};

/// "input", "cache_full", "bundle" or "runtime".
const char* to_string(ErrorCode code);

/// What is wrong, with the value, the limit and the remedy.
struct Error {
  ErrorCode code;
  std::string message;
};

/// An error whose message is its arguments written one after the other: `fail(ErrorCode::kInput, "got ", 3)`.
template <class... Parts>
Error fail(ErrorCode code, const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  return Error{code, message.str()};
}

/// Success, or an error.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Error error) : error_(std::move(error)) {}

  bool ok() const { return !error_.has_value(); }
  /// Only where `ok()` is false.
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
  /// Only where `ok()` is true.
  T& operator*() { return *std::get_if<0>(&content_); }
  const T& operator*() const { return *std::get_if<0>(&content_); }
  T* operator->() { return std::get_if<0>(&content_); }
  const T* operator->() const { return std::get_if<0>(&content_); }
  /// Only where `ok()` is false.
  const Error& error() const { return *std::get_if<1>(&content_); }

 private:
  std::variant<T, Error> content_;
};

}  // namespace exportable_cache
