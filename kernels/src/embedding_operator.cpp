// Embedding operators, whose semantics are in exportable_cache/backends/executorch/native/linears.py:
//   exportable_cache::embedding_bfloat16.out(Tensor weights, Tensor tokens, int rows, int dim, *, Tensor(a!) out)
//                   -> Tensor(a!)
//   exportable_cache::embedding_float16.out, the same
#include <executorch/extension/kernel_util/make_boxed_from_unboxed_functor.h>
#include <executorch/runtime/kernel/operator_registry.h>

#include "native_operators.h"
#include "tensors.h"

namespace exportable_cache::kernels {
namespace {

template <class W>
Tensor& embedding_out(KernelRuntimeContext& context, const Tensor& weights, const Tensor& tokens, int64_t rows,
                      int64_t dim, Tensor& out) {
  const size_t dims = static_cast<size_t>(tokens.dim());
  const W* const packed = packed_weights<W>(weights, dim, rows);
  ET_KERNEL_CHECK_MSG(context, packed != nullptr, InvalidArgument, out,
                      "weights must be blocks of 16 rows, of the operator's type");
  const bool are_tokens = tokens.scalar_type() == ScalarType::Long && is_contiguous(tokens);
  ET_KERNEL_CHECK_MSG(context, are_tokens, InvalidArgument, out, "tokens must be contiguous int64");
  ET_KERNEL_CHECK_MSG(context, out.scalar_type() == ScalarType::Float && static_cast<size_t>(out.dim()) == dims + 1,
                      InvalidArgument, out, "the output must be float32, of one dimension more than tokens");
  ET_KERNEL_CHECK(context, resize_rows(tokens, dims, dim, out) && is_contiguous(out), InvalidArgument, out);
  const int64_t* const ids = tokens.const_data_ptr<int64_t>();
  float* const numbers = out.mutable_data_ptr<float>();
  for (int64_t i = 0; i < tokens.numel(); ++i) {
    ET_KERNEL_CHECK_MSG(context, ids[i] >= 0 && ids[i] < rows, InvalidArgument, out,
                        "token %lld is not one of the table's %lld rows", static_cast<long long>(ids[i]),
                        static_cast<long long>(rows));
    row_of_weights(packed, dim, ids[i], numbers + i * dim);
  }
  return out;
}

constexpr const char kFloat16[] = "exportable_cache::embedding_float16.out",
                     kBFloat16[] = "exportable_cache::embedding_bfloat16.out";

}  // namespace

void register_embedding_operators() {
  using executorch::extension::make_boxed_kernel;
  using executorch::runtime::register_kernel;
  (void)register_kernel(make_boxed_kernel(kFloat16, EXECUTORCH_FN(embedding_out<hwy::float16_t>, kFloat16)));
  (void)register_kernel(make_boxed_kernel(kBFloat16, EXECUTORCH_FN(embedding_out<BFloat16Pair>, kBFloat16)));
}

}  // namespace exportable_cache::kernels
