// Files of the format safetensors, with matrices of floats.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <exportable_cache/result.h>

#include "json.h"

namespace exportable_cache {

/// A matrix of a safetensors file.
struct Matrix {
  int64_t rows = 0;
  int64_t columns = 0;
  std::vector<float> values;
};

/// The largest header, as the library safetensors has it.
constexpr uint64_t kMostHeader = 100'000'000;

/// The contents of a safetensors file.
struct Safetensors {
  Json header;  // an object
  std::string data;

  /// A matrix by its name; nothing if there is none, or it is not of finite floats.
  std::optional<Matrix> matrix(const std::string& name) const;

  /// The checksum that Python writes to `checksum` of the metadata: sha256 of the other metadata and of each tensor. Nothing if the
  /// tensors are not exactly the data of the file.
  std::optional<std::string> checksum() const;
};

/// Read a file of at most `most` bytes. The message of an error names the problem alone.
Result<Safetensors> read_safetensors(const std::string& path, uint64_t most);

}  // namespace exportable_cache
