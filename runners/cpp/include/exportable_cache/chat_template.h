// The chat template of a bundle, rendered over messages.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include <exportable_cache/result.h>

namespace exportable_cache {

/// A part of a conversation: text of the template, or of a message. Special tokens in messages are encoded as text.
struct ChatPart {
  std::string text;
  bool is_said = false;
};

/// A chat template with the special tokens that it writes.
class ChatTemplate {
 public:
  /// Read the templates and the names of special tokens from a bundle's folder of the tokenizer.
  ///
  /// Error kBundle if there is no template, or a file cannot be read.
  static Result<ChatTemplate> open(const std::string& folder);

  /// Render a request, which is JSON: the messages, or an object with `messages`, `tools` and other variables of the template.
  ///
  /// Of each text of `control` that the messages spell, the first character is a part that is said, even if the template joins it to others.
  /// Error kInput if the template refuses the messages, or exceeds a limit of time, memory or size; kBundle if this library was built
  /// without the engine.
  Result<std::vector<ChatPart>> render(const std::string& request, const std::vector<std::string>& control) const;

 private:
  std::string text_;
  std::string with_tools_;  // the template named tool_use, if there is one
  std::vector<std::pair<std::string, std::string>> specials_;
};

}  // namespace exportable_cache
