// Number of compute threads.
#pragma once

#include <cstdint>

#include <exportable_cache/result.h>

namespace exportable_cache {

/// Compute threads of all sessions in this process, because ExecuTorch has one pool. The default is the number of cores.
int64_t threads();

/// Set their number before the first session is opened, because programs keep the pool that they were opened with.
///
/// Error kInput if it is not from 1 to 512, or another number while a program is open. Not thread-safe: no other call of this
/// library may run at the same time.
Status set_threads(int64_t threads);

}  // namespace exportable_cache
