#include <exportable_cache/text_stream.h>

#include <algorithm>
#include <utility>

#include "utf8.h"

namespace exportable_cache {
namespace {

// Length of the longest suffix of `text` that is a proper prefix of `string`.
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
    text += prefix.kind == Utf8Prefix::kCharacter ? rest.substr(0, prefix.size) : kReplacementCharacter;
    rest.remove_prefix(prefix.size);
  }
  held_ = std::string(rest);
  return text;
}

std::string Utf8Stream::finish() {
  return std::exchange(held_, {}).empty() ? std::string() : std::string(kReplacementCharacter);
}

StopStrings::StopStrings(std::vector<std::string> strings) : strings_(std::move(strings)) {
  for (const std::string& string : strings_) longest_ = std::max(longest_, string.size());
}

std::string StopStrings::push(std::string_view piece) {
  unsettled_.clear();
  unsettled_full_.clear();
  unsettled_shown_.clear();
  add(piece, true);
  add(std::exchange(hidden_later_, {}), false);
  return settle();
}

std::string StopStrings::hide(std::string_view name) {
  if (std::find(strings_.begin(), strings_.end(), name) != strings_.end()) {
    stopped_ = true;
    return std::exchange(held_, {}) + std::exchange(unsettled_, {});
  }
  if (!unsettled_.empty()) {
    hidden_later_ += name;
    unsettled_shown_.resize(unsettled_shown_.size() + name.size(), unsettled_.size());
    unsettled_full_ += name;
    return stop_ahead(name.size());
  }
  add(name, false);
  return settle();
}

std::string StopStrings::look_ahead(std::string_view text) {
  for (size_t index = 0; index < text.size(); ++index) unsettled_shown_.push_back(unsettled_.size() + index);
  unsettled_ += text;
  unsettled_full_ += text;
  return stop_ahead(text.size());
}

std::string StopStrings::stop_ahead(size_t added) {
  // A string that ends in the added text begins at most its length before that.
  const auto find = [&](const std::string& whole) {
    const size_t end = whole.size() - std::min(whole.size(), added + longest_);
    size_t found = std::string::npos;
    for (const std::string& string : strings_) found = std::min(found, whole.find(string, end));
    return found;
  };
  size_t cut = find(held_ + unsettled_);
  if (const size_t found = find(full_ + unsettled_full_); found != std::string::npos) {
    cut = std::min(cut, found < full_.size() ? shown_[found] : held_.size() + unsettled_shown_[found - full_.size()]);
  }
  if (cut == std::string::npos) return {};
  stopped_ = true;
  return (std::exchange(held_, {}) + std::exchange(unsettled_, {})).substr(0, cut);
}

std::string StopStrings::finish() { return std::exchange(held_, {}); }

void StopStrings::add(std::string_view text, bool is_shown) {
  for (size_t index = 0; index < text.size(); ++index) shown_.push_back(held_.size() + (is_shown ? index : 0));
  full_ += text;
  if (is_shown) held_ += text;
}

std::string StopStrings::settle() {
  size_t found = std::string::npos;
  size_t kept = 0;
  size_t kept_full = 0;
  for (const std::string& string : strings_) {
    found = std::min(found, held_.find(string));
    if (const size_t start = full_.find(string); start != std::string::npos) found = std::min(found, shown_[start]);
    kept = std::max(kept, overlap(held_, string));
    kept_full = std::max(kept_full, overlap(full_, string));
  }
  stopped_ = found != std::string::npos;
  if (!stopped_) {
    found = held_.size() - kept;
    if (kept_full > 0) found = std::min(found, shown_[full_.size() - kept_full]);
  }
  std::string text = held_.substr(0, found);
  held_ = stopped_ ? std::string() : held_.substr(found);
  const size_t dropped = full_.size() - kept_full;
  full_.erase(0, dropped);
  shown_.erase(shown_.begin(), shown_.begin() + static_cast<std::ptrdiff_t>(dropped));
  for (size_t& shown : shown_) shown -= found;
  return text;
}

}  // namespace exportable_cache
