// Generation: prefill, choose a token, feed it, until a stop.
#include <algorithm>
#include <cmath>
#include <set>

#include <exportable_cache/session.h>

#include "checks.h"
#include "log_probs.h"
#include "timing.h"
#include "token_mask.h"
#include "token_rules.h"
#include "utf8.h"

namespace exportable_cache {
namespace {

double rate(int64_t count, double duration) { return duration > 0 ? static_cast<double>(count) / duration : 0; }

// Without ASCII white space at both ends, which chat templates remove.
std::string trimmed(const std::string& text) {
  constexpr const char* kSpace = " \t\n\r\f\v";
  const size_t first = text.find_first_not_of(kSpace);
  return first == std::string::npos ? std::string() : text.substr(first, text.find_last_not_of(kSpace) + 1 - first);
}

}  // namespace

const char* to_string(StopReason reason) {
  switch (reason) {
    case StopReason::kEndToken: return "end_token";
    case StopReason::kStopString: return "stop_string";
    case StopReason::kMaxNewTokens: return "max_new_tokens";
    case StopReason::kCacheFull: return "cache_full";
    case StopReason::kCallback: return "callback";
    case StopReason::kCancelled: return "cancelled";
    case StopReason::kWhole: return "whole";
  }
  return "unknown";
}

double Statistics::prefill_tokens_per_second() const { return rate(prompt_tokens, time_to_first_token); }

double Statistics::decode_tokens_per_second() const { return rate(std::max<int64_t>(0, generated_tokens - 1), decode_seconds); }

Result<Generation> Session::run(std::vector<int64_t> prompt, const GenerateOptions& given,
                                const std::function<std::optional<StopReason>(int64_t token)>& on_token) {
  if (const Status status = check_options(given, manifest_); !status.ok()) return status.error();
  if (const Status status = check_lookup(given); !status.ok()) return status.error();
  if (const Status status = check_shifts(given); !status.ok()) return status.error();
  if (const Status status = check_tokens(prompt, manifest_, "tokens"); !status.ok()) return status.error();
  if (const Status status = check_cached(given.cached_tokens, prompt); !status.ok()) return status.error();
  // Tokens before the prompt: none if it begins with what is cached.
  const auto prompt_size = static_cast<int64_t>(prompt.size());
  if (given.shift_when_full && given.cached_tokens == 0) {
    if (const Status status = make_room(prompt_size, given.protected_tokens); !status.ok()) return status.error();
  }
  const int64_t held = given.cached_tokens > 0 ? 0 : length_;
  const std::optional<int64_t> must_fit = given.shift_when_full ? std::nullopt : given.max_new_tokens;
  const Status fits = check_room(max_length(), held, prompt_size, must_fit);
  if (!fits.ok()) return fits.error();
  const Result<std::optional<int64_t>> limit = limit_of(manifest_, given.max_new_tokens, held + prompt_size);
  if (!limit.ok()) return limit.error();
  GenerateOptions options = given;
  options.max_new_tokens = *limit;
  if (const Status status = check_encoded(length_); !status.ok()) return status.error();
  if (const Status status = check_items(prompt); !status.ok()) return status.error();
  Result<Sampler> sampler = Sampler::make(manifest_.settings.sampling_for(options.sampling));
  if (!sampler.ok()) return sampler.error();

  const Clock::time_point start = Clock::now();
  Clock::time_point first = start;
  cancelled_->store(false, std::memory_order_relaxed);
  // Called before the step of the choice, because a failure must leave the session as any stop does.
  TokenMask mask(options.allowed_tokens, static_cast<size_t>(manifest_.logits_size));
  Result<bool> goes_on = mask.ask({});
  if (!goes_on.ok()) return goes_on.error();
  if (given.cached_tokens > 0) {
    if (const Status status = rewind(length_ - given.cached_tokens); !status.ok()) return status.error();
  }
  Result<std::span<const float>> logits = feed(std::span<const int64_t>(prompt).subspan(static_cast<size_t>(given.cached_tokens)), true);
  if (!logits.ok()) return logits.error();
  Generation generation;
  // The newest token needs no slot.
  std::optional<int64_t> most = *limit;
  if (room() && !options.shift_when_full) most = std::min(most.value_or(*room() + 1), *room() + 1);
  TokenRules rules(manifest_, {held, prompt_size, most, options.sampling, manifest_.encoder ? encoded_tokens_ : prompt});
  std::vector<int64_t> context = std::move(prompt);
  int64_t proposed = 0, accepted = 0;
  std::vector<int64_t> judged;  // tokens of `logits`: the newest one, and its proposed successors
  LogProbs log_probs;
  std::optional<StopReason> reason;
  if (!*goes_on) reason = StopReason::kWhole;
  // A cancelled prompt has no logits to continue from.
  if (cancelled_->load(std::memory_order_relaxed)) reason = StopReason::kCancelled;
  while (!reason) {
    // A prompt has only the logits of its last token.
    const size_t rows = std::max<size_t>(1, judged.size());
    const size_t vocabulary = logits->size() / rows;
    size_t used = 0;
    while (!reason && used < rows) {
      const Result<std::span<const float>> ruled = rules.apply(logits->subspan(used * vocabulary, vocabulary), context, mask.words());
      if (!ruled.ok()) {
        // Roll back the proposals after the newest token.
        length_ -= static_cast<int64_t>(rows - used) - 1;
        return ruled.error();
      }
      const int64_t token = sampler->choose(*ruled, mask.words());
      if (!std::isfinite((*ruled)[static_cast<size_t>(token)])) {
        length_ -= static_cast<int64_t>(rows - used) - 1;
        return fail(ErrorCode::kRuntime, "the logits are not finite at position ", length_ - 1,
                    ", so no token can be chosen: the model overflows there, or its weights or its cache hold infinities or "
                    "not-a-number; export it in float32");
      }
      ++used;
      if (generation.tokens.empty()) first = Clock::now();
      generation.tokens.push_back(token);
      context.push_back(token);
      if (options.on_logprobs) log_probs.give(logits->subspan((used - 1) * vocabulary, vocabulary), token, options);
      reason = on_token(token);
      if (!reason && is_end(token, manifest_, options)) reason = StopReason::kEndToken;
      if (!reason && static_cast<int64_t>(generation.tokens.size()) == options.max_new_tokens) reason = StopReason::kMaxNewTokens;
      if (!reason) goes_on = mask.ask(generation.tokens);
      if (!goes_on.ok()) break;
      if (!reason && !*goes_on) reason = StopReason::kWhole;
      // A token that differs from the proposed one invalidates the proposals after it.
      if (used < rows && token != judged[used]) break;
    }
    accepted += static_cast<int64_t>(used) - 1;
    // Roll back tokens that were not returned; the newest token was not fed.
    length_ -= static_cast<int64_t>(rows - used);
    const int64_t token = context.back();
    pending_ = is_end(token, manifest_, options) ? std::nullopt : std::optional(token);
    if (!goes_on.ok()) return goes_on.error();
    if (!reason && room() == 0) {
      const int64_t first = options.protected_tokens, count = options.shift_when_full ? std::min((length_ - first) / 2, most_dropped(first)) : 0;
      if (count < 1) reason = StopReason::kCacheFull;
      if (count > 0) {
        if (const Status status = shift(count, first); !status.ok()) return status.error();
      }
    }
    if (!reason && cancelled_->load(std::memory_order_relaxed)) reason = StopReason::kCancelled;
    if (reason) break;
    judged.assign(1, token);
    const auto proposal = propose(context, options, static_cast<int64_t>(generation.tokens.size()));
    if (!proposal.ok()) return proposal.error();
    judged.insert(judged.end(), proposal->begin(), proposal->end());
    proposed += static_cast<int64_t>(proposal->size());
    logits = score(judged);
    if (!logits.ok()) return logits.error();
  }
  generation.reason = *reason;
  generation.statistics = {
      .prompt_tokens = prompt_size - given.cached_tokens,
      .generated_tokens = static_cast<int64_t>(generation.tokens.size()),
      .time_to_first_token = seconds(first - start),
      .decode_seconds = seconds(Clock::now() - first),
      .proposed_tokens = proposed,
      .accepted_tokens = accepted,
  };
  return generation;
}

Result<Generation> Session::generate(std::span<const int64_t> prompt, const GenerateOptions& options, const OnToken& on_token) {
  // Only stop strings need the vocabulary.
  std::optional<AnswerText> text;
  if (!options.stop_strings.empty()) {
    Result<const Detokenizer*> vocabulary = detokenizer();
    if (!vocabulary.ok()) return vocabulary.error();
    text.emplace(**vocabulary, options.stop_strings, !manifest_.encoder && (*vocabulary)->gives_text(prompt));
  }
  return run({prompt.begin(), prompt.end()}, options, [&](int64_t token) -> std::optional<StopReason> {
    if (on_token && !on_token(token)) return StopReason::kCallback;
    if (!text || is_end(token, manifest_, options)) return std::nullopt;
    text->push(token);
    return text->stopped() ? std::optional(StopReason::kStopString) : std::nullopt;
  });
}

Result<Generation> Session::generate_text(const std::string& prompt, const GenerateOptions& options, const OnText& on_text) {
  Result<std::vector<int64_t>> ids = encode(prompt, manifest_.encoder || length_ == 0);
  if (!ids.ok()) return ids.error();
  if (manifest_.encoder) {
    if (!manifest_.start_token) return fail(ErrorCode::kBundle, "the generation config has no decoder_start_token_id; generate from token ids");
    if (const Status status = encode_input(*ids); !status.ok()) return status.error();
    ids->assign(1, *manifest_.start_token);
  }
  return text_after(std::move(*ids), options, on_text, !manifest_.encoder);
}

Result<Generation> Session::chat(const std::string& question, const std::string& system, const GenerateOptions& options,
                                 const OnText& on_text) {
  if (!manifest_.chat) {
    return fail(ErrorCode::kBundle, manifest_.folder, " has no chat template that is turns alone; render the text elsewhere, and pass it ",
                "to generate_text");
  }
  const ChatTurns& turns = *manifest_.chat;
  if (!system.empty() && length_ > 0) {
    return fail(ErrorCode::kInput, "a system message comes before the first question, and ", length_, " tokens are held; reset() first");
  }
  if (!system.empty() && !turns.takes_system) {
    return fail(ErrorCode::kInput, "the model's chat template takes no system message; put it into the first question");
  }
  const auto said = [&turns](const std::string& text) { return turns.trims ? trimmed(text) : text; };
  std::vector<ChatPart> parts{{turns.question, false}};
  if (length_ == 0 && system.empty()) parts = {{turns.opening, false}};
  if (length_ == 0 && !system.empty()) parts = {{turns.before_system, false}, {said(system), true}, {turns.after_system, false}};
  parts.push_back({said(question), true});
  parts.push_back({turns.answer, false});
  Result<std::vector<int64_t>> ids = encode_parts(parts);
  if (!ids.ok()) return ids.error();
  return text_after(std::move(*ids), options, on_text, false);
}

Result<std::string> Session::render(const std::string& request) {
  const Result<std::vector<ChatPart>> parts = text_.render(request);
  if (!parts.ok()) return parts.error();
  std::string text;
  for (const ChatPart& part : *parts) text += part.text;
  return text;
}

Result<Generation> Session::chat_messages(const std::string& request, const GenerateOptions& given, const OnText& on_text) {
  if (manifest_.encoder) return fail(ErrorCode::kBundle, "an encoder-decoder has no chat; pass its input to encode_input");
  const Result<std::vector<ChatPart>> parts = text_.render(request);
  if (!parts.ok()) return parts.error();
  Result<std::vector<int64_t>> ids = encode_parts(*parts);
  if (!ids.ok()) return ids.error();
  const size_t most = std::min({cached_.size(), static_cast<size_t>(length_), ids->empty() ? 0 : ids->size() - 1});
  const auto last = cached_.begin() + static_cast<int64_t>(most);
  GenerateOptions options = given;
  options.cached_tokens = std::mismatch(cached_.begin(), last, ids->begin()).first - cached_.begin();
  // Windows and states cannot always be rolled back.
  if (!check_cached(options.cached_tokens, *ids).ok()) options.cached_tokens = 0;
  if (options.cached_tokens == 0) {
    const Status fits = check_room(max_length(), 0, static_cast<int64_t>(ids->size()), given.max_new_tokens);
    if (!fits.ok()) return fits.error();
    begin();
  }
  pending_.reset();
  return text_after(std::move(*ids), options, on_text, false);
}

Result<std::vector<int64_t>> Session::encode_parts(std::span<const ChatPart> parts) {
  Result<const Detokenizer*> vocabulary = detokenizer();
  if (!vocabulary.ok()) return vocabulary.error();
  // The reader encodes every spelled special token as one. In messages it is split after its first character, so that no user forges
  // another turn.
  std::string text, said;
  std::set<size_t> cuts;
  for (const auto& [part, is_said] : parts) {
    text += part;
    said.append(part.size(), is_said ? '1' : '0');
  }
  for (const auto& [token, name] : (*vocabulary)->specials()) {
    for (size_t found = name.empty() ? std::string::npos : text.find(name); found != std::string::npos; found = text.find(name, found + 1)) {
      // A part of it may be the template's.
      if (said.find('1', found) >= found + name.size()) continue;
      const size_t first = utf8_prefix(name).size;
      if (first == name.size()) {
        return fail(ErrorCode::kInput, "the message spells the special token '", name, "', which cannot be cut; remove it");
      }
      cuts.insert(found + first);
    }
  }
  std::vector<int64_t> ids;
  size_t start = 0;
  cuts.insert(text.size());
  for (const size_t cut : cuts) {
    Result<std::vector<int64_t>> some = encode(text.substr(start, cut - start), false);
    if (!some.ok()) return some.error();
    ids.insert(ids.end(), some->begin(), some->end());
    start = cut;
  }
  return ids;
}

Result<Generation> Session::text_after(std::vector<int64_t> ids, const GenerateOptions& options, const OnText& on_text, bool continues) {
  Result<const Detokenizer*> vocabulary = detokenizer();
  if (!vocabulary.ok()) return vocabulary.error();
  if (pending_ && !manifest_.encoder) ids.insert(ids.begin(), *pending_);

  AnswerText text(**vocabulary, options.stop_strings, continues && (*vocabulary)->gives_text(ids));
  const auto give = [&](const std::string& piece) { return piece.empty() || on_text(piece); };
  Result<Generation> generation = run(std::move(ids), options, [&](int64_t token) -> std::optional<StopReason> {
    if (is_end(token, manifest_, options)) return std::nullopt;
    if (!give(text.push(token))) return StopReason::kCallback;
    return text.stopped() ? std::optional(StopReason::kStopString) : std::nullopt;
  });
  if (generation.ok() && !text.stopped() && generation->reason != StopReason::kCallback) give(text.finish());
  return generation;
}

}  // namespace exportable_cache
