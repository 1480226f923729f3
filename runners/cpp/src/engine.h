// The seam to ExecuTorch: what is asked of it.
//
// By Program and Method, not by its Module, which writes zeros over a whole cache when it opens.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include <executorch/runtime/core/evalue.h>
#include <executorch/runtime/executor/method_meta.h>
#include <exportable_cache/result.h>

namespace exportable_cache {

class Engine {
 public:
  /// Load a file and these of its methods, over one set of memory arenas, which start at zero.
  static Result<std::unique_ptr<Engine>> open(const std::string& path, const std::vector<std::string>& methods);

  virtual ~Engine() = default;

  /// What a loaded method takes and returns.
  virtual executorch::runtime::Result<executorch::runtime::MethodMeta> meta(const std::string& method) = 0;

  /// Run a loaded method. Its outputs live in planned memory, until the next call.
  virtual executorch::runtime::Result<std::vector<executorch::runtime::EValue>> execute(
      const std::string& method, std::span<const executorch::runtime::EValue> inputs) = 0;

  /// The memory that holds the cache, and nothing else; empty where the program does not keep it apart.
  virtual std::span<uint8_t> cache() = 0;

  /// Fill the cache with zeros, which take no memory.
  virtual void clear_cache() = 0;
};

/// "0x14 (DelegateInvalidCompatibility)", or the number alone where ExecuTorch has no names.
std::string describe(executorch::runtime::Error error);

/// The error of a method that is not among those the program has.
Error no_such_method(const std::string& path, const std::string& method, const std::vector<std::string>& found);

/// The error of a file or method that ExecuTorch does not load.
Error cannot_load(const std::string& what, executorch::runtime::Error error);

}  // namespace exportable_cache
