// Kernels under the names of operators that ExecuTorch has kernels for as well.
//
// ExecuTorch prefers a kernel for given dtypes and orders of dimensions to the one for all, which is how its own
// library registers these operators. So ours are registered for those dtypes that they are for: whichever library is
// loaded first, ours serve what is loaded after that, and ExecuTorch's the rest. With EXPORTABLE_CACHE_KERNELS_ALONE,
// in a build without ExecuTorch's library, they are registered for all.
#pragma once

#include <executorch/runtime/core/exec_aten/exec_aten.h>
#include <executorch/runtime/kernel/operator_registry.h>

#include <initializer_list>

namespace exportable_cache::kernels {

// A contiguous tensor argument.
struct TensorKind {
  executorch::aten::ScalarType dtype;
  size_t dims;
};

// `name` must outlive the registry.
void register_for(const char* name, std::initializer_list<TensorKind> arguments,
                  executorch::runtime::OpFunction kernel);

}  // namespace exportable_cache::kernels
