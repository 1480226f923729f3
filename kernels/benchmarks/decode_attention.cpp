// Times the attention of a decode step, and a plain read of the same keys and values.
//
//   decode_attention [THREADS] [TOKENS] [ROUNDS] [TARGET]
//
// 12 layers of 12 query heads of 64 over 4 key heads with 4096 slots, float32, float16 and int8, each layer in separate memory.
// In each round every form runs once, after reading 96 MB of other memory, as a step reads weights, so that no cache holds what
// it needs. Prints the fastest and median of the rounds in ms, and GB/s of the median.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "attention.h"
#include "pool.h"

using namespace exportable_cache::kernels;

namespace {

constexpr int64_t kLayers = 12, kHeads = 4, kGroups = 3, kDim = 64, kSlots = 4096;

struct Cache {
  Dtype dtype;
  int64_t bytes;  // per element
  std::vector<std::vector<char>> parts[4];  // per layer: keys, values and their scales
};

Cache cache_of(Dtype dtype) {
  std::mt19937 random(1);
  Cache cache{dtype, dtype == Dtype::kFloat32 ? 4 : dtype == Dtype::kInt8 ? 1 : 2, {}};
  std::uniform_real_distribution<float> spread(-1.0f, 1.0f);
  for (int64_t layer = 0; layer < kLayers; ++layer) {
    for (int part = 0; part < 4; ++part) {
      const int64_t numbers = kHeads * kSlots * (part < 2 ? kDim : 1), size = part < 2 ? cache.bytes : 4;
      if (part >= 2 && dtype != Dtype::kInt8) continue;
      std::vector<char> memory(numbers * size);
      for (int64_t i = 0; i < numbers; ++i) {
        const float x = spread(random);
        const int8_t whole = static_cast<int8_t>(x * 127);
        const uint16_t half = static_cast<uint16_t>(0x3000 + (random() & 0x83FF));
        const float scale = 0.01f;
        const void* from = part >= 2 ? static_cast<const void*>(&scale) : size == 4 ? static_cast<const void*>(&x)
                           : size == 1 ? static_cast<const void*>(&whole) : &half;
        std::memcpy(memory.data() + i * size, from, size);
      }
      cache.parts[part].push_back(std::move(memory));
    }
  }
  return cache;
}

void attend_all(const Cache& cache, int64_t length, const float* query, float* out, const Threads& threads) {
  for (int64_t layer = 0; layer < kLayers; ++layer) {
    Attention a;
    a.kv_heads = kHeads, a.groups = kGroups, a.key_dim = a.value_dim = kDim, a.stored_dtype = cache.dtype;
    a.query = {query, 0, 0, kDim}, a.out = {out, 0, 0, kDim};
    a.slots = a.kept = kSlots, a.length = &length, a.scale = 0.125f;
    const View rows{nullptr, kHeads * kSlots * kDim, kDim, kSlots * kDim}, scales{nullptr, kHeads * kSlots, 1, kSlots};
    a.stored = {rows, rows, scales, scales};
    a.stored.key.data = cache.parts[0][layer].data(), a.stored.value.data = cache.parts[1][layer].data();
    if (cache.dtype == Dtype::kInt8) {
      a.stored.key_scale.data = cache.parts[2][layer].data(), a.stored.value_scale.data = cache.parts[3][layer].data();
    }
    attend(a, threads);
  }
}

// Four streams at a time, prefetched into L2.
uint64_t read(const char* from, int64_t bytes) {
  constexpr int kStreams = 4;
  using Words = uint64_t __attribute__((vector_size(64), aligned(1)));
  const int64_t part = bytes / kStreams / 64 * 64;
  Words sums[kStreams] = {};
  for (int64_t at = 0; at < part; at += 64) {
#pragma GCC unroll 4
    for (int s = 0; s < kStreams; ++s) {
      __builtin_prefetch(from + s * part + at + 2048, 0, 1);
      sums[s] += *reinterpret_cast<const Words*>(from + s * part + at);
    }
  }
  uint64_t sum = 0;
  for (const Words& words : sums) {
    for (int i = 0; i < 8; ++i) sum += words[i];
  }
  return sum;
}

struct Piece {
  const char* from;
  int64_t bytes;
};

volatile uint64_t sink;

void read_all(const std::vector<Piece>& pieces, const Threads& threads) {
  const auto task = [](void* context, size_t i) {
    const Piece& piece = (*static_cast<const std::vector<Piece>*>(context))[i];
    sink = read(piece.from, piece.bytes);
  };
  threads.run(pieces.size(), task, const_cast<std::vector<Piece>*>(&pieces));
}

double milliseconds(const std::function<void()>& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

int main(int count, char** arguments) {
  const auto number = [&](int i, int64_t otherwise) { return count > i ? std::atoll(arguments[i]) : otherwise; };
  const int64_t threads = number(1, 1), tokens = number(2, 4000), rounds = number(3, 15);
  if (count > 4 && !limit_target(arguments[4])) {
    std::fprintf(stderr, "this processor has no %s\n", arguments[4]);
    return 1;
  }
  Pool own(static_cast<size_t>(threads));
  const Threads runtime = threads_of(own, static_cast<size_t>(threads));
  const std::vector<char> others(96 << 20, 1);
  std::vector<Piece> weights;
  for (int64_t i = 0; i < 8; ++i) weights.push_back({others.data() + i * (12 << 20), 12 << 20});
  std::vector<float> query(kHeads * kGroups * kDim, 0.1f), out(query.size());
  const Cache caches[] = {cache_of(Dtype::kFloat32), cache_of(Dtype::kFloat16), cache_of(Dtype::kInt8)};
  const char* const names[] = {"float32", "float16", "int8"};
  std::vector<Piece> pieces[3];
  std::vector<double> times[3][2];
  for (int c = 0; c < 3; ++c) {
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      for (int64_t i = 0; i < 2 * kHeads; ++i) {
        const int64_t bytes = caches[c].bytes * kDim;
        pieces[c].push_back({caches[c].parts[i % 2][layer].data() + i / 2 * kSlots * bytes, tokens * bytes});
      }
    }
  }
  for (int64_t round = 0; round <= rounds; ++round) {
    for (int c = 0; c < 3; ++c) {
      for (int form = 0; form < 2; ++form) {
        read_all(weights, runtime);
        const double took = milliseconds([&] {
          if (form) read_all(pieces[c], runtime);
          else attend_all(caches[c], tokens - 1, query.data(), out.data(), runtime);
        });
        if (round) times[c][form].push_back(took);
      }
    }
  }
  std::printf("%s, %lld threads, %lld tokens\n", target_name(), static_cast<long long>(threads), static_cast<long long>(tokens));
  for (int c = 0; c < 3; ++c) {
    const double megabytes = 2e-6 * kLayers * kHeads * tokens * kDim * caches[c].bytes;
    for (int form = 0; form < 2; ++form) {
      std::sort(times[c][form].begin(), times[c][form].end());
      const double median = times[c][form][times[c][form].size() / 2];
      std::printf("%-8s %-10s fastest %6.2f  median %6.2f ms  %5.1f GB/s\n", names[c], form ? "plain read" : "attention",
                  times[c][form][0], median, megabytes / median);
    }
  }
}
