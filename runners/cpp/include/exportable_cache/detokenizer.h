// Token ids to text, token by token, from the vocabulary in tokenizer.json alone.
//
// ExecuTorch 1.4.1's own reader decodes single tokens of byte-level vocabularies well, but strips the space in front of every
// token of a Llama 2 vocabulary and throws on its byte tokens. What is needed for streaming is little, so it is here.
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
  /// Error kBundle if it cannot be read, or if its decoder is none of: ByteLevel (GPT 2, Llama 3, Qwen); Replace, ByteFallback,
  /// Fuse and Strip in sequence (Llama 2, Mistral, Gemma); Metaspace (T5, XLNet).
  static Result<Detokenizer> open(const std::string& path);

  /// The bytes of a token; none for special tokens and unknown ids. They need not be whole characters.
  std::string_view bytes(int64_t token) const;

  /// True if any of these tokens gives text, so that what follows goes on from one.
  bool gives_text(std::span<const int64_t> tokens) const;

  /// True if a token is a byte such as <0x0A>. A run of these is text as a whole, or else each of its bytes is U+FFFD.
  bool is_byte(int64_t token) const;

  /// The name of a special token, nothing for another token.
  std::string_view special(int64_t token) const;

  /// All special tokens.
  const std::unordered_map<int64_t, std::string>& specials() const { return specials_; }

  /// Spaces that are taken off the front of a text.
  int64_t strip_left() const { return strip_left_; }

  /// True if they are taken off a text's first piece alone, however few it has.
  bool strips_piece() const { return strips_piece_; }

 private:
  Detokenizer() = default;

  std::vector<std::string> bytes_;
  std::vector<bool> are_bytes_;
  std::unordered_map<int64_t, std::string> specials_;
  int64_t strip_left_ = 0;
  bool strips_piece_ = false;
};

/// Detokenises one token at a time. The pieces join to the text of all tokens; none ends inside a character. A run of tokens
/// that are a byte each is held back until it ends or is known to be broken.
class TextStream {
 public:
  /// With `continues`, the text goes on from another one, so that a space in front of it stays.
  explicit TextStream(const Detokenizer& detokenizer, bool continues = false)
      : detokenizer_(&detokenizer), strip_left_(continues ? 0 : detokenizer.strip_left()) {}

  /// Text that `token` completes, possibly none.
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
  // The run of bytes that the newest token is in, how much of it is whole characters, and whether it is none at all.
  std::string run_;
  size_t whole_ = 0;
  bool is_broken_ = false;
  std::string ahead_;
};

}  // namespace exportable_cache
