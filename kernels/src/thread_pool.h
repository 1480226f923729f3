// The threads that ExecuTorch and its delegates use.
#pragma once

#include "attention.h"

namespace exportable_cache::kernels {

Threads runtime_threads();

}  // namespace exportable_cache::kernels
