// Settings of a checkpoint's generation_config that apply to every generation.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <exportable_cache/sampler.h>

namespace exportable_cache {

/// Settings that decide which tokens are possible, greedy or sampled, as in transformers. Default values change nothing.
struct GenerationSettings {
  std::optional<int64_t> max_new_tokens{};  // if a call has no limit
  std::optional<int64_t> max_length{};      // of all tokens, if there is no max_new_tokens either
  std::vector<std::pair<std::vector<int64_t>, double>> sequence_bias{};
  double encoder_repetition_penalty = 1;
  double repetition_penalty = 1;
  int64_t no_repeat_ngram_size = 0;
  int64_t encoder_no_repeat_ngram_size = 0;
  std::vector<std::vector<int64_t>> bad_words{};
  int64_t min_length = 0;
  int64_t min_new_tokens = 0;
  std::optional<int64_t> forced_begin{};
  std::vector<int64_t> forced_ends{};
  bool remove_invalid_values = false;
  std::optional<std::pair<int64_t, double>> decay{};  // exponential_decay_length_penalty
  std::vector<int64_t> suppressed{};
  std::vector<int64_t> suppressed_first{};
  Sampling sampling{};  // used where a call asks for it; greedy without do_sample
  /// Names of settings that are set, change transformers' results, and are not supported.
  std::vector<std::string> unheeded{};

  /// The sampling of a call: its own, completed by that of the checkpoint if it asks for that. A top_k of 0 sets no limit.
  Sampling sampling_for(Sampling asked) const {
    if (asked.from_checkpoint) {
      if (asked.temperature == 0) asked.temperature = sampling.temperature;
      if (!asked.top_k) asked.top_k = sampling.top_k;
      if (!asked.top_p) asked.top_p = sampling.top_p;
      if (!asked.min_p) asked.min_p = sampling.min_p;
    }
    if (asked.top_k == 0) asked.top_k.reset();
    return asked;
  }

  /// True if logits are changed before a token is chosen.
  bool has_rules() const {
    return !sequence_bias.empty() || encoder_repetition_penalty != 1 || repetition_penalty != 1 || no_repeat_ngram_size > 0 ||
           encoder_no_repeat_ngram_size > 0 || !bad_words.empty() || min_length > 0 || min_new_tokens > 0 || forced_begin ||
           !forced_ends.empty() || remove_invalid_values || decay || !suppressed.empty() || !suppressed_first.empty();
  }
};

}  // namespace exportable_cache
