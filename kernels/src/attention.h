// Attention over a cache, without ExecuTorch.
#pragma once

#include <cstddef>
#include <cstdint>

namespace exportable_cache::kernels {

// kInt4: two values per byte, each plus 8; the first half of a row in the low bits, the second half in the high bits.
enum class Dtype : uint8_t { kFloat32, kFloat16, kBFloat16, kInt8, kInt4 };

inline bool is_whole(Dtype dtype) { return dtype == Dtype::kInt8 || dtype == Dtype::kInt4; }

// A tensor [batch, tokens, heads, dim] whose last dimension is contiguous; strides in elements, for kInt4 in bytes.
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

// Keys and values of some tokens, and for integers their scales: float32, one per token and head; or null.
struct Stored {
  View key, value, key_scale, value_scale;
};

// Float32 values with their strides, 0 for a broadcast dimension; or null.
struct Addend {
  const float* data = nullptr;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t query_stride = 0;

  const float* at(int64_t batch, int64_t head, int64_t query) const {
    return data + batch * batch_stride + head * head_stride + query * query_stride;
  }
};

// softmax(cap(scale * query @ key^T) + bias) @ value, for every batch row and head. There are `kv_heads * groups` query
// heads; those of one key head are consecutive.
//
// A batch row has `length` tokens and `tokens` new ones, the last of which are the queries. Slot s below `kept` holds
// position s. The other slots are a ring of the newest remaining tokens: position p is in slot
// kept + (p - kept) % (slots - kept).
struct Attention {
  int64_t batch = 1;
  int64_t kv_heads = 1;
  int64_t groups = 1;
  int64_t queries = 1;    // query tokens
  int64_t tokens = 1;     // new tokens, at least `queries`
  int64_t key_dim = 0;    // even for kInt4, as value_dim
  int64_t value_dim = 0;  // may differ from key_dim: MLA's latent values are the first elements of keys
  Dtype query_dtype = Dtype::kFloat32;   // and of the output
  Dtype stored_dtype = Dtype::kFloat32;  // of keys and values
  View query;
  MutableView out;

  int64_t slots = 0;
  int64_t kept = 0;  // all slots, if none is overwritten
  Stored stored;     // of the slots; empty slots are never read
  Stored fresh;      // of the new tokens, if the slots do not hold them yet; otherwise null
  const int64_t* length = nullptr;  // [batch]
  int64_t length_stride = 1;

  // Of the positions up to its own, a query sees the kept slots, and of the others:
  bool causal = true;  // false: every position
  int64_t window = 0;  // the newest, including its own; 0: all
  int64_t chunk = 0;   // those from the last multiple of it on; 0: all

  bool rounded = false;  // true: products of many rows may be of queries, weights, keys and values rounded to bfloat16
  float scale = 1.0f;
  float softcap = 0.0f;  // scores become softcap * tanh(score / softcap); 0: no soft-capping
  Addend bias;           // added to the scores after that, by the key's position
  Addend sink;           // an additional score per query without a value
};

// Runs task(context, i) for every i in [0, count), in any order and on any thread, and returns when all are done.
struct Threads {
  size_t count = 1;
  void (*run)(size_t count, void (*task)(void* context, size_t index), void* context) = nullptr;
};

// A query that sees nothing, or only keys masked by minus infinity, gives zeros.
void attend(const Attention& attention, const Threads& threads);

// True if this processor has one of the compiled instruction sets. Call it before anything else.
bool is_supported();

// The instruction set in use, as Highway names it: "AVX3" is AVX-512.
const char* target_name();

// Limits this process to the named instruction set and lower ones; false if there is no such name.
bool limit_target(const char* name);

}  // namespace exportable_cache::kernels
