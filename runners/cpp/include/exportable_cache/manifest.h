// What a bundle says about itself, as far as running it goes.
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
  std::optional<int64_t> kv_read_len{};  // reads only so many tokens of the cache, so it serves no later position
  std::vector<std::string> inputs{};     // their names, in order
  bool takes_embeds = false;             // takes embeddings in the place of token ids
  bool takes_encoded = false;            // takes what the encoder gave: the first step of a sequence, and those of several tokens
  int64_t scored_tokens = 0;             // gives logits of so many of the last tokens; 0 for those of the last alone

  /// Whether it is there to score a few tokens, and others feed prompts.
  bool only_scores() const { return scored_tokens > 0 && min_length > 1; }
};

/// The method `encode` of an encoder-decoder: one input, and for text which of it is padding.
struct EncoderSpec {
  std::string input;                // "input_ids", "input_features" or "input_values"
  bool takes_ids;                   // token ids; otherwise float32 numbers
  bool takes_mask;
  std::vector<int64_t> shape;       // of the input without its rows; -1 is its length
  int64_t min_length;
  int64_t max_length;
  int64_t multiple;                 // of what its length is
};

/// A tensor that the encoder of one item takes.
struct ItemInputSpec {
  std::string name;   // such as "pixel_values"
  std::string dtype;  // "float32", "float16", "bfloat16", "int64", "int32" or "bool"
  std::vector<int64_t> shape;
};

/// What a processor gives with an item, and the program was made for one value of: a grid, a size or a mask.
struct FixedSpec {
  std::string name;  // such as "image_grid_thw"
  std::vector<int64_t> shape;
  std::vector<double> values;
};

/// A method that encodes one image, video or piece of sound, as embeddings in the places of placeholder tokens.
struct ItemSpec {
  std::string method;  // "encode_image"
  int64_t token_id;    // of the placeholder
  int64_t tokens;      // embeddings of one item
  std::vector<ItemInputSpec> inputs{};
  std::vector<FixedSpec> fixed{};
  std::vector<std::vector<int64_t>> positions{};  // rotary ones [axes][tokens], from where it starts; empty: they count on by one
  int64_t advance = 0;                            // from there to the token behind it, where there are positions
  std::string sees{};                             // "item": its tokens see each other; "prompt": all tokens of a prompt with one do
  bool apart = false;                             // of a video: each frame is an item
};

/// How embeddings are fed.
struct EmbedsSpec {
  int64_t longest;          // most token ids that `embed` takes at once
  int64_t hidden_size;
  int64_t axes = 0;         // of the rotary positions that steps take; 0 where they take none
  bool sees_items = false;  // steps take which item each token is of
};

/// One cache layer: its slot policy (exportable_cache/cache/policies), with the fields of it that limit the layer, as far as it
/// has them. How keys and values are stored is the program's business.
struct LayerSpec {
  std::string policy;
  std::optional<int64_t> capacity{};  // slots, of a policy that keeps every token
  std::optional<int64_t> window{};    // newest tokens a query attends to, in a ring
  int64_t rollback_slots = 0;         // slots of the ring past its window
  int64_t sinks = 0;                  // first tokens it attends to as well
  bool has_states = false;            // keeps states of linear attention or convolutions, alone or beside keys and values
};

/// The chat template as the texts around what is said, see exportable_cache/generation/chat_turns.py.
struct ChatTurns {
  std::string opening;        // in front of the first question, where there is no system message
  bool takes_system = false;
  std::string before_system;  // in front of a system message
  std::string after_system;   // between it and the first question
  std::string answer;         // behind a question, where the model goes on
  std::string question;       // between an answer and the next question
  bool trims = false;         // white space around what is said is left out
};

/// The fields of manifest.json that a runner needs.
struct Manifest {
  std::string folder;
  std::string source;   // where the model came from
  int64_t vocab_size;   // token ids run from 0 to vocab_size - 1
  int64_t logits_size;  // ids that can come out: 0 to logits_size - 1, mostly all of them
  int64_t batch_size = 1;   // rows that each step takes
  bool equal_rows = false;  // all rows have to hold as many tokens
  std::vector<MethodSpec> methods;  // those that give logits
  std::vector<LayerSpec> layers;
  std::optional<EncoderSpec> encoder{};
  std::vector<ItemSpec> items;        // what prompts take beside text
  std::optional<EmbedsSpec> embeds{};  // where there are such
  std::optional<ChatTurns> chat{};
  std::optional<int64_t> start_token{};  // decoder_start_token_id of the generation config
  std::vector<int64_t> end_tokens;  // eos_token_id of the generation config; may be empty
  GenerationSettings settings{};    // what else it asks of every generation
  bool has_tokenizer;
  std::string program_sha256;  // of program.pte, by which a saved state knows its program

  /// Path of program.pte and of tokenizer.json.
  std::string program_path() const;
  std::string tokenizer_path() const;

  /// Read `folder`/manifest.json.
  ///
  /// Error kBundle if it cannot be read, is of another schema version, describes something else than an ExecuTorch program
  /// that returns the last token's logits, or if program.pte is missing or has not the size recorded. Checksums
  /// are not compared: `exportable-cache inspect` does that.
  static Result<Manifest> read(const std::string& folder);
};

}  // namespace exportable_cache
