// Several prompts at once, over a bundle that was exported with a batch_size: each row answers as if it were alone.
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

/// A program of several rows, and the position of each.
///
/// Rows of different length end their prompts together: a shorter one begins later. The rules are those of a batch in
/// `exportable_cache.Session` in Python: a refused call changes nothing. Not thread-safe but for `cancel`.
///
///     auto session = BatchSession::open("artifacts/rows");
///     if (!session.ok()) return report(session.error());
///     const std::vector<std::string> prompts{"the code of amber is 4821. amber?", "the code of jade is 77. jade?"};
///     auto answers = session->generate_text(prompts, {.max_new_tokens = 8}, [](size_t row, std::string_view piece) { ... });
class BatchSession {
 public:
  /// Open the bundle that `export` wrote to a folder, every row at position 0.
  ///
  /// Error kBundle as of `Session::open`, or if the bundle has an encoder or takes images or sound: `Session` runs those, one row.
  static Result<BatchSession> open(const std::string& folder);

  const Manifest& manifest() const { return manifest_; }

  /// Rows, each with a prompt of its own.
  size_t rows() const { return lengths_.size(); }

  /// Tokens seen, of each row.
  std::span<const int64_t> lengths() const { return lengths_; }
  /// Tokens a row can hold in all, or nothing where no layer keeps all of them.
  std::optional<int64_t> max_length() const { return limits_.max_length(); }
  /// Tokens there is still room for in every row, or nothing for any number.
  std::optional<int64_t> room() const;

  /// Start anew at position 0 in every row.
  void reset();

  /// Take back the newest tokens of every row; see `Session::rewind`.
  ///
  /// Error kInput if a row holds fewer, a ring has overwritten one that would be needed again, or a layer keeps a state.
  Status rewind(int64_t tokens);

  /// Feed a prompt to each row, behind what it holds. Long ones go through in chunks.
  ///
  /// Returns the logits [rows, vocab_size] of each row's last token, valid until the next call.
  /// Error kInput if there is not one prompt a row, one is empty, a token is outside the vocabulary, or the prompts have different
  /// lengths and rows must be equal in this model, or a row that holds tokens would lose some while it waits for a longer one;
  /// kCacheFull if they do not fit; kRuntime if ExecuTorch fails.
  Result<std::span<const float>> prefill(std::span<const std::vector<int64_t>> prompts);

  /// Feed one token to each row; see `prefill`.
  Result<std::span<const float>> decode(std::span<const int64_t> tokens);

  /// Called with each token as it is chosen; false ends its row.
  using OnToken = std::function<bool(size_t row, int64_t token)>;
  /// Called with each piece of text, which never ends inside a character; false ends its row.
  using OnText = std::function<bool(size_t row, std::string_view piece)>;

  /// Tokens that follow each prompt; rows go on from where they are. A row ends by itself, while others go on: it stays at its
  /// length, but in models with a state, whose ended rows go on over tokens that nobody sees. All end where the fullest row is full.
  ///
  /// Row r draws as a `Session` does with the seed `seed + r`, whatever the others do. Each row's newest token is not fed.
  /// Error as of `prefill`; kInput also for a wrong option, and for `prompt_lookup` and `allowed_tokens`, which serve one row.
  Result<std::vector<Generation>> generate(std::span<const std::vector<int64_t>> prompts, const GenerateOptions& options,
                                           const OnToken& on_token = {});

  /// Text that follows each text; what ends a row is not given out. A row's newest token of an earlier generation is fed in front
  /// of its prompt, unless it ended that.
  ///
  /// Error as of `generate`; kBundle if the bundle has no tokenizer that is known here.
  Result<std::vector<Generation>> generate_text(std::span<const std::string> prompts, const GenerateOptions& options,
                                                const OnText& on_text);

  /// End the generation that is running, before its next step; from any thread, or a signal handler.
  void cancel() { cancelled_->store(true, std::memory_order_relaxed); }

 private:
  BatchSession(Manifest manifest, CacheLimits limits, Program program);

  Status check_count(size_t given, const char* what) const;
  Status check_prompts(std::span<const std::vector<int64_t>> prompts, std::optional<int64_t> max_new_tokens) const;
  // Whether rows that hold tokens still have them after waiting for longer prompts.
  Status check_waiting(std::span<const std::vector<int64_t>> prompts) const;
  // How many tokens of a prompt go through each step.
  std::vector<int64_t> chunk_sizes(int64_t length) const;
  Result<std::span<const float>> feed(std::span<const std::vector<int64_t>> prompts, bool may_stop = false);
  // A step of tokens [rows, size]: those of `counted` rows count, the others stay where they are.
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
  std::vector<std::optional<int64_t>> pending_;  // the newest token given out, while nothing was fed since and it ended nothing
};

}  // namespace exportable_cache
