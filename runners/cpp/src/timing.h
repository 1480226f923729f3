// Time measurement of a generation.
#pragma once

#include <chrono>

namespace exportable_cache {

using Clock = std::chrono::steady_clock;

inline double seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

}  // namespace exportable_cache
