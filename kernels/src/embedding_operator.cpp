// Embedding operators, whose semantics are in exportable_cache/backends/executorch/native/linears.py:
//   exportable_cache::embedding_bfloat16.out(Tensor weights, Tensor tokens, int rows, int dim, *, Tensor(a!) out)
//                   -> Tensor(a!)
//   exportable_cache::embedding_float16.out, and embedding_4bit_float.out and the other forms of weights in groups, the same
#include <executorch/extension/kernel_util/make_boxed_from_unboxed_functor.h>
#include <executorch/runtime/kernel/operator_registry.h>

#include "native_operators.h"
#include "tensors.h"

namespace exportable_cache::kernels {
namespace {

// A table of floats, or of integers in groups, that is packed as the weights of a layer.
template <class W>
struct FloatTable {
  const W* weights = nullptr;
  int64_t dim = 0;

  bool set(const Tensor& packed, int64_t rows, int64_t columns) {
    weights = packed_weights<W>(packed, columns, rows), dim = columns;
    return weights != nullptr;
  }
  void read(int64_t index, float* row) const { row_of_weights(weights, dim, index, row); }
};

template <class L>
struct GroupedTable {
  L layer;

  bool set(const Tensor& packed, int64_t rows, int64_t columns) {
    layer.inputs = columns, layer.outputs = rows;
    return set_blocks(packed, columns, rows, layer);
  }
  void read(int64_t index, float* row) const { row_of_weights(layer, index, row); }
};

template <class Table>
Tensor& embedding_out(KernelRuntimeContext& context, const Tensor& weights, const Tensor& tokens, int64_t rows,
                      int64_t dim, Tensor& out) {
  const size_t dims = static_cast<size_t>(tokens.dim());
  Table table;
  ET_KERNEL_CHECK_MSG(context, table.set(weights, rows, dim), InvalidArgument, out,
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
    table.read(ids[i], numbers + i * dim);
  }
  return out;
}

constexpr const char kFloat16[] = "exportable_cache::embedding_float16.out",
                     kBFloat16[] = "exportable_cache::embedding_bfloat16.out",
                     k4Bit[] = "exportable_cache::embedding_4bit_float.out",
                     k4Bit16[] = "exportable_cache::embedding_4bit_float16.out",
                     k4BitShifted[] = "exportable_cache::embedding_4bit_shifted.out",
                     k8Bit[] = "exportable_cache::embedding_8bit_float.out",
                     k8Bit16[] = "exportable_cache::embedding_8bit_float16.out",
                     k8BitShifted[] = "exportable_cache::embedding_8bit_shifted.out";

template <class Table, const char* kName>
void register_table() {
  (void)executorch::runtime::register_kernel(
      executorch::extension::make_boxed_kernel(kName, EXECUTORCH_FN(embedding_out<Table>, kName)));
}

}  // namespace

void register_embedding_operators() {
  register_table<FloatTable<hwy::float16_t>, kFloat16>();
  register_table<FloatTable<BFloat16Pair>, kBFloat16>();
  register_table<GroupedTable<GroupedLinear>, k4Bit>();
  register_table<GroupedTable<Grouped16Linear>, k4Bit16>();
  register_table<GroupedTable<ShiftedLinear>, k4BitShifted>();
  register_table<GroupedTable<Grouped8BitLinear>, k8Bit>();
  register_table<GroupedTable<Grouped16Of8BitLinear>, k8Bit16>();
  register_table<GroupedTable<Shifted8BitLinear>, k8BitShifted>();
}

}  // namespace exportable_cache::kernels
