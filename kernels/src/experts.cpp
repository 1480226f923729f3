// Slots, which are pairs of a token and a choice, are sorted by expert. The rows of an expert are then multiplied like those
// of any layer, and the results are returned to the order of slots.
#include "experts.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "linear_tasks.h"

namespace exportable_cache::kernels {
namespace {

// Blocks of float layers: a multiple of what every target multiplies together.
constexpr int64_t kFloatTogether = 24;

// Products of some rows and outputs of an expert. Rows are in the order of experts.
struct Task {
  int64_t expert;
  Tile tile;
};

// Slots in the order of experts, and the index of each in it.
struct Order {
  std::vector<int64_t> slots, positions;
  std::vector<Task> tasks;
};

// Rows in the order of experts, as the layers read them: quantized, or copies.
class RoundedRows {
 public:
  RoundedRows(const Linear& layer, int64_t rows, void* scratch) : rounded_(rounded_in(rows, layer.inputs, scratch)) {}
  static size_t bytes(const Linear& layer, int64_t rows) { return rounded_bytes(rows, layer.inputs); }
  static int64_t task_rows(const Linear&) { return kTaskRows; }
  static constexpr int64_t kBlocks = kTogether;
  static int64_t size(const Linear& layer) { return blocks_of(layer.outputs) * bytes_of_block(layer.inputs, layer.groups); }

  void take(const Linear& layer, const float* source, int64_t row) {
    round_linear_row(source, layer.inputs, rounded_, row);
  }
  void multiply(const Linear& layer, const Tile& tile) const { multiply_linear_tile(layer, rounded_, tile); }

 private:
  Rounded rounded_;
};

template <class W>
class FloatRows {
 public:
  using L = FloatLinearOf<W>;
  FloatRows(const L&, int64_t, void* scratch) : rows_(static_cast<float*>(scratch)) {}
  static size_t bytes(const L& layer, int64_t rows) { return aligned(sizeof(float) * rows * layer.inputs); }
  static int64_t task_rows(const L& layer) { return float_task_rows(layer.inputs); }
  static constexpr int64_t kBlocks = kFloatTogether;
  static int64_t size(const L& layer) { return blocks_of(layer.outputs) * steps_of<W>(layer.inputs) * kBlockOutputs; }

  void take(const L& layer, const float* source, int64_t row) {
    std::memcpy(rows_ + row * layer.inputs, source, sizeof(float) * layer.inputs);
  }
  void multiply(L layer, const Tile& tile) const {
    layer.source = rows_;
    multiply_linear_tile(layer, tile);
  }

 private:
  float* rows_;
};

// Sorts slots, and splits the products so that tasks take about as long as each other.
void arrange(const Choice& choice, int64_t outputs, int64_t task_rows, int64_t together, const Threads& threads,
             Order& order) {
  const int64_t slots = choice.slots(), blocks = blocks_of(outputs);
  std::vector<int64_t> next(choice.experts + 1, 0);
  for (int64_t slot = 0; slot < slots; ++slot) ++next[choice.indices[slot] + 1];
  for (int64_t expert = 0; expert < choice.experts; ++expert) next[expert + 1] += next[expert];
  order.slots.resize(slots), order.positions.resize(slots), order.tasks.clear();
  const int64_t wanted = std::max<int64_t>(1, static_cast<int64_t>(threads.count) * kTasksOfThread);
  for (int64_t expert = 0; expert < choice.experts; ++expert) {
    for (int64_t first = next[expert]; first < next[expert + 1]; first += task_rows) {
      const int64_t last = std::min(first + task_rows, next[expert + 1]), share = wanted * (last - first) * together;
      const int64_t step = std::max<int64_t>(1, (2 * slots * blocks / share + 1) / 2) * together;
      for (int64_t block = 0; block < blocks; block += step) {
        order.tasks.push_back({expert, {block, std::min(block + step, blocks), first, last}});
      }
    }
  }
  for (int64_t slot = 0; slot < slots; ++slot) {
    const int64_t position = next[choice.indices[slot]]++;
    order.slots[position] = slot, order.positions[slot] = position;
  }
}

template <class L, class Rows>
struct Work {
  const L& layer;
  const Choice& choice;
  const Order& order;
  Rows rows;
  float* results;  // [slots, outputs], in the order of experts
};

template <class L, class Rows>
void take_row(void* context, size_t index) {
  auto& work = *static_cast<Work<L, Rows>*>(context);
  const int64_t position = static_cast<int64_t>(index), slot = work.order.slots[position];
  const int64_t row = work.choice.is_shared ? slot / work.choice.choices : slot;
  work.rows.take(work.layer, work.layer.source + row * work.layer.inputs, position);
}

template <class L, class Rows>
void multiply_task(void* context, size_t index) {
  const auto& work = *static_cast<Work<L, Rows>*>(context);
  const Task& task = work.order.tasks[index];
  L layer = work.layer;
  layer.weights += task.expert * Rows::size(layer);
  if (layer.bias != nullptr) layer.bias += task.expert * layer.outputs;
  layer.rows = work.choice.slots(), layer.out = work.results;
  work.rows.multiply(layer, task.tile);
}

template <class L, class Rows>
void return_token(void* context, size_t index) {
  const auto& work = *static_cast<Work<L, Rows>*>(context);
  const int64_t choices = work.choice.choices, outputs = work.layer.outputs, token = static_cast<int64_t>(index);
  const int64_t* const positions = work.order.positions.data() + token * choices;
  if (work.choice.factors == nullptr) {
    for (int64_t i = 0; i < choices; ++i) {
      std::memcpy(work.layer.out + (token * choices + i) * outputs, work.results + positions[i] * outputs,
                  sizeof(float) * outputs);
    }
    return;
  }
  const float* const factors = work.choice.factors + token * choices;
  float* const out = work.layer.out + token * outputs;
  for (int64_t i = 0; i < choices; ++i) {
    const float* const result = work.results + positions[i] * outputs;
    const float factor = factors[i];
    if (i == 0) {
      for (int64_t output = 0; output < outputs; ++output) out[output] = factor * result[output];
    } else {
      for (int64_t output = 0; output < outputs; ++output) out[output] += factor * result[output];
    }
  }
}

template <class Rows, class L>
size_t scratch_bytes(const L& layer, const Choice& choice) {
  return Rows::bytes(layer, choice.slots()) + sizeof(float) * choice.slots() * layer.outputs;
}

template <class Rows, class L>
void apply(const L& layer, const Choice& choice, const Threads& threads, void* scratch) {
  const int64_t slots = choice.slots();
  if (slots == 0) return;
  thread_local Order order;
  arrange(choice, layer.outputs, Rows::task_rows(layer), Rows::kBlocks, threads, order);
  float* const results = reinterpret_cast<float*>(static_cast<char*>(scratch) + Rows::bytes(layer, slots));
  Work<L, Rows> work{layer, choice, order, Rows(layer, slots, scratch), results};
  const int64_t inputs = slots * layer.inputs, outputs = slots * layer.outputs;
  run_tasks(threads, slots, take_row<L, Rows>, &work, inputs > kWorthAThread);
  const int64_t tasks = static_cast<int64_t>(order.tasks.size());
  run_tasks(threads, tasks, multiply_task<L, Rows>, &work, inputs * layer.outputs > kWorthAThread);
  run_tasks(threads, choice.tokens, return_token<L, Rows>, &work, outputs > kWorthAThread);
}

}  // namespace

size_t experts_scratch(const Linear& layer, const Choice& choice) { return scratch_bytes<RoundedRows>(layer, choice); }
size_t experts_scratch(const FloatLinear& layer, const Choice& choice) {
  return scratch_bytes<FloatRows<float>>(layer, choice);
}
size_t experts_scratch(const Float16Linear& layer, const Choice& choice) {
  return scratch_bytes<FloatRows<hwy::float16_t>>(layer, choice);
}
size_t experts_scratch(const BFloat16Linear& layer, const Choice& choice) {
  return scratch_bytes<FloatRows<BFloat16Pair>>(layer, choice);
}

void apply_experts(const Linear& layer, const Choice& choice, const Threads& threads, void* scratch) {
  apply<RoundedRows>(layer, choice, threads, scratch);
}
void apply_experts(const FloatLinear& layer, const Choice& choice, const Threads& threads, void* scratch) {
  apply<FloatRows<float>>(layer, choice, threads, scratch);
}
void apply_experts(const Float16Linear& layer, const Choice& choice, const Threads& threads, void* scratch) {
  apply<FloatRows<hwy::float16_t>>(layer, choice, threads, scratch);
}
void apply_experts(const BFloat16Linear& layer, const Choice& choice, const Threads& threads, void* scratch) {
  apply<FloatRows<BFloat16Pair>>(layer, choice, threads, scratch);
}

}  // namespace exportable_cache::kernels
