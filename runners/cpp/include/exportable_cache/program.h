// A loaded program.pte: its methods, checked against the manifest, and one step of any of them.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <exportable_cache/items.h>
#include <exportable_cache/manifest.h>

namespace exportable_cache {

class Engine;

/// What an encoder gave, as the steps of the decoder take it.
struct Encoded {
  std::vector<uint8_t> states;  // [1, encoder_length, hidden_size]
  std::vector<int32_t> sizes;
  int8_t scalar_type = 0;       // ExecuTorch's number of its dtype
  int64_t length = 0;           // tokens of it that are no padding
};

/// What a step takes: token ids, or embeddings of as many tokens; and where they go. Ids alone where there are several rows.
struct Step {
  std::span<const int64_t> tokens{};     // ids [rows, length], where there are no embeddings
  std::span<const float> embeds{};       // [length, hidden_size]
  int64_t length = 0;                    // of each row
  std::span<const int64_t> positions{};  // [rows], of each row's first in the cache
  int64_t rope_delta = 0;             // from there to its rotary position
  std::span<const int64_t> position_ids{};  // [axes, length], beside embeddings
  std::span<const int64_t> image_ids{};     // [length], beside embeddings
  const Encoded* encoded = nullptr;
};

/// The methods of one program. They share its cache, which starts at zero.
class Program {
 public:
  /// Load a file and every method that the manifest names.
  ///
  /// Error kBundle if ExecuTorch cannot load it, a method is missing, or its signature is not the manifest's:
  /// `(int64 [rows, length], int64 [rows], ...) -> floating [rows, vocab_size] or [rows, scored_tokens, vocab_size]` of a step.
  static Result<Program> open(const Manifest& manifest);

  Program(Program&&) noexcept;
  Program& operator=(Program&&) noexcept;
  ~Program();

  const std::vector<MethodSpec>& methods() const { return methods_; }

  /// What a step needs of its method.
  struct Need {
    bool scores = false;       // the logits of each token
    bool encodes = false;      // computes the cross-attention's keys and values: an encoder-decoder's first step
    bool has_encoded = true;   // what the encoder gave is at hand
    bool embeds = false;       // takes embeddings, not ids
  };

  /// The method that serves a step of `length` tokens, after which the cache holds `end`, at the least cost; or null.
  const MethodSpec* method_for(int64_t length, int64_t end, Need need) const;

  /// Most tokens that one step gives the logits of.
  int64_t scored_tokens() const;

  /// The longest step that a method takes at every position, by ids or by embeddings.
  int64_t max_step(bool embeds = false) const;

  /// Run one step. Nothing is checked here: `Session` has done so.
  ///
  /// `method` takes ids or embeddings as `step` has them, `method.min_length` to `method.max_length`. `logits` [rows, scored,
  /// vocab_size] receives those of each row's last `scored` tokens, as float32 whatever the program computes in.
  Status run(const MethodSpec& method, const Step& step, size_t scored, std::vector<float>& logits);

  /// Embeddings [length, hidden_size] of token ids.
  Result<std::vector<float>> embed(const EmbedsSpec& embeds, std::span<const int64_t> tokens);

  /// Embeddings [tokens, hidden_size] of one of the items that are held.
  Result<std::vector<float>> encode_item(const Items& items, size_t kind, size_t item);

  /// Run the encoder over token ids, or over numbers, of which there are as many as `sizes` say.
  ///
  /// Of ids the last `padding` are none. Nothing is checked here.
  Result<Encoded> encode(const EncoderSpec& encoder, const void* values, std::vector<int32_t> sizes, int32_t padding);

  /// The memory that holds the cache; see `Engine::cache`.
  std::span<uint8_t> cache() const;
  void clear_cache() const;

 private:
  Program(std::vector<MethodSpec> methods, std::unique_ptr<Engine> engine);

  std::vector<MethodSpec> methods_;
  std::unique_ptr<Engine> engine_;
};

}  // namespace exportable_cache
