// Tensors of ExecuTorch as numbers and back.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <executorch/extension/tensor/tensor_ptr.h>
#include <executorch/runtime/core/exec_aten/exec_aten.h>
#include <executorch/runtime/core/span.h>

namespace exportable_cache {

/// "[1, 2, 3]".
std::string shape_text(executorch::runtime::Span<const int32_t> sizes);

/// True for float32, float16 and bfloat16.
bool is_float_type(executorch::aten::ScalarType type);

/// The type of a dtype's name.
executorch::aten::ScalarType type_of(const std::string& dtype);

/// The last `count` values of each row.
void last_floats(const executorch::aten::Tensor& tensor, size_t rows, size_t count, std::vector<float>& values);

/// Values in a program's dtype.
std::vector<uint8_t> bytes_of(std::span<const float> values, executorch::aten::ScalarType type);

/// A tensor over memory that stays the caller's. The runtime's tensors have no const view, but a method does not write to its inputs.
executorch::extension::TensorPtr view(const void* data, std::vector<int32_t> sizes,
                                      executorch::aten::ScalarType type = executorch::aten::ScalarType::Long);

}  // namespace exportable_cache
