// Text of a bundle: conversion to token ids and back, and streamed responses.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <exportable_cache/chat_template.h>
#include <exportable_cache/detokenizer.h>
#include <exportable_cache/manifest.h>
#include <exportable_cache/text_stream.h>
#include <exportable_cache/tokenizer.h>

namespace exportable_cache {

/// A bundle's tokenizer, both directions. Each is opened when it is first needed.
class BundleText {
 public:
  explicit BundleText(const Manifest& manifest)
      : folder_(manifest.folder), path_(manifest.tokenizer_path()), is_there_(manifest.has_tokenizer) {}

  /// Token ids of a text; with `starts`, as the beginning of a sequence.
  ///
  /// Error kBundle if the bundle has no supported tokenizer; kInput if the text cannot be read.
  Result<std::vector<int64_t>> encode(const std::string& text, bool starts);

  /// The vocabulary, for `TextStream`.
  Result<const Detokenizer*> detokenizer();

  /// The chat template over messages, see `ChatTemplate::render`.
  Result<std::vector<ChatPart>> render(const std::string& request);

 private:
  std::string folder_;
  std::string path_;
  bool is_there_;
  std::optional<Tokenizer> tokenizer_;
  std::optional<Detokenizer> detokenizer_;
  std::optional<ChatTemplate> template_;
};

/// Text of one response's tokens, up to a stop string, which is not returned.
class AnswerText {
 public:
  /// With `continues`, the text continues the prompt's; otherwise it is a separate text.
  AnswerText(const Detokenizer& detokenizer, std::vector<std::string> stop_strings, bool continues = false)
      : detokenizer_(&detokenizer), stream_(detokenizer, continues), stops_(std::move(stop_strings)) {}

  /// Text that is certain after `token`, possibly empty.
  std::string push(int64_t token);

  /// Text still held back, if no stop string ended it.
  std::string finish();

  /// True if a stop string was completed.
  bool stopped() const { return stops_.stopped(); }

 private:
  const Detokenizer* detokenizer_;
  TextStream stream_;
  StopStrings stops_;
};

}  // namespace exportable_cache
