#include "static_host.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <limits>
#include <map>
#include <string>
#include <utility>

#include "engine.h"
#include "safetensors.h"
#include "tensors.h"

namespace exportable_cache {
namespace {

namespace et = executorch::runtime;
using executorch::aten::ScalarType;

// XNNPACK may read a few bytes past a tensor.
constexpr size_t kAlignment = 64, kPadding = 128;
constexpr double kMostBytes = 1e12;

// Masks in the order of the inputs, each with a layer that has it.
std::map<std::string, const StaticLayer*> masks_of(const StaticPlan& plan) {
  std::map<std::string, const StaticLayer*> masks;
  for (const StaticLayer& layer : plan.layers) masks.emplace(layer.mask, &layer);
  return masks;
}

std::vector<int64_t> shape_of(const StaticLayer& layer, bool is_keys, bool transposed, int64_t slots) {
  if (is_keys && transposed) return {1, layer.heads, layer.key_size, slots};
  return {1, layer.heads, slots, is_keys ? layer.key_size : layer.value_size};
}

// A tensor of a method, and what the plan says of it.
struct Expected {
  std::string name;
  std::vector<int64_t> shape;
  std::optional<ScalarType> type{};  // nothing for any float
};

std::string problem_of(const et::Result<et::TensorInfo>& found, const Expected& expected) {
  if (!found.ok()) return expected.name + " is no tensor";
  const auto sizes = found->sizes();
  const auto order = found->dim_order();
  bool fits = expected.type ? found->scalar_type() == *expected.type : is_float_type(found->scalar_type());
  fits = fits && std::equal(sizes.begin(), sizes.end(), expected.shape.begin(), expected.shape.end(),
                            [](int32_t size, int64_t wanted) { return size == wanted; });
  for (size_t index = 0; fits && index < order.size(); ++index) fits = order[index] == index;
  if (fits) return {};
  std::string text;
  for (const int64_t size : expected.shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return expected.name + " is " + shape_text(sizes) + ", not [" + text + "] in the dtype of the plan";
}

// The methods' inputs and outputs, in order.
std::pair<std::vector<Expected>, std::vector<Expected>> signature_of(
    const StaticPlan& plan, const std::vector<int64_t>& columns, int64_t length, int64_t vocabulary, ScalarType type) {
  std::vector<Expected> inputs{{"input_ids", {1, length}, ScalarType::Int}}, outputs{{"logits", {1, vocabulary}}};
  if (plan.positions) inputs.push_back({"positions", {1, length}, ScalarType::Int});
  for (const auto& [name, layer] : masks_of(plan)) inputs.push_back({name, {1, 1, length, layer->slots + length}, type});
  for (size_t index = 0; index < columns.size(); ++index) inputs.push_back({plan.tables[index], {1, length, columns[index]}});
  for (size_t index = 0; index < plan.layers.size(); ++index) {
    for (const bool is_keys : {true, false}) {
      const StaticLayer& layer = plan.layers[index];
      const std::string name = "layers_" + std::to_string(index) + (is_keys ? "_keys" : "_values");
      inputs.push_back({name, shape_of(layer, is_keys, plan.transposed, layer.slots), type});
      outputs.push_back({"new " + name, shape_of(layer, is_keys, plan.transposed, length), type});
    }
  }
  return {std::move(inputs), std::move(outputs)};
}

// The lowest number of a dtype: what a mask adds to scores that are not seen.
float lowest(ScalarType type) {
  if (type == ScalarType::Half) return -65504.0f;
  if (type == ScalarType::BFloat16) return -3.38953139e38f;
  return std::numeric_limits<float>::lowest();
}

}  // namespace

Result<std::unique_ptr<StaticHost>> StaticHost::open(const Manifest& manifest, Engine& engine) {
  const StaticPlan& plan = *manifest.static_plan;
  const auto damaged = [](const std::string& path, const std::string& what) {
    return fail(ErrorCode::kBundle, path, " does not fit the manifest: ", what, "; copy the bundle again");
  };
  const Result<Safetensors> file = read_safetensors(manifest.tables_path(), static_cast<uint64_t>(plan.tables_bytes));
  if (!file.ok()) return damaged(manifest.tables_path(), file.error().message);
  std::vector<Matrix> matrices;
  std::vector<int64_t> columns;
  for (const std::string& name : plan.tables) {
    std::optional<Matrix> found = file->matrix(name);
    if (!found || (!matrices.empty() && found->rows != matrices.front().rows)) {
      return damaged(manifest.tables_path(), "'" + name + "' must be finite [positions, size], with as many positions as the others");
    }
    columns.push_back(found->columns);
    matrices.push_back(std::move(*found));
  }

  const size_t before = 1 + (plan.positions ? 1 : 0), caches = before + masks_of(plan).size() + plan.tables.size();
  std::optional<ScalarType> type;
  std::vector<ScalarType> table_types;
  for (const MethodSpec& method : manifest.methods) {
    const auto meta = engine.meta(method.name);
    const std::string what = "method '" + method.name + "' of " + manifest.program_path();
    if (!meta.ok()) return cannot_load(what, meta.error());
    if (method.min_length != method.max_length) return damaged(what, "it must have one length");
    // All tensors of the cache have the dtype of the first.
    const auto first = meta->num_inputs() > caches ? meta->input_tensor_meta(caches) : et::Result<et::TensorInfo>(et::Error::InvalidArgument);
    if (!first.ok() || !is_float_type(first->scalar_type())) return damaged(what, "it has no floating cache among its inputs");
    if (!type) type = first->scalar_type();
    const auto [inputs, outputs] = signature_of(plan, columns, method.max_length, manifest.logits_size, *type);
    if (meta->num_inputs() != inputs.size() || meta->num_outputs() != outputs.size()) {
      return damaged(what, "it takes " + std::to_string(meta->num_inputs()) + " inputs and returns " + std::to_string(meta->num_outputs()) +
                               " outputs, not " + std::to_string(inputs.size()) + " and " + std::to_string(outputs.size()));
    }
    for (size_t index = 0; index < inputs.size(); ++index) {
      const std::string problem = problem_of(meta->input_tensor_meta(index), inputs[index]);
      if (!problem.empty()) return damaged(what, problem);
    }
    for (size_t index = 0; index < outputs.size(); ++index) {
      const std::string problem = problem_of(meta->output_tensor_meta(index), outputs[index]);
      if (!problem.empty()) return damaged(what, problem);
    }
    std::vector<ScalarType> types;
    for (size_t index = 0; index < plan.tables.size(); ++index) {
      types.push_back(meta->input_tensor_meta(caches - plan.tables.size() + index)->scalar_type());
    }
    if (!table_types.empty() && types != table_types) return damaged(what, "its tables have other dtypes than in another method");
    table_types = std::move(types);
  }
  if (!type) return damaged(manifest.program_path(), "it has no methods");

  std::vector<Table> tables;
  for (size_t index = 0; index < matrices.size(); ++index) {
    std::vector<uint8_t> rows = bytes_of(matrices[index].values, table_types[index]);
    const auto row_bytes = static_cast<int64_t>(rows.size()) / matrices[index].rows;
    rows.resize(rows.size() + kPadding);
    tables.push_back({std::move(rows), matrices[index].columns, row_bytes, static_cast<int8_t>(table_types[index])});
  }
  const size_t element = *type == ScalarType::Float ? 4 : 2;
  std::vector<Part> parts;
  size_t bytes = 0;
  for (const StaticLayer& layer : plan.layers) {
    for (const bool is_keys : {true, false}) {
      const int64_t size = is_keys ? layer.key_size : layer.value_size;
      const double needed = static_cast<double>(layer.heads) * static_cast<double>(layer.slots) * static_cast<double>(size) * 4;
      if (needed + static_cast<double>(bytes) > kMostBytes) return damaged(manifest.program_path(), "its cache has more than 1 TB");
      parts.push_back({bytes, layer.heads, layer.slots, size, is_keys && plan.transposed});
      bytes += static_cast<size_t>(layer.heads * layer.slots * size) * element + kPadding;
      bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    }
  }
  const int64_t positions = matrices.empty() ? std::numeric_limits<int64_t>::max() : matrices.front().rows;
  std::unique_ptr<StaticHost> host(
      new StaticHost(plan, std::move(tables), positions, std::move(parts), bytes, static_cast<int8_t>(*type)));
  if (host->memory_.data() == nullptr) {
    return fail(ErrorCode::kRuntime, "cannot allocate ", bytes, " bytes for the cache of ", manifest.program_path(),
                "; export the model with a smaller max_cache_len");
  }
  return host;
}

Status StaticHost::run(Engine& engine, const MethodSpec& method, const Step& step, std::vector<float>& logits) {
  const int64_t first = step.positions[0], length = step.length;
  if (first > positions_ - length) {
    return fail(ErrorCode::kCacheFull, "the rotary tables end at position ", positions_, ", and a step of ", length, " tokens begins at ",
                first, "; reset() the session, or use a model with more positions");
  }
  const auto count = static_cast<int32_t>(length);
  const auto type = static_cast<ScalarType>(type_);
  std::vector<int32_t> ids(step.tokens.begin(), step.tokens.end()), positions(ids.size());
  for (size_t index = 0; index < positions.size(); ++index) positions[index] = static_cast<int32_t>(first + static_cast<int64_t>(index));
  std::vector<executorch::extension::TensorPtr> tensors{view(ids.data(), {1, count}, ScalarType::Int)};
  if (plan_.positions) tensors.push_back(view(positions.data(), {1, count}, ScalarType::Int));
  std::deque<std::vector<uint8_t>> masks;  // used while the method runs
  for (const auto& [name, layer] : masks_of(plan_)) {
    masks.push_back(mask(*layer, first, length));
    tensors.push_back(view(masks.back().data(), {1, 1, count, static_cast<int32_t>(layer->slots) + count}, type));
  }
  for (const Table& table : tables_) {
    tensors.push_back(view(table.rows.data() + first * table.row_bytes, {1, count, static_cast<int32_t>(table.columns)},
                           static_cast<ScalarType>(table.type)));
  }
  for (const Part& part : parts_) {
    const auto heads = static_cast<int32_t>(part.heads), slots = static_cast<int32_t>(part.slots), size = static_cast<int32_t>(part.size);
    std::vector<int32_t> sizes{1, heads, slots, size};
    if (part.transposed) std::swap(sizes[2], sizes[3]);
    tensors.push_back(view(memory_.data() + part.offset, std::move(sizes), type));
  }
  std::vector<et::EValue> inputs;
  for (const auto& tensor : tensors) inputs.emplace_back(*tensor);
  const auto outputs = engine.execute(method.name, inputs);
  if (!outputs.ok()) {
    return fail(ErrorCode::kRuntime, "ExecuTorch failed in method '", method.name, "' with ", length, " tokens at position ", first, ": ",
                describe(outputs.error()), "; reset() the session");
  }
  for (size_t index = 0; index < parts_.size(); ++index) {
    write(parts_[index], static_cast<const uint8_t*>((*outputs)[index + 1].toTensor().const_data_ptr()), first, length);
  }
  const executorch::aten::Tensor& found = outputs->front().toTensor();
  last_floats(found, 1, static_cast<size_t>(found.numel()), logits);
  return {};
}

// [1, 1, length, slots + length]: 0 for what a new token sees of the slots and of the new tokens, the lowest number for the rest.
std::vector<uint8_t> StaticHost::mask(const StaticLayer& layer, int64_t first, int64_t length) const {
  const auto type = static_cast<ScalarType>(type_);
  const int64_t width = layer.slots + length;
  std::vector<float> values(static_cast<size_t>(length * width), lowest(type));
  for (int64_t row = 0; row < length; ++row) {
    const int64_t query = first + row, oldest = layer.window ? query - *layer.window + 1 : 0;
    float* line = values.data() + row * width;
    // Slots hold the positions before the step, as many as there are slots.
    for (int64_t position = std::max({int64_t{0}, oldest, first - layer.slots}); position < first; ++position) line[position % layer.slots] = 0;
    for (int64_t position = std::max(first, oldest); position <= query; ++position) line[layer.slots + position - first] = 0;
  }
  std::vector<uint8_t> bytes = bytes_of(values, type);
  bytes.resize(bytes.size() + kPadding);
  return bytes;
}

// Write a step's keys or values, [1, heads, length, size] or transposed, into their slots.
void StaticHost::write(const Part& part, const uint8_t* rows, int64_t first, int64_t length) {
  const int64_t element = static_cast<ScalarType>(type_) == ScalarType::Float ? 4 : 2;
  uint8_t* memory = memory_.data() + part.offset;
  const auto copy = [&](int64_t to, int64_t from, int64_t count) {
    std::memcpy(memory + to * element, rows + from * element, static_cast<size_t>(count * element));
  };
  // Of tokens that share a slot, the newest stays.
  for (int64_t token = std::max<int64_t>(0, length - part.slots); token < length; ++token) {
    const int64_t slot = (first + token) % part.slots;
    for (int64_t head = 0; head < part.heads; ++head) {
      if (!part.transposed) {
        copy((head * part.slots + slot) * part.size, (head * length + token) * part.size, part.size);
        continue;
      }
      for (int64_t index = 0; index < part.size; ++index) {
        copy((head * part.size + index) * part.slots + slot, (head * part.size + index) * length + token, 1);
      }
    }
  }
}

}  // namespace exportable_cache
