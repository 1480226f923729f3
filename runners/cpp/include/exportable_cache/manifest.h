// What a bundle says about itself, as far as running it goes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <exportable_cache/result.h>

namespace exportable_cache {

/// One step of the program: takes min_length to max_length tokens.
struct MethodSpec {
  std::string name;
  int64_t min_length;
  int64_t max_length;
  std::optional<int64_t> read_length{};  // reads only so many tokens of the cache, so it serves no later position
};

/// One cache layer: its class in exportable_cache/cache/layers, and the sizes that limit it, as far as it has them.
struct LayerSpec {
  std::string class_name;
  std::optional<int64_t> capacity{};  // slots
  std::optional<int64_t> window{};    // newest tokens a query attends to, in a ring
  int64_t sinks = 0;                  // first tokens it attends to as well
};

/// The fields of manifest.json that a runner needs.
struct Manifest {
  std::string folder;
  std::string source;   // where the model came from
  int64_t vocab_size;   // token ids run from 0 to vocab_size - 1
  std::vector<MethodSpec> methods;  // those that give the last token's logits
  std::vector<LayerSpec> layers;
  std::vector<int64_t> end_tokens;  // eos_token_id of the generation config; may be empty
  bool has_tokenizer;

  /// Path of program.pte and of tokenizer.json.
  std::string program_path() const;
  std::string tokenizer_path() const;

  /// Read `folder`/manifest.json.
  ///
  /// Error kBundle if it cannot be read, is of another schema version, describes something else than an ExecuTorch program
  /// of one row that returns the last token's logits, or if program.pte is missing or has not the size recorded. Checksums
  /// are not compared: `exportable-cache inspect` does that.
  static Result<Manifest> read(const std::string& folder);
};

}  // namespace exportable_cache
