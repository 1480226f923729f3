// Compares attend() with double precision, for shapes, dtypes, kinds of slots, masks, biases, thread counts and every instruction
// set of this machine.
//
// The oracle knows tokens by their positions, and nothing of ring slots or task splitting. Empty slots hold NaN, and buffers end
// with the last slot, so that the address sanitizer detects reads after it.
#include "../src/attention.h"
#include "../src/half.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "attention_cases.h"
#include "test_threads.h"

using namespace exportable_cache::kernels;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

constexpr size_t kBits[] = {32, 16, 16, 8, 4};

// Values as stored, and as doubles.
struct Numbers {
  std::vector<unsigned char> bytes;
  std::vector<double> exact;
};

Numbers numbers(size_t rows, size_t dim, Dtype dtype, std::mt19937& random, double spread) {
  const size_t count = rows * dim, size = kBits[static_cast<size_t>(dtype)] / 8;
  std::normal_distribution<double> normal(0.0, spread);
  Numbers made{std::vector<unsigned char>(dtype == Dtype::kInt4 ? count / 2 : count * size), std::vector<double>(count)};
  for (size_t i = 0; i < count; ++i) {
    const auto x = static_cast<float>(normal(random));
    if (dtype == Dtype::kInt4) {
      // The first half of a row in the low bits of its bytes, the second half in the high bits.
      const auto whole = std::clamp(std::lround(x * 4), -8L, 7L);
      const size_t row = i / dim, at = i % dim, half = dim / 2;
      made.bytes[row * half + at % half] |= static_cast<unsigned char>((whole + 8) << (at < half ? 0 : 4));
      made.exact[i] = static_cast<double>(whole);
      continue;
    }
    unsigned char* to = made.bytes.data() + i * size;
    if (dtype == Dtype::kFloat32) {
      std::memcpy(to, &x, 4);
      made.exact[i] = x;
    } else if (dtype == Dtype::kFloat16) {
      const uint16_t half = float16_of_float(x);
      std::memcpy(to, &half, 2);
      made.exact[i] = float_of_float16(half);
    } else if (dtype == Dtype::kBFloat16) {
      const uint16_t half = bfloat16_of_float(x);
      std::memcpy(to, &half, 2);
      made.exact[i] = float_of_bfloat16(half);
    } else {
      const auto whole = static_cast<int8_t>(std::clamp(std::lround(x * 50), -127L, 127L));
      std::memcpy(to, &whole, 1);
      made.exact[i] = whole;
    }
  }
  return made;
}

double number_at(const unsigned char* bytes, size_t index, Dtype dtype) {
  if (dtype == Dtype::kFloat32) {
    float x;
    std::memcpy(&x, bytes + 4 * index, 4);
    return x;
  }
  uint16_t half;
  std::memcpy(&half, bytes + 2 * index, 2);
  return dtype == Dtype::kFloat16 ? float_of_float16(half) : float_of_bfloat16(half);
}

// One tensor [batch, tokens, heads, dim] of each kind, in both orders of tokens and heads.
template <class V>
void lay(V& view, int64_t tokens, int64_t heads, int64_t dim, bool heads_as_batch) {
  view.batch_stride = tokens * heads * dim;
  view.token_stride = heads_as_batch ? dim : heads * dim;
  view.head_stride = heads_as_batch ? tokens * dim : dim;
}

// Rows of all tokens, [batch, positions, heads], split into those in slots and those of the queries.
struct Places {
  std::vector<unsigned char> slots, fresh;

  Places(const Case& c, const unsigned char* rows, int64_t positions, size_t bytes, const View& slot_view,
         const View& fresh_view, size_t stride_bytes) {
    slots.assign(c.batch * c.slots() * c.kv_heads * bytes, 0xFF);  // NaN in all float formats
    fresh.assign(c.batch * c.tokens() * c.kv_heads * bytes, 0xFF);
    for (int64_t b = 0; b < c.batch; ++b) {
      const int64_t held = c.length_of(b) + (c.beside ? 0 : c.tokens());
      for (int64_t p = 0; p < c.length_of(b) + c.tokens(); ++p) {
        for (int64_t h = 0; h < c.kv_heads; ++h) {
          const unsigned char* from = rows + ((b * positions + p) * c.kv_heads + h) * bytes;
          const bool in_slots = p < held;
          const View& view = in_slots ? slot_view : fresh_view;
          const int64_t token = in_slots ? c.slot_of(p) : p - held;
          unsigned char* to = (in_slots ? slots : fresh).data() +
                              (b * view.batch_stride + token * view.token_stride + h * view.head_stride) * stride_bytes;
          std::memcpy(to, from, bytes);
        }
      }
    }
  }
};

// Over 8-bit or 4-bit keys and values, queries are rounded to one of 32767 steps up to their largest magnitude, and
// so are weights times the scales of values.
constexpr double kHalfStep = 0.5 / 32767;
// The RMS effect of that on the outputs of a case, relative to their size; the observed maximum was 3.3e-5.
constexpr double kRoundingError = 5e-5;

// The limits for operands that are rounded to bfloat16, of the largest difference and of the RMS of all outputs, relative to their
// size. The observed maxima were 1.5e-2 and 2.2e-3.
constexpr double kRoundedLargest = 3e-2, kRoundedMean = 4e-3;

// The largest difference from double precision, divided by the limit.
double difference(const Case& c, std::mt19937& random, bool to_bfloat16 = false) {
  const int64_t heads = c.kv_heads * c.groups, positions = c.length + c.tokens();
  const size_t tokens = c.batch * positions * c.kv_heads;
  const Numbers query = numbers(c.batch * c.queries * heads, c.dim, c.query_dtype, random, 1.5);
  const Numbers key = numbers(tokens, c.dim, c.stored_dtype, random, 1.0);
  const Numbers value = numbers(tokens, c.value_dim, c.stored_dtype, random, 1.0);
  std::vector<float> key_scale(tokens), value_scale(tokens), bias, sink(heads);
  std::uniform_real_distribution<float> uniform(0.005f, 0.02f);
  std::normal_distribution<float> normal(0.0f, 1.0f);
  for (size_t i = 0; i < tokens; ++i) key_scale[i] = uniform(random), value_scale[i] = uniform(random);
  for (float& x : sink) x = 2.0f * normal(random);

  Attention a;
  a.batch = c.batch, a.kv_heads = c.kv_heads, a.groups = c.groups, a.queries = c.queries;
  a.tokens = c.tokens();
  a.key_dim = c.dim, a.value_dim = c.value_dim, a.query_dtype = c.query_dtype, a.stored_dtype = c.stored_dtype;
  a.scale = static_cast<float>(1.0 / std::sqrt(c.dim)), a.rounded = to_bfloat16;
  lay(a.query, c.queries, heads, c.dim, c.heads_as_batch), lay(a.out, c.queries, heads, c.value_dim, c.heads_as_batch);
  a.query.data = query.bytes.data();
  a.slots = c.slots(), a.kept = c.turns() ? c.first() : a.slots;
  a.causal = c.kind != Kind::kEverything;
  if (c.turns()) (c.kind == Kind::kChunk ? a.chunk : a.window) = c.window;
  std::vector<int64_t> lengths;
  for (int64_t b = 0; b < c.batch; ++b) lengths.push_back(c.length_of(b));
  a.length = lengths.data();

  const bool scaled = c.stored_dtype == Dtype::kInt8 || c.stored_dtype == Dtype::kInt4;
  const size_t packed = c.stored_dtype == Dtype::kInt4 ? 2 : 1;
  const size_t width = std::max<size_t>(1, kBits[static_cast<size_t>(c.stored_dtype)] / 8);
  std::vector<Places> places;
  places.reserve(4);
  auto put = [&](View Stored::* part, const void* rows, int64_t dim, size_t element) {
    lay(a.stored.*part, c.slots(), c.kv_heads, dim, c.heads_as_batch);
    lay(a.fresh.*part, c.tokens(), c.kv_heads, dim, c.heads_as_batch);
    places.emplace_back(c, static_cast<const unsigned char*>(rows), positions, dim * element, a.stored.*part,
                        a.fresh.*part, element);
    (a.stored.*part).data = places.back().slots.data();
    if (c.beside) (a.fresh.*part).data = places.back().fresh.data();
  };
  put(&Stored::key, key.bytes.data(), c.dim / packed, width);
  put(&Stored::value, value.bytes.data(), c.value_dim / packed, width);
  if (scaled) put(&Stored::key_scale, key_scale.data(), 1, 4), put(&Stored::value_scale, value_scale.data(), 1, 4);

  if (c.capped) a.softcap = 1.5f;
  if (c.sinks) a.sink = {sink.data(), 0, 1, 0};
  if (c.added == Added::kPerKey) {
    for (int64_t i = 0; i < heads * positions; ++i) bias.push_back(0.1f * float(i / positions) * float(i % positions - positions));
    a.bias = {bias.data(), 0, positions, 0};
  } else if (c.added == Added::kPerHead) {
    for (int64_t i = 0; i < c.batch * heads * c.queries * positions; ++i) bias.push_back(normal(random));
    a.bias = {bias.data(), heads * c.queries * positions, c.queries * positions, positions};
  } else if (c.added == Added::kMask) {
    // Seven keys per query; the first query sees nothing.
    bias.assign(c.queries * positions, -kInfinity);
    for (int64_t i = 1; i < c.queries; ++i) {
      const int64_t last = i * positions / c.queries;
      for (int64_t j = std::max<int64_t>(0, last - 6); j <= last; ++j) bias[i * positions + j] = 0.25f * float(j % 3);
    }
    a.bias = {bias.data(), 0, 0, positions};
  }
  const size_t outputs = c.batch * c.queries * heads * c.value_dim;
  const auto out = std::make_unique<unsigned char[]>(outputs * (c.query_dtype == Dtype::kFloat32 ? 4 : 2));
  a.out.data = out.get();
  attend(a, threads_of(c.threads));

  const double allowed = to_bfloat16 ? kRoundedLargest : c.query_dtype == Dtype::kFloat32 ? 4e-6 : c.query_dtype == Dtype::kFloat16 ? 6e-4 : 5e-3;
  const bool rounded = scaled;
  // Of all values, because those of a block that a row does not see count, too.
  const double greatest_scale = *std::max_element(value_scale.begin(), value_scale.end());
  double worst = 0.0, squares = 0.0;
  std::vector<double> weights(positions), sums(c.value_dim), sizes(c.value_dim), values(c.value_dim);
  for (int64_t b = 0; b < c.batch; ++b)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < c.queries; ++i) {
        const int64_t g = h / c.groups, at = c.length_of(b) + c.others + i, end = c.length_of(b) + c.tokens();
        const double* q = query.exact.data() + b * a.query.batch_stride + i * a.query.token_stride + h * a.query.head_stride;
        double top = c.sinks ? sink[h] : -INFINITY, greatest_query = 0.0, off_score = 0.0;
        for (int64_t x = 0; x < c.dim; ++x) greatest_query = std::max(greatest_query, std::fabs(q[x]));
        for (int64_t j = 0; j < end; ++j) {
          weights[j] = -INFINITY;
          if (!c.sees(at, j)) continue;
          const size_t token = (b * positions + j) * c.kv_heads + g;
          double score = 0.0, size = 0.0;
          for (int64_t x = 0; x < c.dim; ++x) {
            score += q[x] * key.exact[token * c.dim + x], size += std::fabs(key.exact[token * c.dim + x]);
          }
          const double scale = a.scale * (scaled ? key_scale[token] : 1.0);
          score *= scale;
          off_score = std::max(off_score, kHalfStep * greatest_query * size * scale);
          if (c.capped) score = a.softcap * std::tanh(score / a.softcap);
          if (a.bias.data) score += a.bias.at(b, h, i)[j];
          weights[j] = score;
          top = std::max(top, score);
        }
        double total = c.sinks ? std::exp(sink[h] - top) : 0.0;
        std::fill(sums.begin(), sums.end(), 0.0), std::fill(sizes.begin(), sizes.end(), 0.0);
        std::fill(values.begin(), values.end(), 0.0);
        double greatest_weight = 0.0;
        for (int64_t j = 0; j < end; ++j) {
          if (weights[j] == -INFINITY) continue;
          const size_t token = (b * positions + j) * c.kv_heads + g;
          const double weight = std::exp(weights[j] - top);
          total += weight;
          greatest_weight = std::max(greatest_weight, weight);
          for (int64_t x = 0; x < c.value_dim; ++x) {
            values[x] += std::fabs(value.exact[token * c.value_dim + x]);
            const double term = weight * value.exact[token * c.value_dim + x] * (scaled ? value_scale[token] : 1.0);
            sums[x] += term, sizes[x] += std::fabs(term);
          }
        }
        for (int64_t x = 0; x < c.value_dim; ++x) {
          const double sum = total == 0.0 ? 0.0 : sums[x] / total;
          const double size = std::max(total == 0.0 ? 1.0 : sizes[x] / total, 1e-3);
          const size_t where = b * a.out.batch_stride + i * a.out.token_stride + h * a.out.head_stride + x;
          const double off = std::fabs(number_at(out.get(), where, c.query_dtype) - sum);
          // An error of a score changes a weight, and the sum of weights, by the same relative error.
          const double rounding = rounded && total > 0.0 ? std::expm1(2 * off_score) * sizes[x] / total +
                                                               kHalfStep * greatest_weight * greatest_scale * values[x] / total
                                                         : 0.0;
          const double share = off / (size * allowed + rounding);
          if (!(share <= worst)) worst = share;
          squares += off / size * (off / size);
        }
      }
  if (to_bfloat16) worst = std::max(worst, std::sqrt(squares / static_cast<double>(outputs)) / kRoundedMean);
  if (!rounded) return worst;
  // Systematic rounding would be far from the limits above.
  const double mean = std::sqrt(squares / static_cast<double>(outputs)) / (allowed + kRoundingError);
  return std::isnan(worst) ? worst : std::max(worst, mean);
}

// A NaN key gives a NaN output, for any row and block, capped or not.
bool shows_not_a_number() {
  std::vector<float> query(16, 0.5f), rows(200 * 16, 0.25f), out(16);
  const int64_t length = 199;
  for (const int slot : {0, 63, 64, 130, 199}) {
    for (const float softcap : {0.0f, 2.0f}) {
      std::vector<float> bad = rows;
      bad[slot * 16 + 3] = std::numeric_limits<float>::quiet_NaN();
      Attention a;
      a.slots = a.kept = 200, a.length = &length, a.key_dim = a.value_dim = 16, a.softcap = softcap;
      a.query = {query.data(), 16, 16, 16};
      a.stored.key = {bad.data(), 3200, 16, 16}, a.stored.value = {rows.data(), 3200, 16, 16};
      a.out = {out.data(), 16, 16, 16};
      attend(a, Threads{});
      if (out[0] == out[0]) return false;
    }
  }
  return true;
}

// 8-bit values with scales: a NaN in the query or in a scale gives a NaN output, too, and sums of products of the largest values
// do not overflow. With 12 query heads there are many rows.
bool whole_numbers_hold(int64_t heads) {
  constexpr int64_t kDim = 1024, kSlots = 70;
  std::vector<int8_t> keys(kSlots * kDim, -128), values(kSlots * kDim, 1);
  for (int64_t slot = 0; slot < kSlots; slot += 2) {
    std::fill_n(keys.begin() + slot * kDim, kDim, int8_t{0}), std::fill_n(values.begin() + slot * kDim, kDim, int8_t{-1});
  }
  for (int bad = 0; bad < 4; ++bad) {
    std::vector<float> query(heads * kDim, -1.0f), key_scale(kSlots, 0.01f), value_scale(kSlots, 0.01f), out(heads * kDim);
    std::vector<float>* const parts[] = {nullptr, &query, &key_scale, &value_scale};
    if (bad) (*parts[bad])[66] = std::numeric_limits<float>::quiet_NaN();
    const int64_t length = kSlots - 1;
    Attention a;
    a.slots = a.kept = kSlots, a.length = &length, a.key_dim = a.value_dim = kDim, a.stored_dtype = Dtype::kInt8;
    const View rows{nullptr, kSlots * kDim, kDim, kDim}, scales{nullptr, kSlots, 1, 1};
    a.stored = {rows, rows, scales, scales};
    a.stored.key.data = keys.data(), a.stored.value.data = values.data();
    a.stored.key_scale.data = key_scale.data(), a.stored.value_scale.data = value_scale.data();
    a.groups = heads;
    a.query = {query.data(), heads * kDim, heads * kDim, kDim}, a.out = {out.data(), heads * kDim, heads * kDim, kDim};
    attend(a, Threads{});
    // The correct result gives every second value all the weight.
    if (bad ? out[0] == out[0] : !(std::fabs(out[0] - 0.01f) < 1e-6f)) return false;
  }
  return true;
}

}  // namespace

int main() {
  const char* const targets[] = {"AVX3", "AVX2", "SSE4", "SSSE3", "NEON", "EMU128", "SCALAR"};
  int failures = 0, done = 0, levels = 0;
  for (const char* target : targets) {
    if (!limit_target(target)) continue;
    ++levels;
    std::mt19937 random(7), others(8);
    for (const Case& c : cases()) {
      for (const bool to_bfloat16 : {false, true}) {
        if (to_bfloat16 && (c.query_dtype != Dtype::kFloat32 || c.stored_dtype > Dtype::kBFloat16)) continue;
        const double off = difference(c, to_bfloat16 ? others : random, to_bfloat16);
        ++done;
        if (off <= 1.0) continue;
        ++failures;
        std::printf("%s: %s%s: %.2f times what is allowed\n", target_name(), c.text().c_str(),
                    to_bfloat16 ? " rounded" : "", off);
      }
    }
    if (!shows_not_a_number()) ++failures, std::printf("%s: a key that is not a number was lost\n", target_name());
    for (int64_t heads : {1, 12}) {
      if (!whole_numbers_hold(heads)) ++failures, std::printf("%s: numbers of 8 bits were lost\n", target_name());
    }
    std::printf("%s: %d cases so far, %d failures\n", target_name(), done, failures);
  }
  return failures || levels == 0 ? EXIT_FAILURE : EXIT_SUCCESS;
}
