// ExecuTorch's operators llama::custom_sdpa, update_cache and update_cache_with_indices, with this package's kernels.
//
// Schemas from executorch/extension/llm/custom_ops:
//   custom_sdpa.out(Tensor query, Tensor key, Tensor value, SymInt start_pos, Tensor? attn_mask, float drpout_p,
//                   bool is_causal, float? scale, *, Tensor(a!) out) -> Tensor(a!)
//   update_cache.out(Tensor value, Tensor(a!) cache, SymInt start_pos, *, Tensor(b!) out) -> Tensor(b!)
//   update_cache_with_indices.out(Tensor value, Tensor(a!) cache, SymInt start_pos, Tensor indices, *, Tensor(b!) out)
//                   -> Tensor(b!)
// All tensors are [batch, tokens, heads, dim], contiguous; the mask is float32 [queries, slots].
#include <executorch/extension/kernel_util/make_boxed_from_unboxed_functor.h>

#include <cinttypes>
#include <cmath>
#include <cstring>

#include "native_operators.h"
#include "registration.h"
#include "tensors.h"
#include "thread_pool.h"

namespace exportable_cache::kernels {
namespace {

View view_of(const Tensor& tensor) {
  const int64_t heads = tensor.size(2), dim = tensor.size(3);
  return {tensor.const_data_ptr(), tensor.size(1) * heads * dim, heads * dim, dim};
}

Tensor& custom_sdpa_out(KernelRuntimeContext& context, const Tensor& query, const Tensor& key, const Tensor& value,
                        const int64_t start_pos, const executorch::aten::optional<Tensor> mask, const double dropout,
                        const bool is_causal, const executorch::aten::optional<double> scale, Tensor& out) {
  (void)dropout;
  ET_KERNEL_CHECK_MSG(context, is_cache_shaped(query) && is_cache_shaped(key) && is_cache_shaped(value),
                      InvalidArgument, out, "query, key and value must be contiguous [batch, tokens, heads, dim]");
  const auto dtype = float_dtype(query.scalar_type());
  ET_KERNEL_CHECK_MSG(context,
                      dtype && key.scalar_type() == query.scalar_type() && value.scalar_type() == query.scalar_type(),
                      InvalidArgument, out, "query, key and value must be of one dtype: float32, float16 or bfloat16");
  ET_KERNEL_CHECK_MSG(context,
                      key.size(0) == query.size(0) && value.size(0) == query.size(0) && key.size(1) == value.size(1) &&
                          key.size(2) == value.size(2) && key.size(3) == query.size(3) &&
                          value.size(3) == query.size(3) && key.size(2) > 0 && query.size(2) % key.size(2) == 0,
                      InvalidArgument, out, "the shapes of query, key and value do not fit together");
  ET_KERNEL_CHECK_MSG(context, !mask.has_value() || !is_causal, InvalidArgument, out,
                      "give either a mask or is_causal, not both");
  if (mask.has_value()) {
    ET_KERNEL_CHECK_MSG(context,
                        mask->dim() == 2 && mask->scalar_type() == ScalarType::Float && is_contiguous(*mask) &&
                            mask->size(0) == query.size(1) && mask->size(1) == key.size(1),
                        InvalidArgument, out, "the mask must be float32 [%zd, %zd]", query.size(1), key.size(1));
  } else {
    ET_KERNEL_CHECK_MSG(context, start_pos >= 0 && start_pos + query.size(1) <= key.size(1), InvalidArgument, out,
                        "%zd tokens from position %" PRId64 " on do not fit %zd slots", query.size(1), start_pos,
                        key.size(1));
  }
  ET_KERNEL_CHECK(context, executorch::runtime::resize_tensor(out, query.sizes()) == Error::Ok, InvalidArgument, out);
  ET_KERNEL_CHECK(context, out.scalar_type() == query.scalar_type() && is_contiguous(out), InvalidArgument, out);

  Attention a;
  a.batch = query.size(0), a.queries = a.tokens = query.size(1), a.kv_heads = key.size(2), a.groups = query.size(2) / key.size(2);
  a.key_dim = a.value_dim = query.size(3);
  a.query_dtype = a.stored_dtype = *dtype;
  a.query = view_of(query), a.stored.key = view_of(key), a.stored.value = view_of(value);
  const View at = view_of(out);
  a.out = {out.mutable_data_ptr(), at.batch_stride, at.token_stride, at.head_stride};
  a.scale = static_cast<float>(scale.has_value() ? *scale : 1.0 / std::sqrt(static_cast<double>(a.key_dim)));
  a.slots = a.kept = key.size(1);
  // With a mask all slots are read, for any positions of the queries.
  const int64_t length = mask.has_value() ? a.slots - a.queries : start_pos;
  a.length = &length, a.length_stride = 0;
  a.causal = is_causal && !mask.has_value();
  if (mask.has_value()) a.bias = {mask->const_data_ptr<float>(), 0, 0, a.slots};
  attend_in_runtime(a);
  return out;
}

// True if the rows of `value` have the shape of the rows of `cache`.
bool rows_fit(const Tensor& value, const Tensor& cache) {
  return is_cache_shaped(value) && is_cache_shaped(cache) && value.size(0) == cache.size(0) &&
         value.size(2) == cache.size(2) && value.size(3) == cache.size(3) && value.scalar_type() == cache.scalar_type();
}

struct Rows {
  const char* from;
  char* to;
  int64_t batch, tokens, slots;
  size_t bytes;  // of a token of one batch row

  Rows(const Tensor& value, Tensor& cache)
      : from(static_cast<const char*>(value.const_data_ptr())),
        to(static_cast<char*>(cache.mutable_data_ptr())),
        batch(value.size(0)),
        tokens(value.size(1)),
        slots(cache.size(1)),
        bytes(static_cast<size_t>(value.size(2) * value.size(3)) * value.element_size()) {}

  void copy(int64_t row, int64_t token, int64_t slot, int64_t count) const {
    std::memcpy(to + (row * slots + slot) * bytes, from + (row * tokens + token) * bytes, count * bytes);
  }
};

Tensor& update_cache_out(KernelRuntimeContext& context, const Tensor& value, Tensor& cache, const int64_t start_pos,
                         Tensor& out) {
  ET_KERNEL_CHECK_MSG(
      context, rows_fit(value, cache), InvalidArgument, out,
      "value and cache must be contiguous [batch, tokens, heads, dim], of one dtype and alike but for the tokens");
  ET_KERNEL_CHECK_MSG(context, start_pos >= 0 && start_pos + value.size(1) <= cache.size(1), InvalidArgument, out,
                      "%zd tokens from slot %" PRId64 " on do not fit %zd slots", value.size(1), start_pos,
                      cache.size(1));
  const Rows rows(value, cache);
  for (int64_t row = 0; row < rows.batch; ++row) rows.copy(row, 0, start_pos, rows.tokens);
  return out;
}

Tensor& update_cache_with_indices_out(KernelRuntimeContext& context, const Tensor& value, Tensor& cache,
                                      const int64_t start_pos, const Tensor& indices, Tensor& out) {
  (void)start_pos;
  ET_KERNEL_CHECK_MSG(
      context, rows_fit(value, cache), InvalidArgument, out,
      "value and cache must be contiguous [batch, tokens, heads, dim], of one dtype and alike but for the tokens");
  ET_KERNEL_CHECK_MSG(context,
                      indices.dim() == 2 && indices.scalar_type() == ScalarType::Long && is_contiguous(indices) &&
                          indices.size(0) == value.size(0) && indices.size(1) == value.size(1),
                      InvalidArgument, out, "indices must be int64 [%zd, %zd]", value.size(0), value.size(1));
  const Rows rows(value, cache);
  const int64_t* slots = indices.const_data_ptr<int64_t>();
  const int64_t count = rows.batch * rows.tokens;
  for (int64_t i = 0; i < count; ++i) {
    ET_KERNEL_CHECK_MSG(context, slots[i] >= 0 && slots[i] < rows.slots, InvalidArgument, out,
                        "slot %" PRId64 " is not one of %" PRId64, slots[i], rows.slots);
  }
  for (int64_t i = 0; i < count; ++i) rows.copy(i / rows.tokens, i % rows.tokens, slots[i], 1);
  return out;
}

constexpr const char kCustomSdpa[] = "llama::custom_sdpa.out";
constexpr const char kUpdateCache[] = "llama::update_cache.out";
constexpr const char kUpdateCacheWithIndices[] = "llama::update_cache_with_indices.out";

bool register_operators() {
  using executorch::extension::make_boxed_kernel;
  const auto attention = make_boxed_kernel(kCustomSdpa, EXECUTORCH_FN(custom_sdpa_out, kCustomSdpa)).op_;
  const auto update = make_boxed_kernel(kUpdateCache, EXECUTORCH_FN(update_cache_out, kUpdateCache)).op_;
  const auto indexed =
      make_boxed_kernel(kUpdateCacheWithIndices, EXECUTORCH_FN(update_cache_with_indices_out, kUpdateCacheWithIndices))
          .op_;
  // A call has its output twice: as an argument and as the result.
  for (const ScalarType type : {ScalarType::Float, ScalarType::Half, ScalarType::BFloat16}) {
    const TensorKind rows{type, 4}, mask{ScalarType::Float, 2};
    register_for(kCustomSdpa, {rows, rows, rows, rows, rows}, attention);
    register_for(kCustomSdpa, {rows, rows, rows, mask, rows, rows}, attention);
  }
  for (const ScalarType type :
       {ScalarType::Float, ScalarType::Half, ScalarType::BFloat16, ScalarType::Char, ScalarType::Byte}) {
    for (const ScalarType result : {ScalarType::Float, type}) {
      const TensorKind rows{type, 4}, indices{ScalarType::Long, 2}, out{result, 1};
      register_for(kUpdateCache, {rows, rows, out, out}, update);
      register_for(kUpdateCacheWithIndices, {rows, rows, indices, out, out}, indexed);
      if (result == type) break;
    }
  }
  register_native_operators();
  register_linear_operators();
  register_embedding_operators();
  register_quantize_operator();
  register_elementwise_operators();
  return true;
}

const bool registered = is_supported() && register_operators();

}  // namespace
}  // namespace exportable_cache::kernels

// Functions for Python.
extern "C" {

// Highway's name of the instruction set in use, or "" if the processor is too old for these kernels.
__attribute__((visibility("default"))) const char* exportable_cache_kernels_target() {
  using namespace exportable_cache::kernels;
  return registered ? target_name() : "";
}

// Limits the instruction set to the named one and lower ones; 0 if this processor does not have it.
__attribute__((visibility("default"))) int exportable_cache_kernels_limit_target(const char* name) {
  return exportable_cache::kernels::limit_target(name);
}

__attribute__((visibility("default"))) int exportable_cache_kernels_threads() {
  return static_cast<int>(exportable_cache::kernels::runtime_threads().count);
}

// Number of attention calls since the library was loaded.
__attribute__((visibility("default"))) long long exportable_cache_kernels_attention_calls() {
  return exportable_cache::kernels::attention_calls();
}
}
