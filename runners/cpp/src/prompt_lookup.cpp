#include "prompt_lookup.h"

#include <algorithm>

namespace exportable_cache {
namespace {

constexpr size_t kNgram = 3;

}  // namespace

std::span<const int64_t> look_up(std::span<const int64_t> context, size_t count) {
  if (context.empty()) return {};
  for (size_t size = std::min(kNgram, context.size() - 1); size > 0; --size) {
    const auto end = context.last(size);
    for (size_t start = context.size() - size; start-- > 0;) {
      if (std::equal(end.begin(), end.end(), context.begin() + static_cast<std::ptrdiff_t>(start))) {
        const auto behind = context.subspan(start + size);
        return behind.first(std::min(count, behind.size()));
      }
    }
  }
  return {};
}

}  // namespace exportable_cache
