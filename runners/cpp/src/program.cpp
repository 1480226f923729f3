#include <exportable_cache/program.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include <executorch/extension/tensor/tensor_ptr_maker.h>

#include "engine.h"
#include "static_host.h"
#include "tensors.h"

namespace exportable_cache {
namespace {

namespace et = executorch::runtime;
using executorch::aten::ScalarType;

constexpr const char* kEncode = "encode";
constexpr const char* kEmbed = "embed";
constexpr const char* kShift = "shift";
constexpr const char* kDraft = "draft";
constexpr const char* kWriteAdapter = "write_adapter";

int64_t reads(const MethodSpec& method) { return method.kv_read_len.value_or(std::numeric_limits<int64_t>::max()); }

// The difference between a tensor and the manifest, or nothing. Dynamic sizes are given at their upper bound.
std::string tensor_problem(const et::Result<et::TensorInfo>& found, const char* what, const std::vector<int64_t>& shape, bool floats) {
  if (!found.ok()) return "takes or returns something else than tensors";
  const auto sizes = found->sizes();
  const bool fits = std::equal(sizes.begin(), sizes.end(), shape.begin(), shape.end(),
                               [](int32_t size, int64_t expected) { return size == expected; });
  if (fits && (floats ? is_float_type(found->scalar_type()) : found->scalar_type() == ScalarType::Long)) return {};
  std::string text;
  for (const int64_t size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "takes " + std::string(what) + " " + shape_text(sizes) + ", not " + (floats ? "floating [" : "int64 [") + text + "]";
}

// The difference between a step's other inputs and the manifest, or nothing.
std::string further_problem(const et::MethodMeta& meta, const MethodSpec& method, const Manifest& manifest) {
  const std::optional<EmbedsSpec>& embeds = manifest.embeds;
  for (size_t index = 2; index < method.inputs.size(); ++index) {
    const std::string& name = method.inputs[index];
    std::vector<int64_t> shape;
    if (method.takes_encoded) continue;  // an encoder's output, of any size up to its longest
    if (name == "rope_deltas") {
      shape = {1};
    } else if (name == "position_ids" && method.takes_embeds) {
      shape = {embeds->axes, 1, method.max_length};
    } else if (name == "image_ids" && method.takes_embeds) {
      shape = {1, method.max_length};
    } else if (name == "adapters") {
      shape = {manifest.batch_size};
    } else {
      return "takes " + name + ", which this library does not give";
    }
    const std::string problem = tensor_problem(meta.input_tensor_meta(index), name.c_str(), shape, false);
    if (!problem.empty()) return problem;
  }
  return {};
}

// The violated condition of `Program::open`, or nothing.
std::string signature_problem(const et::MethodMeta& meta, const MethodSpec& method, const Manifest& manifest) {
  const int64_t logits_size = manifest.logits_size;
  const size_t inputs = method.takes_encoded ? 4 : std::max<size_t>(2, method.inputs.size());
  if (meta.num_inputs() != inputs || meta.num_outputs() != 1) {
    return "takes " + std::to_string(meta.num_inputs()) + " inputs and returns " + std::to_string(meta.num_outputs()) +
           " outputs, not " + std::to_string(inputs) + " and 1";
  }
  const auto logits = meta.output_tensor_meta(0);
  if (!logits.ok()) return "takes or returns something else than tensors";
  if (method.takes_embeds && !manifest.embeds) return "takes embeddings, which no method gives";
  const int64_t rows = manifest.batch_size;
  std::vector<int64_t> tokens{rows, method.max_length};
  if (method.takes_embeds) tokens.push_back(manifest.embeds->hidden_size);
  for (const std::string& problem :
       {tensor_problem(meta.input_tensor_meta(0), method.takes_embeds ? "embeddings" : "tokens", tokens, method.takes_embeds),
        tensor_problem(meta.input_tensor_meta(1), "a position", {rows}, false), further_problem(meta, method, manifest)}) {
    if (!problem.empty()) return problem;
  }
  const auto logits_sizes = logits->sizes();
  int64_t count = 1;
  for (const int32_t size : logits_sizes) count *= size;
  const int64_t tokens_judged = std::max<int64_t>(1, method.scored_tokens);
  const bool is_of_vocabulary = logits_sizes.size() > 0 && logits_sizes[logits_sizes.size() - 1] == logits_size;
  const bool of_these = is_of_vocabulary && count / logits_size % rows == 0 && count / logits_size / rows == tokens_judged;
  if (!is_float_type(logits->scalar_type()) || !of_these) {
    const std::string several = method.scored_tokens > 0 ? std::to_string(tokens_judged) + ", " : "";
    return "returns " + shape_text(logits_sizes) + ", not floating [" + std::to_string(rows) + ", " + several +
           std::to_string(logits_size) + "]";
  }
  return {};
}

// The difference in a tensor's number of values, for any dimensions, and dtype, or nothing.
bool gives(const et::Result<et::TensorInfo>& found, int64_t count) {
  if (!found.ok() || !is_float_type(found->scalar_type())) return false;
  for (const int32_t size : found->sizes()) {
    if (size < 1 || count % size != 0) return false;
    count /= size;
  }
  return count == 1;
}

// Check the inputs and outputs of encoders and `embed`.
Status check_items(Engine& engine, const Manifest& manifest) {
  const auto refused = [&manifest](const std::string& method, const std::string& what) {
    return fail(ErrorCode::kBundle, "method '", method, "' of ", manifest.program_path(), " ", what,
                "; it is not the program of this manifest: copy the bundle again");
  };
  const EmbedsSpec& embeds = *manifest.embeds;
  const auto embed = engine.meta(kEmbed);
  if (!embed.ok() || embed->num_inputs() != 1 || embed->num_outputs() != 1) return refused(kEmbed, "takes or returns not one tensor");
  const std::string problem = tensor_problem(embed->input_tensor_meta(0), "tokens", {1, embeds.longest}, false);
  if (!problem.empty()) return refused(kEmbed, problem);
  if (!gives(embed->output_tensor_meta(0), embeds.longest * embeds.hidden_size)) {
    return refused(kEmbed, "returns not floating [1, " + std::to_string(embeds.longest) + ", " + std::to_string(embeds.hidden_size) + "]");
  }
  for (const ItemSpec& item : manifest.items) {
    const auto meta = engine.meta(item.method);
    if (!meta.ok() || meta->num_inputs() != item.inputs.size() || meta->num_outputs() < 1) {
      return refused(item.method, "takes not " + std::to_string(item.inputs.size()) + " inputs");
    }
    for (size_t index = 0; index < item.inputs.size(); ++index) {
      const ItemInputSpec& input = item.inputs[index];
      const auto found = meta->input_tensor_meta(index);
      const bool fits = found.ok() && found->scalar_type() == type_of(input.dtype) &&
                        std::equal(found->sizes().begin(), found->sizes().end(), input.shape.begin(), input.shape.end(),
                                   [](int32_t size, int64_t expected) { return size == expected; });
      if (!fits) return refused(item.method, "takes another " + input.name + " than the manifest says");
    }
    if (!gives(meta->output_tensor_meta(0), item.tokens * embeds.hidden_size)) {
      return refused(item.method, "returns not floating [" + std::to_string(item.tokens) + ", " + std::to_string(embeds.hidden_size) + "]");
    }
  }
  return {};
}

}  // namespace

Program::Program(std::vector<MethodSpec> methods, std::unique_ptr<Engine> engine, std::unique_ptr<StaticHost> host)
    : methods_(std::move(methods)), engine_(std::move(engine)), host_(std::move(host)) {}
Program::Program(Program&&) noexcept = default;
Program& Program::operator=(Program&&) noexcept = default;
Program::~Program() = default;

Result<Program> Program::open(const Manifest& manifest) {
  std::vector<std::string> names;
  std::vector<std::string> later;
  for (const MethodSpec& method : manifest.methods) (method.takes_adapters ? later : names).push_back(method.name);
  if (manifest.lora) later.emplace_back(kWriteAdapter);
  if (manifest.drafts) later.emplace_back(kDraft);
  if (manifest.encoder) names.emplace_back(kEncode);
  if (manifest.embeds) names.emplace_back(kEmbed);
  if (manifest.shifts) names.emplace_back(kShift);
  for (const ItemSpec& item : manifest.items) names.push_back(item.method);
  Result<std::unique_ptr<Engine>> engine = Engine::open(manifest.program_path(), names, later);
  if (!engine.ok()) return engine.error();
  std::unique_ptr<StaticHost> host;
  if (manifest.static_plan) {
    Result<std::unique_ptr<StaticHost>> opened = StaticHost::open(manifest, **engine);
    if (!opened.ok()) return opened.error();
    host = std::move(*opened);
  }
  for (const MethodSpec& method : manifest.methods) {
    if (host != nullptr) break;  // it has checked them
    const auto meta = (*engine)->meta(method.name);
    if (!meta.ok()) return cannot_load("method '" + method.name + "' of " + manifest.program_path(), meta.error());
    const std::string problem = signature_problem(meta.get(), method, manifest);
    if (!problem.empty()) {
      return fail(ErrorCode::kBundle, "method '", method.name, "' of ", manifest.program_path(), " ", problem,
                  "; it is not the program of this manifest: copy the bundle again");
    }
  }
  if (manifest.embeds) {
    if (const Status status = check_items(**engine, manifest); !status.ok()) return status.error();
  }
  if (manifest.shifts) {
    const auto meta = (*engine)->meta(kShift);
    bool fits = meta.ok() && meta->num_inputs() == 3 && meta->num_outputs() == 1;
    for (size_t index = 0; fits && index < 3; ++index) {
      fits = tensor_problem(meta->input_tensor_meta(index), "a position", {manifest.batch_size}, false).empty();
    }
    if (!fits) {
      return fail(ErrorCode::kBundle, "method 'shift' of ", manifest.program_path(),
                  " takes or returns something else than the manifest says: copy the bundle again");
    }
  }
  if (manifest.drafts) {
    const auto meta = (*engine)->meta(kDraft);
    bool fits = meta.ok() && meta->num_inputs() == 3 && meta->num_outputs() == 1;
    for (size_t index = 0; fits && index < 3; ++index) {
      const std::vector<int64_t> shape = index == 0 ? std::vector<int64_t>{1, 1} : std::vector<int64_t>{1};
      fits = tensor_problem(meta->input_tensor_meta(index), "a token", shape, false).empty();
    }
    if (!fits || !tensor_problem(meta->output_tensor_meta(0), "logits", {1, manifest.logits_size}, true).empty()) {
      return fail(ErrorCode::kBundle, "method 'draft' of ", manifest.program_path(),
                  " takes or returns something else than the manifest says: copy the bundle again");
    }
  }
  if (manifest.lora) {
    const auto meta = (*engine)->meta(kWriteAdapter);
    const LoraSpec& lora = *manifest.lora;
    bool fits = meta.ok() && meta->num_inputs() == 1 + 2 * lora.targets.size() && tensor_problem(meta->input_tensor_meta(0), "a slot", {1}, false).empty();
    for (size_t index = 0; fits && index < lora.targets.size(); ++index) {
      const LoraTarget& target = lora.targets[index];
      const std::vector<int64_t> shapes[] = {{1, target.inputs, lora.rank}, {1, lora.rank, target.outputs}};
      for (size_t half = 0; half < 2; ++half) {
        const auto found = meta->input_tensor_meta(1 + 2 * index + half);
        fits = fits && tensor_problem(found, "a tensor", shapes[half], true).empty() && found->scalar_type() == type_of(lora.dtype);
      }
    }
    if (!fits) {
      return fail(ErrorCode::kBundle, "method 'write_adapter' of ", manifest.program_path(),
                  " takes something else than the manifest says: copy the bundle again");
    }
  }
  Program program(manifest.methods, std::move(*engine), std::move(host));
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
  if (manifest.embeds && program.method_for(1, std::numeric_limits<int64_t>::max(), {.embeds = true}) == nullptr) {
    return fail(ErrorCode::kBundle, manifest.program_path(), " has no method that takes one embedding at every position; ",
                "export the model again");
  }
  return program;
}

const MethodSpec* Program::method_for(int64_t length, int64_t end, Need need) const {
  const MethodSpec* best = nullptr;
  for (const MethodSpec& method : methods_) {
    if (method.takes_embeds != need.embeds || method.takes_adapters != need.adapted) continue;
    if (need.scores ? method.scored_tokens < length : method.only_scores()) continue;
    if (method.takes_encoded ? !need.has_encoded : need.encodes) continue;
    if (length < method.min_length || length > method.max_length || end > reads(method)) continue;
    // Of the suitable methods, the one that reads and takes least.
    if (best == nullptr || std::pair(reads(method), method.max_length) < std::pair(reads(*best), best->max_length)) best = &method;
  }
  return best;
}

int64_t Program::max_step(bool embeds) const {
  int64_t longest = 1;
  for (const MethodSpec& method : methods_) {
    if (method.takes_embeds == embeds && !method.kv_read_len && !method.only_scores()) longest = std::max(longest, method.max_length);
  }
  return longest;
}

int64_t Program::scored_tokens() const {
  int64_t most = 0;
  for (const MethodSpec& method : methods_) most = std::max(most, method.scored_tokens);
  return most;
}

Status Program::write_adapter(const LoraSpec& lora, int64_t slot, const std::vector<std::vector<float>>& tensors) {
  std::vector<std::string> names{kWriteAdapter};
  for (const MethodSpec& method : methods_) {
    if (method.takes_adapters) names.push_back(method.name);
  }
  if (const Status status = engine_->load(names); !status.ok()) return status;
  std::vector<std::vector<uint8_t>> bytes;
  std::vector<executorch::extension::TensorPtr> views{view(&slot, {1})};
  const ScalarType type = type_of(lora.dtype);
  const auto rank = static_cast<int32_t>(lora.rank);
  for (size_t index = 0; index < tensors.size(); ++index) {
    const LoraTarget& target = lora.targets[index / 2];
    std::vector<int32_t> sizes{1, rank, static_cast<int32_t>(target.outputs)};
    if (index % 2 == 0) sizes = {1, static_cast<int32_t>(target.inputs), rank};
    bytes.push_back(bytes_of(tensors[index], type));
    views.push_back(view(bytes.back().data(), std::move(sizes), type));
  }
  std::vector<et::EValue> inputs;
  for (const auto& one : views) inputs.emplace_back(*one);
  const auto output = engine_->execute(kWriteAdapter, inputs);
  if (output.ok()) return {};
  return fail(ErrorCode::kRuntime, "ExecuTorch failed in method 'write_adapter': ", describe(output.error()), "; load the adapter again");
}

Status Program::draft(int64_t token, int64_t position, int64_t link, std::vector<float>& logits) {
  if (const Status status = engine_->load({kDraft}); !status.ok()) return status;
  const auto places = {view(&token, {1, 1}), view(&position, {1}), view(&link, {1})};
  std::vector<et::EValue> inputs;
  for (const auto& place : places) inputs.emplace_back(*place);
  const auto output = engine_->execute(kDraft, inputs);
  if (!output.ok()) {
    return fail(ErrorCode::kRuntime, "ExecuTorch failed in method 'draft' at position ", position, ": ", describe(output.error()),
                "; reset() the session");
  }
  const executorch::aten::Tensor& tensor = output->front().toTensor();
  last_floats(tensor, 1, static_cast<size_t>(tensor.numel()), logits);
  return {};
}

Status Program::shift(int64_t length, int64_t first, int64_t count) {
  const auto places = {view(&length, {1}), view(&first, {1}), view(&count, {1})};
  std::vector<et::EValue> inputs;
  for (const auto& place : places) inputs.emplace_back(*place);
  const auto output = engine_->execute(kShift, inputs);
  if (output.ok()) return {};
  return fail(ErrorCode::kRuntime, "ExecuTorch failed in method 'shift' at a length of ", length, ": ", describe(output.error()),
              "; reset() the session");
}

std::span<uint8_t> Program::cache() const { return host_ != nullptr ? host_->cache() : engine_->cache(); }

void Program::clear_cache() const { host_ != nullptr ? host_->clear() : engine_->clear_cache(); }

Status Program::run(const MethodSpec& method, const Step& step, size_t scored, std::vector<float>& logits) {
  if (host_ != nullptr) return host_->run(*engine_, method, step, logits);
  const auto length = static_cast<int32_t>(step.length), rows = static_cast<int32_t>(step.positions.size());
  std::vector<executorch::extension::TensorPtr> tensors;
  std::vector<uint8_t> embeds;  // used while the method runs
  if (method.takes_embeds) {
    const auto meta = engine_->meta(method.name);
    const ScalarType type = meta->input_tensor_meta(0)->scalar_type();
    embeds = bytes_of(step.embeds, type);
    tensors.push_back(view(embeds.data(), {1, length, static_cast<int32_t>(step.embeds.size() / step.length)}, type));
  } else {
    tensors.push_back(view(step.tokens.data(), {rows, length}));
  }
  tensors.push_back(view(step.positions.data(), {rows}));
  if (method.takes_encoded) {
    tensors.push_back(view(step.encoded->states.data(), step.encoded->sizes, static_cast<ScalarType>(step.encoded->scalar_type)));
    tensors.push_back(view(&step.encoded->length, {1}));
  } else {
    for (size_t index = 2; index < method.inputs.size(); ++index) {
      const std::string& name = method.inputs[index];
      if (name == "adapters") tensors.push_back(view(&step.adapter, {1}));
      if (name == "rope_deltas") tensors.push_back(view(&step.rope_delta, {1}));
      if (name == "image_ids") tensors.push_back(view(step.image_ids.data(), {1, length}));
      if (name == "position_ids") {
        tensors.push_back(view(step.position_ids.data(), {static_cast<int32_t>(step.position_ids.size()) / length, 1, length}));
      }
    }
  }
  std::vector<et::EValue> inputs;
  for (const auto& tensor : tensors) inputs.emplace_back(*tensor);
  const auto output = engine_->execute(method.name, inputs);
  if (!output.ok()) {
    std::string positions;
    for (const int64_t position : step.positions) positions += (positions.empty() ? "" : ", ") + std::to_string(position);
    return fail(ErrorCode::kRuntime, "ExecuTorch failed in method '", method.name, "' with ", length, " tokens at position ", positions,
                ": ", describe(output.error()), "; reset() the session");
  }
  const executorch::aten::Tensor& tensor = output->front().toTensor();
  const size_t count = scored * static_cast<size_t>(tensor.size(tensor.dim() - 1));
  const size_t all = count * static_cast<size_t>(rows);
  if (all > static_cast<size_t>(tensor.numel())) {
    return fail(ErrorCode::kRuntime, "method '", method.name, "' gave ", tensor.numel(), " logits, not ", all, "; reset() the session");
  }
  last_floats(tensor, static_cast<size_t>(rows), count, logits);
  return {};
}

Result<std::vector<float>> Program::embed(const EmbedsSpec& embeds, std::span<const int64_t> tokens) {
  std::vector<float> found, part;
  const auto hidden = static_cast<size_t>(embeds.hidden_size);
  found.reserve(tokens.size() * hidden);
  while (!tokens.empty()) {
    const size_t size = std::min(tokens.size(), static_cast<size_t>(embeds.longest));
    const auto ids = view(tokens.data(), {1, static_cast<int32_t>(size)});
    const auto output = engine_->execute(kEmbed, std::vector<et::EValue>{et::EValue(*ids)});
    if (!output.ok()) {
      return fail(ErrorCode::kRuntime, "ExecuTorch failed in method 'embed' with ", size, " tokens: ", describe(output.error()));
    }
    const executorch::aten::Tensor& tensor = output->front().toTensor();
    if (static_cast<size_t>(tensor.numel()) != size * hidden) {
      return fail(ErrorCode::kRuntime, "method 'embed' gave ", tensor.numel(), " numbers of ", size, " tokens, not ", size * hidden);
    }
    last_floats(tensor, 1, size * hidden, part);
    found.insert(found.end(), part.begin(), part.end());
    tokens = tokens.subspan(size);
  }
  return found;
}

Result<std::vector<float>> Program::encode_item(const Items& items, size_t kind, size_t item) {
  const ItemSpec& spec = items.specs()[kind];
  std::vector<executorch::extension::TensorPtr> tensors;
  std::vector<et::EValue> inputs;
  for (size_t index = 0; index < spec.inputs.size(); ++index) {
    const ItemInputSpec& input = spec.inputs[index];
    tensors.push_back(view(items.bytes(kind, index, item).data(), {input.shape.begin(), input.shape.end()}, type_of(input.dtype)));
    inputs.emplace_back(*tensors.back());
  }
  const auto output = engine_->execute(spec.method, inputs);
  if (!output.ok()) {
    return fail(ErrorCode::kRuntime, "ExecuTorch failed in method '", spec.method, "': ", describe(output.error()));
  }
  const executorch::aten::Tensor& tensor = output->front().toTensor();
  if (tensor.numel() % spec.tokens != 0) {
    return fail(ErrorCode::kRuntime, "method '", spec.method, "' gave ", tensor.numel(), " numbers of ", spec.tokens, " embeddings");
  }
  std::vector<float> found;
  last_floats(tensor, 1, static_cast<size_t>(tensor.numel()), found);
  return found;
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
