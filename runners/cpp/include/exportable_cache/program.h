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
class StaticHost;

/// Output of an encoder, as the decoder's steps take it.
struct Encoded {
  std::vector<uint8_t> states;  // [1, encoder_length, hidden_size]
  std::vector<int32_t> sizes;
  int8_t scalar_type = 0;       // ExecuTorch's number of its dtype
  int64_t length = 0;           // tokens without padding
};

/// Input of a step: token ids, or embeddings of as many tokens, and their positions. With several rows, ids only.
struct Step {
  std::span<const int64_t> tokens{};     // ids [rows, length], without embeddings
  std::span<const float> embeds{};       // [length, hidden_size]
  int64_t length = 0;                    // per row
  std::span<const int64_t> positions{};  // [rows], of each row's first token in the cache
  int64_t rope_delta = 0;             // offset to its rotary position
  std::span<const int64_t> position_ids{};  // [axes, length], with embeddings
  std::span<const int64_t> image_ids{};     // [length], with embeddings
  const Encoded* encoded = nullptr;
  int64_t adapter = 0;                      // slot of the LoRA adapter, for methods that take one
};

/// The methods of one program. They share its cache, which starts at zero.
class Program {
 public:
  /// Load a file and every method that the manifest names.
  ///
  /// Error kBundle if ExecuTorch cannot load it, a method is missing, or its signature is not the manifest's. A step is
  /// `(int64 [rows, length], int64 [rows], ...) -> floating [rows, vocab_size] or [rows, scored_tokens, vocab_size]`.
  static Result<Program> open(const Manifest& manifest);

  Program(Program&&) noexcept;
  Program& operator=(Program&&) noexcept;
  ~Program();

  const std::vector<MethodSpec>& methods() const { return methods_; }

  /// What a step needs from its method.
  struct Need {
    bool scores = false;       // logits of each token
    bool encodes = false;      // computes the cross-attention's keys and values: an encoder-decoder's first step
    bool has_encoded = true;   // the encoder's output is available
    bool embeds = false;       // takes embeddings instead of ids
    bool adapted = false;      // takes the slot of a LoRA adapter
  };

  /// The cheapest method for a step of `length` tokens after which the cache has `end` tokens, or null.
  const MethodSpec* method_for(int64_t length, int64_t end, Need need) const;

  /// Most tokens per step whose logits are returned.
  int64_t scored_tokens() const;

  /// The longest step that a method supports at every position, with ids or embeddings.
  int64_t max_step(bool embeds = false) const;

  /// Run one step. Nothing is checked here, because `Session` has done so.
  ///
  /// `method` takes ids or embeddings, like `step`, of `method.min_length` to `method.max_length` tokens. `logits` [rows, scored,
  /// vocab_size] receives those of each row's last `scored` tokens, as float32 for any dtype of the program.
  Status run(const MethodSpec& method, const Step& step, size_t scored, std::vector<float>& logits);

  /// Embeddings [length, hidden_size] of token ids.
  Result<std::vector<float>> embed(const EmbedsSpec& embeds, std::span<const int64_t> tokens);

  /// Embeddings [tokens, hidden_size] of one added item.
  Result<std::vector<float>> encode_item(const Items& items, size_t kind, size_t item);

  /// Run the encoder over token ids, or over values of the given `sizes`.
  ///
  /// The last `padding` ids are padding. Nothing is checked here.
  Result<Encoded> encode(const EncoderSpec& encoder, const void* values, std::vector<int32_t> sizes, int32_t padding);

  /// Write a LoRA adapter into a slot: two tensors for each target, [inputs, rank] and [rank, outputs].
  ///
  /// The first call loads the methods that take adapters. Error kBundle if they cannot be loaded, kRuntime if ExecuTorch fails.
  Status write_adapter(const LoraSpec& lora, int64_t slot, const std::vector<std::vector<float>>& tensors);

  /// Logits [logits_size] of the draft head after a token at a position, which comes after `link` other proposed ones. It writes the
  /// head's part of the cache there, which the next step writes again. Nothing is checked here.
  ///
  /// The first call loads the method. Error kBundle if it cannot be loaded, kRuntime if ExecuTorch fails.
  Status draft(int64_t token, int64_t position, int64_t link, std::vector<float>& logits);

  /// Drop `count` positions of the cache from `first` on, of `length` tokens. Nothing is checked here.
  ///
  /// Error kRuntime if ExecuTorch fails, after which the cache is half-written.
  Status shift(int64_t length, int64_t first, int64_t count);

  /// The memory of the cache; see `Engine::cache`. In the static form it is the host's.
  std::span<uint8_t> cache() const;
  void clear_cache() const;

 private:
  Program(std::vector<MethodSpec> methods, std::unique_ptr<Engine> engine, std::unique_ptr<StaticHost> host);

  std::vector<MethodSpec> methods_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<StaticHost> host_;  // present in the static form
};

}  // namespace exportable_cache
