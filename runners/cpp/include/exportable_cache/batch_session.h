// Several prompts at once, with a bundle that was exported with a batch_size; each row generates what it would generate alone.
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

#include <exportable_cache/session.h>

namespace exportable_cache {

/// A program of several rows, and the position of each row.
///
/// Rows of different length finish their prompts in the same step, so a shorter one starts later. The rules are those of a batch in
/// `exportable_cache.Session` in Python: a refused call changes nothing. Not thread-safe except for `cancel`.
///
///     auto session = BatchSession::open("artifacts/rows");
///     if (!session.ok()) return report(session.error());
///     const std::vector<std::string> prompts{"the code of amber is 4821. amber?", "the code of jade is 77. jade?"};
///     auto answers = session->generate_text(prompts, {.max_new_tokens = 8}, [](size_t row, std::string_view piece) { ... });
class BatchSession {
 public:
  /// Open the bundle that `export` wrote to a folder, every row at position 0.
  ///
  /// Error kBundle as of `Session::open`, or if the bundle has an encoder or takes images, video or audio: `Session` runs those.
  static Result<BatchSession> open(const std::string& folder);

  const Manifest& manifest() const { return manifest_; }

  /// Number of rows, each with its own prompt.
  size_t rows() const { return lengths_.size(); }

  /// Number of cached tokens per row.
  std::span<const int64_t> lengths() const { return lengths_; }
  /// The limit of tokens per row, or nothing if no layer stores all of them.
  std::optional<int64_t> max_length() const { return limits_.max_length(); }
  /// Number of tokens that fit into every row, or nothing for no limit.
  std::optional<int64_t> room() const;

  /// Start again at position 0 in every row.
  void reset();

  /// Roll back the newest tokens of every row; see `Session::rewind`.
  ///
  /// Error kInput if a row has fewer tokens, a ring has overwritten a needed one, or a layer stores a state.
  Status rewind(int64_t tokens);

  /// Feed a prompt to each row, after its cached tokens. Long prompts are fed in chunks.
  ///
  /// Returns the logits [rows, vocab_size] of each row's last token, valid until the next call.
  /// Error kInput if there is not one prompt per row, one is empty, a token is outside the vocabulary, the prompts have different
  /// lengths and this model needs equal rows, or a row would lose cached tokens while it waits for a longer prompt; kCacheFull if
  /// they do not fit; kRuntime if ExecuTorch fails.
  Result<std::span<const float>> prefill(std::span<const std::vector<int64_t>> prompts);

  /// Feed one token to each row; see `prefill`.
  Result<std::span<const float>> decode(std::span<const int64_t> tokens);

  /// Called with each chosen token; false ends its row.
  using OnToken = std::function<bool(size_t row, int64_t token)>;
  /// Called with each piece of text, which never ends inside a character; false ends its row.
  using OnText = std::function<bool(size_t row, std::string_view piece)>;

  /// Generate tokens after each prompt; rows continue their cached tokens. A finished row keeps its length while the others continue,
  /// except in models with a state, whose finished rows continue with ignored tokens. All rows end when the fullest row is full.
  ///
  /// Row r draws like a `Session` with the seed `seed + r`, independent of the others. Each row's newest token is not fed.
  /// Error as of `prefill`; kInput also for an invalid option, and for `prompt_lookup` and `allowed_tokens`, which support one row.
  Result<std::vector<Generation>> generate(std::span<const std::vector<int64_t>> prompts, const GenerateOptions& options,
                                           const OnToken& on_token = {});

  /// Generate text after each text; what ends a row is not returned. A row's newest token of an earlier generation is fed before its
  /// prompt, unless it ended that generation.
  ///
  /// Error as of `generate`; kBundle if the bundle has no supported tokenizer.
  Result<std::vector<Generation>> generate_text(std::span<const std::string> prompts, const GenerateOptions& options,
                                                const OnText& on_text);

  /// End the running generation before its next step; from any thread, or a signal handler.
  void cancel() { cancelled_->store(true, std::memory_order_relaxed); }

 private:
  BatchSession(Manifest manifest, CacheLimits limits, Program program);

  Status check_count(size_t given, const char* what) const;
  Status check_prompts(std::span<const std::vector<int64_t>> prompts, std::optional<int64_t> max_new_tokens) const;
  // True if rows with cached tokens still have them after waiting for longer prompts.
  Status check_waiting(std::span<const std::vector<int64_t>> prompts) const;
  // Number of prompt tokens in each step.
  std::vector<int64_t> chunk_sizes(int64_t length) const;
  Result<std::span<const float>> feed(std::span<const std::vector<int64_t>> prompts, bool may_stop = false);
  // Run a step of tokens [rows, size]: those of `counted` rows count, the others keep their length.
  Result<std::span<const float>> step(std::span<const int64_t> tokens, int64_t size, const std::vector<bool>& counted);
  bool is_cancelled() const { return cancelled_->load(std::memory_order_relaxed); }

  using Ends = std::function<std::optional<StopReason>(size_t row, int64_t token)>;
  Result<std::vector<Generation>> run(std::span<const std::vector<int64_t>> prompts, const GenerateOptions& options, const Ends& on_token);

  Manifest manifest_;
  CacheLimits limits_;
  Program program_;
  BundleText text_;
  std::vector<float> logits_;
  std::unique_ptr<std::atomic<bool>> cancelled_ = std::make_unique<std::atomic<bool>>(false);
  std::vector<int64_t> lengths_;
  std::vector<int64_t> max_lens_ever_;            // see `Session`
  std::vector<std::optional<int64_t>> pending_;  // newest returned token, if it was not fed yet and ended nothing
};

}  // namespace exportable_cache
