// Attention over a cache, by itself: no ExecuTorch here.
#pragma once

#include <cstddef>
#include <cstdint>

namespace exportable_cache::kernels {

// kInt4: two numbers a byte, each 8 more than it is: the first half of a row in the low bits, the second in the high
// ones.
enum class Dtype : uint8_t { kFloat32, kFloat16, kBFloat16, kInt8, kInt4 };

// A tensor [batch, tokens, heads, dim] whose last dimension is contiguous; strides in elements, of kInt4 in bytes.
struct View {
  const void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
};

struct MutableView {
  void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
};

// softmax(scale * query @ key^T + mask) @ value, for every batch row and head. `kv_heads * groups` query heads: those
// of one key head are consecutive.
struct Attention {
  int64_t batch = 1;
  int64_t kv_heads = 1;
  int64_t groups = 1;
  int64_t queries = 1;    // query tokens
  int64_t keys = 0;       // slots that may be read; those behind are never touched
  int64_t key_dim = 0;    // even for kInt4, as the next
  int64_t value_dim = 0;  // may differ from key_dim: in MLA's latent form values are the first numbers of keys
  Dtype query_dtype = Dtype::kFloat32;   // of the output as well
  Dtype stored_dtype = Dtype::kFloat32;  // of keys and values
  View query, key, value;
  MutableView out;
  View key_scale, value_scale;  // float32, one number a slot and head, by which whole numbers are multiplied; or null
  const float* mask = nullptr;  // [queries, keys], added to the scores, or null
  int64_t mask_stride = 0;
  float scale = 1.0f;
  bool causal = false;  // query token i sees the slots up to start + i
  int64_t start = 0;
};

// Runs task(context, i) for every i in [0, count), in any order, on any thread, and returns when all are done.
struct Threads {
  size_t count = 1;
  void (*run)(size_t count, void (*task)(void* context, size_t index), void* context) = nullptr;
};

// A row all of whose slots are masked by minus infinity gives zeros.
void attend(const Attention& attention, const Threads& threads);

// Whether this processor has one of the instruction sets that are compiled in. Ask before anything else.
bool is_supported();

// The instruction set in use, as Highway names it: "AVX3" is AVX-512.
const char* target_name();

// Uses no instruction set better than the named one, in this process; false if there is none of that name.
bool limit_target(const char* name);

}  // namespace exportable_cache::kernels
