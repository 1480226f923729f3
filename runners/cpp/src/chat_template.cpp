#include <exportable_cache/chat_template.h>

#include <fstream>
#include <iterator>
#include <optional>

#include "json.h"
#if defined(EC_TEMPLATES)
#include "template_engine.h"
#endif

namespace exportable_cache {
namespace {

// As in exportable_cache/models/tokenizers/text.py.
constexpr const char* kNamedTokens[] = {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"};

std::optional<std::string> contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  return std::string{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

}  // namespace

Result<ChatTemplate> ChatTemplate::open(const std::string& folder) {
  ChatTemplate found;
  const std::optional<std::string> config = contents(folder + "/tokenizer_config.json");
  if (!config) return fail(ErrorCode::kBundle, "cannot read ", folder, "/tokenizer_config.json, which names special tokens; copy it, too");
  const Result<Json> parsed = Json::parse(*config);
  if (!parsed.ok()) return fail(ErrorCode::kBundle, folder, "/tokenizer_config.json: ", parsed.error().message, "; copy it again");
  for (const char* name : kNamedTokens) {
    const Json& value = (*parsed)[name];
    const std::string* text = value.string() != nullptr ? value.string() : value["content"].string();
    if (text != nullptr) found.specials_.emplace_back(name, *text);
  }
  std::optional<std::string> text = contents(folder + "/chat_template.jinja");
  if (!text && (*parsed)["chat_template"].string() != nullptr) text = *(*parsed)["chat_template"].string();
  if (!text) return fail(ErrorCode::kBundle, folder, " has no chat_template.jinja; copy it, or pass text to generate_text");
  found.text_ = std::move(*text);
  found.with_tools_ = contents(folder + "/additional_chat_templates/tool_use.jinja").value_or("");
  return found;
}

Result<std::vector<ChatPart>> ChatTemplate::render(const std::string& request, const std::vector<std::string>& control) const {
#if defined(EC_TEMPLATES)
  const Result<Json> parsed = Json::parse(request);
  if (!parsed.ok()) return fail(ErrorCode::kInput, "the request is ", parsed.error().message, "; pass the messages as JSON");
  const Json::Array* tools = (*parsed)["tools"].array();
  const bool has_tools = tools != nullptr && !tools->empty();
  return render_template(has_tools && !with_tools_.empty() ? with_tools_ : text_, specials_, control, request);
#else
  (void)request;
  (void)control;
  return fail(ErrorCode::kBundle, "this library was built without chat templates; build it with -DEC_TEMPLATES=ON, or render the ",
              "conversation in Python, and pass the text to generate_text");
#endif
}

}  // namespace exportable_cache
