// All calls of ExecuTorch.
//
// It uses Program and Method instead of Module, because Module writes zeros over a whole cache when it opens.
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
  /// Load a file and the named methods over one set of memory arenas, which start at zero. The arenas also have room for the methods
  /// `later`, which `load` loads.
  static Result<std::unique_ptr<Engine>> open(const std::string& path, const std::vector<std::string>& methods,
                                              const std::vector<std::string>& later = {});

  /// Load further methods; those that are loaded stay.
  virtual Status load(const std::vector<std::string>& methods) = 0;

  virtual ~Engine() = default;

  /// Inputs and outputs of a loaded method.
  virtual executorch::runtime::Result<executorch::runtime::MethodMeta> meta(const std::string& method) = 0;

  /// Run a loaded method. Its outputs are in planned memory, valid until the next call.
  virtual executorch::runtime::Result<std::vector<executorch::runtime::EValue>> execute(
      const std::string& method, std::span<const executorch::runtime::EValue> inputs) = 0;

  /// The memory that holds the cache and nothing else; empty if the program does not store it separately.
  virtual std::span<uint8_t> cache() = 0;

  /// Fill the cache with zeros, which take no memory.
  virtual void clear_cache() = 0;
};

/// "0x14 (DelegateInvalidCompatibility)", or the number alone if ExecuTorch has no names.
std::string describe(executorch::runtime::Error error);

/// The error for a method that the program does not have.
Error no_such_method(const std::string& path, const std::string& method, const std::vector<std::string>& found);

/// The error for a file or method that ExecuTorch does not load.
Error cannot_load(const std::string& what, executorch::runtime::Error error);

}  // namespace exportable_cache
