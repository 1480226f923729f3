#include "adapter_file.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <optional>
#include <span>

#include "json.h"

namespace exportable_cache {
namespace {

static_assert(std::endian::native == std::endian::little);
constexpr uint64_t kMostHeader = 100'000'000;  // as in safetensors

// A matrix of a safetensors file.
struct Matrix {
  int64_t rows = 0;
  int64_t columns = 0;
  std::vector<float> values;
};

float from_half(uint16_t bits) {
  const int exponent = bits >> 10 & 31;
  const float fraction = static_cast<float>(bits & 1023);
  const float size = exponent == 0    ? std::ldexp(fraction, -24)
                     : exponent == 31 ? (fraction == 0 ? std::numeric_limits<float>::infinity() : std::numeric_limits<float>::quiet_NaN())
                                      : std::ldexp(fraction + 1024, exponent - 25);
  return bits >> 15 != 0 ? -size : size;
}

template <class Stored, class Convert>
std::vector<float> converted(std::span<const char> bytes, Convert convert) {
  std::vector<float> values(bytes.size() / sizeof(Stored));
  for (size_t index = 0; index < values.size(); ++index) {
    Stored stored;
    std::memcpy(&stored, bytes.data() + index * sizeof(Stored), sizeof(Stored));
    values[index] = convert(stored);
  }
  return values;
}

// The values of a dtype's bytes; nothing for another dtype.
std::optional<std::vector<float>> floats_of(const std::string& dtype, std::span<const char> bytes) {
  if (dtype == "F32") return converted<float>(bytes, [](float value) { return value; });
  if (dtype == "F64") return converted<double>(bytes, [](double value) { return static_cast<float>(value); });
  if (dtype == "F16") return converted<uint16_t>(bytes, from_half);
  if (dtype == "BF16") return converted<uint16_t>(bytes, [](uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); });
  return std::nullopt;
}

std::optional<Matrix> matrix_of(const Json& entry, std::span<const char> data) {
  const Json::Array *shape = entry["shape"].array(), *ends = entry["data_offsets"].array();
  if (shape == nullptr || shape->size() != 2 || ends == nullptr || ends->size() != 2 || entry["dtype"].string() == nullptr) return std::nullopt;
  const int64_t *rows = (*shape)[0].integer(), *columns = (*shape)[1].integer(), *begin = (*ends)[0].integer(), *end = (*ends)[1].integer();
  if (rows == nullptr || columns == nullptr || begin == nullptr || end == nullptr) return std::nullopt;
  const auto size = static_cast<int64_t>(data.size());
  if (*begin < 0 || *end < *begin || *end > size || *rows < 1 || *columns < 1 || *rows > size / *columns) return std::nullopt;
  auto values = floats_of(*entry["dtype"].string(), data.subspan(static_cast<size_t>(*begin), static_cast<size_t>(*end - *begin)));
  if (!values || static_cast<int64_t>(values->size()) != *rows * *columns) return std::nullopt;
  const bool finite = std::all_of(values->begin(), values->end(), [](float value) { return std::isfinite(value); });
  if (!finite) return std::nullopt;
  return Matrix{*rows, *columns, std::move(*values)};
}

// Rows as columns, in a matrix of `width` columns.
void transpose(const Matrix& given, int64_t width, std::vector<float>& found) {
  for (int64_t row = 0; row < given.rows; ++row) {
    for (int64_t column = 0; column < given.columns; ++column) found[column * width + row] = given.values[row * given.columns + column];
  }
}

}  // namespace

Result<std::vector<std::vector<float>>> read_adapter(const std::string& path, const LoraSpec& lora, const std::string& fingerprint) {
  const auto damaged = [&path](const std::string& what) {
    return fail(ErrorCode::kInput, path, " is not an adapter that `exportable-cache adapter` wrote: ", what, "; copy it again");
  };
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) return fail(ErrorCode::kInput, "cannot read the adapter ", path, "; pass a file that `exportable-cache adapter` wrote");
  const auto bytes = static_cast<uint64_t>(std::max<int64_t>(0, file.tellg()));
  // An adapter has at most float64 values of each target's two matrices; a larger file would only take memory.
  uint64_t most = sizeof(uint64_t) + kMostHeader;
  for (const LoraTarget& target : lora.targets) most += static_cast<uint64_t>((target.inputs + target.outputs) * lora.rank) * sizeof(double);
  if (bytes > most) return damaged("it has " + std::to_string(bytes) + " bytes, at most " + std::to_string(most) + " fit the program");
  uint64_t size = 0;
  file.seekg(0);
  if (bytes < sizeof size || !file.read(reinterpret_cast<char*>(&size), sizeof size)) return damaged("it has " + std::to_string(bytes) + " bytes");
  if (size > std::min(kMostHeader, bytes - sizeof size)) return damaged("its header is longer than the file");
  std::string header(size, '\0'), data(bytes - sizeof size - size, '\0');
  file.read(header.data(), static_cast<std::streamsize>(size));
  if (!file.read(data.data(), static_cast<std::streamsize>(data.size()))) return damaged("it ends early");
  const Result<Json> parsed = Json::parse(header);
  if (!parsed.ok() || parsed->object() == nullptr) return damaged("its header is no JSON object");
  const Json& metadata = (*parsed)["__metadata__"];
  if (metadata["format"].string() == nullptr || *metadata["format"].string() != "exportable_cache.adapter.v1") return damaged("it has another format");
  const std::string* made_for = metadata["fingerprint"].string();
  if (made_for != nullptr && !made_for->empty() && !fingerprint.empty() && *made_for != fingerprint) {
    return fail(ErrorCode::kInput, path, " was made for other weights than those of this program; make it again with ",
                "`exportable-cache adapter FOLDER --for BUNDLE`");
  }

  std::map<std::string, size_t> indices;
  std::vector<std::vector<float>> tensors;
  for (const LoraTarget& target : lora.targets) {
    indices[target.name] = tensors.size() / 2;
    tensors.emplace_back(static_cast<size_t>(target.inputs * lora.rank));
    tensors.emplace_back(static_cast<size_t>(lora.rank * target.outputs));
  }
  constexpr std::string_view kFirst = ".lora_A", kSecond = ".lora_B";
  size_t seconds = 0, firsts = 0;
  for (const auto& [name, entry] : *parsed->object()) {
    if (name == "__metadata__") continue;
    if (name.ends_with(kSecond)) {
      ++seconds;
      continue;
    }
    if (!name.ends_with(kFirst)) return damaged("'" + name + "' is not a tensor of an adapter");
    ++firsts;
    const std::string layer = name.substr(0, name.size() - kFirst.size());
    const auto a = matrix_of(entry, data), b = matrix_of((*parsed)[layer + std::string(kSecond)], data);
    if (!a || !b || a->rows != b->columns) return damaged("'" + layer + "' must have two finite matrices of one rank");
    const auto found = indices.find(layer);
    if (found == indices.end()) {
      return fail(ErrorCode::kInput, path, " changes ", layer, ", which has no slot for adapters; export with lora_targets that include it");
    }
    const LoraTarget& target = lora.targets[found->second];
    if (a->columns != target.inputs || b->rows != target.outputs) {
      return fail(ErrorCode::kInput, path, " must have ", target.inputs, " inputs and ", target.outputs, " outputs in ", layer, ", got ",
                  a->columns, " and ", b->rows, "; it was trained for another model");
    }
    if (a->rows > lora.rank) {
      return fail(ErrorCode::kInput, path, " must have a rank of at most ", lora.rank, ", got ", a->rows, " in ", layer,
                  "; export with lora_rank=", a->rows);
    }
    transpose(*a, lora.rank, tensors[2 * found->second]);
    transpose(*b, target.outputs, tensors[2 * found->second + 1]);
  }
  if (firsts != seconds || firsts == 0) return damaged("its tensors are not pairs");
  return tensors;
}

}  // namespace exportable_cache
