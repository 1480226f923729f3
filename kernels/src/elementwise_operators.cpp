// Operators between linear layers, whose semantics are in exportable_cache/backends/executorch/lowering/steps.py:
//   exportable_cache::rms_norm.out(Tensor source, Tensor? weight, float epsilon, *, Tensor(a!) out) -> Tensor(a!)
//   exportable_cache::rotate.out(Tensor source, Tensor cos, Tensor sin, bool tokens_first, *, Tensor(a!) out) -> Tensor(a!)
//   exportable_cache::gate.out(Tensor source, Tensor factor, float first, float third, *, Tensor(a!) out) -> Tensor(a!)
//   exportable_cache::to_float16.out(Tensor source, *, Tensor(a!) out) -> Tensor(a!)
//   exportable_cache::to_bfloat16.out, the same
#include <executorch/extension/kernel_util/make_boxed_from_unboxed_functor.h>
#include <executorch/runtime/kernel/operator_registry.h>

#include "elementwise.h"
#include "native_operators.h"
#include "tensors.h"
#include "thread_pool.h"

namespace exportable_cache::kernels {
namespace {

using OptionalTensor = executorch::aten::optional<Tensor>;

bool resized(const Tensor& like, Tensor& out) {
  return is_float(out) && executorch::runtime::resize_tensor(out, like.sizes()) == Error::Ok;
}

Tensor& rms_norm_out(KernelRuntimeContext& context, const Tensor& source, const OptionalTensor weight, double epsilon,
                     Tensor& out) {
  ET_KERNEL_CHECK_MSG(context, is_float(source) && source.dim() > 0 && source.size(source.dim() - 1) > 0, InvalidArgument, out,
                      "source must be contiguous float32 of at least one value per row");
  const int64_t size = source.size(source.dim() - 1);
  ET_KERNEL_CHECK_MSG(context, !weight || (is_float(*weight) && weight->dim() == 1 && weight->size(0) == size), InvalidArgument,
                      out, "a weight must be float32 [size]");
  ET_KERNEL_CHECK(context, resized(source, out), InvalidArgument, out);
  const float* const of_weight = weight ? weight->const_data_ptr<float>() : nullptr;
  apply_norm({static_cast<int64_t>(source.numel()) / size, size, source.const_data_ptr<float>(), of_weight,
              static_cast<float>(epsilon), out.mutable_data_ptr<float>()},
             runtime_threads());
  return out;
}

Tensor& rotate_out(KernelRuntimeContext& context, const Tensor& source, const Tensor& cos, const Tensor& sin, bool tokens_first,
                   Tensor& out) {
  ET_KERNEL_CHECK_MSG(context, is_float(source) && source.dim() == 4 && source.size(3) > 0 && source.size(3) % 2 == 0,
                      InvalidArgument, out, "source must be contiguous float32 of four dimensions and an even size");
  Rotation rotation;
  rotation.batch = source.size(0), rotation.heads = source.size(tokens_first ? 2 : 1);
  rotation.tokens = source.size(tokens_first ? 1 : 2), rotation.dim = source.size(3);
  for (const Tensor* angles : {&cos, &sin}) {
    ET_KERNEL_CHECK_MSG(context,
                        is_float(*angles) && angles->dim() == 4 && (angles->size(0) == 1 || angles->size(0) == rotation.batch) &&
                            angles->size(0) == cos.size(0) && angles->size(1) == 1 && angles->size(2) == rotation.tokens &&
                            angles->size(3) == rotation.dim,
                        InvalidArgument, out, "cos and sin must be float32 [batch or 1, 1, tokens, dim]");
  }
  const int64_t of_head = tokens_first ? rotation.dim : rotation.tokens * rotation.dim;
  const int64_t of_token = tokens_first ? rotation.heads * rotation.dim : rotation.dim;
  rotation.source = {source.const_data_ptr(), rotation.heads * rotation.tokens * rotation.dim, of_token, of_head};
  rotation.cos = cos.const_data_ptr<float>(), rotation.sin = sin.const_data_ptr<float>();
  rotation.angle_stride = cos.size(0) == 1 ? 0 : rotation.tokens * rotation.dim;
  using Size = executorch::aten::SizesType;
  const std::array<Size, 4> sizes = {static_cast<Size>(rotation.batch), static_cast<Size>(rotation.heads),
                                     static_cast<Size>(rotation.tokens), static_cast<Size>(rotation.dim)};
  ET_KERNEL_CHECK(context,
                  is_float(out) && executorch::runtime::resize_tensor(out, {sizes.data(), sizes.size()}) == Error::Ok,
                  InvalidArgument, out);
  rotation.out = out.mutable_data_ptr<float>();
  apply_rotation(rotation, runtime_threads());
  return out;
}

Tensor& gate_out(KernelRuntimeContext& context, const Tensor& source, const Tensor& factor, double first, double third,
                 Tensor& out) {
  ET_KERNEL_CHECK_MSG(context, is_float(source) && is_float(factor) && source.sizes() == factor.sizes(), InvalidArgument, out,
                      "source and factor must be contiguous float32 of the same sizes");
  ET_KERNEL_CHECK(context, resized(source, out), InvalidArgument, out);
  apply_gate({static_cast<int64_t>(source.numel()), source.const_data_ptr<float>(), factor.const_data_ptr<float>(),
              static_cast<float>(first), static_cast<float>(third), out.mutable_data_ptr<float>()},
             runtime_threads());
  return out;
}

template <ScalarType type>
Tensor& narrowed_out(KernelRuntimeContext& context, const Tensor& source, Tensor& out) {
  ET_KERNEL_CHECK_MSG(context, is_float(source) && is_contiguous(out) && out.scalar_type() == type, InvalidArgument, out,
                      "source must be contiguous float32, and the output of the operator's type");
  ET_KERNEL_CHECK(context, executorch::runtime::resize_tensor(out, source.sizes()) == Error::Ok, InvalidArgument, out);
  apply_narrowing({static_cast<int64_t>(source.numel()), source.const_data_ptr<float>(), *float_dtype(type),
                   static_cast<uint16_t*>(out.mutable_data_ptr())},
                  runtime_threads());
  return out;
}

constexpr const char kToFloat16[] = "exportable_cache::to_float16.out", kToBFloat16[] = "exportable_cache::to_bfloat16.out";
constexpr const char kNorm[] = "exportable_cache::rms_norm.out", kRotate[] = "exportable_cache::rotate.out",
                     kGate[] = "exportable_cache::gate.out";

}  // namespace

void register_elementwise_operators() {
  using executorch::extension::make_boxed_kernel;
  using executorch::runtime::register_kernel;
  (void)register_kernel(make_boxed_kernel(kToFloat16, EXECUTORCH_FN(narrowed_out<ScalarType::Half>, kToFloat16)));
  (void)register_kernel(make_boxed_kernel(kToBFloat16, EXECUTORCH_FN(narrowed_out<ScalarType::BFloat16>, kToBFloat16)));
  (void)register_kernel(make_boxed_kernel(kNorm, EXECUTORCH_FN(rms_norm_out, kNorm)));
  (void)register_kernel(make_boxed_kernel(kRotate, EXECUTORCH_FN(rotate_out, kRotate)));
  (void)register_kernel(make_boxed_kernel(kGate, EXECUTORCH_FN(gate_out, kGate)));
}

}  // namespace exportable_cache::kernels
