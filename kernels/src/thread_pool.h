// The threads that ExecuTorch and its delegates use.
#pragma once

#include "attention.h"

namespace exportable_cache::kernels {

Threads runtime_threads();

// `attend` on these threads, counted.
void attend_in_runtime(const Attention& attention);

// Number of those calls since the library was loaded.
int64_t attention_calls();

}  // namespace exportable_cache::kernels
