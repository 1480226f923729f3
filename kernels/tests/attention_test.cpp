// attend() against double precision, over shapes, dtypes, kinds of masks, thread counts and every instruction set here.
//
// The buffers end with the last slot that may be read, so that the address sanitizer sees a read behind it.
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
#include <string>
#include <thread>
#include <vector>

using namespace exportable_cache::kernels;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Case {
  int64_t batch, kv_heads, groups, queries, keys, dim, value_dim;
  Dtype query_dtype, stored_dtype;
  enum { kAll, kCausal, kWindow } kind;
  size_t threads;
  bool heads_as_batch;

  std::string text() const {
    char line[200];
    std::snprintf(line, sizeof line,
                  "batch %d heads %dx%d queries %d keys %d dim %d/%d dtypes %d/%d kind %d threads %zu%s", int(batch),
                  int(kv_heads), int(groups), int(queries), int(keys), int(dim), int(value_dim), int(query_dtype),
                  int(stored_dtype), int(kind), threads, heads_as_batch ? " heads as batch" : "");
    return line;
  }
};

void run_threads(size_t count, void (*task)(void*, size_t), void* context) {
  std::vector<std::thread> pool;
  for (size_t worker = 0; worker < 3; ++worker) {
    pool.emplace_back([=] {
      for (size_t index = worker; index < count; index += 3) task(context, index);
    });
  }
  for (std::thread& thread : pool) thread.join();
}

// Numbers as they are stored, and as doubles.
struct Numbers {
  std::unique_ptr<unsigned char[]> bytes;
  std::vector<double> exact;
};

Numbers numbers(size_t rows, size_t dim, Dtype dtype, std::mt19937& random, double spread) {
  const size_t count = rows * dim;
  static const size_t sizes[] = {4, 2, 2, 1, 1};
  const size_t size = sizes[static_cast<size_t>(dtype)];
  std::normal_distribution<double> normal(0.0, spread);
  Numbers made{std::make_unique<unsigned char[]>(dtype == Dtype::kInt4 ? count / 2 : count * size),
               std::vector<double>(count)};
  for (size_t i = 0; i < count; ++i) {
    const auto x = static_cast<float>(normal(random));
    if (dtype == Dtype::kInt4) {
      // The first half of a row in the low bits of its bytes, the second in the high ones.
      const auto whole = std::clamp(std::lround(x * 4), -8L, 7L);
      const size_t row = i / dim, at = i % dim, half = dim / 2;
      made.bytes[row * half + at % half] |= static_cast<unsigned char>((whole + 8) << (at < half ? 0 : 4));
      made.exact[i] = static_cast<double>(whole);
      continue;
    }
    unsigned char* to = made.bytes.get() + i * size;
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

// The largest difference from double precision, as a share of what is allowed.
double difference(const Case& c, std::mt19937& random) {
  const int64_t heads = c.kv_heads * c.groups;
  const size_t slots = c.batch * c.keys * c.kv_heads;
  const Numbers query = numbers(c.batch * c.queries * heads, c.dim, c.query_dtype, random, 1.5);
  const Numbers key = numbers(slots, c.dim, c.stored_dtype, random, 1.0);
  const Numbers value = numbers(slots, c.value_dim, c.stored_dtype, random, 1.0);
  std::vector<float> key_scale(slots), value_scale(slots), mask;
  std::uniform_real_distribution<float> uniform(0.005f, 0.02f);
  for (size_t i = 0; i < slots; ++i) key_scale[i] = uniform(random), value_scale[i] = uniform(random);
  Attention a;
  a.batch = c.batch, a.kv_heads = c.kv_heads, a.groups = c.groups, a.queries = c.queries, a.keys = c.keys;
  a.key_dim = c.dim, a.value_dim = c.value_dim, a.query_dtype = c.query_dtype, a.stored_dtype = c.stored_dtype;
  a.scale = static_cast<float>(1.0 / std::sqrt(c.dim));
  auto lay = [&](auto& view, int64_t tokens, int64_t many, int64_t dim) {
    // Both orders of tokens and heads.
    view.batch_stride = tokens * many * dim;
    view.token_stride = c.heads_as_batch ? dim : many * dim;
    view.head_stride = c.heads_as_batch ? tokens * dim : dim;
  };
  lay(a.query, c.queries, heads, c.dim), lay(a.out, c.queries, heads, c.value_dim);
  lay(a.key, c.keys, c.kv_heads, c.dim), lay(a.value, c.keys, c.kv_heads, c.value_dim);
  lay(a.key_scale, c.keys, c.kv_heads, 1), lay(a.value_scale, c.keys, c.kv_heads, 1);
  a.query.data = query.bytes.get(), a.key.data = key.bytes.get(), a.value.data = value.bytes.get();
  // Strides of the numbers; of what is stored they are halved where two share a byte.
  const Attention exact = a;
  if (c.stored_dtype == Dtype::kInt4) {
    for (View* view : {&a.key, &a.value}) view->batch_stride /= 2, view->token_stride /= 2, view->head_stride /= 2;
  }
  const bool scaled = c.stored_dtype == Dtype::kInt8 || c.stored_dtype == Dtype::kInt4;
  if (scaled) a.key_scale.data = key_scale.data(), a.value_scale.data = value_scale.data();
  if (c.kind == Case::kCausal) a.causal = true, a.start = c.keys - c.queries;
  if (c.kind == Case::kWindow) {
    // A window of seven slots before each query, and an offset: the first query sees nothing.
    mask.assign(c.queries * c.keys, -kInfinity);
    for (int64_t i = 1; i < c.queries; ++i) {
      for (int64_t j = 0; j < c.keys; ++j) {
        if (j <= i * c.keys / c.queries && j > i * c.keys / c.queries - 7) mask[i * c.keys + j] = 0.25f * float(j % 3);
      }
    }
    a.mask = mask.data(), a.mask_stride = c.keys;
  }
  const size_t outputs = c.batch * c.queries * heads * c.value_dim;
  const size_t width = c.query_dtype == Dtype::kFloat32 ? 4 : 2;
  const auto out = std::make_unique<unsigned char[]>(outputs * width);
  a.out.data = out.get();
  attend(a, Threads{c.threads, run_threads});

  const double allowed = c.query_dtype == Dtype::kFloat32 ? 4e-6 : c.query_dtype == Dtype::kFloat16 ? 6e-4 : 5e-3;
  double worst = 0.0;
  std::vector<double> weights(c.keys);
  for (int64_t b = 0; b < c.batch; ++b)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < c.queries; ++i) {
        const int64_t g = h / c.groups;
        double top = -1e300, total = 0.0;
        for (int64_t j = 0; j < c.keys; ++j) {
          double score = 0.0;
          for (int64_t x = 0; x < c.dim; ++x) {
            score += query.exact[b * a.query.batch_stride + i * a.query.token_stride + h * a.query.head_stride + x] *
                     key.exact[b * exact.key.batch_stride + j * exact.key.token_stride + g * exact.key.head_stride + x];
          }
          if (scaled)
            score *=
                key_scale[b * a.key_scale.batch_stride + j * a.key_scale.token_stride + g * a.key_scale.head_stride];
          score *= a.scale;
          if (a.mask) score += mask[i * c.keys + j];
          if (a.causal && j > a.start + i) score = -INFINITY;
          weights[j] = score;
          top = std::max(top, score);
        }
        for (double& weight : weights) total += weight = std::exp(weight - top);
        for (int64_t x = 0; x < c.value_dim; ++x) {
          double sum = 0.0, size = 1e-3;
          for (int64_t j = 0; j < c.keys; ++j) {
            if (weights[j] == 0.0) continue;
            double term = weights[j] * value.exact[b * exact.value.batch_stride + j * exact.value.token_stride +
                                                   g * exact.value.head_stride + x];
            if (scaled)
              term *= value_scale[b * a.value_scale.batch_stride + j * a.value_scale.token_stride +
                                  g * a.value_scale.head_stride];
            sum += term, size += std::fabs(term);
          }
          const bool nothing = total == 0.0 || top == -1e300;
          sum = nothing ? 0.0 : sum / total, size = nothing ? 1.0 : std::max(size / total, 1e-3);
          const size_t at = b * a.out.batch_stride + i * a.out.token_stride + h * a.out.head_stride + x;
          double found;
          if (width == 4) {
            float x32;
            std::memcpy(&x32, out.get() + 4 * at, 4);
            found = x32;
          } else if (c.query_dtype == Dtype::kFloat16) {
            uint16_t half;
            std::memcpy(&half, out.get() + 2 * at, 2);
            found = float_of_float16(half);
          } else {
            uint16_t half;
            std::memcpy(&half, out.get() + 2 * at, 2);
            found = float_of_bfloat16(half);
          }
          const double off = std::fabs(found - sum) / size / allowed;
          if (!(off <= worst)) worst = off;
        }
      }
  return worst;
}

// What is behind the last slot that a causal step sees may be anything, and is not read.
bool ignores_what_is_not_filled() {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> query(2 * 16, 0.5f), rows(128 * 16, nan), out(2 * 16);
  for (size_t i = 0; i < 70 * 16; ++i) rows[i] = 0.25f;
  Attention a;
  a.queries = 2, a.keys = 70, a.key_dim = a.value_dim = 16, a.causal = true, a.start = 68;
  a.query = {query.data(), 32, 16, 16}, a.key = a.value = {rows.data(), 128 * 16, 16, 16},
  a.out = {out.data(), 32, 16, 16};
  attend(a, Threads{});
  return std::all_of(out.begin(), out.end(), [](float x) { return std::fabs(x - 0.25f) < 1e-6f; });
}

// A key that is not a number gives an output that is not one, whatever row and block it is in.
bool shows_not_a_number() {
  std::vector<float> query(16, 0.5f), rows(200 * 16, 0.25f), out(16);
  for (const int slot : {0, 63, 64, 130, 199}) {
    std::vector<float> bad = rows;
    bad[slot * 16 + 3] = std::numeric_limits<float>::quiet_NaN();
    Attention a;
    a.keys = 200, a.key_dim = a.value_dim = 16;
    a.query = {query.data(), 16, 16, 16}, a.key = {bad.data(), 3200, 16, 16}, a.value = {rows.data(), 3200, 16, 16};
    a.out = {out.data(), 16, 16, 16};
    attend(a, Threads{});
    if (out[0] == out[0]) return false;
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
    std::mt19937 random(7);
    auto check = [&](const Case& c) {
      const double off = difference(c, random);
      ++done;
      if (!(off <= 1.0)) {
        ++failures;
        std::printf("%s: %s: %.2f times what is allowed\n", target_name(), c.text().c_str(), off);
      }
    };
    const int64_t lengths[] = {1, 3, 63, 64, 65, 200, 1030};
    const int64_t dims[] = {8, 16, 24, 64, 80, 128};
    for (const int64_t keys : lengths)
      for (const int64_t dim : dims)
        for (const int kind : {0, 1, 2}) {
          for (const int64_t queries : {int64_t{1}, int64_t{2}, int64_t{7}, int64_t{50}}) {
            if (queries > keys) continue;
            Case c{1,
                   2,
                   3,
                   queries,
                   keys,
                   dim,
                   dim,
                   Dtype::kFloat32,
                   Dtype::kFloat32,
                   static_cast<decltype(Case::kind)>(kind),
                   1,
                   done % 2 == 0};
            c.threads = done % 3 == 0 ? 3 : 1;
            c.batch = done % 5 == 0 ? 2 : 1;
            c.groups = 1 + done % 5;
            if (c.threads > 1 && keys > 1000) c.kv_heads = 1;
            check(c);
            c.stored_dtype = static_cast<Dtype>(1 + done % 4);
            check(c);
            c.query_dtype = c.stored_dtype >= Dtype::kInt8 ? Dtype::kFloat32 : c.stored_dtype;
            c.value_dim = dim == 80 ? 64 : dim == 8 ? 12 : dim == 24 ? 40 : dim;
            check(c);
          }
        }
    if (!ignores_what_is_not_filled())
      ++failures, std::printf("%s: slots behind the filled ones were read\n", target_name());
    if (!shows_not_a_number()) ++failures, std::printf("%s: a key that is not a number was lost\n", target_name());
    std::printf("%s: %d cases so far, %d failures\n", target_name(), done, failures);
  }
  return failures || levels == 0 ? EXIT_FAILURE : EXIT_SUCCESS;
}
