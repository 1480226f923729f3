#pragma once

namespace exportable_cache::kernels {

// Operators for which ExecuTorch has no kernel.
void register_own_operators();
void register_linear_operators();

}  // namespace exportable_cache::kernels
