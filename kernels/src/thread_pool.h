// The threads that ExecuTorch and its delegates use.
#pragma once

#include "attention.h"

namespace exportable_cache::kernels {

Threads runtime_threads();

// `attend` on them, counted.
void attend_in_runtime(const Attention& attention);

// Calls of the above since the library was loaded.
int64_t attention_calls();

}  // namespace exportable_cache::kernels
