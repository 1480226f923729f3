// Proposals for speculative decoding that cost nothing: what followed the same few tokens earlier.
#pragma once

#include <cstdint>
#include <span>

namespace exportable_cache {

/// Up to `count` tokens that followed the latest earlier occurrence of the newest three tokens, or else two, or one; part of
/// `context`. As `PromptLookup` in Python.
std::span<const int64_t> look_up(std::span<const int64_t> context, size_t count);

}  // namespace exportable_cache
