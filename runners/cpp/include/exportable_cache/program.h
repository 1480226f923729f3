// A loaded program.pte: its methods, checked against the manifest, and one step of any of them.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <exportable_cache/manifest.h>

namespace exportable_cache {

class Engine;

/// The methods of one program. They share its cache, which starts at zero.
class Program {
 public:
  /// Load a file and every method that the manifest names.
  ///
  /// Error kBundle if ExecuTorch cannot load it, a method is missing, or its signature is not
  /// `(int64 [1, length], int64 [1]) -> floating [1, vocab_size] or [1, scored_tokens, vocab_size]`.
  static Result<Program> open(const Manifest& manifest);

  Program(Program&&) noexcept;
  Program& operator=(Program&&) noexcept;
  ~Program();

  const std::vector<MethodSpec>& methods() const { return methods_; }

  /// The method that serves a step of `length` tokens, after which the cache holds `end`, at the least cost; or null. With
  /// `scores` one that gives the logits of each of them.
  const MethodSpec* method_for(int64_t length, int64_t end, bool scores = false) const;

  /// Most tokens that one step gives the logits of.
  int64_t scored_tokens() const;

  /// The longest step that a method takes at every position.
  int64_t max_step() const;

  /// Run one step. Nothing is checked here: `Session` has done so.
  ///
  /// `tokens` are `method.min_length` to `method.max_length` of them, the first goes to `position`. `logits` [scored,
  /// vocab_size] receives those of the last `scored` tokens, as float32 whatever the program computes in.
  Status run(const MethodSpec& method, std::span<const int64_t> tokens, int64_t position, size_t scored, std::vector<float>& logits);

  /// The memory that holds the cache; see `Engine::cache`.
  std::span<uint8_t> cache() const;
  void clear_cache() const;

 private:
  Program(std::vector<MethodSpec> methods, std::unique_ptr<Engine> engine);

  std::vector<MethodSpec> methods_;
  std::unique_ptr<Engine> engine_;
};

}  // namespace exportable_cache
