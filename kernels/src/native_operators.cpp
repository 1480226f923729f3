// Attention and cache operators, whose semantics are in exportable_cache/backends/executorch/native/operators.py:
//   exportable_cache::attention.out(Tensor query, Tensor[] stored, Tensor[] fresh, Tensor length, float scaling,
//                   int kept, int window, int chunk, float softcap, Tensor? sinks, Tensor? bias, *, Tensor(a!) out)
//                   -> Tensor(a!)
//   exportable_cache::attention_rounded.out, the same, with operands of many rows rounded to bfloat16
//   exportable_cache::write.out(Tensor rows, Tensor(a!) cache, Tensor length, int kept, Tensor? after, *, Tensor(b!)
//                   out) -> Tensor(b!)
#include "native_operators.h"

#include <executorch/extension/kernel_util/make_boxed_from_unboxed_functor.h>

#include <cinttypes>
#include <cstring>

#include "tensors.h"
#include "thread_pool.h"

namespace exportable_cache::kernels {
namespace {

// Longer than any sequence, so that adding a length does not overflow.
constexpr int64_t kMostTokens = int64_t{1} << 40;

using Tensors = executorch::aten::ArrayRef<Tensor>;
using OptionalTensor = executorch::aten::optional<Tensor>;

std::optional<Dtype> stored_dtype(ScalarType type) {
  switch (type) {
    case ScalarType::Char: return Dtype::kInt8;
    case ScalarType::Byte: return Dtype::kInt4;
    default: return float_dtype(type);
  }
}

// Strides of [batch * heads, tokens, 1, dim].
View rows_of(const Tensor& rows, int64_t heads) {
  const int64_t dim = rows.size(3), of_head = rows.size(1) * dim;
  return {rows.const_data_ptr(), heads * of_head, dim, of_head};
}

Stored stored_of(Tensors parts, int64_t heads) {
  Stored stored{rows_of(parts[0], heads), rows_of(parts.back(), heads), {}, {}};
  if (parts.size() > 1) stored.value = rows_of(parts[1], heads);
  if (parts.size() == 4) stored.key_scale = rows_of(parts[2], heads), stored.value_scale = rows_of(parts[3], heads);
  return stored;
}

// True if these are keys, values and, for integers, the scales of both, [rows, tokens, 1, ...]; or float keys alone, which are
// the values as well.
bool are_parts(Tensors parts, int64_t rows, int64_t tokens) {
  if (parts.size() != 1 && parts.size() != 2 && parts.size() != 4) return false;
  for (size_t i = 0; i < parts.size(); ++i) {
    const Tensor& part = parts[i];
    if (!is_cache_shaped(part) || part.size(0) != rows || part.size(1) != tokens || part.size(2) != 1) return false;
    if (i >= 2 && (part.scalar_type() != ScalarType::Float || part.size(3) != 1)) return false;
  }
  const auto dtype = stored_dtype(parts[0].scalar_type());
  if (!dtype || is_whole(*dtype) != (parts.size() == 4)) return false;
  return parts.size() == 1 || parts[1].scalar_type() == parts[0].scalar_type();
}

bool are_alike(Tensors parts, Tensors others) {
  for (size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].scalar_type() != others[i].scalar_type() || parts[i].size(3) != others[i].size(3)) return false;
  }
  return true;
}

bool is_length(int64_t number) { return number >= 0 && number < kMostTokens; }

bool are_lengths(const Tensor& length, int64_t batch) {
  return length.dim() == 1 && length.size(0) == batch && length.scalar_type() == ScalarType::Long;
}

// Strides of a tensor [batch or 1, heads or 1, queries or 1, positions].
bool fits(const Tensor& addend, int64_t batch, int64_t heads, int64_t queries) {
  const auto serves = [&](int64_t dim, int64_t size) { return addend.size(dim) == 1 || addend.size(dim) == size; };
  return is_cache_shaped(addend) && addend.scalar_type() == ScalarType::Float && serves(0, batch) &&
         serves(1, heads) && serves(2, queries);
}

Addend addend_of(const Tensor& addend) {
  const int64_t of_query = addend.size(3), of_head = addend.size(2) * of_query, of_row = addend.size(1) * of_head;
  return {addend.const_data_ptr<float>(), addend.size(0) == 1 ? 0 : of_row, addend.size(1) == 1 ? 0 : of_head,
          addend.size(2) == 1 ? 0 : of_query};
}

template <bool is_rounded>
Tensor& attention_out(KernelRuntimeContext& context, const Tensor& query, Tensors stored, Tensors fresh,
                      const Tensor& length, double scaling, int64_t kept, int64_t window, int64_t chunk,
                      double softcap, const OptionalTensor sinks, const OptionalTensor bias, Tensor& out) {
  ET_KERNEL_CHECK_MSG(context,
                      is_cache_shaped(query) && is_cache_shaped(out) && float_dtype(query.scalar_type()) &&
                          out.scalar_type() == query.scalar_type(),
                      InvalidArgument, out, "query and output must be contiguous, float, and of four dimensions");
  const int64_t batch = query.size(0), heads = query.size(1), queries = query.size(2);
  ET_KERNEL_CHECK_MSG(context, !stored.empty() && stored[0].dim() == 4 && batch > 0 && stored[0].size(0) % batch == 0,
                      InvalidArgument, out, "keys must be [batch * heads, slots, 1, dim]");
  const int64_t rows = stored[0].size(0), kv_heads = rows / batch, slots = stored[0].size(1);
  ET_KERNEL_CHECK_MSG(context, are_parts(stored, rows, slots), InvalidArgument, out,
                      "keys and values must be of one dtype, float, int8 or uint8, with float32 scales of whole numbers");
  const int64_t tokens = fresh.empty() || fresh[0].dim() != 4 ? 0 : fresh[0].size(1);
  ET_KERNEL_CHECK_MSG(context,
                      tokens >= queries && fresh.size() == stored.size() && are_parts(fresh, rows, tokens) &&
                          are_alike(fresh, stored),
                      InvalidArgument, out, "new keys and values must be as those that are stored, of all queries");
  const Dtype dtype = *stored_dtype(stored[0].scalar_type());
  const int64_t packed = dtype == Dtype::kInt4 ? 2 : 1, value_dim = stored[stored.size() > 1].size(3) * packed;
  ET_KERNEL_CHECK_MSG(context,
                      kv_heads > 0 && heads % kv_heads == 0 && stored[0].size(3) * packed == query.size(3) &&
                          kept >= 0 && kept <= slots && window >= 0 && chunk >= 0 && softcap >= 0.0,
                      InvalidArgument, out, "the sizes of query, keys and slots do not fit together");
  ET_KERNEL_CHECK_MSG(context, are_lengths(length, batch), InvalidArgument, out, "lengths must be int64 [%" PRId64 "]",
                      batch);
  ET_KERNEL_CHECK_MSG(context, !sinks || (fits(*sinks, batch, heads, queries) && sinks->size(3) == 1), InvalidArgument,
                      out, "sinks must be float32 [batch or 1, heads, queries or 1, 1]");
  ET_KERNEL_CHECK_MSG(context, !bias || fits(*bias, batch, heads, queries), InvalidArgument, out,
                      "a bias must be float32 [batch or 1, heads or 1, queries or 1, positions]");
  const int64_t* lengths = length.const_data_ptr<int64_t>();
  for (int64_t row = 0; row < batch; ++row) {
    const int64_t end = is_length(lengths[row]) ? lengths[row] + tokens : 0;
    ET_KERNEL_CHECK_MSG(context, is_length(lengths[row]) && (kept < slots || end <= slots), InvalidArgument, out,
                        "%" PRId64 " tokens from position %" PRId64 " on do not fit %" PRId64 " slots", tokens,
                        lengths[row], slots);
    ET_KERNEL_CHECK_MSG(context, !bias || end <= bias->size(3), InvalidArgument, out,
                        "position %" PRId64 " has no bias", end - 1);
  }
  using Size = executorch::aten::SizesType;
  const Size sizes[] = {static_cast<Size>(batch), static_cast<Size>(queries), static_cast<Size>(heads),
                        static_cast<Size>(value_dim)};
  ET_KERNEL_CHECK(context, executorch::runtime::resize_tensor(out, {sizes, 4}) == Error::Ok, InvalidArgument, out);

  Attention a;
  a.batch = batch, a.kv_heads = kv_heads, a.groups = heads / kv_heads;
  a.queries = queries, a.tokens = tokens;
  a.key_dim = query.size(3), a.value_dim = value_dim;
  a.query_dtype = *float_dtype(query.scalar_type()), a.stored_dtype = dtype;
  a.query = {query.const_data_ptr(), heads * queries * a.key_dim, a.key_dim, queries * a.key_dim};
  a.out = {out.mutable_data_ptr(), queries * heads * value_dim, heads * value_dim, value_dim};
  a.slots = slots, a.kept = kept, a.length = lengths;
  a.stored = stored_of(stored, kv_heads);
  // If no slot is overwritten, the new tokens are in their slots already.
  if (kept < slots) a.fresh = stored_of(fresh, kv_heads);
  a.window = window, a.chunk = chunk, a.rounded = is_rounded;
  a.scale = static_cast<float>(scaling), a.softcap = static_cast<float>(softcap);
  if (sinks) a.sink = addend_of(*sinks);
  if (bias) a.bias = addend_of(*bias);
  attend_in_runtime(a);
  return out;
}

Tensor& write_out(KernelRuntimeContext& context, const Tensor& rows, Tensor& cache, const Tensor& length, int64_t kept,
                  const OptionalTensor after, Tensor& out) {
  (void)after;
  ET_KERNEL_CHECK_MSG(context,
                      is_cache_shaped(rows) && is_cache_shaped(cache) && rows.size(0) == cache.size(0) &&
                          rows.size(2) == 1 && cache.size(2) == 1 && rows.size(3) == cache.size(3) &&
                          rows.scalar_type() == cache.scalar_type(),
                      InvalidArgument, out, "rows must be as the cache, [batch * heads, tokens, 1, dim]");
  const int64_t batch = length.dim() == 1 ? length.size(0) : 0, tokens = rows.size(1), slots = cache.size(1);
  ET_KERNEL_CHECK_MSG(context,
                      batch > 0 && are_lengths(length, batch) && rows.size(0) % batch == 0 && kept >= 0 && kept <= slots,
                      InvalidArgument, out, "lengths must be int64, one for each row of the batch");
  const int64_t* lengths = length.const_data_ptr<int64_t>();
  for (int64_t row = 0; row < batch; ++row) {
    ET_KERNEL_CHECK_MSG(context, is_length(lengths[row]) && (kept < slots || lengths[row] + tokens <= slots),
                        InvalidArgument, out, "%" PRId64 " tokens from position %" PRId64 " on do not fit %" PRId64
                        " slots", tokens, lengths[row], slots);
  }
  const int64_t heads = rows.size(0) / batch, ring = slots - kept;
  const size_t bytes = static_cast<size_t>(rows.size(3)) * rows.element_size();
  const char* from = static_cast<const char*>(rows.const_data_ptr());
  char* to = static_cast<char*>(cache.mutable_data_ptr());
  for (int64_t head = 0; head < rows.size(0); ++head) {
    const int64_t start = lengths[head / heads];
    for (int64_t token = 0; token < tokens;) {
      const int64_t position = start + token;
      const int64_t slot = position < kept ? position : kept + (position - kept) % ring;
      // Copies up to the end of the kept slots or of the ring at once.
      const int64_t count = std::min(tokens - token, (slot < kept ? kept : slots) - slot);
      std::memcpy(to + (head * slots + slot) * bytes, from + (head * tokens + token) * bytes, count * bytes);
      token += count;
    }
  }
  return out;
}

constexpr const char kAttention[] = "exportable_cache::attention.out",
                     kRounded[] = "exportable_cache::attention_rounded.out", kWrite[] = "exportable_cache::write.out";

}  // namespace

void register_native_operators() {
  using executorch::extension::make_boxed_kernel;
  using executorch::runtime::register_kernel;
  (void)register_kernel(make_boxed_kernel(kAttention, EXECUTORCH_FN(attention_out<false>, kAttention)));
  (void)register_kernel(make_boxed_kernel(kRounded, EXECUTORCH_FN(attention_out<true>, kRounded)));
  (void)register_kernel(make_boxed_kernel(kWrite, EXECUTORCH_FN(write_out, kWrite)));
}

}  // namespace exportable_cache::kernels
