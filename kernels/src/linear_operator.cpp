// Linear operators, whose semantics are in exportable_cache/backends/executorch/native/linears.py:
//   exportable_cache::linear_4bit.out(Tensor source, Tensor weights, Tensor? bias, int outputs, *, Tensor(a!) out)
//                   -> Tensor(a!)
//   exportable_cache::linears_4bit.out(Tensor source, Tensor[] weights, Tensor[] biases, int[] outputs, *,
//                   Tensor(a!)[] out) -> ()
//   exportable_cache::linear_4bit_float.out and linears_4bit_float.out, the same, with float32 scales, zero points and float
//                   inputs; and linear_4bit_float16.out and linears_4bit_float16.out, with float16 scales
//   exportable_cache::linear_8bit_float.out, linear_8bit_float16.out and linears_..., the same, of 8 bits
//   exportable_cache::linear_4bit_shifted.out, linear_8bit_shifted.out and linears_..., with float32 scales and zero points
//   exportable_cache::linear_float.out and linears_float.out, and of float16 and bfloat16, the same
//   exportable_cache::linear_bfloat16_rounded.out and linears_bfloat16_rounded.out, the same, with inputs rounded to bfloat16
// and those of experts.py, with weights of all experts:
//   exportable_cache::experts_4bit.out(Tensor source, Tensor weights, Tensor? bias, Tensor indices, Tensor? factors,
//                   int outputs, *, Tensor(a!) out) -> Tensor(a!)
//   exportable_cache::experts_float.out, and of float16 and bfloat16, the same
#include <executorch/extension/kernel_util/make_boxed_from_unboxed_functor.h>
#include <executorch/runtime/kernel/operator_registry.h>

#include <array>
#include <cinttypes>
#include <vector>

#include "experts.h"
#include "float_linear.h"
#include "linear.h"
#include "native_operators.h"
#include "tensors.h"
#include "thread_pool.h"

namespace exportable_cache::kernels {
namespace {

using executorch::runtime::EValue;
using executorch::runtime::Span;
using OptionalTensor = executorch::aten::optional<Tensor>;

constexpr size_t kAlignment = 64;

// Scratch memory of a thread, as large as its largest layer needed.
void* scratch_of(size_t bytes) {
  thread_local std::vector<char> memory;
  if (memory.size() < bytes + kAlignment) memory.resize(bytes + kAlignment);
  const size_t beyond = reinterpret_cast<uintptr_t>(memory.data()) % kAlignment;
  return memory.data() + (kAlignment - beyond) % kAlignment;
}

// Number of inputs of layers with a source; 0 if it does not fit.
int64_t inputs_of(KernelRuntimeContext& context, const Tensor& source) {
  const size_t dims = static_cast<size_t>(source.dim());
  ET_KERNEL_CHECK_MSG(context, dims > 0 && dims <= kMostDims && is_float(source), InvalidArgument, 0,
                      "source must be contiguous float32");
  return source.size(source.dim() - 1);
}

// Resizes the output; false if a size does not fit.
bool is_prepared(KernelRuntimeContext& context, const Tensor& source, const Tensor* bias, int64_t outputs, Tensor& out) {
  ET_KERNEL_CHECK_MSG(context, is_float(out) && out.dim() == source.dim(), InvalidArgument, false,
                      "source and output must be contiguous float32 of as many dimensions");
  ET_KERNEL_CHECK_MSG(context, outputs > 0 && (!bias || (bias->dim() == 1 && bias->size(0) == outputs && is_float(*bias))),
                      InvalidArgument, false, "a bias must be float32 [outputs]");
  ET_KERNEL_CHECK(context, resize_rows(source, static_cast<size_t>(source.dim()) - 1, outputs, out), InvalidArgument,
                  false);
  return true;
}

// True if weights of a kind fit, after `leading` dimensions; they are then set in the layer.
template <class L>
bool has_blocks(KernelRuntimeContext& context, const Tensor& weights, int64_t inputs, int64_t outputs, L& linear,
                ssize_t leading) {
  ET_KERNEL_CHECK_MSG(context, set_blocks(weights, inputs, outputs, linear, leading), InvalidArgument, false,
                      "weights must be uint8 blocks of 16 outputs, packed for the source's size");
  return true;
}
bool has_weights(KernelRuntimeContext& context, const Tensor& weights, int64_t inputs, int64_t outputs, Linear& linear,
                 ssize_t leading = 0) {
  return has_blocks(context, weights, inputs, outputs, linear, leading);
}
template <class S, class Z, int kBits>
bool has_weights(KernelRuntimeContext& context, const Tensor& weights, int64_t inputs, int64_t outputs,
                 GroupedLinearOf<S, Z, kBits>& linear, ssize_t leading = 0) {
  return has_blocks(context, weights, inputs, outputs, linear, leading);
}

template <class W>
bool has_weights(KernelRuntimeContext& context, const Tensor& weights, int64_t inputs, int64_t outputs,
                 FloatLinearOf<W>& linear, ssize_t leading = 0) {
  linear.weights = packed_weights<W>(weights, inputs, outputs, leading);
  ET_KERNEL_CHECK_MSG(context, linear.weights != nullptr, InvalidArgument, false,
                      "weights must be blocks of 16 outputs, of the operator's type and the source's size");
  return true;
}

// Converts a layer for the kernel; false if a tensor does not fit.
template <class L>
bool is_made(KernelRuntimeContext& context, const Tensor& source, int64_t inputs, const Tensor& weights,
             const Tensor* bias, int64_t outputs, Tensor& out, L& linear) {
  if (!is_prepared(context, source, bias, outputs, out)) return false;
  if (!has_weights(context, weights, inputs, outputs, linear)) return false;
  linear.rows = source.numel() / inputs, linear.inputs = inputs, linear.outputs = outputs;
  linear.source = source.const_data_ptr<float>(), linear.out = out.mutable_data_ptr<float>();
  linear.bias = bias ? bias->const_data_ptr<float>() : nullptr;
  return true;
}

void apply(const Linear* layers, size_t count) {
  apply_linears(layers, count, runtime_threads(), scratch_of(linear_scratch(*layers)));
}
void apply(const RoundedLinear* layers, size_t count) {
  apply_float_linears(layers, count, runtime_threads(), scratch_of(rounded_scratch(*layers)));
}
template <class W>
void apply(const FloatLinearOf<W>* layers, size_t count) {
  apply_float_linears(layers, count, runtime_threads());
}
template <class S, class Z, int kBits>
void apply(const GroupedLinearOf<S, Z, kBits>* layers, size_t count) {
  apply_float_linears(layers, count, runtime_threads());
}

template <class L>
Tensor& linear_out(KernelRuntimeContext& context, const Tensor& source, const Tensor& weights, const OptionalTensor bias,
                   int64_t outputs, Tensor& out) {
  const int64_t inputs = inputs_of(context, source);
  L linear;
  if (inputs > 0 && is_made(context, source, inputs, weights, bias ? &*bias : nullptr, outputs, out, linear)) {
    apply(&linear, 1);
  }
  return out;
}

// ExecuTorch's kernel wrapper supports one output tensor only.
template <class L>
void linears_out(KernelRuntimeContext& context, Span<EValue*> stack) {
  const Tensor& source = stack[0]->toTensor();
  const auto weights = stack[1]->toTensorList(), biases = stack[2]->toTensorList(), out = stack[4]->toTensorList();
  const auto outputs = stack[3]->toIntList();
  const size_t count = weights.size();
  ET_KERNEL_CHECK_MSG(context,
                      count > 0 && count <= kMostLayers && outputs.size() == count && out.size() == count &&
                          (biases.empty() || biases.size() == count),
                      InvalidArgument, , "1 to 4 layers have as many weights, numbers of outputs and outputs, and biases or none");
  const int64_t inputs = inputs_of(context, source);
  if (inputs == 0) return;
  std::array<L, kMostLayers> layers;
  for (size_t i = 0; i < count; ++i) {
    const Tensor* const bias = biases.empty() ? nullptr : &biases[i];
    Tensor result = out[i];
    if (!is_made(context, source, inputs, weights[i], bias, outputs[i], result, layers[i])) return;
  }
  apply(layers.data(), count);
}

bool is_float_shaped(const Tensor& tensor, int64_t rows, int64_t columns) {
  return is_float(tensor) && tensor.dim() == 2 && tensor.size(0) == rows && tensor.size(1) == columns;
}

// Converts choices for the kernel; false if a tensor does not fit, or an index is not one of an expert.
bool is_chosen(KernelRuntimeContext& context, const Tensor& source, const Tensor& weights, const Tensor& indices,
               const OptionalTensor& factors, Choice& choice) {
  ET_KERNEL_CHECK_MSG(context,
                      indices.dim() == 2 && indices.size(1) > 0 && indices.scalar_type() == ScalarType::Long &&
                          is_contiguous(indices),
                      InvalidArgument, false, "indices must be int64 [tokens, choices], with at least one choice");
  choice.tokens = indices.size(0), choice.choices = indices.size(1);
  choice.experts = weights.dim() > 0 ? weights.size(0) : 0;
  choice.is_shared = source.dim() == 2;
  ET_KERNEL_CHECK_MSG(context,
                      (choice.is_shared || (source.dim() == 3 && source.size(1) == choice.choices)) &&
                          source.size(0) == choice.tokens,
                      InvalidArgument, false, "source must be [tokens, inputs] or [tokens, choices, inputs]");
  ET_KERNEL_CHECK_MSG(context, !factors || is_float_shaped(*factors, choice.tokens, choice.choices), InvalidArgument, false,
                      "factors must be float32 [tokens, choices]");
  choice.indices = indices.const_data_ptr<int64_t>();
  choice.factors = factors ? factors->const_data_ptr<float>() : nullptr;
  for (int64_t slot = 0; slot < choice.slots(); ++slot) {
    ET_KERNEL_CHECK_MSG(context, choice.indices[slot] >= 0 && choice.indices[slot] < choice.experts, InvalidArgument, false,
                        "expert %" PRId64 " is out of range (%" PRId64 " experts)", choice.indices[slot], choice.experts);
  }
  return true;
}

template <class L>
Tensor& experts_out(KernelRuntimeContext& context, const Tensor& source, const Tensor& weights, const OptionalTensor bias,
                    const Tensor& indices, const OptionalTensor factors, int64_t outputs, Tensor& out) {
  const int64_t inputs = inputs_of(context, source);
  Choice choice;
  L layer;
  if (inputs == 0 || !is_chosen(context, source, weights, indices, factors, choice)) return out;
  ET_KERNEL_CHECK_MSG(context, outputs > 0 && (!bias || is_float_shaped(*bias, choice.experts, outputs)), InvalidArgument,
                      out, "a bias must be float32 [experts, outputs]");
  if (!has_weights(context, weights, inputs, outputs, layer, 1)) return out;
  const size_t kept = factors ? 1 : 2;
  ET_KERNEL_CHECK_MSG(context, is_float(out) && resize_rows(indices, kept, outputs, out), InvalidArgument, out,
                      "the output must be contiguous float32 [tokens, outputs], without factors [tokens, choices, outputs]");
  layer.inputs = inputs, layer.outputs = outputs;
  layer.source = source.const_data_ptr<float>(), layer.out = out.mutable_data_ptr<float>();
  layer.bias = bias ? bias->const_data_ptr<float>() : nullptr;
  apply_experts(layer, choice, runtime_threads(), scratch_of(experts_scratch(layer, choice)));
  return out;
}

constexpr const char kLinearFloat[] = "exportable_cache::linear_float.out",
                     kLinearFloat16[] = "exportable_cache::linear_float16.out",
                     kLinearBFloat16[] = "exportable_cache::linear_bfloat16.out",
                     kLinearRounded[] = "exportable_cache::linear_bfloat16_rounded.out",
                     kLinear4Bit[] = "exportable_cache::linear_4bit.out",
                     kLinearGrouped[] = "exportable_cache::linear_4bit_float.out",
                     kLinearGrouped16[] = "exportable_cache::linear_4bit_float16.out",
                     kLinear8Bit[] = "exportable_cache::linear_8bit_float.out",
                     kLinear8Bit16[] = "exportable_cache::linear_8bit_float16.out",
                     kLinearShifted[] = "exportable_cache::linear_4bit_shifted.out",
                     kLinear8BitShifted[] = "exportable_cache::linear_8bit_shifted.out",
                     kExpertsFloat[] = "exportable_cache::experts_float.out",
                     kExpertsFloat16[] = "exportable_cache::experts_float16.out",
                     kExpertsBFloat16[] = "exportable_cache::experts_bfloat16.out",
                     kExperts4Bit[] = "exportable_cache::experts_4bit.out";

}  // namespace

void register_linear_operators() {
  using executorch::extension::make_boxed_kernel;
  using executorch::runtime::Kernel;
  using executorch::runtime::register_kernel;
  (void)register_kernel(make_boxed_kernel(kLinearFloat, EXECUTORCH_FN(linear_out<FloatLinear>, kLinearFloat)));
  (void)register_kernel(make_boxed_kernel(kLinearFloat16, EXECUTORCH_FN(linear_out<Float16Linear>, kLinearFloat16)));
  (void)register_kernel(make_boxed_kernel(kLinearBFloat16, EXECUTORCH_FN(linear_out<BFloat16Linear>, kLinearBFloat16)));
  (void)register_kernel(make_boxed_kernel(kLinearRounded, EXECUTORCH_FN(linear_out<RoundedLinear>, kLinearRounded)));
  (void)register_kernel(make_boxed_kernel(kLinear4Bit, EXECUTORCH_FN(linear_out<Linear>, kLinear4Bit)));
  (void)register_kernel(make_boxed_kernel(kLinearGrouped, EXECUTORCH_FN(linear_out<GroupedLinear>, kLinearGrouped)));
  (void)register_kernel(make_boxed_kernel(kLinearGrouped16, EXECUTORCH_FN(linear_out<Grouped16Linear>, kLinearGrouped16)));
  (void)register_kernel(make_boxed_kernel(kLinear8Bit, EXECUTORCH_FN(linear_out<Grouped8BitLinear>, kLinear8Bit)));
  (void)register_kernel(make_boxed_kernel(kLinear8Bit16, EXECUTORCH_FN(linear_out<Grouped16Of8BitLinear>, kLinear8Bit16)));
  (void)register_kernel(make_boxed_kernel(kLinearShifted, EXECUTORCH_FN(linear_out<ShiftedLinear>, kLinearShifted)));
  (void)register_kernel(make_boxed_kernel(kLinear8BitShifted, EXECUTORCH_FN(linear_out<Shifted8BitLinear>, kLinear8BitShifted)));
  (void)register_kernel(make_boxed_kernel(kExpertsFloat, EXECUTORCH_FN(experts_out<FloatLinear>, kExpertsFloat)));
  (void)register_kernel(make_boxed_kernel(kExpertsFloat16, EXECUTORCH_FN(experts_out<Float16Linear>, kExpertsFloat16)));
  (void)register_kernel(make_boxed_kernel(kExpertsBFloat16, EXECUTORCH_FN(experts_out<BFloat16Linear>, kExpertsBFloat16)));
  (void)register_kernel(make_boxed_kernel(kExperts4Bit, EXECUTORCH_FN(experts_out<Linear>, kExperts4Bit)));
  (void)register_kernel(Kernel("exportable_cache::linears_float.out", linears_out<FloatLinear>));
  (void)register_kernel(Kernel("exportable_cache::linears_float16.out", linears_out<Float16Linear>));
  (void)register_kernel(Kernel("exportable_cache::linears_bfloat16.out", linears_out<BFloat16Linear>));
  (void)register_kernel(Kernel("exportable_cache::linears_bfloat16_rounded.out", linears_out<RoundedLinear>));
  (void)register_kernel(Kernel("exportable_cache::linears_4bit.out", linears_out<Linear>));
  (void)register_kernel(Kernel("exportable_cache::linears_4bit_float.out", linears_out<GroupedLinear>));
  (void)register_kernel(Kernel("exportable_cache::linears_4bit_float16.out", linears_out<Grouped16Linear>));
  (void)register_kernel(Kernel("exportable_cache::linears_8bit_float.out", linears_out<Grouped8BitLinear>));
  (void)register_kernel(Kernel("exportable_cache::linears_8bit_float16.out", linears_out<Grouped16Of8BitLinear>));
  (void)register_kernel(Kernel("exportable_cache::linears_4bit_shifted.out", linears_out<ShiftedLinear>));
  (void)register_kernel(Kernel("exportable_cache::linears_8bit_shifted.out", linears_out<Shifted8BitLinear>));
}

}  // namespace exportable_cache::kernels
