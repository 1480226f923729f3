// How many threads compute.
#pragma once

#include <cstdint>

#include <exportable_cache/result.h>

namespace exportable_cache {

/// Threads that compute, in all sessions of this process: ExecuTorch has one pool. As many as the processor has cores until
/// `set_threads` is called.
int64_t threads();

/// Change how many they are, before the first session is opened: programs keep the pool that they were opened with.
///
/// Error kInput if it is none of 1 to 512, or another number while a program is open. Not thread-safe: no other call of this
/// library may run meanwhile.
Status set_threads(int64_t threads);

}  // namespace exportable_cache
