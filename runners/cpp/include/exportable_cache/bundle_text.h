// Text of a bundle: to token ids and back, and an answer's text as it comes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <exportable_cache/detokenizer.h>
#include <exportable_cache/manifest.h>
#include <exportable_cache/text_stream.h>
#include <exportable_cache/tokenizer.h>

namespace exportable_cache {

/// A bundle's tokenizer, both ways. Each is opened when it is first needed.
class BundleText {
 public:
  explicit BundleText(const Manifest& manifest)
      : folder_(manifest.folder), path_(manifest.tokenizer_path()), is_there_(manifest.has_tokenizer) {}

  /// Token ids of a text; with `starts`, as the first of a sequence.
  ///
  /// Error kBundle if the bundle has no tokenizer that is known here; kInput if the text cannot be read.
  Result<std::vector<int64_t>> encode(const std::string& text, bool starts);

  /// The vocabulary, for `TextStream`.
  Result<const Detokenizer*> detokenizer();

 private:
  std::string folder_;
  std::string path_;
  bool is_there_;
  std::optional<Tokenizer> tokenizer_;
  std::optional<Detokenizer> detokenizer_;
};

/// Text of one answer's tokens, up to a stop string, which is not given out.
class AnswerText {
 public:
  /// With `continues`, the text goes on from the prompt's; it is one of its own otherwise.
  AnswerText(const Detokenizer& detokenizer, std::vector<std::string> stop_strings, bool continues = false)
      : detokenizer_(&detokenizer), stream_(detokenizer, continues), stops_(std::move(stop_strings)) {}

  /// Text that may be given out now that `token` follows, possibly none.
  std::string push(int64_t token);

  /// Text still held back, where none ended it.
  std::string finish();

  /// Whether a stop string was completed.
  bool stopped() const { return stops_.stopped(); }

 private:
  const Detokenizer* detokenizer_;
  TextStream stream_;
  StopStrings stops_;
};

}  // namespace exportable_cache
