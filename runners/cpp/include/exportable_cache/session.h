// One running program and its position: prefill, decode, rewind, generate.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <exportable_cache/allowed_tokens.h>
#include <exportable_cache/bundle_text.h>
#include <exportable_cache/cache_limits.h>
#include <exportable_cache/items.h>
#include <exportable_cache/manifest.h>
#include <exportable_cache/program.h>
#include <exportable_cache/sampler.h>

namespace exportable_cache {

/// Log probability of a token, and the most probable tokens with theirs, in order.
using OnLogProbs = std::function<void(double logprob, std::span<const int64_t> tokens, std::span<const double> logprobs)>;

struct GenerateOptions {
  std::optional<int64_t> max_new_tokens{};  // default: the checkpoint's limit, otherwise as many as fit
  Sampling sampling{};
  std::vector<int64_t> stop_tokens{};       // in addition to the model's end tokens
  std::vector<std::string> stop_strings{};
  /// Most tokens proposed per step from the text itself (prompt lookup, Saxena 2023) and verified together. Tokens are the same as
  /// without, up to rounding. Needs a bundle that was exported with `score_length`. 0 for none.
  int64_t prompt_lookup = 0;
  /// Most tokens proposed per step by the bundle's draft head, and verified together, at most 15. Sampled tokens follow the model's
  /// distribution. Needs a bundle that was exported with `draft`. 0 for none.
  int64_t draft_tokens = 0;
  /// Number of the prompt's first tokens that the cache holds: later ones are rolled back, and the rest of the prompt is fed. Rules
  /// for tokens read the whole prompt. 0 if the prompt follows the cached tokens.
  int64_t cached_tokens = 0;
  /// If the cache is full, drop half of the tokens after the first `protected_tokens`, and continue: see `Session::shift`. The same
  /// before a prompt that does not fit. Needs a bundle that was exported with `shift`.
  bool shift_when_full = false;
  int64_t protected_tokens = 4;
  /// Called before each token with its log probability under the model and the most probable tokens; empty if not needed.
  OnLogProbs on_logprobs{};
  int64_t alternatives = 0;  // number of most probable tokens
  /// Allowed next tokens; empty if all are allowed. Its failure is the call's failure; tokens returned before stay valid.
  AllowTokens allowed_tokens{};
};

enum class StopReason { kEndToken, kStopString, kMaxNewTokens, kCacheFull, kCallback, kCancelled, kWhole };

/// "end_token", "stop_string", "max_new_tokens", "cache_full", "callback", "cancelled" or "whole" (from `allowed_tokens`).
const char* to_string(StopReason reason);

/// Statistics of a generation, in seconds and tokens.
struct Statistics {
  int64_t prompt_tokens = 0;
  int64_t generated_tokens = 0;
  double time_to_first_token = 0;  // from the call to the first token
  double decode_seconds = 0;       // from the first token to the last
  int64_t proposed_tokens = 0;     // by prompt lookup or a draft head
  int64_t accepted_tokens = 0;     // of these

  /// Prompt tokens per second, until the first token.
  double prefill_tokens_per_second() const;
  /// Tokens per second after the first; 0 if there are none.
  double decode_tokens_per_second() const;
};

struct Generation {
  std::vector<int64_t> tokens;  // including the one that ended it
  StopReason reason;
  Statistics statistics;
};

/// A program and its position.
///
/// Every call checks its arguments and the free slots before anything runs: a refused call changes nothing. The rules are those of
/// `exportable_cache.Session` in Python. Not thread-safe; several sessions of one bundle are independent.
///
///     auto session = Session::open("artifacts/demo");
///     if (!session.ok()) return report(session.error());
///     auto done = session->generate_text("the code of amber is 4821. amber?", {.max_new_tokens = 8},
///                                        [](std::string_view piece) { std::cout << piece; return true; });
class Session {
 public:
  /// Open the bundle that `export` wrote to a folder, at position 0.
  ///
  /// Error kBundle if the bundle cannot be run, see `Manifest::read`, `CacheLimits::make` and `Program::open`, or if it has several
  /// rows, which `BatchSession` runs.
  static Result<Session> open(const std::string& folder);

  const Manifest& manifest() const { return manifest_; }

  /// Number of cached tokens.
  int64_t length() const { return length_; }
  /// The limit of cached tokens, or nothing if no layer stores all of them.
  std::optional<int64_t> max_length() const { return limits_.max_length(); }
  /// Number of tokens that still fit, or nothing for no limit.
  std::optional<int64_t> room() const;

  /// Start again at position 0. The buffers keep their contents, which no query sees. Items added for the next prompt are
  /// dropped.
  void reset();

  /// Roll back the newest tokens. A returned token that was not fed yet is dropped as well, and not counted.
  ///
  /// Error kInput if there are fewer tokens, a ring has overwritten a needed one, a layer stores a state, or the remaining tokens
  /// would end inside an image that must stay whole.
  Status rewind(int64_t tokens);

  /// Drop `count` tokens from position `first` on; later tokens move to lower positions, with their keys rotated to these. A
  /// returned token that was not fed yet stays pending.
  ///
  /// Error kInput if a number is out of range, a sliding window would lack tokens, or images are after the first dropped token;
  /// kBundle if the program has no such method; kRuntime if ExecuTorch fails.
  Status shift(int64_t count, int64_t first = 0);

  /// Feed a prompt of any length. Long prompts are fed in chunks.
  ///
  /// `position` is that of the first token, by default after all cached tokens. 0 starts a new sequence, an earlier one rewinds to
  /// it, and a later one is refused because it would skip positions.
  ///
  /// Returns the logits [vocab_size] of the last token, valid until the next call.
  /// Error kInput if there is no token, one is outside the vocabulary, or the position is invalid; kCacheFull if they do not fit;
  /// kRuntime if ExecuTorch fails.
  Result<std::span<const float>> prefill(std::span<const int64_t> tokens, std::optional<int64_t> position = {});

  /// Feed one token; see `prefill`.
  Result<std::span<const float>> decode(int64_t token, std::optional<int64_t> position = {});

  /// Encode an encoder-decoder's input: token ids, or the values that a speech model's processor makes, last dimension innermost. The
  /// decoder starts again at position 0; after `reset` it does so with the same input.
  ///
  /// Error kInput if the model has no encoder, or takes another kind or number of values; kRuntime if ExecuTorch fails.
  Status encode_input(std::span<const int64_t> tokens);
  Status encode_input(std::span<const float> values);

  /// Add an image, video or audio for the next prompt: one tensor of the model's processor, for one item or several. The prompt has
  /// the placeholder token once per embedding, as processors make it. A refused prompt keeps what was added. Grids and masks are
  /// optional; if given, they are compared with those of the export.
  ///
  /// Error kInput if the program does not take the tensor, or its shape or dtype is another; nothing changes then.
  Status add_input(const Input& input);

  /// Called with each chosen token; false ends the generation.
  using OnToken = std::function<bool(int64_t token)>;
  /// Called with each piece of text, which never ends inside a character; false ends the generation.
  using OnText = std::function<bool(std::string_view piece)>;

  /// Generate tokens after a prompt. The session continues its cached tokens: call `reset` first for a new sequence. The newest token
  /// is not fed, so it is not in the cache; to continue from it, start the next prompt with it.
  ///
  /// Error as of `prefill`; kInput also for an invalid option, kCacheFull if the prompt with max_new_tokens does not fit.
  Result<Generation> generate(std::span<const int64_t> prompt, const GenerateOptions& options, const OnToken& on_token = {});

  /// Generate text after a text, or an encoder-decoder's response to it. What ends it (an end token, a stop token or a stop string)
  /// is not returned. The newest token of an earlier generation is fed before the prompt, unless it ended that generation.
  ///
  /// Error as of `generate`; kBundle if the bundle has no supported tokenizer.
  Result<Generation> generate_text(const std::string& prompt, const GenerateOptions& options, const OnText& on_text);

  /// End the running generation before its next step; from any thread, or a signal handler. Without one it does nothing. Fed tokens
  /// stay in the cache.
  void cancel() { cancelled_->store(true, std::memory_order_relaxed); }

  /// Save the position and the non-zero part of the cache to a file, so that a prefix is computed once or another process continues
  /// the conversation. The file is for the same bundle only, and not for `Session` in Python.
  ///
  /// Error kInput if the file cannot be written, or an adapter is in use; kBundle if the program does not store its cache separately.
  Status save_state(const std::string& path) const;

  /// Load a state that a session of this bundle saved.
  ///
  /// Error kInput if the file cannot be read, is damaged, or is of another program; nothing changes then.
  Status load_state(const std::string& path);

  /// Respond to a question with the model's chat template. A continued conversation feeds its new turn only; `reset` begins another.
  ///
  /// `system` is the system message before the first question; empty for none. Error as of `generate_text`; kInput if there is a
  /// system message later, or the template takes none; kBundle if the template needs a template engine: render the text elsewhere,
  /// and pass it to `generate_text`.
  Result<Generation> chat(const std::string& question, const std::string& system, const GenerateOptions& options,
                          const OnText& on_text);

  /// Load a LoRA adapter that `exportable-cache adapter` wrote into a free slot, or in place of the one of this name. The first one loads
  /// the methods that take adapters, which takes memory. A loaded state drops all adapters.
  ///
  /// Error kBundle if the program has no slots; kInput if all are used, or the file is missing, damaged, or for another program;
  /// kRuntime if ExecuTorch fails.
  Status load_adapter(const std::string& path, const std::string& name);

  /// Free the slot of an adapter; if it is in use, the model continues without one. Error kInput if none has this name.
  Status unload_adapter(const std::string& name);

  /// Run the next steps with an adapter, by its name; an empty name is the model itself. Cached tokens keep the values that they were
  /// computed with, so `reset` before a text with another adapter. Error kInput if none has this name.
  Status use_adapter(const std::string& name);

  /// The model's chat template over messages, up to where the response begins; needs a build with -DEC_TEMPLATES=ON.
  ///
  /// `request` is JSON: the messages (`[{"role": "user", "content": "hello"}]`), or an object with `messages`, `tools` and other
  /// variables of the template. Error as of `ChatTemplate`.
  Result<std::string> render(const std::string& request);

  /// Respond to messages with the model's chat template, see `render`. The request has the whole conversation; tokens that are cached
  /// from an earlier one are not fed again, and others are rolled back.
  ///
  /// Error as of `generate_text` and `render`.
  Result<Generation> chat_messages(const std::string& request, const GenerateOptions& options, const OnText& on_text);

  /// Token ids of a text; with `starts`, as the beginning of a sequence. Opens the tokenizer at the first call.
  Result<std::vector<int64_t>> encode(const std::string& text, bool starts) { return text_.encode(text, starts); }

  /// The vocabulary, for `TextStream`. Opened at the first call.
  Result<const Detokenizer*> detokenizer() { return text_.detokenizer(); }

 private:
  Session(Manifest manifest, CacheLimits limits, Program program);

  Status check_encoded(int64_t position) const;
  Status check_lookup(const GenerateOptions& options) const;
  Status check_shifts(const GenerateOptions& options) const;
  Status check_rewind(int64_t tokens) const;
  // Check that the prompt matches the added items.
  Status check_cached(int64_t cached, std::span<const int64_t> prompt) const;
  Status check_items(std::span<const int64_t> tokens) const;
  // Most cached tokens that can be dropped from position `first` on.
  int64_t most_dropped(int64_t first) const;
  // Drop tokens after the first ones, if a prompt does not fit.
  Status make_room(int64_t tokens, int64_t first);
  // Restart at position 0; added items stay.
  void begin();
  // The embeddings of a prompt, [length, hidden_size], with those of added items at their placeholders.
  Result<std::vector<float>> embedded(std::span<const int64_t> tokens);
  // Record the ids of tokens that are fed next, unless earlier ones are unknown.
  void remember(std::span<const int64_t> tokens);
  // With `may_stop`, it ends early when the session is cancelled.
  Result<std::span<const float>> feed(std::span<const int64_t> tokens, bool may_stop = false);
  // Feed a few tokens in one step: logits [tokens, vocab_size] after each.
  Result<std::span<const float>> score(std::span<const int64_t> tokens);
  Status encode_input(const void* values, std::vector<int32_t> sizes, int32_t padding);
  // The method for a step of `size` tokens from here, or null.
  const MethodSpec* method_for(int64_t size, bool scores = false, bool embeds = false) const;
  // The error if there is no such method, which a manifest may cause.
  Error no_method(int64_t size) const;
  // Tokens proposed after `context`, whose newest token was not fed yet: as many as fit and can be rolled back.
  Result<std::span<const int64_t>> propose(std::span<const int64_t> context, const GenerateOptions& options, int64_t given);
  // Token ids of a conversation; special tokens in messages are encoded as text.
  Result<std::vector<int64_t>> encode_parts(std::span<const ChatPart> parts);
  // Generate text after token ids, after the token that is still to be fed. With `continues`, it continues their text.
  Result<Generation> text_after(std::vector<int64_t> ids, const GenerateOptions& options, const OnText& on_text, bool continues);
  Result<Generation> run(std::vector<int64_t> prompt, const GenerateOptions& options,
                         const std::function<std::optional<StopReason>(int64_t token)>& on_token);

  Manifest manifest_;
  CacheLimits limits_;
  Program program_;
  BundleText text_;
  std::vector<float> logits_;
  std::vector<float> draft_logits_;
  std::vector<int64_t> drafted_;  // proposed by the draft head
  std::optional<Encoded> encoded_;
  std::vector<int64_t> encoded_tokens_;  // encoded text, as ids
  Items items_;                     // for the next prompt
  std::vector<Placed> placed_;      // cached items, oldest first
  std::unique_ptr<std::atomic<bool>> cancelled_ = std::make_unique<std::atomic<bool>>(false);
  std::map<std::string, int64_t> adapters_;  // slots of the loaded adapters
  int64_t adapter_ = 0;                      // slot in use; 0 for none
  std::vector<int64_t> cached_;  // ids of cached tokens; fewer than `length_` if later ones are unknown
  int64_t length_ = 0;
  int64_t max_len_ever_ = 0;          // most cached tokens since position 0: the limit of a rewind depends on it
  std::optional<int64_t> pending_;  // newest returned token, if it was not fed yet and ended nothing
};

}  // namespace exportable_cache
