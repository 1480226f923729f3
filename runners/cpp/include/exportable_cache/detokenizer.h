// Token ids to text, token by token, from the vocabulary in tokenizer.json alone.
//
// ExecuTorch 1.4.1's reader decodes single tokens of byte-level vocabularies well, but strips the space before every token of a
// Llama 2 vocabulary and throws on its byte tokens. Streaming needs little, so it is implemented here.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include <exportable_cache/result.h>
#include <exportable_cache/text_stream.h>

namespace exportable_cache {

/// The bytes of every token.
class Detokenizer {
 public:
  /// Read a tokenizer.json.
  ///
  /// Error kBundle if it cannot be read, or if its decoder is not supported. Supported are ByteLevel (GPT 2, Llama 3, Qwen); Replace,
  /// ByteFallback, Fuse and Strip in sequence (Llama 2, Mistral, Gemma); Metaspace (T5, XLNet).
  static Result<Detokenizer> open(const std::string& path);

  /// The bytes of a token; empty for special tokens and unknown ids. They need not be whole characters.
  std::string_view bytes(int64_t token) const;

  /// True if any of these tokens has text, so that a text after them is a continuation.
  bool gives_text(std::span<const int64_t> tokens) const;

  /// True if a token is a byte such as <0x0A>. A run of these is decoded as a whole, otherwise each byte is U+FFFD.
  bool is_byte(int64_t token) const;

  /// The name of a special token, nothing for another token.
  std::string_view special(int64_t token) const;

  /// All special tokens.
  const std::unordered_map<int64_t, std::string>& specials() const { return specials_; }

  /// Number of spaces that are removed from the beginning of a text.
  int64_t strip_left() const { return strip_left_; }

  /// True if they are removed from the text's first piece only, even if it has fewer.
  bool strips_piece() const { return strips_piece_; }

 private:
  Detokenizer() = default;

  std::vector<std::string> bytes_;
  std::vector<bool> are_bytes_;
  std::unordered_map<int64_t, std::string> specials_;
  int64_t strip_left_ = 0;
  bool strips_piece_ = false;
};

/// Detokenizes one token at a time. The pieces join to the text of all tokens; none ends inside a character. A run of byte tokens
/// is held back until it ends or is known to be invalid.
class TextStream {
 public:
  /// With `continues`, the text continues another one, so a space at its beginning stays.
  explicit TextStream(const Detokenizer& detokenizer, bool continues = false)
      : detokenizer_(&detokenizer), strip_left_(continues ? 0 : detokenizer.strip_left()) {}

  /// Text that `token` completes, possibly empty.
  std::string push(int64_t token);

  /// Characters that the newest token completed and that are held back with a run of bytes.
  const std::string& ahead() const { return ahead_; }

  /// Text still held back.
  std::string finish();

 private:
  std::string push_byte(char byte);
  std::string end_run();
  std::string stripped(std::string_view text);

  const Detokenizer* detokenizer_;
  int64_t strip_left_;
  Utf8Stream utf8_;
  // The run of bytes that the newest token is in, how much of it is whole characters, and whether it is invalid.
  std::string run_;
  size_t whole_ = 0;
  bool is_broken_ = false;
  std::string ahead_;
};

}  // namespace exportable_cache
