// One running program and its position: prefill, decode, rewind, generate.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
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

struct GenerateOptions {
  std::optional<int64_t> max_new_tokens{};  // by default the checkpoint's own limit, or else as many as fit
  Sampling sampling{};
  std::vector<int64_t> stop_tokens{};       // besides the model's end tokens
  std::vector<std::string> stop_strings{};
  /// Most tokens that are proposed a step from the text itself (prompt lookup, Saxena 2023) and judged together; the tokens are
  /// the same as without, to rounding. Needs a bundle that was exported with `score_length`. 0 for none.
  int64_t prompt_lookup = 0;
  /// Which tokens may come next; empty where all may. What it fails with is what the call fails with: what was given out stays.
  AllowTokens allowed_tokens{};
};

enum class StopReason { kEndToken, kStopString, kMaxNewTokens, kCacheFull, kCallback, kCancelled, kWhole };

/// "end_token", "stop_string", "max_new_tokens", "cache_full", "callback", "cancelled" or "whole", which `allowed_tokens` said.
const char* to_string(StopReason reason);

/// How long a generation took, in seconds and tokens.
struct Statistics {
  int64_t prompt_tokens = 0;
  int64_t generated_tokens = 0;
  double time_to_first_token = 0;  // from the call to the first token chosen
  double decode_seconds = 0;       // from then to the last
  int64_t proposed_tokens = 0;     // by prompt lookup
  int64_t accepted_tokens = 0;     // of these

  /// Prompt tokens by time_to_first_token.
  double prefill_tokens_per_second() const;
  /// Tokens after the first by decode_seconds; 0 where there are none.
  double decode_tokens_per_second() const;
};

struct Generation {
  std::vector<int64_t> tokens;  // the one that ended it included
  StopReason reason;
  Statistics statistics;
};

/// A program and its position.
///
/// Every call checks its arguments and the room in the cache before anything runs: a refused call changes nothing. The rules
/// are those of `exportable_cache.Session` in Python. Not thread-safe; several sessions of one bundle are independent.
///
///     auto session = Session::open("artifacts/demo");
///     if (!session.ok()) return report(session.error());
///     auto done = session->generate_text("the code of amber is 4821. amber?", {.max_new_tokens = 8},
///                                        [](std::string_view piece) { std::cout << piece; return true; });
class Session {
 public:
  /// Open the bundle that `export` wrote to a folder, at position 0.
  ///
  /// Error kBundle if the bundle cannot be run, see `Manifest::read`, `CacheLimits::make` and `Program::open`, or if it is of
  /// several rows, which `BatchSession` runs.
  static Result<Session> open(const std::string& folder);

  const Manifest& manifest() const { return manifest_; }

  /// Tokens seen.
  int64_t length() const { return length_; }
  /// Tokens the cache can hold in all, or nothing where no layer keeps all of them.
  std::optional<int64_t> max_length() const { return limits_.max_length(); }
  /// Tokens there is still room for, or nothing for any number.
  std::optional<int64_t> room() const;

  /// Start anew at position 0. The buffers keep their contents, which no query sees. What was added for the next prompt is
  /// dropped.
  void reset();

  /// Take back the newest tokens, so that others can follow in their place. A generated token that was given out and not
  /// fed yet is dropped as well, and not counted.
  ///
  /// Error kInput if there are fewer, a ring has overwritten one that would be needed again, a layer keeps a state, or what is
  /// left ends inside an image that counts as one.
  Status rewind(int64_t tokens);

  /// Feed a prompt of any length. Long ones go through in chunks.
  ///
  /// `position` is where the first token goes: by default after all that is held. 0 starts anew, an earlier one rewinds to
  /// there, and a later one would skip ahead and is refused.
  ///
  /// Returns the logits [vocab_size] of the last token, valid until the next call.
  /// Error kInput if there is no token, one is outside the vocabulary, or the position cannot be gone to; kCacheFull if they
  /// do not fit; kRuntime if ExecuTorch fails.
  Result<std::span<const float>> prefill(std::span<const int64_t> tokens, std::optional<int64_t> position = {});

  /// Feed one token; see `prefill`.
  Result<std::span<const float>> decode(int64_t token, std::optional<int64_t> position = {});

  /// Give an encoder-decoder its input: token ids, or the numbers that a speech model's processor makes, the last dimension
  /// innermost. The decoder begins anew at position 0; so it does after `reset`, with the same input.
  ///
  /// Error kInput if the model has no encoder, takes the other kind, or not so many; kRuntime if ExecuTorch fails.
  Status encode_input(std::span<const int64_t> tokens);
  Status encode_input(std::span<const float> values);

  /// Hold an image, a video or a piece of sound for the next prompt, as the model's processor gives it: one tensor, of one item or
  /// of several. The prompt has the placeholder token once for each embedding, as processors make it; a refused prompt leaves what
  /// was added. Grids and masks may be left out: where they are given, they are compared with those of the export.
  ///
  /// Error kInput if the program does not take such, or of another shape or dtype; nothing changes then.
  Status add_input(const Input& input);

  /// Called with each token as it is chosen; false ends the generation.
  using OnToken = std::function<bool(int64_t token)>;
  /// Called with each piece of text, which never ends inside a character; false ends the generation.
  using OnText = std::function<bool(std::string_view piece)>;

  /// Tokens that follow a prompt. The session continues from where it is: `reset` first for a new sequence. The newest token
  /// is not fed, so it is not in the cache; to go on from it, start the next prompt with it.
  ///
  /// Error as of `prefill`; kInput also for a wrong option, kCacheFull if the prompt with max_new_tokens does not fit.
  Result<Generation> generate(std::span<const int64_t> prompt, const GenerateOptions& options, const OnToken& on_token = {});

  /// Text that follows a text; an encoder-decoder's answer to it. What ends it (an end token, a stop token or a stop string) is not given out. The newest token
  /// of an earlier generation is fed in front of the prompt, unless it ended that.
  ///
  /// Error as of `generate`; kBundle if the bundle has no tokenizer that is known here.
  Result<Generation> generate_text(const std::string& prompt, const GenerateOptions& options, const OnText& on_text);

  /// End the generation that is running, before its next step; from any thread, or a signal handler. Without one it does
  /// nothing. What was fed stays in the cache.
  void cancel() { cancelled_->store(true, std::memory_order_relaxed); }

  /// Write where the session is, and what of its cache is not zeros, to a file: a prefix that is computed once, or a
  /// conversation to be continued by another process. Of the same bundle only, and not for `Session` in Python.
  ///
  /// Error kInput if the file cannot be written; kBundle if the program does not keep its cache apart.
  Status save_state(const std::string& path) const;

  /// Go to where a session of this bundle was.
  ///
  /// Error kInput if the file cannot be read, is damaged, or is of another program; nothing changes then.
  Status load_state(const std::string& path);

  /// The answer to a question, in the turns of the model's chat template. A conversation that goes on is fed its new turn alone;
  /// `reset` begins another.
  ///
  /// `system` is what the model is told before the first question; empty for nothing. Error as of `generate_text`; kInput if
  /// there is a system message later, or the template takes none; kBundle if the template is none of turns alone, which needs an
  /// engine for templates: render the text elsewhere, and pass it to `generate_text`.
  Result<Generation> chat(const std::string& question, const std::string& system, const GenerateOptions& options,
                          const OnText& on_text);

  /// Token ids of a text; with `starts`, as the first of a sequence. Opens the tokenizer at the first call.
  Result<std::vector<int64_t>> encode(const std::string& text, bool starts) { return text_.encode(text, starts); }

  /// The vocabulary, for `TextStream`. Opened at the first call.
  Result<const Detokenizer*> detokenizer() { return text_.detokenizer(); }

 private:
  Session(Manifest manifest, CacheLimits limits, Program program);

  Status check_encoded(int64_t position) const;
  Status check_lookup(const GenerateOptions& options) const;
  Status check_rewind(int64_t tokens) const;
  // Whether the prompt goes with what was added for it.
  Status check_items(std::span<const int64_t> tokens) const;
  // At position 0; what was added stays.
  void begin();
  // The embeddings of a prompt, [length, hidden_size], with those of what was added in their places.
  Result<std::vector<float>> embedded(std::span<const int64_t> tokens);
  // With `may_stop` it ends early when the session is cancelled.
  Result<std::span<const float>> feed(std::span<const int64_t> tokens, bool may_stop = false);
  // Feeds a few tokens in one step: logits [tokens, vocab_size] after each.
  Result<std::span<const float>> score(std::span<const int64_t> tokens);
  Status encode_input(const void* values, std::vector<int32_t> sizes, int32_t padding);
  // The method of a step of `size` tokens from here, or null.
  const MethodSpec* method_for(int64_t size, bool scores = false, bool embeds = false) const;
  // The error where there is none, as a manifest may have it.
  Error no_method(int64_t size) const;
  // What may follow `context`, whose newest token was not fed yet: at most as many as fit and can be taken back.
  std::span<const int64_t> propose(std::span<const int64_t> context, const GenerateOptions& options, int64_t given) const;
  // Part of a conversation's text: what the template writes, or what somebody has said.
  struct Part {
    std::string text;
    bool is_said;
  };
  // Token ids of a conversation, in which special tokens that somebody spells are text.
  Result<std::vector<int64_t>> encode_parts(std::span<const Part> parts);
  // Text that follows token ids, behind the token that is still to be fed. With `continues`, it goes on from theirs.
  Result<Generation> text_after(std::vector<int64_t> ids, const GenerateOptions& options, const OnText& on_text, bool continues);
  Result<Generation> run(std::vector<int64_t> prompt, const GenerateOptions& options,
                         const std::function<std::optional<StopReason>(int64_t token)>& on_token);

  Manifest manifest_;
  CacheLimits limits_;
  Program program_;
  BundleText text_;
  std::vector<float> logits_;
  std::optional<Encoded> encoded_;
  std::vector<int64_t> encoded_tokens_;  // what was encoded, where that is text
  Items items_;                     // for the next prompt
  std::vector<Placed> placed_;      // the items that are held, oldest first
  std::unique_ptr<std::atomic<bool>> cancelled_ = std::make_unique<std::atomic<bool>>(false);
  int64_t length_ = 0;
  int64_t max_len_ever_ = 0;          // the most tokens held since position 0: a rewind's limit depends on it
  std::optional<int64_t> pending_;  // the newest token given out, while nothing was fed since and it ended nothing
};

}  // namespace exportable_cache
