// Generation of several rows: each ends separately, and steps continue until all have ended.
#include <algorithm>

#include <exportable_cache/batch_session.h>

#include "checks.h"
#include "timing.h"
#include "token_rules.h"

namespace exportable_cache {
namespace {

// One per row, with its own seed.
Result<std::vector<Sampler>> samplers_of(const Sampling& sampling, size_t rows) {
  std::vector<Sampler> samplers;
  for (size_t row = 0; row < rows; ++row) {
    Sampling mine = sampling;
    if (mine.seed) *mine.seed += row;
    Result<Sampler> sampler = Sampler::make(mine);
    if (!sampler.ok()) return sampler.error();
    samplers.push_back(std::move(*sampler));
  }
  return samplers;
}

}  // namespace

Result<std::vector<Generation>> BatchSession::run(std::span<const std::vector<int64_t>> prompts, const GenerateOptions& options,
                                                  const Ends& on_token) {
  if (const Status status = check_options(options, manifest_); !status.ok()) return status.error();
  if (options.prompt_lookup != 0 || options.draft_tokens != 0 || options.allowed_tokens || options.on_logprobs || options.cached_tokens != 0) {
    const char* name = options.allowed_tokens       ? "allowed_tokens"
                       : options.on_logprobs         ? "on_logprobs"
                       : options.cached_tokens != 0  ? "cached_tokens"
                       : options.draft_tokens != 0   ? "draft_tokens"
                                                     : "prompt_lookup";
    return fail(ErrorCode::kInput, name, " serves one row, and this program runs ",
                rows(), "; leave it out, or export with batch_size=1 and use a Session");
  }
  if (const Status status = check_prompts(prompts, options.max_new_tokens); !status.ok()) return status.error();
  int64_t longest = 0;
  for (size_t row = 0; row < rows(); ++row) longest = std::max(longest, lengths_[row] + static_cast<int64_t>(prompts[row].size()));
  const Result<std::optional<int64_t>> limit = limit_of(manifest_, options.max_new_tokens, longest);
  if (!limit.ok()) return limit.error();
  Result<std::vector<Sampler>> samplers = samplers_of(manifest_.settings.sampling_for(options.sampling), rows());
  if (!samplers.ok()) return samplers.error();

  const Clock::time_point start = Clock::now();
  Clock::time_point first = start;
  cancelled_->store(false, std::memory_order_relaxed);
  // Ended rows keep their length, if every layer can roll back the tokens written after them.
  constexpr int64_t kFar = int64_t{1} << 40;
  const bool rows_stay = limits_.max_rollback(kFar, kFar).tokens > 0 && !manifest_.equal_rows;
  const std::vector<int64_t> held = lengths_;
  Result<std::span<const float>> logits = feed(prompts, true);
  if (!logits.ok()) return logits.error();

  // The newest token needs no slot.
  std::optional<int64_t> most = *limit;
  if (room()) most = std::min(most.value_or(*room() + 1), *room() + 1);
  std::vector<TokenRules> rules;
  std::vector<std::vector<int64_t>> contexts(prompts.begin(), prompts.end());
  for (size_t row = 0; row < rows(); ++row) {
    rules.emplace_back(manifest_, RowStart{held[row], static_cast<int64_t>(prompts[row].size()), most, options.sampling, prompts[row]});
  }
  std::vector<Generation> answers(rows());
  std::vector<std::optional<StopReason>> reasons(rows());
  std::vector<int64_t> newest(rows());
  std::vector<bool> is_unfed(rows());
  const auto has_ended = [](const std::optional<StopReason>& reason) { return reason.has_value(); };
  const auto end_all = [&](StopReason reason) {
    for (auto& one : reasons) one = one.value_or(reason);
  };
  // Cancelled prompts have no logits to continue from.
  if (is_cancelled()) end_all(StopReason::kCancelled);
  while (!std::all_of(reasons.begin(), reasons.end(), has_ended)) {
    const size_t vocabulary = logits->size() / rows();
    for (size_t row = 0; row < rows(); ++row) {
      if (reasons[row]) continue;
      Generation& answer = answers[row];
      std::optional<StopReason>& reason = reasons[row];
      const Result<std::span<const float>> ruled = rules[row].apply(logits->subspan(row * vocabulary, vocabulary), contexts[row], {});
      if (!ruled.ok()) return ruled.error();
      const int64_t token = (*samplers)[row].choose(*ruled);
      contexts[row].push_back(token);
      if (first == start) first = Clock::now();
      newest[row] = token;
      is_unfed[row] = true;
      answer.tokens.push_back(token);
      reason = on_token(row, token);
      if (!reason && is_end(token, manifest_, options)) reason = StopReason::kEndToken;
      if (!reason && static_cast<int64_t>(answer.tokens.size()) == *limit) reason = StopReason::kMaxNewTokens;
      answer.statistics.decode_seconds = seconds(Clock::now() - first);
    }
    if (room() == 0) end_all(StopReason::kCacheFull);
    if (is_cancelled()) end_all(StopReason::kCancelled);
    if (std::all_of(reasons.begin(), reasons.end(), has_ended)) break;
    // An ended row is fed its newest token repeatedly, after its cached tokens if it keeps its length.
    std::vector<bool> counted(rows());
    for (size_t row = 0; row < rows(); ++row) {
      counted[row] = !rows_stay || !reasons[row];
      if (counted[row]) is_unfed[row] = false;
    }
    logits = step(newest, 1, counted);
    if (!logits.ok()) return logits.error();
  }
  for (size_t row = 0; row < rows(); ++row) {
    Generation& answer = answers[row];
    answer.reason = *reasons[row];
    answer.statistics.prompt_tokens = static_cast<int64_t>(prompts[row].size());
    answer.statistics.generated_tokens = static_cast<int64_t>(answer.tokens.size());
    answer.statistics.time_to_first_token = seconds(first - start);
    if (is_unfed[row] && !is_end(newest[row], manifest_, options)) pending_[row] = newest[row];
  }
  return answers;
}

Result<std::vector<Generation>> BatchSession::generate(std::span<const std::vector<int64_t>> prompts, const GenerateOptions& options,
                                                       const OnToken& on_token) {
  // Only stop strings need the vocabulary.
  std::vector<AnswerText> texts;
  if (!options.stop_strings.empty()) {
    Result<const Detokenizer*> vocabulary = text_.detokenizer();
    if (!vocabulary.ok()) return vocabulary.error();
    for (const std::vector<int64_t>& prompt : prompts) {
      texts.emplace_back(**vocabulary, options.stop_strings, (*vocabulary)->gives_text(prompt));
    }
  }
  return run(prompts, options, [&](size_t row, int64_t token) -> std::optional<StopReason> {
    if (on_token && !on_token(row, token)) return StopReason::kCallback;
    if (texts.empty() || is_end(token, manifest_, options)) return std::nullopt;
    texts[row].push(token);
    return texts[row].stopped() ? std::optional(StopReason::kStopString) : std::nullopt;
  });
}

Result<std::vector<Generation>> BatchSession::generate_text(std::span<const std::string> prompts, const GenerateOptions& options,
                                                            const OnText& on_text) {
  if (const Status status = check_count(prompts.size(), "prompts"); !status.ok()) return status.error();
  std::vector<std::vector<int64_t>> ids;
  for (size_t row = 0; row < rows(); ++row) {
    Result<std::vector<int64_t>> one = text_.encode(prompts[row], lengths_[row] == 0);
    if (!one.ok()) return one.error();
    if (pending_[row]) one->insert(one->begin(), *pending_[row]);
    ids.push_back(std::move(*one));
  }
  Result<const Detokenizer*> vocabulary = text_.detokenizer();
  if (!vocabulary.ok()) return vocabulary.error();

  std::vector<AnswerText> texts;
  for (const std::vector<int64_t>& one : ids) {
    texts.emplace_back(**vocabulary, options.stop_strings, (*vocabulary)->gives_text(one));
  }
  const auto give = [&](size_t row, const std::string& piece) { return piece.empty() || !on_text || on_text(row, piece); };
  Result<std::vector<Generation>> answers = run(ids, options, [&](size_t row, int64_t token) -> std::optional<StopReason> {
    if (is_end(token, manifest_, options)) return std::nullopt;
    if (!give(row, texts[row].push(token))) return StopReason::kCallback;
    return texts[row].stopped() ? std::optional(StopReason::kStopString) : std::nullopt;
  });
  for (size_t row = 0; answers.ok() && row < rows(); ++row) {
    if (!texts[row].stopped() && (*answers)[row].reason != StopReason::kCallback) give(row, texts[row].finish());
  }
  return answers;
}

}  // namespace exportable_cache
