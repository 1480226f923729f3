#include "adapter_file.h"

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>

#include "safetensors.h"

namespace exportable_cache {
namespace {

constexpr const char* kMakeIt = "make its file with `exportable-cache adapter FOLDER --for BUNDLE`";

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
  std::error_code none;
  if (std::filesystem::is_directory(path, none)) return fail(ErrorCode::kInput, path, " is a folder; ", kMakeIt);
  if (!std::ifstream(path)) return fail(ErrorCode::kInput, "cannot read the adapter ", path, "; pass a file that `exportable-cache adapter` wrote");
  // An adapter has at most float64 values of each target's two matrices; a larger file would only take memory.
  uint64_t most = sizeof(uint64_t) + kMostHeader;
  for (const LoraTarget& target : lora.targets) most += static_cast<uint64_t>((target.inputs + target.outputs) * lora.rank) * sizeof(double);
  const Result<Safetensors> file = read_safetensors(path, most);
  if (!file.ok()) return damaged(file.error().message);
  const Json& metadata = file->header["__metadata__"];
  if (metadata["format"].string() == nullptr || *metadata["format"].string() != "exportable_cache.adapter.v1") {
    return fail(ErrorCode::kInput, path, " is of another format than adapters for a program; ", kMakeIt);
  }
  const std::string* made_for = metadata["fingerprint"].string();
  if (made_for != nullptr && !made_for->empty() && !fingerprint.empty() && *made_for != fingerprint) {
    return fail(ErrorCode::kInput, path, " was made for other weights than those of this program; make it again with ",
                "`exportable-cache adapter FOLDER --for BUNDLE`");
  }
  const std::optional<std::string> sum = file->checksum();
  if (!sum) return damaged("it is shorter or longer than its tensors");
  if (metadata["checksum"].string() == nullptr || *metadata["checksum"].string() != *sum) return damaged("its checksum does not match");

  std::map<std::string, size_t> indices;
  std::vector<std::vector<float>> tensors;
  for (const LoraTarget& target : lora.targets) {
    indices[target.name] = tensors.size() / 2;
    tensors.emplace_back(static_cast<size_t>(target.inputs * lora.rank));
    tensors.emplace_back(static_cast<size_t>(lora.rank * target.outputs));
  }
  constexpr std::string_view kFirst = ".lora_A", kSecond = ".lora_B";
  size_t seconds = 0, firsts = 0;
  for (const auto& [name, entry] : *file->header.object()) {
    if (name == "__metadata__") continue;
    if (name.ends_with(kSecond)) {
      ++seconds;
      continue;
    }
    if (!name.ends_with(kFirst)) return damaged("'" + name + "' is not a tensor of an adapter");
    ++firsts;
    const std::string layer = name.substr(0, name.size() - kFirst.size());
    const auto a = file->matrix(name), b = file->matrix(layer + std::string(kSecond));
    if (!a || !b || a->rows != b->columns) return damaged("'" + layer + "' must have two finite matrices of one rank");
    const auto found = indices.find(layer);
    if (found == indices.end()) {
      return fail(ErrorCode::kInput, path, " changes ", layer, ", which has no slot for adapters; export with lora_targets that include it");
    }
    const LoraTarget& target = lora.targets[found->second];
    if (a->columns != target.inputs || b->rows != target.outputs) {
      return fail(ErrorCode::kInput, path, " must have ", target.inputs, " inputs and ", target.outputs, " outputs in ", layer, ", got ",
                  a->columns, " and ", b->rows, "; it was trained for another model, so pass one of this model");
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
