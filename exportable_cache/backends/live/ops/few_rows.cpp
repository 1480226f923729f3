// Linear layers of few rows, as decode steps have them, over weights in float32, in bfloat16, or in 8 bits with scales.
//
// A step reads every weight once and is limited by how fast memory delivers them. So weights keep the model's layout,
// [out, in], and are read once, in order, with prefetches of the next ones. This file is compiled on the user's machine
// for its processor, with vector extensions of the compiler.
#include "row_products.h"

#include <atomic>

namespace {

// The remaining units of a thread. It takes them from the front, and threads that have finished steal from the back,
// because cores do not get equal memory bandwidth.
class alignas(kLine) Share {
 public:
  void set(uint64_t begin, uint64_t end) { left_.store(begin << 32 | end, std::memory_order_relaxed); }
  // Takes a unit and returns the following one in next, -1 for none.
  bool take(bool is_own, int64_t& unit, int64_t& next) {
    uint64_t left = left_.load(std::memory_order_relaxed);
    while (true) {
      const uint64_t begin = left >> 32, end = left & 0xffffffff;
      if (begin >= end) return false;
      const uint64_t rest = is_own ? (begin + 1) << 32 | end : begin << 32 | (end - 1);
      if (left_.compare_exchange_weak(left, rest, std::memory_order_relaxed)) {
        unit = static_cast<int64_t>(is_own ? begin : end - 1);
        next = end - begin < 2 ? -1 : is_own ? unit + 1 : unit - 1;
        return true;
      }
    }
  }

 private:
  std::atomic<uint64_t> left_{0};
};

template <class W>
struct Work {
  const Layers<W>& layers;
  Blocks blocks;
  std::vector<Share> shares;

  // Runs on one thread: its share first, then units stolen from other shares.
  void run(int64_t own) {
    thread_local Scratch scratch;
    const int64_t padded = (layers.in + kLanes - 1) / kLanes * kLanes;
    float* rows = scratch.numbers(padded * kMostRows * blocks.count);
    for (int64_t b = 0; b < blocks.count; ++b) {
      blocks.with_capacity(b, [&](auto capacity) {
        pack(layers, blocks.first(b), blocks.size(b), capacity, rows + b * padded * kMostRows);
      });
    }
    const int64_t threads = static_cast<int64_t>(shares.size());
    for (int64_t i = 0; i < threads; ++i) {
      int64_t unit, next;
      while (shares[(own + i) % threads].take(i == 0, unit, next)) one(unit, next, rows, padded * kMostRows);
    }
  }

 private:
  // Computes all rows of a unit. After the first block of rows the weights are in the cache.
  void one(int64_t unit, int64_t next, const float* rows, int64_t stride) const {
    const Layer<W>& layer = layers.find(unit);
    const int64_t end = std::min(unit + kOutputs, layer.out);
    int64_t ahead = 0;
    if (next >= 0) {
      const Layer<W>& other = layers.find(next);
      ahead = (reinterpret_cast<intptr_t>(other.weights.data + next * layers.in) -
               reinterpret_cast<intptr_t>(layer.weights.data + unit * layers.in)) /
              intptr_t{sizeof(typename W::Stored)};
    }
    for (int64_t b = 0; b < blocks.count; ++b) {
      // Fewer rows leave registers for more outputs, which keeps more memory requests in flight.
      blocks.with_capacity(b, [&](auto capacity) {
        constexpr int R = capacity;
        outputs_of<W, R, std::min(kSums / R, kMostOutputs)>(layer, blocks.first(b), blocks.size(b), rows + b * stride,
                                                            unit, end, b == 0 ? ahead : 0);
      });
    }
  }
};

template <class W>
void some_shares(int64_t begin, int64_t end, void* context) {
  for (; begin < end; ++begin) static_cast<Work<W>*>(context)->run(begin);
}

template <class W>
void run(const Layers<W>& layers) {
  if (layers.rows == 0) return;
  const int64_t units = layers.units(), bytes = units * kOutputs * layers.in * int64_t{sizeof(typename W::Stored)};
  uint32_t threads;
  STABLE_TORCH_ERROR_CODE_CHECK(torch_get_num_threads(&threads));
  const int64_t count = std::min({int64_t{threads}, units, bytes / kWorthAThread + 1});
  Work<W> work{layers, Blocks(layers.rows), std::vector<Share>(count)};
  for (int64_t i = 0; i < count; ++i) work.shares[i].set(units * i / count, units * (i + 1) / count);
  STABLE_TORCH_ERROR_CODE_CHECK(torch_parallel_for(0, count, 1, some_shares<W>, &work));
}

Numbers numbers(const Tensor& tensor) {
  const ScalarType type = tensor.scalar_type();
  STD_TORCH_CHECK((type == ScalarType::Float || type == ScalarType::BFloat16) && tensor.is_contiguous(),
                  "few_rows_linear: numbers are in float32 or bfloat16, without gaps");
  return {tensor.data_ptr(), type == ScalarType::BFloat16};
}

Numbers one_each(const std::optional<Tensor>& tensor, int64_t size) {
  if (!tensor.has_value()) return {};
  STD_TORCH_CHECK(tensor->numel() == size, "few_rows_linear: a bias, or a scale, has ", size, " numbers");
  return numbers(*tensor);
}

// Returns layers over the rows of a contiguous tensor.
template <class W>
Layers<W> layers_over(const Tensor& x) {
  const int64_t in = x.dim() > 0 ? x.size(x.dim() - 1) : 0;
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) rows *= x.size(d);
  return {rows, in, numbers(x), {}};
}

// Adds a layer and returns the tensor of its outputs.
template <class W>
Tensor add(Layers<W>& layers, const Tensor& x, const Tensor& weight, const Numbers& scales,
           const std::optional<Tensor>& bias, Weights<W> weights = {}) {
  STD_TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous() && x.dim() > 0 && layers.in == weight.size(1),
                  "few_rows_linear: x is [..., in], and a weight [out, in] without gaps");
  STD_TORCH_CHECK(weight.size(0) >= kMostOutputs && weight.size(1) >= kLanes, "few_rows_linear: a weight is at least [",
                  kMostOutputs, ", ", kLanes, "]");
  weights.data = static_cast<const typename W::Stored*>(weight.data_ptr());
  weights.in = weight.size(1);
  const auto sizes = x.sizes();
  std::vector<int64_t> shape(sizes.begin(), sizes.end());
  shape.back() = weight.size(0);
  const Tensor y = empty(x, shape);
  layers.of.push_back({weights, weight.size(0), scales, one_each(bias, weight.size(0)), numbers(y)});
  return y;
}

template <class W>
Tensor linear(const Tensor& input, const Tensor& weight, const Numbers& scales, const std::optional<Tensor>& bias,
              Weights<W> weights) {
  const Tensor x = without_gaps(input);
  Layers<W> layers = layers_over<W>(x);
  const Tensor y = add(layers, x, weight, scales, bias, weights);
  run(layers);
  return y;
}

template <class W>
std::vector<Tensor> linears(const Tensor& input, const std::vector<Tensor>& weights,
                            const std::vector<Tensor>& biases) {
  const Tensor x = without_gaps(input);
  Layers<W> layers = layers_over<W>(x);
  std::vector<Tensor> outputs;
  for (size_t i = 0; i < weights.size(); ++i) {
    STD_TORCH_CHECK(weights[i].scalar_type() == weights[0].scalar_type(), "few_rows_linears: weights of one dtype");
    outputs.push_back(add(layers, x, weights[i], {}, biases.empty() ? std::nullopt : std::optional(biases[i])));
  }
  run(layers);
  return outputs;
}

bool is_float32(const Tensor& weight) {
  const ScalarType type = weight.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16,
                  "few_rows_linear: weights in float32 or bfloat16");
  return type == ScalarType::Float;
}

Tensor few_rows_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  return is_float32(weight) ? linear<Float32>(x, weight, {}, bias, {}) : linear<BFloat16>(x, weight, {}, bias, {});
}

std::vector<Tensor> few_rows_linears(const Tensor& x, const std::vector<Tensor>& weights,
                                     const std::vector<Tensor>& biases) {
  STD_TORCH_CHECK(!weights.empty() && (biases.empty() || biases.size() == weights.size()),
                  "few_rows_linears: weights, and a bias for each or none");
  return is_float32(weights[0]) ? linears<Float32>(x, weights, biases) : linears<BFloat16>(x, weights, biases);
}

Tensor few_rows_linear_int8(const Tensor& x, const Tensor& weight, const Tensor& scale,
                            const std::optional<Tensor>& zero_point, const std::optional<Tensor>& bias) {
  STD_TORCH_CHECK(weight.scalar_type() == ScalarType::Char && weight.dim() == 2, "few_rows_linear: weights in int8");
  const int64_t out = weight.size(0), in = weight.size(1), groups = scale.numel() / out;
  STD_TORCH_CHECK(groups >= 1 && groups * out == scale.numel() && in % groups == 0,
                  "few_rows_linear: a scale for each group of inputs");
  if (groups == 1 && !zero_point.has_value()) return linear<Int8>(x, weight, one_each(scale, out), bias, {});
  Weights<Int8Groups> weights{};
  while (int64_t{1} << weights.shift < in / groups) ++weights.shift;
  STD_TORCH_CHECK(int64_t{1} << weights.shift == in / groups && in / groups >= kLeastGroup,
                  "few_rows_linear: groups have 32 inputs, 64, 128 and so on");
  weights.scales = numbers(scale);
  if (zero_point.has_value()) {
    STD_TORCH_CHECK(zero_point->scalar_type() == ScalarType::Char && zero_point->numel() == scale.numel() &&
                        zero_point->is_contiguous(),
                    "few_rows_linear: a zero point in int8 for each scale");
    weights.zeros = static_cast<const int8_t*>(zero_point->data_ptr());
  }
  return linear<Int8Groups>(x, weight, {}, bias, weights);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(exportable_cache, library) {
  library.def("few_rows_linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor");
  library.def("few_rows_linears(Tensor x, Tensor[] weights, Tensor[] biases) -> Tensor[]");
  library.def(
      "few_rows_linear_int8(Tensor x, Tensor weight, Tensor scale, Tensor? zero_point=None, Tensor? bias=None) "
      "-> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(exportable_cache, CPU, library) {
  library.impl("few_rows_linear", TORCH_BOX(&few_rows_linear));
  library.impl("few_rows_linears", TORCH_BOX(&few_rows_linears));
  library.impl("few_rows_linear_int8", TORCH_BOX(&few_rows_linear_int8));
}
