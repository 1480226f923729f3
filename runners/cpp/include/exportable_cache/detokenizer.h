// Token ids to text, token by token, from the vocabulary in tokenizer.json alone.
//
// ExecuTorch 1.4.1's own reader decodes single tokens of byte-level vocabularies well, but strips the space in front of every
// token of a Llama 2 vocabulary and throws on its byte tokens. What is needed for streaming is little, so it is here.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
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

  /// Spaces that are taken off the front of a text.
  int64_t strip_left() const { return strip_left_; }

 private:
  Detokenizer() = default;

  std::vector<std::string> bytes_;
  int64_t strip_left_ = 0;
};

/// Detokenises one token at a time. The pieces join to the text of all tokens; none ends inside a character.
class TextStream {
 public:
  explicit TextStream(const Detokenizer& detokenizer)
      : detokenizer_(&detokenizer), strip_left_(detokenizer.strip_left()) {}

  /// Text that `token` completes, possibly none.
  std::string push(int64_t token);

  /// Text still held back.
  std::string finish() { return utf8_.finish(); }

 private:
  const Detokenizer* detokenizer_;
  int64_t strip_left_;
  Utf8Stream utf8_;
};

}  // namespace exportable_cache
