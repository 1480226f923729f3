// Argument checks of sessions with one row and with several.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include <exportable_cache/session.h>

namespace exportable_cache {

/// Check that a prompt has a token, and that all are in the vocabulary. Errors call it `name`, and its fourth token `name`[3].
Status check_tokens(std::span<const int64_t> tokens, const Manifest& manifest, const std::string& name);

/// Check that a prompt fits after `held` cached tokens of at most `limit`, and so do the requested new tokens.
Status check_room(std::optional<int64_t> limit, int64_t held, int64_t tokens, std::optional<int64_t> max_new_tokens);

/// Check the limit and the stops of a generation.
Status check_options(const GenerateOptions& options, const Manifest& manifest);

/// True if a token ends a response.
bool is_end(int64_t token, const Manifest& manifest, const GenerateOptions& options);

}  // namespace exportable_cache
