// Our operators for linear layers, of which exportable_cache/backends/executorch/own_linears.py has the meaning:
//   exportable_cache::linear_4bit.out(Tensor source, Tensor weights, Tensor? bias, int outputs, *, Tensor(a!) out)
//                   -> Tensor(a!)
//   exportable_cache::linear_float.out, the same
#include <executorch/extension/kernel_util/make_boxed_from_unboxed_functor.h>

#include <array>
#include <vector>

#include "float_linear.h"
#include "linear.h"
#include "own_operators.h"
#include "tensors.h"
#include "thread_pool.h"

namespace exportable_cache::kernels {
namespace {

using OptionalTensor = executorch::aten::optional<Tensor>;

constexpr size_t kMostDims = 8, kAlignment = 64;

// Groups of an output's weights in blocks of so many bytes; 0 where the sizes do not fit together.
int64_t groups_of(int64_t bytes, int64_t inputs) {
  const int64_t of_scales = bytes / kBlockOutputs - 4 - inputs / 2, groups = of_scales / 2;
  const bool fits = groups > 0 && inputs % groups == 0 && inputs / groups % kGroupMultiple == 0;
  return fits && bytes == bytes_of_block(inputs, groups) ? groups : 0;
}

// Memory of a thread, as much as its largest layer took.
void* scratch_of(size_t bytes) {
  thread_local std::vector<char> memory;
  if (memory.size() < bytes + kAlignment) memory.resize(bytes + kAlignment);
  const size_t beyond = reinterpret_cast<uintptr_t>(memory.data()) % kAlignment;
  return memory.data() + (kAlignment - beyond) % kAlignment;
}

bool is_float(const Tensor& tensor) { return tensor.scalar_type() == ScalarType::Float && is_contiguous(tensor); }

// Inputs of a layer, and an output of its size; 0 where something does not fit.
int64_t prepared(KernelRuntimeContext& context, const Tensor& source, const OptionalTensor& bias, int64_t outputs,
                 Tensor& out) {
  const size_t dims = static_cast<size_t>(source.dim());
  ET_KERNEL_CHECK_MSG(context,
                      dims > 0 && dims <= kMostDims && is_float(source) && is_float(out) && out.dim() == source.dim(),
                      InvalidArgument, 0, "source and output must be contiguous float32 of as many dimensions");
  ET_KERNEL_CHECK_MSG(context, outputs > 0 && (!bias || (bias->dim() == 1 && bias->size(0) == outputs && is_float(*bias))),
                      InvalidArgument, 0, "a bias must be float32 [outputs]");
  std::array<executorch::aten::SizesType, kMostDims> sizes{};
  for (size_t dim = 0; dim < dims; ++dim) sizes[dim] = source.sizes()[dim];
  sizes[dims - 1] = static_cast<executorch::aten::SizesType>(outputs);
  ET_KERNEL_CHECK(context, executorch::runtime::resize_tensor(out, {sizes.data(), dims}) == Error::Ok, InvalidArgument,
                  0);
  return source.size(source.dim() - 1);
}

Tensor& linear_4bit_out(KernelRuntimeContext& context, const Tensor& source, const Tensor& weights,
                        const OptionalTensor bias, int64_t outputs, Tensor& out) {
  const int64_t inputs = prepared(context, source, bias, outputs, out);
  if (inputs == 0) return out;
  const bool is_packed = weights.dim() == 2 && weights.scalar_type() == ScalarType::Byte && is_contiguous(weights);
  const int64_t groups = is_packed ? groups_of(weights.size(1), inputs) : 0;
  ET_KERNEL_CHECK_MSG(context, groups > 0 && weights.size(0) == blocks_of(outputs), InvalidArgument, out,
                      "weights must be uint8 blocks of 16 outputs, packed for the source's size");
  Linear linear;
  linear.rows = source.numel() / inputs, linear.inputs = inputs, linear.outputs = outputs, linear.groups = groups;
  linear.source = source.const_data_ptr<float>(), linear.weights = weights.const_data_ptr<uint8_t>();
  linear.bias = bias ? bias->const_data_ptr<float>() : nullptr, linear.out = out.mutable_data_ptr<float>();
  apply_linear(linear, runtime_threads(), scratch_of(linear_scratch(linear)));
  return out;
}

Tensor& linear_float_out(KernelRuntimeContext& context, const Tensor& source, const Tensor& weights,
                   const OptionalTensor bias, int64_t outputs, Tensor& out) {
  const int64_t inputs = prepared(context, source, bias, outputs, out);
  if (inputs == 0) return out;
  const bool fits = weights.dim() == 3 && is_float(weights) && weights.size(0) == blocks_of(outputs) &&
                    weights.size(1) == inputs && weights.size(2) == kBlockOutputs;
  ET_KERNEL_CHECK_MSG(context, fits, InvalidArgument, out, "weights must be float32 [blocks, inputs, 16]");
  FloatLinear linear;
  linear.rows = source.numel() / inputs, linear.inputs = inputs, linear.outputs = outputs;
  linear.source = source.const_data_ptr<float>(), linear.weights = weights.const_data_ptr<float>();
  linear.bias = bias ? bias->const_data_ptr<float>() : nullptr, linear.out = out.mutable_data_ptr<float>();
  apply_float_linear(linear, runtime_threads());
  return out;
}

constexpr const char kLinearFloat[] = "exportable_cache::linear_float.out", kLinear4Bit[] = "exportable_cache::linear_4bit.out";

}  // namespace

void register_linear_operators() {
  using executorch::extension::make_boxed_kernel;
  (void)executorch::runtime::register_kernel(make_boxed_kernel(kLinearFloat, EXECUTORCH_FN(linear_float_out, kLinearFloat)));
  (void)executorch::runtime::register_kernel(make_boxed_kernel(kLinear4Bit, EXECUTORCH_FN(linear_4bit_out, kLinear4Bit)));
}

}  // namespace exportable_cache::kernels
