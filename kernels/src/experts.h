// Linear layers of a mixture of experts: each row goes through the layers of the experts that were chosen for it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention.h"
#include "float_linear.h"
#include "linear.h"

namespace exportable_cache::kernels {

struct Choice {
  int64_t tokens = 0, choices = 0, experts = 0;
  const int64_t* indices = nullptr;  // [tokens, choices], from 0 to experts - 1
  const float* factors = nullptr;    // [tokens, choices], or null
  // The source is [tokens, inputs], for all choices of a token; otherwise [tokens, choices, inputs].
  bool is_shared = false;

  int64_t slots() const { return tokens * choices; }
};

// Bytes of scratch memory, which must be aligned to 64.
size_t experts_scratch(const Linear& layer, const Choice& choice);
size_t experts_scratch(const FloatLinear& layer, const Choice& choice);
size_t experts_scratch(const Float16Linear& layer, const Choice& choice);
size_t experts_scratch(const BFloat16Linear& layer, const Choice& choice);

// Computes the chosen layers; weights of experts that were not chosen are not read. `layer` is that of the first expert: the
// weights and biases of the others follow its own. Its rows are ignored. The output is [tokens, choices, outputs], or with
// factors the sum of a token's results times its factors, [tokens, outputs].
void apply_experts(const Linear& layer, const Choice& choice, const Threads& threads, void* scratch);
void apply_experts(const FloatLinear& layer, const Choice& choice, const Threads& threads, void* scratch);
void apply_experts(const Float16Linear& layer, const Choice& choice, const Threads& threads, void* scratch);
void apply_experts(const BFloat16Linear& layer, const Choice& choice, const Threads& threads, void* scratch);

}  // namespace exportable_cache::kernels
