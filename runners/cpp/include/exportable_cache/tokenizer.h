// Text to token ids, by ExecuTorch's reader of tokenizer.json (which its LLM runner uses).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <exportable_cache/result.h>

namespace tokenizers {
class Tokenizer;
}

namespace exportable_cache {

/// The bundle's tokenizer, from text to ids; `Detokenizer` is the other direction.
class Tokenizer {
 public:
  /// Error kBundle if the file is missing or of an unsupported kind. The reader logs the reason to stderr.
  static Result<Tokenizer> open(const std::string& path);

  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;
  ~Tokenizer();

  /// Token ids of a text.
  ///
  /// With `starts`, the text begins a sequence and gets the special tokens that the tokenizer adds.
  Result<std::vector<int64_t>> encode(const std::string& text, bool starts) const;

 private:
  explicit Tokenizer(std::unique_ptr<tokenizers::Tokenizer> reader);

  std::unique_ptr<tokenizers::Tokenizer> reader_;
};

}  // namespace exportable_cache
