#include "safetensors.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <span>

namespace exportable_cache {
namespace {

static_assert(std::endian::native == std::endian::little);

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

}  // namespace

std::optional<Matrix> Safetensors::matrix(const std::string& name) const {
  const Json& entry = header[name];
  const Json::Array *shape = entry["shape"].array(), *ends = entry["data_offsets"].array();
  if (shape == nullptr || shape->size() != 2 || ends == nullptr || ends->size() != 2 || entry["dtype"].string() == nullptr) return std::nullopt;
  const int64_t *rows = (*shape)[0].integer(), *columns = (*shape)[1].integer(), *begin = (*ends)[0].integer(), *end = (*ends)[1].integer();
  if (rows == nullptr || columns == nullptr || begin == nullptr || end == nullptr) return std::nullopt;
  const auto size = static_cast<int64_t>(data.size());
  if (*begin < 0 || *end < *begin || *end > size || *rows < 1 || *columns < 1 || *rows > size / *columns) return std::nullopt;
  auto values = floats_of(*entry["dtype"].string(), std::span(data).subspan(static_cast<size_t>(*begin), static_cast<size_t>(*end - *begin)));
  if (!values || static_cast<int64_t>(values->size()) != *rows * *columns) return std::nullopt;
  const bool finite = std::all_of(values->begin(), values->end(), [](float value) { return std::isfinite(value); });
  if (!finite) return std::nullopt;
  return Matrix{*rows, *columns, std::move(*values)};
}

Result<Safetensors> read_safetensors(const std::string& path, uint64_t most) {
  const auto problem = [](const std::string& what) { return fail(ErrorCode::kInput, what); };
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) return problem("it cannot be read");
  const auto bytes = static_cast<uint64_t>(std::max<int64_t>(0, file.tellg()));
  if (bytes > most) return problem("it has " + std::to_string(bytes) + " bytes, at most " + std::to_string(most) + " fit the program");
  uint64_t size = 0;
  file.seekg(0);
  if (bytes < sizeof size || !file.read(reinterpret_cast<char*>(&size), sizeof size)) return problem("it has " + std::to_string(bytes) + " bytes");
  if (size > std::min(kMostHeader, bytes - sizeof size)) return problem("its header is longer than the file");
  std::string header(size, '\0'), data(bytes - sizeof size - size, '\0');
  file.read(header.data(), static_cast<std::streamsize>(size));
  if (!file.read(data.data(), static_cast<std::streamsize>(data.size()))) return problem("it ends early");
  Result<Json> parsed = Json::parse(header);
  if (!parsed.ok() || parsed->object() == nullptr) return problem("its header is no JSON object");
  return Safetensors{std::move(*parsed), std::move(data)};
}

}  // namespace exportable_cache
