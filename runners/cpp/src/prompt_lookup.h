// Prompt lookup: speculative decoding that proposes what followed the same few tokens earlier.
#pragma once

#include <cstdint>
#include <span>

namespace exportable_cache {

/// Up to `count` tokens that followed the latest earlier occurrence of the newest three tokens, otherwise two, or one; a part of
/// `context`. It matches `PromptLookup` in Python.
std::span<const int64_t> look_up(std::span<const int64_t> context, size_t count);

}  // namespace exportable_cache
