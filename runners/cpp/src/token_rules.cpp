#include "token_rules.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace exportable_cache {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

bool ends_with(std::span<const int64_t> tokens, std::span<const int64_t> prefix) {
  return prefix.size() <= tokens.size() && std::equal(prefix.begin(), prefix.end(), tokens.end() - static_cast<int64_t>(prefix.size()));
}

}  // namespace

Result<std::optional<int64_t>> limit_of(const Manifest& manifest, std::optional<int64_t> asked, int64_t tokens) {
  const GenerationSettings& settings = manifest.settings;
  if (asked || settings.max_new_tokens || !settings.max_length) return asked ? asked : settings.max_new_tokens;
  if (tokens >= *settings.max_length) {
    return fail(ErrorCode::kInput, "max_length of the generation config must be above the ", tokens, " tokens of the prompt, got ",
                *settings.max_length, "; pass max_new_tokens");
  }
  return std::optional(*settings.max_length - tokens);
}

TokenRules::TokenRules(const Manifest& manifest, RowStart start)
    : manifest_(manifest), start_(std::move(start)), counted_(static_cast<size_t>(start_.prompt)) {
  const Sampling& sampling = start_.sampling;
  adds_ = !sampling.logit_bias.empty() || sampling.presence_penalty != 0 || sampling.frequency_penalty != 0;
  for (const auto& [token, value] : sampling.logit_bias) added_[token] = value;
  for (const int64_t token : sampling.counted_tokens) ++counts_[token];
}

void TokenRules::add(std::span<const int64_t> tokens) {
  for (; counted_ < tokens.size(); ++counted_) ++counts_[tokens[counted_]];
  std::map<int64_t, double> added = added_;
  for (const auto& [token, count] : counts_) {
    double& value = added[token];
    value = value - start_.sampling.presence_penalty - static_cast<double>(count) * start_.sampling.frequency_penalty;
  }
  for (const auto& [token, value] : added) {
    if (token < static_cast<int64_t>(scores_.size())) scores_[token] += static_cast<float>(value);
  }
}

void TokenRules::ban(int64_t token) {
  if (token < static_cast<int64_t>(scores_.size())) scores_[token] = kNever;
}

void TokenRules::ban_ends() {
  for (const int64_t token : manifest_.end_tokens) ban(token);
}

void TokenRules::only(std::span<const int64_t> tokens) {
  std::fill(scores_.begin(), scores_.end(), kNever);
  for (const int64_t token : tokens) {
    if (token < static_cast<int64_t>(scores_.size())) scores_[token] = 0;
  }
}

void TokenRules::bias(std::span<const int64_t> tokens) {
  for (const auto& [sequence, value] : manifest_.settings.sequence_bias) {
    const std::span<const int64_t> all(sequence);
    const int64_t token = all.back();
    if (token < static_cast<int64_t>(scores_.size()) && ends_with(tokens, all.first(all.size() - 1))) {
      scores_[token] += static_cast<float>(value);
    }
  }
}

void TokenRules::repeat(std::span<const int64_t> tokens, double penalty) {
  seen_.assign(scores_.size(), false);
  const auto factor = static_cast<float>(penalty);
  for (const int64_t token : tokens) {
    if (token >= static_cast<int64_t>(scores_.size()) || seen_[token]) continue;
    seen_[token] = true;
    scores_[token] = scores_[token] < 0 ? scores_[token] * factor : scores_[token] / factor;
  }
}

void TokenRules::ban_ngrams(std::span<const int64_t> tokens, std::span<const int64_t> text, int64_t size) {
  const auto before = static_cast<size_t>(size - 1);
  if (tokens.size() < before) return;
  const auto newest = tokens.last(before);
  for (size_t start = 0; start + before < text.size(); ++start) {
    if (std::equal(newest.begin(), newest.end(), text.begin() + static_cast<int64_t>(start))) ban(text[start + before]);
  }
}

void TokenRules::decay(int64_t length) {
  const auto [start, factor] = *manifest_.settings.decay;
  const int64_t past = length - start - start_.prompt;
  if (past <= 0) return;
  for (const int64_t token : manifest_.end_tokens) {
    if (token >= static_cast<int64_t>(scores_.size())) continue;
    scores_[token] += std::abs(scores_[token]) * static_cast<float>(std::pow(factor, static_cast<double>(past)) - 1);
  }
}

Result<std::span<const float>> TokenRules::apply(std::span<const float> logits, std::span<const int64_t> tokens,
                                                 std::span<const uint32_t> mask) {
  const GenerationSettings& settings = manifest_.settings;
  const double penalty = start_.sampling.repetition_penalty.value_or(settings.repetition_penalty);
  if (!settings.has_rules() && penalty == 1 && !adds_) return logits;
  scores_.assign(logits.begin(), logits.end());
  // A penalty without other settings follows the additions, as in `Sampler` of Python.
  if (adds_ && !settings.has_rules()) add(tokens);
  const auto length = static_cast<int64_t>(tokens.size());
  bias(tokens);
  if (settings.encoder_repetition_penalty != 1) repeat(start_.encoded, 1 / settings.encoder_repetition_penalty);
  if (penalty != 1) repeat(tokens, penalty);
  if (settings.no_repeat_ngram_size > 0) ban_ngrams(tokens, tokens, settings.no_repeat_ngram_size);
  if (settings.encoder_no_repeat_ngram_size > 0) ban_ngrams(tokens, start_.encoded, settings.encoder_no_repeat_ngram_size);
  for (const std::vector<int64_t>& words : settings.bad_words) {
    const bool is_end = words.size() == 1 && std::find(manifest_.end_tokens.begin(), manifest_.end_tokens.end(), words[0]) !=
                                                 manifest_.end_tokens.end();
    if (!is_end && ends_with(tokens, std::span(words).first(words.size() - 1))) ban(words.back());
  }
  if (length + start_.held < settings.min_length) ban_ends();
  if (length - start_.prompt < settings.min_new_tokens) ban_ends();
  if (settings.forced_begin && length == 1 && start_.held == 0) only(std::span(&*settings.forced_begin, 1));
  if (!settings.forced_ends.empty() && start_.limit && length == start_.prompt + *start_.limit - 1) only(settings.forced_ends);
  if (settings.remove_invalid_values) {
    constexpr float kMost = std::numeric_limits<float>::max();
    for (float& score : scores_) score = std::isnan(score) ? 0 : std::clamp(score, -kMost, kMost);
  }
  if (settings.decay) decay(length);
  for (const int64_t token : settings.suppressed) ban(token);
  const int64_t first = start_.prompt == 1 && settings.forced_begin ? 2 : start_.prompt;
  if (length == first) {
    for (const int64_t token : settings.suppressed_first) ban(token);
  }
  if (adds_ && settings.has_rules()) add(tokens);
  for (size_t token = 0; token < scores_.size(); ++token) {
    if (scores_[token] != kNever && (mask.empty() || (mask[token / 32] >> (token % 32) & 1) != 0)) return std::span<const float>(scores_);
  }
  if (adds_) {
    scores_.assign(logits.begin(), logits.end());
    add(tokens);
    return std::span<const float>(scores_);
  }
  if (!mask.empty()) return logits;
  return fail(ErrorCode::kInput, "the generation config of the checkpoint allows no next token; ",
              "correct generation_config.json, and export the model again");
}

}  // namespace exportable_cache
