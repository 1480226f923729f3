#include <exportable_cache/items.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include <executorch/runtime/core/exec_aten/exec_aten.h>

namespace exportable_cache {
namespace {

// Outputs of some processors that a program does not take, because items of one size have no padding.
constexpr const char* kMask = "pixel_attention_mask";
// Frames, rows and columns of a video; a program whose frames are separate items has a row for each.
constexpr const char* kVideoGrid = "video_grid_thw";

std::string text_of(std::span<const int64_t> shape) {
  std::string text;
  for (const int64_t size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "[" + text + "]";
}

size_t count_of(const Input& input) {
  return std::visit([](const auto& values) { return values.size(); }, input.values);
}

bool is_floating(const std::string& dtype) { return dtype == "float32" || dtype == "float16" || dtype == "bfloat16"; }

template <class To, class From>
std::vector<uint8_t> as(const std::vector<From>& values) {
  std::vector<uint8_t> bytes(values.size() * sizeof(To));
  for (size_t index = 0; index < values.size(); ++index) {
    const To value = static_cast<To>(values[index]);
    std::memcpy(bytes.data() + index * sizeof(To), &value, sizeof(To));
  }
  return bytes;
}

std::vector<uint8_t> bytes_of(const Input& input, const std::string& dtype) {
  if (const auto* numbers = std::get_if<std::vector<float>>(&input.values)) {
    if (dtype == "float16") return as<executorch::aten::Half>(*numbers);
    if (dtype == "bfloat16") return as<executorch::aten::BFloat16>(*numbers);
    return as<float>(*numbers);
  }
  const auto& integers = *std::get_if<std::vector<int64_t>>(&input.values);
  if (dtype == "int32") return as<int32_t>(integers);
  if (dtype == "bool") return as<bool>(integers);
  return as<int64_t>(integers);
}

// Number of items of a tensor, the dimension along which they are joined, and the size before it.
struct Layout {
  int64_t items = 0;
  int64_t outer = 1;  // product of the sizes before the item dimension
};

Layout layout_of(std::vector<int64_t> given, const std::vector<int64_t>& shape) {
  if (given.size() == shape.size() + 1) {
    given[1] *= given[0];
    given.erase(given.begin());
  }
  if (given.size() != shape.size()) return {};
  const auto rest = [&](size_t from) { return std::equal(given.begin() + static_cast<int64_t>(from), given.end(), shape.begin() + static_cast<int64_t>(from)); };
  if (rest(1) && given[0] % shape[0] == 0) return {given[0] / shape[0]};
  if (shape[0] == 1 && shape.size() > 1 && rest(2)) {
    const int64_t all = given[0] * given[1];
    return given[1] % shape[1] == 0 ? Layout{all / shape[1]} : Layout{};
  }
  if (shape.size() > 2 && std::equal(given.begin(), given.end() - 1, shape.begin()) && given.back() % shape.back() == 0) {
    return {given.back() / shape.back(), std::accumulate(shape.begin(), shape.end() - 1, int64_t{1}, std::multiplies<>())};
  }
  return {};
}

}  // namespace

Status Items::add(const Input& input) {
  const auto count = static_cast<int64_t>(count_of(input));
  int64_t product = 1;
  for (const int64_t size : input.shape) {
    // Divided instead of multiplied, because any sizes may be given.
    if (size < 1 || product > count / size) {
      product = -1;
      break;
    }
    product *= size;
  }
  if (input.shape.empty() || product != count) {
    return fail(ErrorCode::kInput, input.name, " has shape ", text_of(input.shape), " and ", count,
                " values; pass as many as its sizes multiply to");
  }
  std::string known;
  for (size_t kind = 0; kind < specs_.size(); ++kind) {
    const ItemSpec& spec = specs_[kind];
    for (const FixedSpec& fixed : spec.fixed) {
      if (fixed.name == input.name) return add_fixed(kind, fixed, input);
    }
    for (size_t index = 0; index < spec.inputs.size(); ++index) {
      if (spec.inputs[index].name == input.name) return add_main(kind, index, input);
      if (spec.inputs[index].name == "pixel_values" && input.name == kMask) {
        const bool is_whole = std::visit(
            [](const auto& values) { return std::all_of(values.begin(), values.end(), [](auto value) { return value != 0; }); },
            input.values);
        if (is_whole) return {};
        return fail(ErrorCode::kInput, kMask, " has padding; pass images of the exported size");
      }
      known += (known.empty() ? "" : ", ") + spec.inputs[index].name;
    }
  }
  if (known.empty()) {
    return fail(ErrorCode::kInput, "this program takes token ids only, got ", input.name, "; export with modalities, such as ",
                "--modalities image");
  }
  return fail(ErrorCode::kInput, "the program takes ", known, " in addition to token ids, got ", input.name, "; leave it out");
}

Status Items::add_main(size_t kind, size_t index, const Input& input) {
  const ItemInputSpec& spec = specs_[kind].inputs[index];
  const bool has_numbers = std::holds_alternative<std::vector<float>>(input.values);
  if (has_numbers != is_floating(spec.dtype)) {
    return fail(ErrorCode::kInput, spec.name, " is ", has_numbers ? "float32" : "int64", "; it must be ",
                has_numbers ? "int64" : "float32");
  }
  const Layout layout = layout_of(input.shape, spec.shape);
  if (layout.items == 0) {
    std::string rows = text_of(spec.shape).substr(1);
    rows.erase(0, std::to_string(spec.shape[0]).size());
    return fail(ErrorCode::kInput, spec.name, " has shape ", text_of(input.shape), "; it must be [items",
                spec.shape[0] == 1 ? "" : " * " + std::to_string(spec.shape[0]), rows, ", the size of the export");
  }
  const std::vector<uint8_t> bytes = bytes_of(input, spec.dtype);
  const size_t items = static_cast<size_t>(layout.items), outer = static_cast<size_t>(layout.outer);
  const size_t piece = bytes.size() / items / outer;
  for (size_t item = 0; item < items; ++item) {
    std::vector<uint8_t>& one = held_[kind].inputs[index].emplace_back(piece * outer);
    for (size_t row = 0; row < outer; ++row) {
      std::memcpy(one.data() + row * piece, bytes.data() + (row * items + item) * piece, piece);
    }
  }
  return {};
}

Status Items::add_fixed(size_t kind, const FixedSpec& fixed, const Input& input) {
  std::vector<double> values;
  std::visit([&values](const auto& given) { values.assign(given.begin(), given.end()); }, input.values);
  if (fixed.name == kVideoGrid && specs_[kind].apart && values.size() % 3 == 0) {
    std::vector<double> frames;
    constexpr double kMostFrames = 1 << 20;
    for (size_t row = 0; row < values.size(); row += 3) {
      for (double frame = 0; frame < std::min(values[row], kMostFrames); ++frame) {
        frames.insert(frames.end(), {1.0, values[row + 1], values[row + 2]});
      }
    }
    values = std::move(frames);
  }
  const size_t each = fixed.values.size();
  bool fits = !values.empty() && values.size() % each == 0;
  for (size_t index = 0; fits && index < values.size(); ++index) fits = values[index] == fixed.values[index % each];
  if (!fits) {
    const auto list = [](const std::vector<double>& numbers) {
      std::ostringstream text;
      const size_t shown = std::min<size_t>(numbers.size(), 12);
      for (size_t index = 0; index < shown; ++index) text << (index == 0 ? "[" : ", ") << numbers[index];
      text << (shown < numbers.size() ? ", ...]" : "]");
      return numbers.empty() ? std::string("[]") : text.str();
    };
    return fail(ErrorCode::kInput, input.name, " has ", list(values), ", ", specs_[kind].method, " was made for ", list(fixed.values),
                " of each item: bring items to that size before the processor, or export with another image_size or example");
  }
  auto& given = held_[kind].fixed;
  const auto found = std::find_if(given.begin(), given.end(), [&](const auto& one) { return one.first == fixed.name; });
  if (found == given.end()) {
    given.emplace_back(fixed.name, values.size() / each);
  } else {
    found->second += values.size() / each;
  }
  return {};
}

void Items::clear() {
  for (Held& held : held_) {
    held.fixed.clear();
    for (auto& input : held.inputs) input.clear();
  }
}

bool Items::is_empty() const {
  return std::all_of(held_.begin(), held_.end(), [](const Held& held) {
    return held.fixed.empty() && std::all_of(held.inputs.begin(), held.inputs.end(), [](const auto& input) { return input.empty(); });
  });
}

Status Items::check(std::span<const int64_t> tokens) const {
  for (size_t kind = 0; kind < specs_.size(); ++kind) {
    const ItemSpec& spec = specs_[kind];
    const Held& held = held_[kind];
    const size_t items = held.inputs.front().size();
    for (size_t index = 1; index < held.inputs.size(); ++index) {
      if (held.inputs[index].size() != items) {
        return fail(ErrorCode::kInput, "there are ", items, " items of ", spec.inputs.front().name, " and ", held.inputs[index].size(),
                    " of ", spec.inputs[index].name, "; add the processor's tensors for the same items");
      }
    }
    for (const auto& [name, count] : held.fixed) {
      if (count != items) {
        return fail(ErrorCode::kInput, name, " is of ", count, " items, ", spec.inputs.front().name, " of ", items,
                    "; add the processor's tensors for the same items");
      }
    }
    const auto places = std::count(tokens.begin(), tokens.end(), spec.token_id);
    const int64_t embeddings = spec.tokens * static_cast<int64_t>(items);
    if (places != embeddings) {
      return fail(ErrorCode::kInput, "the prompt has ", places, " tokens of id ", spec.token_id, ", ", spec.method, " gives ", embeddings,
                  " embeddings for what was added: build the prompt with the model's own processor, add what it gives, and no more ",
                  "(reset() drops what was added)");
    }
  }
  return {};
}

}  // namespace exportable_cache
