#include "tensors.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <executorch/extension/tensor/tensor_ptr_maker.h>

namespace exportable_cache {
namespace {

// The last `count` values of each row.
template <class T>
void copy_floats(const executorch::aten::Tensor& tensor, size_t rows, size_t count, std::vector<float>& values) {
  const size_t size = static_cast<size_t>(tensor.numel()) / rows;
  values.resize(rows * count);
  for (size_t row = 0; row < rows; ++row) {
    const T* end = tensor.const_data_ptr<T>() + (row + 1) * size;
    std::transform(end - count, end, values.begin() + static_cast<int64_t>(row * count), [](T value) { return static_cast<float>(value); });
  }
}

template <class T>
std::vector<uint8_t> bytes_as(std::span<const float> values) {
  std::vector<uint8_t> bytes(values.size() * sizeof(T));
  for (size_t index = 0; index < values.size(); ++index) {
    const T value = static_cast<T>(values[index]);
    std::memcpy(bytes.data() + index * sizeof(T), &value, sizeof(T));
  }
  return bytes;
}

}  // namespace

using executorch::aten::ScalarType;

std::string shape_text(executorch::runtime::Span<const int32_t> sizes) {
  std::string text = "[";
  for (const int32_t size : sizes) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

bool is_float_type(ScalarType type) {
  return type == ScalarType::Float || type == ScalarType::Half || type == ScalarType::BFloat16;
}

ScalarType type_of(const std::string& dtype) {
  return dtype == "float32"    ? ScalarType::Float
         : dtype == "float16"  ? ScalarType::Half
         : dtype == "bfloat16" ? ScalarType::BFloat16
         : dtype == "int64"    ? ScalarType::Long
         : dtype == "int32"    ? ScalarType::Int
                               : ScalarType::Bool;
}

void last_floats(const executorch::aten::Tensor& tensor, size_t rows, size_t count, std::vector<float>& values) {
  switch (tensor.scalar_type()) {
    case ScalarType::Half: copy_floats<executorch::aten::Half>(tensor, rows, count, values); break;
    case ScalarType::BFloat16: copy_floats<executorch::aten::BFloat16>(tensor, rows, count, values); break;
    default: copy_floats<float>(tensor, rows, count, values); break;
  }
}

std::vector<uint8_t> bytes_of(std::span<const float> values, ScalarType type) {
  if (type == ScalarType::Half) return bytes_as<executorch::aten::Half>(values);
  if (type == ScalarType::BFloat16) return bytes_as<executorch::aten::BFloat16>(values);
  return bytes_as<float>(values);
}

executorch::extension::TensorPtr view(const void* data, std::vector<int32_t> sizes, ScalarType type) {
  return executorch::extension::from_blob(const_cast<void*>(data), std::move(sizes), type);
}

}  // namespace exportable_cache
