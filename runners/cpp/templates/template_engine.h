// Chat templates: the Jinja engine of llama.cpp, in a child process with limits.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include <exportable_cache/chat_template.h>

namespace exportable_cache {

/// Render a Jinja chat template, as `render_chat` in Python does.
///
/// `specials` are the names and texts of special tokens, such as `eos_token`. `request` is JSON: the messages, or an object with
/// `messages`, `tools` and other variables of the template (`enable_thinking`). The template sees `add_generation_prompt` as true.
///
/// A template is a program of a stranger. A fork of this process renders it, with limits of memory (1 GiB more than this process
/// has), time (10 s) and output (1 MB and four times the request), so that endless loops and recursion end with an error.
///
/// Error kInput if a limit is exceeded, the request is not valid, or the template refuses the messages.
Result<std::vector<ChatPart>> render_template(const std::string& text,
                                                  const std::vector<std::pair<std::string, std::string>>& specials,
                                                  const std::vector<std::string>& control, const std::string& request);

}  // namespace exportable_cache
