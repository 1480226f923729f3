#include "registration.h"

#include <deque>
#include <string>

namespace exportable_cache::kernels {

void register_for(const char* name, std::initializer_list<TensorKind> arguments,
                  executorch::runtime::OpFunction kernel) {
  using executorch::runtime::Kernel;
#ifdef EXPORTABLE_CACHE_KERNELS_ALONE
  (void)arguments;
  if (!executorch::runtime::registry_has_op_function(name))
    (void)executorch::runtime::register_kernel(Kernel(name, kernel));
#else
  // The registry keeps pointers to the keys, so they are never moved or freed.
  static auto* const keys = new std::deque<std::string>();
  std::string key = "v1/";
  for (const TensorKind& argument : arguments) {
    if (key.back() != '/') key += '|';
    key += std::to_string(static_cast<int>(argument.dtype)) + ';';
    for (size_t dim = 0; dim < argument.dims; ++dim) key += (dim ? "," : "") + std::to_string(dim);
  }
  keys->push_back(key);
  (void)executorch::runtime::register_kernel(
      Kernel(name, executorch::runtime::KernelKey(keys->back().c_str()), kernel));
#endif
}

}  // namespace exportable_cache::kernels
