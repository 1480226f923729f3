// The part of a bundle's manifest that a runner needs.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <exportable_cache/generation_settings.h>
#include <exportable_cache/result.h>

namespace exportable_cache {

/// One step of the program: takes min_length to max_length tokens.
struct MethodSpec {
  std::string name;
  int64_t min_length;
  int64_t max_length;
  std::optional<int64_t> kv_read_len{};  // reads only the first slots, so it does not support later positions
  std::vector<std::string> inputs{};     // names, in order
  bool takes_embeds = false;             // takes embeddings instead of token ids
  bool takes_encoded = false;            // takes the encoder's output: the first step of a sequence, and steps of several tokens
  bool takes_adapters = false;           // takes the slot of each row's LoRA adapter
  int64_t scored_tokens = 0;             // number of last tokens with logits; 0 for the last token alone

  /// True if it only scores a few tokens, while other methods feed prompts.
  bool only_scores() const { return scored_tokens > 0 && min_length > 1; }
};

/// A linear layer with slots for LoRA adapters.
struct LoraTarget {
  std::string name;
  int64_t inputs;
  int64_t outputs;
};

/// The slots of a program for LoRA adapters, see exportable_cache/models/lora.py.
struct LoraSpec {
  int64_t slots;
  int64_t rank;                     // the largest
  std::string dtype;                // of the tensors of `write_adapter`
  std::vector<LoraTarget> targets;  // in its order
};

/// The method `encode` of an encoder-decoder: one input, and for text the number of padding tokens.
struct EncoderSpec {
  std::string input;                // "input_ids", "input_features" or "input_values"
  bool takes_ids;                   // token ids; otherwise float32 values
  bool takes_mask;
  std::vector<int64_t> shape;       // of the input without rows; -1 is the length
  int64_t min_length;
  int64_t max_length;
  int64_t multiple;                 // divisor of the length
};

/// A tensor that the encoder of one item takes.
struct ItemInputSpec {
  std::string name;   // such as "pixel_values"
  std::string dtype;  // "float32", "float16", "bfloat16", "int64", "int32" or "bool"
  std::vector<int64_t> shape;
};

/// A tensor of an item for which the program was made for one value: a grid, a size or a mask.
struct FixedSpec {
  std::string name;  // such as "image_grid_thw"
  std::vector<int64_t> shape;
  std::vector<double> values;
};

/// A method that encodes one image, video or audio, as embeddings for its placeholder tokens.
struct ItemSpec {
  std::string method;  // "encode_image"
  int64_t token_id;    // of the placeholder
  int64_t tokens;      // embeddings of one item
  std::vector<ItemInputSpec> inputs{};
  std::vector<FixedSpec> fixed{};
  std::vector<std::vector<int64_t>> positions{};  // rotary positions [axes][tokens], relative to the start; empty: they increase by one
  int64_t advance = 0;                            // from the start to the token after it, if there are positions
  std::string sees{};                             // "item": its tokens see each other; "prompt": all tokens of a prompt with one do
  bool apart = false;                             // for video: each frame is an item
};

/// How embeddings are fed.
struct EmbedsSpec {
  int64_t longest;          // most token ids per call of `embed`
  int64_t hidden_size;
  int64_t axes = 0;         // number of axes of rotary positions; 0 if steps take none
  bool sees_items = false;  // steps take the index of the item of each token
};

/// One cache layer: its slot policy (exportable_cache/cache/policies), with the fields that limit the layer. The program defines how
/// keys and values are stored.
struct LayerSpec {
  std::string policy;
  std::optional<int64_t> capacity{};  // slots, for a policy that stores every token
  std::optional<int64_t> window{};    // newest tokens a query attends to, in a ring
  int64_t rollback_slots = 0;         // slots of the ring past its window
  int64_t sinks = 0;                  // first tokens that it attends to as well
  bool has_states = false;            // stores states of linear attention or convolutions, with or without keys and values
};

/// A layer of the cache that the host keeps, see exportable_cache/backends/executorch/static/plan.py.
struct StaticLayer {
  std::string mask;                 // "full_attention" or "sliding_attention"
  int64_t slots;
  std::optional<int64_t> window{};  // tokens that a query attends to, itself included
  int64_t heads;
  int64_t key_size;
  int64_t value_size;
};

/// A program in the static form: it takes the cache, masks and rows of rotary tables, and returns new keys and values.
struct StaticPlan {
  std::vector<StaticLayer> layers;
  std::vector<std::string> tables;  // names in rope.safetensors, in the order of the inputs
  bool positions = false;           // methods take the positions
  bool transposed = false;          // keys are [1, heads, key_size, slots]
  int64_t tables_bytes = 0;         // size of rope.safetensors
};

/// The chat template as the text around messages, see exportable_cache/generation/templates.py.
struct ChatTurns {
  std::string opening;        // before the first question, without a system message
  bool takes_system = false;
  std::string before_system;  // before a system message
  std::string after_system;   // between it and the first question
  std::string answer;         // after a question, before the response
  std::string question;       // between a response and the next question
  bool trims = false;         // white space around messages is removed
};

/// The fields of manifest.json that a runner needs.
struct Manifest {
  std::string folder;
  std::string source;   // model id or folder
  int64_t vocab_size;   // token ids run from 0 to vocab_size - 1
  int64_t logits_size;  // possible ids: 0 to logits_size - 1, mostly all of them
  int64_t batch_size = 1;   // rows of each step
  bool equal_rows = false;  // all rows must have the same length
  std::vector<MethodSpec> methods;  // methods that return logits
  std::vector<LayerSpec> layers;
  std::optional<EncoderSpec> encoder{};
  std::vector<ItemSpec> items;        // inputs of prompts besides text
  std::optional<EmbedsSpec> embeds{};  // present if there are items
  std::optional<ChatTurns> chat{};
  std::optional<LoraSpec> lora{};
  std::string fingerprint;  // of the weights; adapters name that of theirs
  std::optional<StaticPlan> static_plan{};
  bool drafts = false;  // the program has a method `draft`: a draft head that proposes tokens
  bool shifts = false;  // the program has a method `shift`, which drops old tokens
  std::optional<int64_t> start_token{};  // decoder_start_token_id of the generation config
  std::vector<int64_t> end_tokens;  // eos_token_id of the generation config; may be empty
  GenerationSettings settings{};    // its other settings
  bool has_tokenizer;
  std::string program_sha256;  // of program.pte; identifies the program of a saved state

  /// Path of program.pte, of tokenizer.json, and of rope.safetensors.
  std::string program_path() const;
  std::string tokenizer_path() const;
  std::string tables_path() const;

  /// Read `folder`/manifest.json.
  ///
  /// Error kBundle if it cannot be read, has another schema version, does not describe an ExecuTorch program that returns the last
  /// token's logits, or if program.pte is missing or has another size. Checksums are not compared: use `exportable-cache inspect`.
  static Result<Manifest> read(const std::string& folder);
};

}  // namespace exportable_cache
