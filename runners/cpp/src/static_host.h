// The host's part of a program in the static form: it keeps the cache, and makes masks and rotary rows.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include <exportable_cache/manifest.h>
#include <exportable_cache/program.h>

#include "arena.h"

namespace exportable_cache {

class Engine;

/// The loop around a program of fixed sizes, whose methods return the new keys and values. It knows nothing of the model but
/// `StaticPlan`; the same in Python is exportable_cache/backends/executorch/static/runner.py.
class StaticHost {
 public:
  /// Read the rotary tables, and compare the methods with the plan.
  ///
  /// Error kBundle if the tables cannot be read, or a method takes or returns something else; kRuntime if the cache cannot be
  /// allocated.
  static Result<std::unique_ptr<StaticHost>> open(const Manifest& manifest, Engine& engine);

  /// Run a step, and write its keys and values into the cache. `logits` [vocab_size] receives those of the last token.
  ///
  /// Error kCacheFull if the tables end before its positions; kRuntime if ExecuTorch fails.
  Status run(Engine& engine, const MethodSpec& method, const Step& step, std::vector<float>& logits);

  std::span<uint8_t> cache() { return {memory_.data(), memory_.size()}; }
  void clear() { memory_.clear(); }

 private:
  // Rows [positions, columns] of one rotary table, in the dtype of its input.
  struct Table {
    std::vector<uint8_t> rows;
    int64_t columns;
    int64_t row_bytes;
    int8_t type;
  };
  // A layer's keys or values, [1, heads, slots, size], or [1, heads, size, slots] if transposed.
  struct Part {
    size_t offset;  // in the cache
    int64_t heads;
    int64_t slots;
    int64_t size;
    bool transposed;
  };

  StaticHost(StaticPlan plan, std::vector<Table> tables, int64_t positions, std::vector<Part> parts, size_t bytes, int8_t type)
      : plan_(std::move(plan)), tables_(std::move(tables)), positions_(positions), parts_(std::move(parts)), memory_(bytes), type_(type) {}

  std::vector<uint8_t> mask(const StaticLayer& layer, int64_t first, int64_t length) const;
  void write(const Part& part, const uint8_t* rows, int64_t first, int64_t length);

  StaticPlan plan_;
  std::vector<Table> tables_;
  int64_t positions_;  // rows of each table; without tables, no limit
  std::vector<Part> parts_;
  Arena memory_;
  int8_t type_;  // ExecuTorch's number of the dtype of the cache and the masks
};

}  // namespace exportable_cache
