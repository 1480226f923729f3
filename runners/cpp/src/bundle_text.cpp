#include <exportable_cache/bundle_text.h>

#include <utility>

namespace exportable_cache {

Result<std::vector<int64_t>> BundleText::encode(const std::string& text, bool starts) {
  if (!tokenizer_) {
    if (!is_there_) return fail(ErrorCode::kBundle, folder_, " was exported without a tokenizer; pass token ids");
    Result<Tokenizer> tokenizer = Tokenizer::open(path_);
    if (!tokenizer.ok()) return tokenizer.error();
    tokenizer_ = std::move(*tokenizer);
  }
  return tokenizer_->encode(text, starts);
}

Result<const Detokenizer*> BundleText::detokenizer() {
  if (!detokenizer_) {
    if (!is_there_) {
      return fail(ErrorCode::kBundle, folder_, " was exported without a tokenizer, which text needs; use token ids");
    }
    Result<Detokenizer> detokenizer = Detokenizer::open(path_);
    if (!detokenizer.ok()) return detokenizer.error();
    detokenizer_ = std::move(*detokenizer);
  }
  return &*detokenizer_;
}

Result<std::vector<ChatPart>> BundleText::render(const std::string& request) {
  if (!template_) {
    if (!is_there_) return fail(ErrorCode::kBundle, folder_, " was exported without a tokenizer, which has the chat template; pass token ids");
    Result<ChatTemplate> found = ChatTemplate::open(path_.substr(0, path_.rfind('/')));
    if (!found.ok()) return found.error();
    template_ = std::move(*found);
  }
  Result<const Detokenizer*> vocabulary = detokenizer();
  if (!vocabulary.ok()) return vocabulary.error();
  std::vector<std::string> control;
  for (const auto& [token, name] : (*vocabulary)->specials()) {
    if (!name.empty()) control.push_back(name);
  }
  return template_->render(request, control);
}

std::string AnswerText::push(int64_t token) {
  if (const std::string_view special = detokenizer_->special(token); !special.empty()) return stops_.hide(special);
  const std::string piece = stream_.push(token);
  std::string text = piece.empty() ? piece : stops_.push(piece);
  if (!stops_.stopped() && !stream_.ahead().empty()) text += stops_.look_ahead(stream_.ahead());
  return text;
}

std::string AnswerText::finish() {
  std::string rest = stops_.push(stream_.finish());
  return stops_.stopped() ? rest : rest + stops_.finish();
}

}  // namespace exportable_cache
