#include <exportable_cache/detokenizer.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <fstream>
#include <iterator>
#include <limits>
#include <optional>
#include <utility>

#include "json.h"
#include "utf8.h"

namespace exportable_cache {
namespace {

constexpr int64_t kMaxTokens = int64_t{1} << 24;

// Conversion of a vocabulary's pieces to bytes.
struct Decoder {
  bool byte_level = false;
  bool byte_fallback = false;
  std::string pattern;  // replaced by `content` in every piece
  std::string content;
  int64_t strip_left = 0;
  bool strips_piece = false;
};

const std::string& text_of(const Json& value) {
  static const std::string kNone;
  return value.string() == nullptr ? kNone : *value.string();
}

// Add the effect of one decoder of tokenizer.json; return false if it is not supported.
bool add_decoder(const Json& fields, Decoder& decoder) {
  const std::string& type = text_of(fields["type"]);
  if (type == "Sequence") {
    if (fields["decoders"].array() == nullptr) return false;
    for (const Json& part : *fields["decoders"].array()) {
      if (!add_decoder(part, decoder)) return false;
    }
    return true;
  }
  if (type == "Fuse") return true;
  if (type == "ByteLevel") return decoder.byte_level = true;
  if (type == "ByteFallback") return decoder.byte_fallback = true;
  if (type == "Replace") {
    decoder.pattern = text_of(fields["pattern"]["String"]);
    decoder.content = text_of(fields["content"]);
    return !decoder.pattern.empty();
  }
  if (type == "Strip") {
    const int64_t* start = fields["start"].integer();
    const int64_t* stop = fields["stop"].integer();
    if (text_of(fields["content"]) != " " || start == nullptr || stop == nullptr || *stop != 0) return false;
    decoder.strip_left = *start;
    return true;
  }
  if (type == "Metaspace") {
    decoder.pattern = text_of(fields["replacement"]);
    decoder.content.assign(1, ' ');
    decoder.strips_piece = text_of(fields["prepend_scheme"]) != "never";
    return !decoder.pattern.empty();
  }
  return false;
}

// The byte of each character of a byte-level vocabulary, or -1: printable Latin-1 is itself, and every other byte is U+0100 and on,
// in order (GPT 2, Radford et al. 2019).
const std::array<int16_t, 0x200>& byte_level_table() {
  static const std::array<int16_t, 0x200> table = [] {
    std::array<int16_t, 0x200> bytes;
    bytes.fill(-1);
    size_t next = 0x100;
    for (int16_t byte = 0; byte < 0x100; ++byte) {
      const bool printable = (byte > 0x20 && byte < 0x7F) || (byte > 0xA0 && byte != 0xAD);
      bytes[printable ? static_cast<size_t>(byte) : next++] = byte;
    }
    return bytes;
  }();
  return table;
}

std::string byte_level_bytes(std::string_view piece) {
  const auto& table = byte_level_table();
  std::string bytes;
  for (size_t index = 0; index < piece.size(); ++index) {
    // Characters below U+0200 are one or two bytes of UTF-8.
    size_t code = static_cast<unsigned char>(piece[index]);
    if (code >= 0xC0 && index + 1 < piece.size()) {
      code = ((code & 0x3F) << 6) | (static_cast<unsigned char>(piece[++index]) & 0x3F);
    } else if (code >= 0x80) {
      return std::string(piece);
    }
    // Pieces with other characters, as in added tokens, are their own text.
    if (code >= table.size() || table[code] < 0) return std::string(piece);
    bytes += static_cast<char>(table[code]);
  }
  return bytes;
}

// The byte of "<0x0A>".
std::optional<char> fallback_byte(std::string_view piece) {
  if (piece.size() != 6 || !piece.starts_with("<0x") || piece[5] != '>') return std::nullopt;
  unsigned value = 0;
  const auto [stop, problem] = std::from_chars(piece.data() + 3, piece.data() + 5, value, 16);
  if (problem != std::errc() || stop != piece.data() + 5) return std::nullopt;
  return static_cast<char>(value);
}

std::string decode(const Decoder& decoder, const std::string& piece) {
  if (decoder.byte_level) return byte_level_bytes(piece);
  if (decoder.byte_fallback) {
    if (const std::optional<char> byte = fallback_byte(piece)) return std::string(1, *byte);
  }
  if (decoder.pattern.empty()) return piece;
  std::string bytes;
  size_t position = 0;
  for (size_t found; (found = piece.find(decoder.pattern, position)) != std::string::npos; position = found + decoder.pattern.size()) {
    bytes.append(piece, position, found - position).append(decoder.content);
  }
  return bytes.append(piece, position);
}

}  // namespace

Result<Detokenizer> Detokenizer::open(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
  if (!stream) return fail(ErrorCode::kBundle, "cannot read ", path, "; copy the bundle again, or pass token ids");
  // Merges are most of the file, and only needed to encode text.
  Result<Json> parsed = Json::parse(text, "merges");
  if (!parsed.ok()) return fail(ErrorCode::kBundle, path, " is ", parsed.error().message, "; copy the bundle again");
  const Json& fields = *parsed;

  Decoder decoder;
  if (!add_decoder(fields["decoder"], decoder)) {
    return fail(ErrorCode::kBundle, path, " has a decoder of type '", text_of(fields["decoder"]["type"]),
                "' that this library does not know; pass token ids, and turn tokens to text in Python");
  }
  Detokenizer detokenizer;
  detokenizer.strip_left_ = decoder.strips_piece ? std::numeric_limits<int64_t>::max() : decoder.strip_left;
  detokenizer.strips_piece_ = decoder.strips_piece;
  const auto set = [&detokenizer, &decoder](int64_t token, const std::string& piece, bool is_special) {
    if (token < 0 || token >= kMaxTokens) return;
    if (token >= static_cast<int64_t>(detokenizer.bytes_.size())) {
      detokenizer.bytes_.resize(static_cast<size_t>(token) + 1);
      detokenizer.are_bytes_.resize(static_cast<size_t>(token) + 1);
    }
    const auto index = static_cast<size_t>(token);
    detokenizer.bytes_[index] = is_special ? std::string() : decode(decoder, piece);
    detokenizer.are_bytes_[index] = !is_special && !decoder.byte_level && decoder.byte_fallback && fallback_byte(piece).has_value();
    if (is_special) detokenizer.specials_[token] = piece;
  };
  const Json& vocabulary = fields["model"]["vocab"];
  if (const Json::Object* pieces = vocabulary.object()) {
    for (const auto& [piece, id] : *pieces) {
      if (id.integer() != nullptr) set(*id.integer(), piece, false);
    }
  } else if (const Json::Array* entries = vocabulary.array()) {
    // A unigram model lists [piece, score] by id.
    for (size_t id = 0; id < entries->size(); ++id) {
      const Json::Array* entry = (*entries)[id].array();
      if (entry != nullptr && !entry->empty()) set(static_cast<int64_t>(id), text_of(entry->front()), false);
    }
  }
  if (const Json::Array* added = fields["added_tokens"].array()) {
    for (const Json& token : *added) {
      if (token["id"].integer() == nullptr) continue;
      const bool special = token["special"].boolean() != nullptr && *token["special"].boolean();
      set(*token["id"].integer(), text_of(token["content"]), special);
    }
  }
  return detokenizer;
}

std::string_view Detokenizer::bytes(int64_t token) const {
  if (token < 0 || token >= static_cast<int64_t>(bytes_.size())) return {};
  return bytes_[static_cast<size_t>(token)];
}

bool Detokenizer::gives_text(std::span<const int64_t> tokens) const {
  return std::any_of(tokens.begin(), tokens.end(), [this](int64_t token) { return !bytes(token).empty(); });
}

bool Detokenizer::is_byte(int64_t token) const {
  return token >= 0 && token < static_cast<int64_t>(are_bytes_.size()) && are_bytes_[static_cast<size_t>(token)];
}

std::string_view Detokenizer::special(int64_t token) const {
  const auto found = specials_.find(token);
  return found == specials_.end() ? std::string_view() : found->second;
}

std::string TextStream::push(int64_t token) {
  ahead_.clear();
  const std::string_view bytes = detokenizer_->bytes(token);
  // Special tokens do not end a run either.
  if (bytes.empty()) return {};
  if (detokenizer_->is_byte(token)) return push_byte(bytes.front());
  std::string text = end_run();
  return text + utf8_.push(stripped(bytes));
}

std::string TextStream::finish() {
  ahead_.clear();
  return end_run() + utf8_.finish();
}

std::string TextStream::push_byte(char byte) {
  if (is_broken_) return std::string(kReplacementCharacter);
  run_ += byte;
  while (whole_ < run_.size()) {
    const Utf8Prefix prefix = utf8_prefix(std::string_view(run_).substr(whole_));
    if (prefix.kind == Utf8Prefix::kIncomplete) break;
    if (prefix.kind == Utf8Prefix::kInvalid) {
      // Further bytes cannot repair it: output what is held, and each further byte at once.
      std::string text = end_run();
      is_broken_ = true;
      return text;
    }
    ahead_ += run_.substr(whole_, prefix.size);
    whole_ += prefix.size;
  }
  return {};
}

std::string TextStream::end_run() {
  is_broken_ = false;
  const std::string run = std::exchange(run_, {});
  if (std::exchange(whole_, 0) == run.size()) return stripped(run);
  std::string text;
  for (size_t count = run.size(); count > 0; --count) text += kReplacementCharacter;
  return stripped(text);
}

std::string TextStream::stripped(std::string_view text) {
  const bool is_last = detokenizer_->strips_piece() && !text.empty();
  while (strip_left_ > 0 && !text.empty()) {
    if (text.front() != ' ') {
      strip_left_ = 0;
    } else {
      text.remove_prefix(1);
      --strip_left_;
    }
  }
  if (is_last) strip_left_ = 0;
  return std::string(text);
}

}  // namespace exportable_cache
