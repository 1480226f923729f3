#include <exportable_cache/program.h>

#include <algorithm>
#include <limits>
#include <utility>

#include <executorch/extension/tensor/tensor_ptr_maker.h>

#include "engine.h"

namespace exportable_cache {
namespace {

namespace et = executorch::runtime;
using executorch::aten::ScalarType;

std::string shape_text(et::Span<const int32_t> sizes) {
  std::string text = "[";
  for (const int32_t size : sizes) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

int64_t reads(const MethodSpec& method) { return method.kv_read_len.value_or(std::numeric_limits<int64_t>::max()); }

bool is_floating(ScalarType type) {
  return type == ScalarType::Float || type == ScalarType::Half || type == ScalarType::BFloat16;
}

// What is not as `Program::open` says, or nothing. Dynamic sizes are given at their upper bound.
std::string signature_problem(const et::MethodMeta& meta, const MethodSpec& method, int64_t logits_size) {
  if (meta.num_inputs() != 2 || meta.num_outputs() != 1) {
    return "takes " + std::to_string(meta.num_inputs()) + " inputs and returns " + std::to_string(meta.num_outputs()) +
           " outputs, not 2 and 1";
  }
  const auto tokens = meta.input_tensor_meta(0);
  const auto position = meta.input_tensor_meta(1);
  const auto logits = meta.output_tensor_meta(0);
  if (!tokens.ok() || !position.ok() || !logits.ok()) return "takes or returns something else than tensors";

  const auto sizes = tokens->sizes();
  if (tokens->scalar_type() != ScalarType::Long || sizes.size() != 2 || sizes[0] != 1 || sizes[1] != method.max_length) {
    return "takes tokens " + shape_text(sizes) + ", not int64 [1, " + std::to_string(method.max_length) + "]";
  }
  const auto position_sizes = position->sizes();
  if (position->scalar_type() != ScalarType::Long || position_sizes.size() != 1 || position_sizes[0] != 1) {
    return "takes a position " + shape_text(position_sizes) + ", not int64 [1]";
  }
  const auto logits_sizes = logits->sizes();
  int64_t count = 1;
  for (const int32_t size : logits_sizes) count *= size;
  const int64_t tokens_judged = std::max<int64_t>(1, method.scored_tokens);
  const bool of_these = logits_sizes.size() > 0 && count == tokens_judged * logits_size &&
                        logits_sizes[logits_sizes.size() - 1] == logits_size;
  if (!is_floating(logits->scalar_type()) || !of_these) {
    const std::string several = method.scored_tokens > 0 ? std::to_string(tokens_judged) + ", " : "";
    return "returns " + shape_text(logits_sizes) + ", not floating [1, " + several + std::to_string(logits_size) + "]";
  }
  return {};
}

// The last `count` values.
template <class T>
void copy_floats(const executorch::aten::Tensor& tensor, size_t count, std::vector<float>& values) {
  const T* end = tensor.const_data_ptr<T>() + tensor.numel();
  values.resize(count);
  std::transform(end - count, end, values.begin(), [](T value) { return static_cast<float>(value); });
}

}  // namespace

Program::Program(std::vector<MethodSpec> methods, std::unique_ptr<Engine> engine)
    : methods_(std::move(methods)), engine_(std::move(engine)) {}
Program::Program(Program&&) noexcept = default;
Program& Program::operator=(Program&&) noexcept = default;
Program::~Program() = default;

Result<Program> Program::open(const Manifest& manifest) {
  std::vector<std::string> names;
  for (const MethodSpec& method : manifest.methods) names.push_back(method.name);
  Result<std::unique_ptr<Engine>> engine = Engine::open(manifest.program_path(), names);
  if (!engine.ok()) return engine.error();
  for (const MethodSpec& method : manifest.methods) {
    const auto meta = (*engine)->meta(method.name);
    if (!meta.ok()) return cannot_load("method '" + method.name + "' of " + manifest.program_path(), meta.error());
    const std::string problem = signature_problem(meta.get(), method, manifest.logits_size);
    if (!problem.empty()) {
      return fail(ErrorCode::kBundle, "method '", method.name, "' of ", manifest.program_path(), " ", problem,
                  "; it is not the program of this manifest: copy the bundle again");
    }
  }
  Program program(manifest.methods, std::move(*engine));
  if (program.method_for(1, std::numeric_limits<int64_t>::max()) == nullptr) {
    return fail(ErrorCode::kBundle, manifest.program_path(), " has no method that takes one token at every position; ",
                "export the model again");
  }
  return program;
}

const MethodSpec* Program::method_for(int64_t length, int64_t end, bool scores) const {
  const MethodSpec* best = nullptr;
  for (const MethodSpec& method : methods_) {
    if (scores ? method.scored_tokens < length : method.only_scores()) continue;
    if (length < method.min_length || length > method.max_length || end > reads(method)) continue;
    // Of those that serve, the one that reads and takes least.
    if (best == nullptr || std::pair(reads(method), method.max_length) < std::pair(reads(*best), best->max_length)) best = &method;
  }
  return best;
}

int64_t Program::max_step() const {
  int64_t longest = 1;
  for (const MethodSpec& method : methods_) {
    if (!method.kv_read_len && !method.only_scores()) longest = std::max(longest, method.max_length);
  }
  return longest;
}

int64_t Program::scored_tokens() const {
  int64_t most = 0;
  for (const MethodSpec& method : methods_) most = std::max(most, method.scored_tokens);
  return most;
}

std::span<uint8_t> Program::cache() const { return engine_->cache(); }

void Program::clear_cache() const { engine_->clear_cache(); }

Status Program::run(const MethodSpec& method, std::span<const int64_t> tokens, int64_t position, size_t scored,
                    std::vector<float>& logits) {
  // The runtime's tensors have no const view; a method does not write to its inputs.
  auto input_ids = executorch::extension::from_blob(
      const_cast<int64_t*>(tokens.data()), {1, static_cast<int32_t>(tokens.size())}, ScalarType::Long);
  auto input_pos = executorch::extension::from_blob(&position, {1}, ScalarType::Long);
  const auto output = engine_->execute(method.name, et::EValue(*input_ids), et::EValue(*input_pos));
  if (!output.ok()) {
    return fail(ErrorCode::kRuntime, "ExecuTorch failed in method '", method.name, "' with ", tokens.size(), " tokens at position ",
                position, ": ", describe(output.error()), "; reset() the session");
  }
  const executorch::aten::Tensor& tensor = output->toTensor();
  const size_t count = scored * static_cast<size_t>(tensor.size(tensor.dim() - 1));
  if (count > static_cast<size_t>(tensor.numel())) {
    return fail(ErrorCode::kRuntime, "method '", method.name, "' gave ", tensor.numel(), " logits, not ", count, "; reset() the session");
  }
  switch (tensor.scalar_type()) {
    case ScalarType::Half: copy_floats<executorch::aten::Half>(tensor, count, logits); break;
    case ScalarType::BFloat16: copy_floats<executorch::aten::BFloat16>(tensor, count, logits); break;
    default: copy_floats<float>(tensor, count, logits); break;
  }
  return {};
}

}  // namespace exportable_cache
