// Linear layers over weights of float32, bfloat16 and float16, and of 4 and 8 bits in groups, compiled for every instruction set and
// chosen at run time.
//
// One row reads the weights block by block, in order, at the speed of memory. Several rows keep the sums of a tile in
// registers while its weights and rows are read once; weights of 4 and 8 bits are converted first.
#include "float_linear.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "half.h"
#include "linear_tasks.h"

#undef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "float_linear.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.h.
#include "hwy/highway.h"
#include "bfloat16_dots-inl.h"
#include "unrolled-inl.h"

HWY_BEFORE_NAMESPACE();
namespace exportable_cache::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F = hn::ScalableTag<float>;
using V = hn::Vec<F>;
using I32 = hn::RebindToSigned<F>;
using U32 = hn::RebindToUnsigned<F>;

constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(F()));
// Vectors per block.
constexpr int64_t kVectors = kBlockOutputs / kLanes;
// A tile's sums fill the registers, except for its weights and a row's value.
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
constexpr int64_t kTileRows = 8, kTileBlocks = 3;
#elif HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_NEON
constexpr int64_t kTileRows = 6, kTileBlocks = 1;
#else
constexpr int64_t kTileRows = 3, kTileBlocks = 1;
#endif
// Blocks of one row: one thread reads 24.4 GB/s of a mapped file in one stream, 26.8 in four and 27.6 in eight (AMD EPYC,
// family 25). Their sums must stay in registers.
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
constexpr int64_t kStreams = 8;
#else
constexpr int64_t kStreams = HWY_TARGET == HWY_SSE4 ? 2 : 4;
#endif
// Prefetch distance in steps: 2 KB.
constexpr int64_t kAhead = 512;

// The weights of one input of a step.
HWY_INLINE V weights_of(const float* step, int64_t) { return hn::LoadU(F(), step); }
HWY_INLINE V weights_of(const hwy::float16_t* step, int64_t) {
  return hn::PromoteTo(F(), hn::LoadU(hn::Rebind<hwy::float16_t, F>(), step));
}
HWY_INLINE V weights_of(const BFloat16Pair* step, int64_t input) {
  const hn::RebindToUnsigned<F> bits;
  const auto pairs = hn::LoadU(bits, step);
  return hn::BitCast(F(), input == 0 ? hn::ShiftLeft<16>(pairs) : hn::And(pairs, hn::Set(bits, 0xFFFF0000u)));
}

// Writes the sums of one row and block.
HWY_INLINE void finish(const LinearRows& linear, const float* sums, int64_t block, int64_t row) {
  const int64_t output = block * kBlockOutputs, count = std::min(kBlockOutputs, linear.outputs - output);
  float* const out = linear.out + row * linear.outputs + output;
  for (int64_t i = 0; i < count; ++i) out[i] = sums[i] + (linear.bias ? linear.bias[output + i] : 0.0f);
}

// kRows rows of kBlocks blocks.
template <int64_t kRows, int64_t kBlocks, class W>
HWY_NOINLINE void multiply(const LinearRows& linear, const W* weights, int64_t block, int64_t row) {
  constexpr int64_t kAll = kBlocks * kVectors, kInputs = kInputsOfStep<W>;
  const F d;
  const int64_t inputs = linear.inputs, size = steps_of<W>(inputs) * kBlockOutputs;
  const float* rows[kRows];
  V sums[kRows][kAll];
  EC_EACH(r, kRows) {
    rows[r] = linear.source + (row + r) * inputs;
    EC_EACH(v, kAll) sums[r][v] = hn::Zero(d);
  }
  const auto add = [&](int64_t first, int64_t input) HWY_ATTR {
    V of_outputs[kAll];
    EC_EACH(v, kAll) of_outputs[v] = weights_of(weights + v / kVectors * size + v % kVectors * kLanes, input);
    EC_EACH(r, kRows) {
      V of_row = hn::Set(d, rows[r][first + input]);
      keep(of_row);
      EC_EACH(v, kAll) sums[r][v] = hn::MulAdd(of_row, of_outputs[v], sums[r][v]);
    }
  };
  int64_t i = 0;
  for (; i + kInputs <= inputs; i += kInputs, weights += kBlockOutputs) {
    if (kRows == 1) EC_EACH(b, kBlocks) ask_for(weights + b * size + kAhead);
    EC_EACH(input, kInputs) add(i, input);
  }
  if (i < inputs) add(i, 0);
  EC_EACH(b, kBlocks) {
    const int64_t output = (block + b) * kBlockOutputs, count = std::min(kBlockOutputs, linear.outputs - output);
    EC_EACH(r, kRows) {
      float* const out = linear.out + (row + r) * linear.outputs + output;
      if (count == kBlockOutputs && linear.bias == nullptr) {
        EC_EACH(v, kVectors) hn::StoreU(sums[r][b * kVectors + v], d, out + v * kLanes);
        continue;
      }
      float results[kBlockOutputs];
      EC_EACH(v, kVectors) hn::StoreU(sums[r][b * kVectors + v], d, results + v * kLanes);
      finish(linear, results, block + b, row + r);
    }
  }
}

template <int64_t kBlocks, class W>
void multiply_rows(const LinearRows& linear, const W* weights, const Tile& tile, int64_t block) {
  int64_t row = tile.first_row;
  // A tile of few rows waits for its sums, so the last eight rows are four and four, not six, one and one.
  for (; row + kTileRows <= tile.last_row && (kTileRows != 6 || tile.last_row - row != 8); row += kTileRows) {
    multiply<kTileRows, kBlocks>(linear, weights, block, row);
  }
  for (; row + 4 <= tile.last_row; row += 4) multiply<4, kBlocks>(linear, weights, block, row);
  for (; row < tile.last_row; ++row) multiply<1, kBlocks>(linear, weights, block, row);
}

// Weights of a block as rows read them. The sums of several rows leave no registers for the conversion of 16-bit weights, so
// a block is converted once for all rows of a tile (a prompt of 128, AVX2: 101 ms instead of 134, as in float32).
template <class W>
auto as_rows_take(const W* block, int64_t inputs, std::vector<float>& floats) {
  if constexpr (kTileBlocks > 1 || std::is_same_v<W, float>) {
    return block;
  } else {
    constexpr int64_t kInputs = kInputsOfStep<W>;
    floats.resize(static_cast<size_t>(steps_of<W>(inputs) * kInputs * kBlockOutputs));
    float* to = floats.data();
    for (int64_t i = 0; i < inputs; i += kInputs, block += kBlockOutputs) {
      EC_EACH(input, kInputs) {
        for (int64_t v = 0; v < kVectors; ++v, to += kLanes) hn::StoreU(weights_of(block + v * kLanes, input), F(), to);
      }
    }
    return static_cast<const float*>(floats.data());
  }
}

template <class W>
void multiply_tile(const FloatLinearOf<W>& linear, const Tile& tile) {
  const int64_t size = steps_of<W>(linear.inputs) * kBlockOutputs, rows = tile.last_row - tile.first_row;
  const auto weights = [&](int64_t block) { return linear.weights + block * size; };
  int64_t block = tile.first_block;
  if (rows == 1) {
    for (; block + kStreams <= tile.last_block; block += kStreams) {
      multiply<1, kStreams>(linear, weights(block), block, tile.first_row);
    }
    for (; block < tile.last_block; ++block) multiply<1, 1>(linear, weights(block), block, tile.first_row);
    return;
  }
  for (; block + kTileBlocks <= tile.last_block && kTileBlocks > 1; block += kTileBlocks) {
    multiply_rows<kTileBlocks>(linear, weights(block), tile, block);
  }
  thread_local std::vector<float> floats;
  for (; block < tile.last_block; ++block) {
    if (rows < 2 * kTileRows) {
      multiply_rows<1>(linear, weights(block), tile, block);
    } else {
      multiply_rows<1>(linear, as_rows_take(weights(block), linear.inputs, floats), tile, block);
    }
  }
}

HWY_INLINE V scales_of(const uint8_t* at, float) { return hn::LoadU(F(), reinterpret_cast<const float*>(at)); }
HWY_INLINE V scales_of(const uint8_t* at, hwy::float16_t) {
  return hn::PromoteTo(F(), hn::LoadU(hn::Rebind<hwy::float16_t, F>(), reinterpret_cast<const hwy::float16_t*>(at)));
}
HWY_INLINE V zeros_of(const uint8_t* at, float) { return hn::LoadU(F(), reinterpret_cast<const float*>(at)); }
HWY_INLINE V zeros_of(const uint8_t* at, uint8_t) {
  return hn::ConvertTo(F(), hn::PromoteTo(I32(), hn::LoadU(hn::Rebind<uint8_t, F>(), at)));
}
// The low half of each word's byte, as a float times 2 to the power of the byte's first bit.
HWY_INLINE V halves_of(hn::Vec<U32> words, int64_t byte) {
  return hn::ConvertTo(F(), hn::BitCast(I32(), hn::And(words, hn::Set(U32(), 15u << 8 * byte))));
}

// Each word's byte, as a float times 2 to the power of 24; it is signed, because sums of integers plus 128 would lose more bits
// (a random model in 8 bits: 1.1e-4 instead of 3e-5 from eager mode).
HWY_INLINE V bytes_of(hn::Vec<U32> words, int64_t byte) {
  if (byte == 0) words = hn::ShiftLeft<24>(words);
  if (byte == 1) words = hn::ShiftLeft<16>(words);
  if (byte == 2) words = hn::ShiftLeft<8>(words);
  return hn::ConvertTo(F(), hn::BitCast(I32(), hn::And(words, hn::Set(U32(), 0xFF000000u))));
}

// Words of weights; of 8 bits without the 128 that is stored with each.
template <int kBits>
HWY_INLINE hn::Vec<U32> words_of(const uint8_t* at) {
  const auto words = hn::LoadU(U32(), reinterpret_cast<const uint32_t*>(at));
  return kBits == 8 ? hn::Xor(words, hn::Set(U32(), 0x80808080u)) : words;
}

// Zero points of such integers.
template <class Z, int kBits>
HWY_INLINE V zeros_of_words(const uint8_t* at) {
  const V zeros = zeros_of(at, Z());
  return kBits == 8 && std::is_same_v<Z, uint8_t> ? hn::Sub(zeros, hn::Set(F(), 128.0f)) : zeros;
}

// The inverse of the factors of `halves_of` and `bytes_of`.
template <int kBits>
constexpr float unit_of(int64_t byte) {
  return 1.0f / static_cast<float>(1 << 8 * (kBits == 8 ? 3 : byte));
}

// One row as blocks of 4-bit and 8-bit weights take it: the sums of groups, because zero points are subtracted once for a group,
// and the inputs times `unit_of` their byte, because a multiplication takes less time than shifts of the weights.
template <int kBits>
void take_grouped_row(const float* source, int64_t groups, int64_t size, std::vector<float>& to) {
  HWY_ALIGN constexpr float kFactors[4] = {unit_of<kBits>(0), unit_of<kBits>(1), unit_of<kBits>(2), unit_of<kBits>(3)};
  const V factors = hn::LoadDup128(F(), kFactors);
  to.resize(static_cast<size_t>(groups * (1 + size)));
  float* inputs = to.data() + groups;
  for (int64_t group = 0; group < groups; ++group) {
    V sums = hn::Zero(F());
    for (int64_t i = 0; i < size; i += kLanes, source += kLanes, inputs += kLanes) {
      const V some = hn::LoadU(F(), source);
      sums = hn::Add(sums, some);
      hn::StoreU(hn::Mul(some, factors), F(), inputs);
    }
    to[static_cast<size_t>(group)] = hn::GetLane(hn::SumOfLanes(F(), sums));
  }
}

// One row of one block.
template <class S, class Z, int kBits>
HWY_NOINLINE void multiply_grouped(const GroupedLinearOf<S, Z, kBits>& linear, const float* taken, int64_t block,
                                   int64_t row) {
  // Sums of a vector, because one would wait for itself.
  constexpr int64_t kParts = kVectors == 1 ? 8 : kVectors == 2 ? 4 : 2;
  const F d;
  constexpr int64_t kWord = 32 / kBits;
  const int64_t inputs = linear.inputs, groups = linear.groups, steps = inputs / groups / kWord;
  const int64_t size = bytes_of_grouped<S, Z, kBits>(inputs, groups), bytes = sizeof(S), zero_bytes = sizeof(Z);
  const uint8_t* scales = linear.weights + block * size;
  const uint8_t* zeros = scales + bytes * kBlockOutputs * groups;
  const uint8_t* words = zeros + zero_bytes * kBlockOutputs * groups;
  const float* source = taken + groups;
  V totals[kVectors];
  EC_EACH(v, kVectors) totals[v] = hn::Zero(d);
  for (int64_t group = 0; group < groups; ++group) {
    ask_for(scales + size);
    V sums[kVectors][kParts];
    EC_EACH(v, kVectors) {
      EC_EACH(part, kParts) sums[v][part] = hn::Zero(d);
    }
    for (int64_t step = 0; step < steps; ++step) {
      ask_for(words + size);
      hn::Vec<U32> low[kVectors], high[kVectors];
      EC_EACH(v, kVectors) {
        low[v] = words_of<kBits>(words + 4 * kLanes * v);
        high[v] = hn::ShiftRight<4>(low[v]);
      }
      if constexpr (kBits == 8) {
        EC_EACH(i, 4) {
          const V of_row = hn::Set(d, source[i]);
          EC_EACH(v, kVectors) sums[v][i % kParts] = hn::MulAdd(of_row, bytes_of(low[v], i), sums[v][i % kParts]);
        }
      } else {
        EC_EACH(i, 4) {
          const V first = hn::Set(d, source[i]), second = hn::Set(d, source[i + 4]);
          EC_EACH(v, kVectors) {
            V& even = sums[v][2 * i % kParts];
            V& odd = sums[v][(2 * i + 1) % kParts];
            even = hn::MulAdd(first, halves_of(low[v], i), even);
            odd = hn::MulAdd(second, halves_of(high[v], i), odd);
          }
        }
      }
      words += 4 * kBlockOutputs, source += kWord;
    }
    const V of_group = hn::Set(d, taken[group]);
    EC_EACH(v, kVectors) {
      V sum = hn::NegMulAdd(of_group, (zeros_of_words<Z, kBits>(zeros + zero_bytes * kLanes * v)), sums[v][0]);
      for (int64_t part = 1; part < kParts; ++part) sum = hn::Add(sum, sums[v][part]);
      totals[v] = hn::MulAdd(sum, scales_of(scales + bytes * kLanes * v, S()), totals[v]);
    }
    scales += bytes * kBlockOutputs, zeros += zero_bytes * kBlockOutputs;
  }
  float results[kBlockOutputs];
  EC_EACH(v, kVectors) hn::StoreU(totals[v], d, results + v * kLanes);
  finish(linear, results, block, row);
}

// Converts a block to float32 [inputs, kBlockOutputs].
template <class S, class Z, int kBits>
HWY_NOINLINE void floats_of(const GroupedLinearOf<S, Z, kBits>& linear, int64_t block, float* to) {
  constexpr int64_t kWord = 32 / kBits;
  const int64_t inputs = linear.inputs, groups = linear.groups, steps = inputs / groups / kWord;
  const int64_t bytes = sizeof(S), zero_bytes = sizeof(Z);
  const uint8_t* const start = linear.weights + block * bytes_of_grouped<S, Z, kBits>(inputs, groups);
  const uint8_t* const all_zeros = start + bytes * kBlockOutputs * groups;
  for (int64_t lane = 0; lane < kBlockOutputs; lane += kLanes) {
    const uint8_t* words = all_zeros + zero_bytes * kBlockOutputs * groups + 4 * lane;
    float* at = to + lane;
    for (int64_t group = 0; group < groups; ++group) {
      const V scale = scales_of(start + bytes * (group * kBlockOutputs + lane), S());
      const V zero = zeros_of_words<Z, kBits>(all_zeros + zero_bytes * (group * kBlockOutputs + lane));
      for (int64_t step = 0; step < steps; ++step) {
        const auto low = words_of<kBits>(words), high = hn::ShiftRight<4>(low);
        EC_EACH(i, 4) {
          const V unit = hn::Set(F(), unit_of<kBits>(i)), first = kBits == 8 ? bytes_of(low, i) : halves_of(low, i);
          hn::StoreU(hn::Mul(hn::MulSub(first, unit, zero), scale), F(), at + i * kBlockOutputs);
          if constexpr (kBits == 4) {
            const V second = hn::Mul(hn::MulSub(halves_of(high, i), unit, zero), scale);
            hn::StoreU(second, F(), at + (i + 4) * kBlockOutputs);
          }
        }
        words += 4 * kBlockOutputs, at += kWord * kBlockOutputs;
      }
    }
  }
}

template <class S, class Z, int kBits>
void multiply_tile(const GroupedLinearOf<S, Z, kBits>& linear, const Tile& tile) {
  const int64_t inputs = linear.inputs;
  thread_local std::vector<float> floats;
  int64_t block = tile.first_block;
  if (tile.last_row - tile.first_row == 1) {
    take_grouped_row<kBits>(linear.source + tile.first_row * inputs, linear.groups, inputs / linear.groups, floats);
    for (; block < tile.last_block; ++block) multiply_grouped(linear, floats.data(), block, tile.first_row);
    return;
  }
  const int64_t size = inputs * kBlockOutputs;
  floats.resize(static_cast<size_t>(kTileBlocks * size));
  while (block < tile.last_block) {
    const int64_t count = std::min(kTileBlocks, tile.last_block - block);
    for (int64_t i = 0; i < count; ++i) floats_of(linear, block + i, floats.data() + i * size);
    if (count == kTileBlocks) {
      multiply_rows<kTileBlocks>(linear, static_cast<const float*>(floats.data()), tile, block);
    } else {
      for (int64_t i = 0; i < count; ++i) {
        multiply_rows<1>(linear, static_cast<const float*>(floats.data() + i * size), tile, block + i);
      }
    }
    block += count;
  }
}

void multiply_float_tile(const FloatLinear& linear, const Tile& tile) { multiply_tile(linear, tile); }
void multiply_float16_tile(const Float16Linear& linear, const Tile& tile) { multiply_tile(linear, tile); }
void multiply_bfloat16_tile(const BFloat16Linear& linear, const Tile& tile) { multiply_tile(linear, tile); }
void multiply_grouped_tile(const GroupedLinear& linear, const Tile& tile) { multiply_tile(linear, tile); }
void multiply_grouped16_tile(const Grouped16Linear& linear, const Tile& tile) { multiply_tile(linear, tile); }
void multiply_grouped_8bit_tile(const Grouped8BitLinear& linear, const Tile& tile) { multiply_tile(linear, tile); }
void multiply_grouped16_8bit_tile(const Grouped16Of8BitLinear& linear, const Tile& tile) { multiply_tile(linear, tile); }
void multiply_shifted_tile(const ShiftedLinear& linear, const Tile& tile) { multiply_tile(linear, tile); }
void multiply_shifted_8bit_tile(const Shifted8BitLinear& linear, const Tile& tile) { multiply_tile(linear, tile); }

int64_t blocks_of_tile() { return kTileBlocks; }

// The bits of floats rounded to bfloat16, to nearest and ties to even, in the high halves.
template <class Bits>
HWY_INLINE hn::Vec<Bits> rounded(Bits bits, V floats) {
  const auto whole = hn::BitCast(bits, floats);
  const auto is_odd = hn::And(hn::ShiftRight<16>(whole), hn::Set(bits, 1));
  const auto nearest = hn::Add(whole, hn::Add(is_odd, hn::Set(bits, 0x7FFF)));
  // The sum of a NaN may be infinite.
  const auto nan = hn::Or(whole, hn::Set(bits, 0x400000));
  const auto chosen = hn::IfThenElse(hn::RebindMask(bits, hn::IsNaN(floats)), nan, nearest);
  return hn::And(chosen, hn::Set(bits, 0xFFFF0000u));
}

void round_row(const float* row, int64_t inputs, float* to) {
  const hn::RebindToUnsigned<F> bits;
  int64_t i = 0;
  for (; i + kLanes <= inputs; i += kLanes) {
    hn::StoreU(hn::BitCast(F(), rounded(bits, hn::LoadU(F(), row + i))), F(), to + i);
  }
  for (; i < inputs; ++i) to[i] = float_of_bfloat16(bfloat16_of_float(row[i]));
}

void round_row_to_pairs(const float* row, int64_t inputs, BFloat16Pair* to) {
  const hn::RebindToUnsigned<F> bits;
  int64_t i = 0;
  for (; i + 2 * kLanes <= inputs; i += 2 * kLanes) {
    V even, odd;
    hn::LoadInterleaved2(F(), row + i, even, odd);
    hn::StoreU(hn::Or(hn::ShiftRight<16>(rounded(bits, even)), rounded(bits, odd)), bits, to + i / 2);
  }
  for (; i < inputs; i += 2) {
    const uint16_t next = i + 1 < inputs ? bfloat16_of_float(row[i + 1]) : 0;
    to[i / 2] = bfloat16_of_float(row[i]) | static_cast<BFloat16Pair>(next) << 16;
  }
}

#ifdef EC_DOTS
bool has_dots() { return dots::are_there(); }

int64_t blocks_of_dots() { return dots::kTileBlocks; }

template <int64_t kBlocks>
void multiply_dots_rows(const BFloat16Linear& linear, const BFloat16Pair* rows, const Tile& tile, int64_t block) {
  const int64_t steps = steps_of<BFloat16Pair>(linear.inputs);
  const BFloat16Pair* const weights = linear.weights + block * steps * kBlockOutputs;
  int64_t row = tile.first_row;
  const auto store = [&](const float* sums, int64_t count) {
    for (int64_t r = 0; r < count; ++r) {
      for (int64_t b = 0; b < kBlocks; ++b, sums += kBlockOutputs) finish(linear, sums, block + b, row + r);
    }
  };
  for (; row + dots::kTileRows <= tile.last_row; row += dots::kTileRows) {
    dots::multiply<dots::kTileRows, kBlocks>(rows + row * steps, weights, steps, store);
  }
  for (; row + 4 <= tile.last_row; row += 4) dots::multiply<4, kBlocks>(rows + row * steps, weights, steps, store);
  for (; row < tile.last_row; ++row) dots::multiply<1, kBlocks>(rows + row * steps, weights, steps, store);
}

void multiply_dots_tile(const BFloat16Linear& linear, const BFloat16Pair* rows, const Tile& tile) {
  int64_t block = tile.first_block;
  for (; block + dots::kTileBlocks <= tile.last_block; block += dots::kTileBlocks) {
    multiply_dots_rows<dots::kTileBlocks>(linear, rows, tile, block);
  }
  for (; block < tile.last_block; ++block) multiply_dots_rows<1>(linear, rows, tile, block);
}
#else
bool has_dots() { return false; }
int64_t blocks_of_dots() { return 1; }
void multiply_dots_tile(const BFloat16Linear&, const BFloat16Pair*, const Tile&) {}
#endif

}  // namespace HWY_NAMESPACE
}  // namespace exportable_cache::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace exportable_cache::kernels {
HWY_EXPORT(multiply_float_tile);
HWY_EXPORT(multiply_float16_tile);
HWY_EXPORT(multiply_bfloat16_tile);
HWY_EXPORT(multiply_grouped_tile);
HWY_EXPORT(multiply_grouped16_tile);
HWY_EXPORT(multiply_grouped_8bit_tile);
HWY_EXPORT(multiply_grouped16_8bit_tile);
HWY_EXPORT(multiply_shifted_tile);
HWY_EXPORT(multiply_shifted_8bit_tile);
HWY_EXPORT(blocks_of_tile);
HWY_EXPORT(round_row);
HWY_EXPORT(round_row_to_pairs);
HWY_EXPORT(has_dots);
HWY_EXPORT(blocks_of_dots);
HWY_EXPORT(multiply_dots_tile);

void multiply_linear_tile(const FloatLinear& linear, const Tile& tile) {
  HWY_DYNAMIC_DISPATCH(multiply_float_tile)(linear, tile);
}
void multiply_linear_tile(const Float16Linear& linear, const Tile& tile) {
  HWY_DYNAMIC_DISPATCH(multiply_float16_tile)(linear, tile);
}
void multiply_linear_tile(const BFloat16Linear& linear, const Tile& tile) {
  HWY_DYNAMIC_DISPATCH(multiply_bfloat16_tile)(linear, tile);
}
void multiply_linear_tile(const GroupedLinear& linear, const Tile& tile) {
  HWY_DYNAMIC_DISPATCH(multiply_grouped_tile)(linear, tile);
}
void multiply_linear_tile(const Grouped16Linear& linear, const Tile& tile) {
  HWY_DYNAMIC_DISPATCH(multiply_grouped16_tile)(linear, tile);
}
void multiply_linear_tile(const Grouped8BitLinear& linear, const Tile& tile) {
  HWY_DYNAMIC_DISPATCH(multiply_grouped_8bit_tile)(linear, tile);
}
void multiply_linear_tile(const Grouped16Of8BitLinear& linear, const Tile& tile) {
  HWY_DYNAMIC_DISPATCH(multiply_grouped16_8bit_tile)(linear, tile);
}
void multiply_linear_tile(const ShiftedLinear& linear, const Tile& tile) {
  HWY_DYNAMIC_DISPATCH(multiply_shifted_tile)(linear, tile);
}
void multiply_linear_tile(const Shifted8BitLinear& linear, const Tile& tile) {
  HWY_DYNAMIC_DISPATCH(multiply_shifted_8bit_tile)(linear, tile);
}

namespace {

// Bytes of a task's rounded rows: a tile's rows are read once for 48 outputs, so weights that are read less often are worth
// more than rows in the L2 cache (8192 inputs: 208 instead of 188 GFLOPS).
constexpr int64_t kTaskBytesOfPairs = 1024 * 1024;
// Blocks of one row that some targets multiply together.
constexpr int64_t kOneRowTogether = 8;

template <class L>
void multiply_one(void* context, size_t index) {
  static_cast<TilesOfLayers<L>*>(context)->run(static_cast<int64_t>(index),
                                               [](const L& linear, const Tile& tile) { multiply_linear_tile(linear, tile); });
}

template <class L>
void apply(const L* layers, size_t count, const Threads& threads) {
  if (count == 0 || layers->rows == 0) return;
  const int64_t task_rows = float_task_rows(layers->inputs);
  const int64_t together = layers->rows == 1 ? kOneRowTogether : HWY_DYNAMIC_DISPATCH(blocks_of_tile)();
  TilesOfLayers<L> work(layers, count, task_rows, together, threads);
  run_tasks(threads, work.count(), multiply_one<L>, &work, work.is_worth_threads());
}

// Rows that a task rounds.
constexpr int64_t kRoundedRows = 16;

struct Rounding {
  const RoundedLinear& layer;
  // Pairs, or floats that bfloat16 represents.
  bool to_pairs;
  void* to;
};

void round_rows(void* context, size_t task) {
  const auto& [layer, to_pairs, to] = *static_cast<const Rounding*>(context);
  const int64_t first = static_cast<int64_t>(task) * kRoundedRows, last = std::min(first + kRoundedRows, layer.rows);
  for (int64_t row = first; row < last; ++row) {
    const float* const from = layer.source + row * layer.inputs;
    if (to_pairs) {
      auto* const pairs = static_cast<BFloat16Pair*>(to) + row * steps_of<BFloat16Pair>(layer.inputs);
      HWY_DYNAMIC_DISPATCH(round_row_to_pairs)(from, layer.inputs, pairs);
    } else {
      HWY_DYNAMIC_DISPATCH(round_row)(from, layer.inputs, static_cast<float*>(to) + row * layer.inputs);
    }
  }
}

struct DotTiles {
  TilesOfLayers<RoundedLinear> tiles;
  const BFloat16Pair* rows;
};

void multiply_dots(void* context, size_t index) {
  const auto& work = *static_cast<const DotTiles*>(context);
  work.tiles.run(static_cast<int64_t>(index), [&](const RoundedLinear& linear, const Tile& tile) {
    HWY_DYNAMIC_DISPATCH(multiply_dots_tile)(linear, work.rows, tile);
  });
}

// A row alone is bound by memory: the products of floats are as fast, and need no conversion of what they read.
bool by_dots(int64_t rows) { return rows > 1 && HWY_DYNAMIC_DISPATCH(has_dots)(); }

}  // namespace

size_t rounded_scratch(const RoundedLinear& layer) {
  const int64_t words = by_dots(layer.rows) ? steps_of<BFloat16Pair>(layer.inputs) : layer.inputs;
  return static_cast<size_t>(layer.rows * words) * sizeof(BFloat16Pair);
}

void apply_float_linears(const RoundedLinear* layers, size_t count, const Threads& threads, void* scratch) {
  if (count == 0 || layers->rows == 0) return;
  const bool is_by_dots = by_dots(layers->rows);
  Rounding rounding{*layers, is_by_dots, scratch};
  run_tasks(threads, (layers->rows + kRoundedRows - 1) / kRoundedRows, round_rows, &rounding,
            layers->rows * layers->inputs > kWorthAThread);
  if (!is_by_dots) {
    BFloat16Linear of_floats[kMostLayers];
    for (size_t i = 0; i < count; ++i) of_floats[i] = layers[i], of_floats[i].source = static_cast<float*>(scratch);
    apply(of_floats, count, threads);
    return;
  }
  const int64_t task_rows = std::max<int64_t>(1, kTaskBytesOfPairs / 2 / layers->inputs / 24) * 24;
  DotTiles work{{layers, count, task_rows, HWY_DYNAMIC_DISPATCH(blocks_of_dots)(), threads},
                static_cast<const BFloat16Pair*>(scratch)};
  run_tasks(threads, work.tiles.count(), multiply_dots, &work, work.tiles.is_worth_threads());
}

void apply_float_linears(const FloatLinear* layers, size_t count, const Threads& threads) {
  apply(layers, count, threads);
}
void apply_float_linears(const Float16Linear* layers, size_t count, const Threads& threads) {
  apply(layers, count, threads);
}
void apply_float_linears(const BFloat16Linear* layers, size_t count, const Threads& threads) {
  apply(layers, count, threads);
}
void apply_float_linears(const GroupedLinear* layers, size_t count, const Threads& threads) {
  apply(layers, count, threads);
}
void apply_float_linears(const Grouped16Linear* layers, size_t count, const Threads& threads) {
  apply(layers, count, threads);
}
void apply_float_linears(const Grouped8BitLinear* layers, size_t count, const Threads& threads) {
  apply(layers, count, threads);
}
void apply_float_linears(const Grouped16Of8BitLinear* layers, size_t count, const Threads& threads) {
  apply(layers, count, threads);
}
void apply_float_linears(const ShiftedLinear* layers, size_t count, const Threads& threads) {
  apply(layers, count, threads);
}
void apply_float_linears(const Shifted8BitLinear* layers, size_t count, const Threads& threads) {
  apply(layers, count, threads);
}

void row_of_weights(const hwy::float16_t* weights, int64_t inputs, int64_t output, float* row) {
  const hwy::float16_t* number = weights + output / kBlockOutputs * inputs * kBlockOutputs + output % kBlockOutputs;
  for (int64_t i = 0; i < inputs; ++i, number += kBlockOutputs) {
    uint16_t bits;
    std::memcpy(&bits, number, sizeof bits);
    row[i] = float_of_float16(bits);
  }
}

void row_of_weights(const BFloat16Pair* weights, int64_t inputs, int64_t output, float* row) {
  const int64_t steps = steps_of<BFloat16Pair>(inputs);
  const BFloat16Pair* pair = weights + output / kBlockOutputs * steps * kBlockOutputs + output % kBlockOutputs;
  for (int64_t i = 0; i < inputs; i += 2, pair += kBlockOutputs) {
    row[i] = float_of_bfloat16(static_cast<uint16_t>(*pair & 0xFFFF));
    if (i + 1 < inputs) row[i + 1] = float_of_bfloat16(static_cast<uint16_t>(*pair >> 16));
  }
}

namespace {

float float_at(const uint8_t* at, float) {
  float value;
  std::memcpy(&value, at, sizeof value);
  return value;
}
float float_at(const uint8_t* at, hwy::float16_t) {
  uint16_t bits;
  std::memcpy(&bits, at, sizeof bits);
  return float_of_float16(bits);
}
float float_at(const uint8_t* at, uint8_t) { return *at; }

}  // namespace

template <class S, class Z, int kBits>
void row_of_weights(const GroupedLinearOf<S, Z, kBits>& layer, int64_t output, float* row) {
  // Inputs of an output whose integers are in four bytes.
  constexpr int64_t kInputsOfWord = 32 / kBits;
  constexpr float kBias = std::is_same_v<Z, float> && kBits == 8 ? 128.0f : 0.0f;
  const int64_t lane = output % kBlockOutputs, group = layer.inputs / layer.groups;
  const uint8_t* const scales =
      layer.weights + output / kBlockOutputs * bytes_of_grouped<S, Z, kBits>(layer.inputs, layer.groups);
  const uint8_t* const zeros = scales + static_cast<int64_t>(sizeof(S)) * kBlockOutputs * layer.groups;
  const uint8_t* const words = zeros + static_cast<int64_t>(sizeof(Z)) * kBlockOutputs * layer.groups;
  for (int64_t i = 0; i < layer.inputs; ++i) {
    const int64_t header = i / group * kBlockOutputs + lane;
    const int byte = words[(i / kInputsOfWord * kBlockOutputs + lane) * 4 + i % 4];
    const int integer = kBits == 8 ? byte : i % kInputsOfWord < 4 ? byte & 15 : byte >> 4;
    const float zero = float_at(zeros + header * static_cast<int64_t>(sizeof(Z)), Z{});
    row[i] = (static_cast<float>(integer) - kBias - zero) * float_at(scales + header * static_cast<int64_t>(sizeof(S)), S{});
  }
}

template void row_of_weights(const GroupedLinear&, int64_t, float*);
template void row_of_weights(const Grouped16Linear&, int64_t, float*);
template void row_of_weights(const Grouped8BitLinear&, int64_t, float*);
template void row_of_weights(const Grouped16Of8BitLinear&, int64_t, float*);
template void row_of_weights(const ShiftedLinear&, int64_t, float*);
template void row_of_weights(const Shifted8BitLinear&, int64_t, float*);

}  // namespace exportable_cache::kernels
#endif  // HWY_ONCE
