#include "safetensors.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <span>
#include <string_view>

#include "sha256.h"

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

// A text as Python's json.dumps writes it. Bytes of other characters than ASCII cannot be in such a file.
std::string json_text(std::string_view text) {
  constexpr char kDigits[] = "0123456789abcdef";
  constexpr std::string_view kEscaped = "\"\\\n\r\t\b\f", kNames = "\"\\nrtbf";
  std::string found = "\"";
  for (const char letter : text) {
    const size_t at = kEscaped.find(letter);
    if (at != std::string_view::npos) {
      found += {'\\', kNames[at]};
    } else if (letter < ' ' || letter > '~') {
      found += "\\u00";
      found += {kDigits[letter >> 4 & 15], kDigits[letter & 15]};
    } else {
      found += letter;
    }
  }
  return found + '"';
}

// The name of a dtype in torch.
std::string_view torch_name(std::string_view dtype) {
  if (dtype == "F64") return "torch.float64";
  if (dtype == "F16") return "torch.float16";
  return dtype == "BF16" ? "torch.bfloat16" : "torch.float32";
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

std::optional<std::string> Safetensors::checksum() const {
  std::string texts = "{";
  if (const Json::Object* metadata = header["__metadata__"].object()) {
    for (const auto& [name, text] : *metadata) {
      if (name == "checksum" || text.string() == nullptr) continue;
      texts += (texts.size() > 1 ? ", " : "") + json_text(name) + ": " + json_text(*text.string());
    }
  }
  Sha256 digest;
  digest.add(texts + "}");
  int64_t left = static_cast<int64_t>(data.size());
  for (const auto& [name, entry] : *header.object()) {
    if (name == "__metadata__") continue;
    const Json::Array *shape = entry["shape"].array(), *ends = entry["data_offsets"].array();
    if (shape == nullptr || ends == nullptr || ends->size() != 2 || entry["dtype"].string() == nullptr) return std::nullopt;
    const int64_t *begin = (*ends)[0].integer(), *end = (*ends)[1].integer();
    if (begin == nullptr || end == nullptr || *begin < 0 || *end < *begin || *end > static_cast<int64_t>(data.size())) return std::nullopt;
    // Tensors do not overlap, or many of them could take forever.
    left -= *end - *begin;
    if (left < 0) return std::nullopt;
    std::string sizes;
    for (const Json& size : *shape) {
      if (size.integer() == nullptr) return std::nullopt;
      sizes += (sizes.empty() ? "" : ", ") + std::to_string(*size.integer());
    }
    digest.add("[" + json_text(name) + ", \"" + std::string(torch_name(*entry["dtype"].string())) + "\", [" + sizes + "]]");
    digest.add(std::string_view(data).substr(static_cast<size_t>(*begin), static_cast<size_t>(*end - *begin)));
  }
  if (left > 0) return std::nullopt;
  return digest.hex();
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
