// Registration of kernels for operators that ExecuTorch has kernels for as well.
//
// ExecuTorch prefers a kernel for given dtypes and dimension orders to a general one, and its library registers general ones.
// So ours are registered for the dtypes they support. They are then used for any order of loading, and ExecuTorch's for the
// other dtypes. With EXPORTABLE_CACHE_KERNELS_ALONE, in a build without ExecuTorch's library, they are registered as general
// kernels.
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
