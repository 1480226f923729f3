// What sessions of one row and of several refuse before anything runs.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include <exportable_cache/session.h>

namespace exportable_cache {

/// A prompt has a token, and every one is of the vocabulary. `name` is what errors call it, and `name`[3] its fourth token.
Status check_tokens(std::span<const int64_t> tokens, const Manifest& manifest, const std::string& name);

/// A prompt fits behind `held` tokens of at most `limit`, and so does what is to be generated after it, if that was asked for.
Status check_room(std::optional<int64_t> limit, int64_t held, int64_t tokens, std::optional<int64_t> max_new_tokens);

/// What every generation checks of its options: the limit and the stops.
Status check_options(const GenerateOptions& options, const Manifest& manifest);

/// Whether a token ends an answer.
bool is_end(int64_t token, const Manifest& manifest, const GenerateOptions& options);

}  // namespace exportable_cache
