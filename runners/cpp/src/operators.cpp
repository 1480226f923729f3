// Registers the kernels of the operators that are listed in EC_OPERATORS, and no others: the linker leaves those out.
//
// ExecuTorch generates such a file too, but its generator is only in its sources. Here templates do it, over declarations that
// CMake makes from the list.
#include <executorch/runtime/core/evalue.h>
#include <executorch/runtime/core/exec_aten/exec_aten.h>
#include <executorch/runtime/kernel/kernel_runtime_context.h>
#include <executorch/runtime/kernel/operator_registry.h>

#include <optional>
#include <string_view>
#include <tuple>
#include <utility>

namespace torch::executor::native {

using Context = ::executorch::runtime::KernelRuntimeContext;
using ::executorch::aten::ArrayRef;
using ::executorch::aten::Device;
using ::executorch::aten::IntArrayRef;
using ::executorch::aten::Layout;
using ::executorch::aten::MemoryFormat;
using ::executorch::aten::Scalar;
using ::executorch::aten::ScalarType;
using ::executorch::aten::Tensor;
using ::executorch::aten::TensorList;
using std::optional;
using std::string_view;
using Outputs0 = void;
using Outputs1 = Tensor&;
using Outputs2 = std::tuple<Tensor&, Tensor&>;
using Outputs3 = std::tuple<Tensor&, Tensor&, Tensor&>;
using Outputs4 = std::tuple<Tensor&, Tensor&, Tensor&, Tensor&>;

#define EC_KERNEL(operator_name, kernel, outputs, ...) outputs kernel(Context&, __VA_ARGS__);
#include "listed_operators.inc"
#undef EC_KERNEL

namespace {

namespace et = ::executorch::runtime;

// Conversion of a program's value to a kernel's argument.
template <class T>
struct Argument {
  static T of(et::EValue& value) { return value.to<T>(); }
};
template <class T>
struct Argument<const T&> : Argument<T> {};
template <>
struct Argument<Tensor&> {
  static Tensor& of(et::EValue& value) { return value.toTensor(); }
};
template <>
struct Argument<const Tensor&> : Argument<Tensor&> {};
template <class T>
struct Argument<optional<T>> {
  static optional<T> of(et::EValue& value) { return value.toOptional<T>(); }
};

template <class Function>
struct Boxed;
template <class Result, class... Types>
struct Boxed<Result(Context&, Types...)> {
  template <Result (*kernel)(Context&, Types...), size_t... index>
  static void call(Context& context, et::Span<et::EValue*> stack, std::index_sequence<index...>) {
    kernel(context, Argument<Types>::of(*stack[index])...);
  }
  template <Result (*kernel)(Context&, Types...)>
  static void call(Context& context, et::Span<et::EValue*> stack) {
    // As ExecuTorch does around its kernels: a failed allocation is an error of that step.
    try {
      call<kernel>(context, stack, std::index_sequence_for<Types...>());
    } catch (...) {
      context.fail(et::Error::Internal);
    }
  }
};

const et::Kernel kKernels[] = {
#define EC_KERNEL(operator_name, kernel, outputs, ...) \
  et::Kernel(operator_name, Boxed<outputs(Context&, __VA_ARGS__)>::call<kernel>),
#include "listed_operators.inc"
#undef EC_KERNEL
};

[[maybe_unused]] const auto registered = et::register_kernels({kKernels, sizeof(kKernels) / sizeof(et::Kernel)});

}  // namespace
}  // namespace torch::executor::native
