// The operator that quantizes keys and values, whose semantics are in exportable_cache/backends/executorch/native/operators.py:
//   exportable_cache::quantize.out(Tensor rows, int bits, *, Tensor(a!) numbers, Tensor(b!) scales)
//                   -> (Tensor(a!), Tensor(b!))
#include <executorch/runtime/kernel/operator_registry.h>

#include "native_operators.h"
#include "quantize.h"
#include "tensors.h"
#include "thread_pool.h"

namespace exportable_cache::kernels {
namespace {

using executorch::runtime::EValue;
using executorch::runtime::Span;

bool resized(const Tensor& like, int64_t last, Tensor& tensor) {
  return resize_rows(like, 3, last, tensor) && is_cache_shaped(tensor);
}

// ExecuTorch's kernel wrapper supports one output only.
void quantize_out(KernelRuntimeContext& context, Span<EValue*> stack) {
  const Tensor& rows = stack[0]->toTensor();
  const int64_t bits = stack[1]->toInt();
  Tensor &numbers = stack[2]->toTensor(), &scales = stack[3]->toTensor();
  ET_KERNEL_CHECK_MSG(context, is_cache_shaped(rows) && rows.scalar_type() == ScalarType::Float, InvalidArgument, ,
                      "rows must be contiguous float32 [batch * heads, tokens, 1, dim]");
  const int64_t dim = rows.size(3);
  ET_KERNEL_CHECK_MSG(context, dim > 0 && (bits == 8 || (bits == 4 && dim % 2 == 0)), InvalidArgument, ,
                      "bits must be 8, or 4 of rows of an even size");
  const bool is_packed = bits == 4;
  ET_KERNEL_CHECK_MSG(context,
                      numbers.scalar_type() == (is_packed ? ScalarType::Byte : ScalarType::Char) &&
                          scales.scalar_type() == ScalarType::Float,
                      InvalidArgument, , "numbers must be int8, or uint8 of 4 bits, and scales float32");
  ET_KERNEL_CHECK(context, resized(rows, is_packed ? dim / 2 : dim, numbers) && resized(rows, 1, scales),
                  InvalidArgument, );
  QuantizedRows quantized;
  quantized.dtype = is_packed ? Dtype::kInt4 : Dtype::kInt8;
  quantized.rows = rows.numel() / dim, quantized.dim = dim, quantized.source = rows.const_data_ptr<float>();
  quantized.numbers = numbers.mutable_data_ptr(), quantized.scales = scales.mutable_data_ptr<float>();
  quantize_rows(quantized, runtime_threads());
}

}  // namespace

void register_quantize_operator() {
  (void)executorch::runtime::register_kernel(
      executorch::runtime::Kernel("exportable_cache::quantize.out", quantize_out));
}

}  // namespace exportable_cache::kernels
