#pragma once

namespace exportable_cache::kernels {

// Operators for which ExecuTorch has no kernel.
void register_native_operators();
void register_linear_operators();
void register_embedding_operators();
void register_quantize_operator();
void register_elementwise_operators();

}  // namespace exportable_cache::kernels
