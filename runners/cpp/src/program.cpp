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

constexpr const char* kEncode = "encode";

int64_t reads(const MethodSpec& method) { return method.kv_read_len.value_or(std::numeric_limits<int64_t>::max()); }

bool is_floating(ScalarType type) {
  return type == ScalarType::Float || type == ScalarType::Half || type == ScalarType::BFloat16;
}

// What is not as `Program::open` says, or nothing. Dynamic sizes are given at their upper bound.
std::string signature_problem(const et::MethodMeta& meta, const MethodSpec& method, int64_t logits_size) {
  const size_t inputs = method.takes_encoded ? 4 : 2;
  if (meta.num_inputs() != inputs || meta.num_outputs() != 1) {
    return "takes " + std::to_string(meta.num_inputs()) + " inputs and returns " + std::to_string(meta.num_outputs()) +
           " outputs, not " + std::to_string(inputs) + " and 1";
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
  if (manifest.encoder) names.emplace_back(kEncode);
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
  if (manifest.encoder) {
    const auto meta = program.engine_->meta(kEncode);
    const size_t inputs = manifest.encoder->takes_mask ? 2 : 1;
    if (!meta.ok() || meta->num_inputs() != inputs || meta->num_outputs() != 2) {
      return fail(ErrorCode::kBundle, "method 'encode' of ", manifest.program_path(),
                  " takes or returns something else than the manifest says: copy the bundle again");
    }
  }
  if (program.method_for(1, std::numeric_limits<int64_t>::max(), {}) == nullptr) {
    return fail(ErrorCode::kBundle, manifest.program_path(), " has no method that takes one token at every position; ",
                "export the model again");
  }
  return program;
}

const MethodSpec* Program::method_for(int64_t length, int64_t end, Need need) const {
  const MethodSpec* best = nullptr;
  for (const MethodSpec& method : methods_) {
    if (need.scores ? method.scored_tokens < length : method.only_scores()) continue;
    if (method.takes_encoded ? !need.has_encoded : need.encodes) continue;
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
                    const Encoded* encoded, std::vector<float>& logits) {
  // The runtime's tensors have no const view; a method does not write to its inputs.
  auto input_ids = executorch::extension::from_blob(
      const_cast<int64_t*>(tokens.data()), {1, static_cast<int32_t>(tokens.size())}, ScalarType::Long);
  auto input_pos = executorch::extension::from_blob(&position, {1}, ScalarType::Long);
  std::vector<et::EValue> inputs{et::EValue(*input_ids), et::EValue(*input_pos)};
  executorch::extension::TensorPtr states, lengths;
  if (method.takes_encoded) {
    states = executorch::extension::from_blob(const_cast<uint8_t*>(encoded->states.data()), encoded->sizes,
                                              static_cast<ScalarType>(encoded->scalar_type));
    lengths = executorch::extension::from_blob(const_cast<int64_t*>(&encoded->length), {1}, ScalarType::Long);
    inputs.emplace_back(*states);
    inputs.emplace_back(*lengths);
  }
  const auto output = engine_->execute(method.name, inputs);
  if (!output.ok()) {
    return fail(ErrorCode::kRuntime, "ExecuTorch failed in method '", method.name, "' with ", tokens.size(), " tokens at position ",
                position, ": ", describe(output.error()), "; reset() the session");
  }
  const executorch::aten::Tensor& tensor = output->front().toTensor();
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

Result<Encoded> Program::encode(const EncoderSpec& encoder, const void* values, std::vector<int32_t> sizes, int32_t padding) {
  const int32_t length = sizes.back();
  auto input = executorch::extension::from_blob(const_cast<void*>(values), std::move(sizes),
                                                encoder.takes_ids ? ScalarType::Long : ScalarType::Float);
  std::vector<int64_t> mask(static_cast<size_t>(length), 1);
  std::fill(mask.end() - padding, mask.end(), 0);
  auto attention_mask = executorch::extension::from_blob(mask.data(), {1, length}, ScalarType::Long);
  std::vector<et::EValue> inputs{et::EValue(*input)};
  if (encoder.takes_mask) inputs.emplace_back(*attention_mask);
  const auto outputs = engine_->execute(kEncode, inputs);
  if (!outputs.ok()) {
    return fail(ErrorCode::kRuntime, "ExecuTorch failed in method 'encode' with a length of ", length, ": ", describe(outputs.error()));
  }
  const executorch::aten::Tensor& states = (*outputs)[0].toTensor();
  const auto* bytes = static_cast<const uint8_t*>(states.const_data_ptr());
  Encoded encoded;
  encoded.states.assign(bytes, bytes + states.nbytes());
  encoded.sizes.assign(states.sizes().begin(), states.sizes().end());
  encoded.scalar_type = static_cast<int8_t>(states.scalar_type());
  encoded.length = *(*outputs)[1].toTensor().const_data_ptr<int64_t>();
  return encoded;
}

}  // namespace exportable_cache
