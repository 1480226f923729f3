#include "json.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>

#include "utf8.h"

namespace exportable_cache {
namespace {

constexpr int kMaxDepth = 64;

class Parser {
 public:
  Parser(std::string_view text, std::string_view without) : text_(text), without_(without) {}

  Result<Json> document() {
    Json value;
    if (!parse_value(value, 0)) return failure();
    skip_space();
    if (position_ != text_.size()) {
      expect("the end of the document");
      return failure();
    }
    return value;
  }

 private:
  Error failure() const { return fail(ErrorCode::kInput, "no JSON: at byte ", position_, " there should be ", expected_); }

  bool expect(const char* what) {
    expected_ = what;
    return false;
  }

  void skip_space() {
    while (position_ < text_.size() && std::string_view(" \t\r\n").find(text_[position_]) != std::string_view::npos) ++position_;
  }

  bool take(char character) {
    skip_space();
    if (position_ >= text_.size() || text_[position_] != character) return false;
    ++position_;
    return true;
  }

  bool parse_value(Json& value, int depth) {
    if (depth > kMaxDepth) return expect("no deeper nesting");
    skip_space();
    const std::string_view rest = text_.substr(position_);
    if (rest.empty()) return expect("a value");
    switch (rest[0]) {
      case '{': return parse_object(value, depth);
      case '[': return parse_array(value, depth);
      case '"': {
        std::string content;
        if (!parse_string(content)) return false;
        value = Json(std::move(content));
        return true;
      }
      default: break;
    }
    if (rest.starts_with("true")) return literal(value, Json(true), 4);
    if (rest.starts_with("false")) return literal(value, Json(false), 5);
    if (rest.starts_with("null")) return literal(value, Json(), 4);
    return parse_number(value);
  }

  bool literal(Json& value, Json content, size_t length) {
    position_ += length;
    value = std::move(content);
    return true;
  }

  bool parse_object(Json& value, int depth) {
    Json::Object members;
    take('{');
    if (!take('}')) {
      do {
        skip_space();
        std::string key;
        if (position_ >= text_.size() || text_[position_] != '"') return expect("a key");
        if (!parse_string(key)) return false;
        if (!take(':')) return expect("a colon");
        auto& member = members.emplace_back(std::move(key), Json());
        skip_space();
        const bool passed = !without_.empty() && member.first == without_ && text_.substr(position_).starts_with('[');
        if (passed ? !pass_array() : !parse_value(member.second, depth + 1)) return false;
      } while (take(','));
      if (!take('}')) return expect("a closing brace");
    }
    const auto before = [](const auto& one, const auto& other) { return one.first < other.first; };
    std::sort(members.begin(), members.end(), before);
    const auto same = [](const auto& one, const auto& other) { return one.first == other.first; };
    if (std::adjacent_find(members.begin(), members.end(), same) != members.end()) return expect("no key twice");
    value = Json(std::move(members));
    return true;
  }

  bool parse_array(Json& value, int depth) {
    Json::Array items;
    take('[');
    if (!take(']')) {
      do {
        items.emplace_back();
        if (!parse_value(items.back(), depth + 1)) return false;
      } while (take(','));
      if (!take(']')) return expect("a closing bracket");
    }
    value = Json(std::move(items));
    return true;
  }

  bool parse_number(Json& value) {
    size_t end = position_;
    while (end < text_.size() && std::string_view("+-.eE0123456789").find(text_[end]) != std::string_view::npos) ++end;
    const std::string digits(text_.substr(position_, end - position_));
    if (digits.empty()) return expect("a value");
    int64_t integer = 0;
    const auto [stop, problem] = std::from_chars(digits.data(), digits.data() + digits.size(), integer);
    if (problem == std::errc() && stop == digits.data() + digits.size()) {
      value = Json(integer);
    } else {
      char* after = nullptr;
      const double number = std::strtod(digits.c_str(), &after);
      if (after != digits.c_str() + digits.size()) return expect("a number");
      value = Json(number);
    }
    position_ = end;
    return true;
  }

  // Skip from the bracket that opens an array past the one that closes it.
  bool pass_array() {
    int depth = 0;
    do {
      position_ = text_.find_first_of("\"[]", position_);
      if (position_ == std::string_view::npos) {
        position_ = text_.size();
        return expect("a closing bracket");
      }
      if (text_[position_] == '"') {
        do {
          position_ += text_[position_] == '\\' ? 2 : 1;
        } while (position_ < text_.size() && text_[position_] != '"');
      } else {
        depth += text_[position_] == '[' ? 1 : -1;
      }
      ++position_;
    } while (depth > 0);
    return true;
  }

  bool parse_string(std::string& content) {
    ++position_;
    while (position_ < text_.size()) {
      size_t plain = position_;
      while (plain < text_.size() && text_[plain] != '"' && text_[plain] != '\\' && static_cast<unsigned char>(text_[plain]) >= 0x20) ++plain;
      content.append(text_, position_, plain - position_);
      position_ = plain;
      if (position_ >= text_.size()) break;
      const char character = text_[position_];
      if (character == '"') {
        ++position_;
        return true;
      }
      if (static_cast<unsigned char>(character) < 0x20) return expect("an escape instead of a control character");
      ++position_;
      if (!parse_escape(content)) return false;
    }
    return expect("a closing quote");
  }

  bool parse_escape(std::string& content) {
    if (position_ >= text_.size()) return expect("an escape");
    const char kind = text_[position_++];
    constexpr std::string_view kKinds = "\"\\/bfnrt";
    constexpr std::string_view kCharacters = "\"\\/\b\f\n\r\t";
    if (const size_t index = kKinds.find(kind); index != std::string_view::npos) {
      content += kCharacters[index];
      return true;
    }
    uint32_t code = 0;
    if (kind != 'u' || !parse_hex(code)) return expect("an escape");
    if (code >= 0xD800 && code < 0xDC00) {
      uint32_t low = 0;
      if (!text_.substr(position_).starts_with("\\u")) return expect("the second half of a surrogate pair");
      position_ += 2;
      if (!parse_hex(low) || low < 0xDC00 || low > 0xDFFF) return expect("the second half of a surrogate pair");
      code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
    }
    append_utf8(content, code);
    return true;
  }

  bool parse_hex(uint32_t& code) {
    const std::string_view digits = text_.substr(position_, 4);
    const auto [stop, problem] = std::from_chars(digits.data(), digits.data() + digits.size(), code, 16);
    if (digits.size() != 4 || problem != std::errc() || stop != digits.data() + 4) return false;
    position_ += 4;
    return true;
  }

  std::string_view text_;
  std::string_view without_;
  size_t position_ = 0;
  const char* expected_ = "a value";
};

}  // namespace

Result<Json> Json::parse(std::string_view text, std::string_view without) { return Parser(text, without).document(); }

const Json& Json::operator[](std::string_view key) const {
  static const Json kNull;
  const Object* members = object();
  if (members == nullptr) return kNull;
  const auto found = std::lower_bound(members->begin(), members->end(), key, [](const auto& one, auto other) { return one.first < other; });
  return found == members->end() || found->first != key ? kNull : found->second;
}

}  // namespace exportable_cache
