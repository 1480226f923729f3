// A reader for JSON documents such as manifests, because the wheel ships no JSON headers and exceptions are not available.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include <exportable_cache/result.h>

namespace exportable_cache {

/// One JSON value. Looking up a missing value returns null or a null pointer, never an error.
class Json {
 public:
  using Array = std::vector<Json>;
  using Object = std::vector<std::pair<std::string, Json>>;  // by key, ascending

  using Value = std::variant<std::monostate, bool, int64_t, double, std::string, Array, Object>;

  Json() = default;
  explicit Json(Value value) : value_(std::move(value)) {}

  /// Parse a whole document. Duplicate keys, text after the value, and more than 64 levels are refused.
  ///
  /// Arrays under a key `without`, at any level, are skipped by brackets and quotes, and become null.
  static Result<Json> parse(std::string_view text, std::string_view without = {});

  bool is_null() const { return std::holds_alternative<std::monostate>(value_); }
  const bool* boolean() const { return std::get_if<bool>(&value_); }
  /// Only for numbers without fraction or exponent that fit 64 bits.
  const int64_t* integer() const { return std::get_if<int64_t>(&value_); }
  const double* number() const { return std::get_if<double>(&value_); }
  const std::string* string() const { return std::get_if<std::string>(&value_); }
  const Array* array() const { return std::get_if<Array>(&value_); }
  const Object* object() const { return std::get_if<Object>(&value_); }

  /// The value of a key, or a null value.
  const Json& operator[](std::string_view key) const;

 private:
  Value value_;
};

}  // namespace exportable_cache
