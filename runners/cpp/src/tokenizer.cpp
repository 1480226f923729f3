// The only file that is compiled with exceptions, if there are any: ExecuTorch's reader may throw, which is caught here.
#include <exportable_cache/tokenizer.h>

#include <pytorch/tokenizers/tokenizer.h>

#include <exception>
#include <fstream>
#include <optional>

#if defined(EC_HF_TOKENIZER)
#include <pytorch/tokenizers/hf_tokenizer.h>
#elif __has_include(<executorch/extension/llm/runner/llm_runner_helper.h>)
#include <executorch/extension/llm/runner/llm_runner_helper.h>
#else
// The wheel has the function (in _llm_runner) without its header, which is extension/llm/runner/llm_runner_helper.h.
namespace executorch::extension::llm {
std::unique_ptr<tokenizers::Tokenizer> load_tokenizer(
    const std::string& tokenizer_path,
    std::unique_ptr<std::vector<std::string>> special_tokens = nullptr,
    std::optional<std::string> pattern = std::nullopt,
    size_t bos_token_index = 0,
    size_t eos_token_index = 1);
}  // namespace executorch::extension::llm
#endif

#include "utf8.h"

namespace exportable_cache {
namespace {

// The reader of a tokenizer.json, or nothing if ExecuTorch does not support it.
std::unique_ptr<tokenizers::Tokenizer> read(const std::string& path) {
#if defined(EC_HF_TOKENIZER)
  auto reader = std::make_unique<tokenizers::HFTokenizer>();
  return reader->load(path) == tokenizers::Error::Ok ? std::move(reader) : nullptr;
#else
  // It tries other formats, too. The wheel lacks headers that this format's reader includes, so no other function can be called.
  return executorch::extension::llm::load_tokenizer(path);
#endif
}

// Run `call`, with an exception as an error.
template <class T, class Call>
Result<T> guarded(const char* what, const Call& call) {
#if defined(__cpp_exceptions)
  try {
    return call();
  } catch (const std::exception& error) {
    return fail(ErrorCode::kBundle, "the tokenizer failed to ", what, ": ", error.what(), "; pass token ids");
  }
#else
  (void)what;
  return call();
#endif
}

}  // namespace

Tokenizer::Tokenizer(std::unique_ptr<tokenizers::Tokenizer> reader) : reader_(std::move(reader)) {}
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

Result<Tokenizer> Tokenizer::open(const std::string& path) {
  if (!std::ifstream(path)) return fail(ErrorCode::kBundle, "cannot read ", path, "; copy the bundle again, or pass token ids");
  return guarded<Tokenizer>("load", [&path]() -> Result<Tokenizer> {
    std::unique_ptr<tokenizers::Tokenizer> reader = read(path);
    if (reader == nullptr) {
      return fail(ErrorCode::kBundle, "ExecuTorch's reader does not know the kind of tokenizer in ", path,
                  "; pass token ids, made in Python");
    }
    return Tokenizer(std::move(reader));
  });
}

Result<std::vector<int64_t>> Tokenizer::encode(const std::string& text, bool starts) const {
  // Readers drop characters that they cannot encode.
  if (const size_t valid = valid_utf8(text); valid != text.size()) {
    return fail(ErrorCode::kInput, "the text is not valid UTF-8 at byte ", valid, " of ", text.size(), "; pass UTF-8");
  }
  return guarded<std::vector<int64_t>>("encode", [&]() -> Result<std::vector<int64_t>> {
    // Some readers refuse an empty text and others return special tokens; here it has no tokens.
    if (text.empty()) return std::vector<int64_t>();
    const auto ids = reader_->encode(text, starts ? 1 : 0, 0);
    if (!ids.ok()) {
      return fail(ErrorCode::kBundle, "the tokenizer failed to encode, with its error ", static_cast<int>(ids.error()),
                  "; pass token ids");
    }
    return std::vector<int64_t>(ids.get().begin(), ids.get().end());
  });
}

}  // namespace exportable_cache
