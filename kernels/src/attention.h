// Attention over a cache, by itself: no ExecuTorch here.
#pragma once

#include <cstddef>
#include <cstdint>

namespace exportable_cache::kernels {

// kInt4: two numbers a byte, each 8 more than it is: the first half of a row in the low bits, the second in the high
// ones.
enum class Dtype : uint8_t { kFloat32, kFloat16, kBFloat16, kInt8, kInt4 };

inline bool is_whole(Dtype dtype) { return dtype == Dtype::kInt8 || dtype == Dtype::kInt4; }

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

// Keys and values of some tokens, and of whole numbers the factors that these are multiplied by: float32, one a token
// and head; or null.
struct Stored {
  View key, value, key_scale, value_scale;
};

// Float32 numbers with their strides, 0 where one serves all; or null.
struct Addend {
  const float* data = nullptr;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t query_stride = 0;

  const float* at(int64_t batch, int64_t head, int64_t query) const {
    return data + batch * batch_stride + head * head_stride + query * query_stride;
  }
};

// softmax(cap(scale * query @ key^T) + bias) @ value, for every batch row and head. `kv_heads * groups` query heads:
// those of one key head are consecutive.
//
// A batch row has `length` tokens and `tokens` new ones, of which the last are the queries. The slots hold its tokens:
// slot s below `kept` that of position s, the others, a ring, the newest of the rest, that of position p in slot
// kept + (p - kept) % (slots - kept).
struct Attention {
  int64_t batch = 1;
  int64_t kv_heads = 1;
  int64_t groups = 1;
  int64_t queries = 1;    // query tokens
  int64_t tokens = 1;     // new ones, at least as many
  int64_t key_dim = 0;    // even for kInt4, as the next
  int64_t value_dim = 0;  // may differ from key_dim: in MLA's latent form values are the first numbers of keys
  Dtype query_dtype = Dtype::kFloat32;   // of the output as well
  Dtype stored_dtype = Dtype::kFloat32;  // of keys and values
  View query;
  MutableView out;

  int64_t slots = 0;
  int64_t kept = 0;  // all of them where none is written again
  Stored stored;     // of the slots; those that hold nothing are never touched
  Stored fresh;      // of the new tokens, whose rows the slots do not hold yet; or null: they do
  const int64_t* length = nullptr;  // [batch]
  int64_t length_stride = 1;

  // Of what comes up to its own position, a query sees the kept slots, and of the others:
  bool causal = true;  // or everything there is, whatever its position
  int64_t window = 0;  // the newest, itself included; 0: all
  int64_t chunk = 0;   // those from the last multiple of it on; 0: all

  float scale = 1.0f;
  float softcap = 0.0f;  // scores become softcap * tanh(score / softcap); 0: they do not
  Addend bias;           // added to the scores after that, by the key's position
  Addend sink;           // a score more in the sum, one a query, that has no value
};

// Runs task(context, i) for every i in [0, count), in any order, on any thread, and returns when all are done.
struct Threads {
  size_t count = 1;
  void (*run)(size_t count, void (*task)(void* context, size_t index), void* context) = nullptr;
};

// A query that sees nothing, or only what is masked by minus infinity, gives zeros.
void attend(const Attention& attention, const Threads& threads);

// Whether this processor has one of the instruction sets that are compiled in. Ask before anything else.
bool is_supported();

// The instruction set in use, as Highway names it: "AVX3" is AVX-512.
const char* target_name();

// Uses no instruction set better than the named one, in this process; false if there is none of that name.
bool limit_target(const char* name);

}  // namespace exportable_cache::kernels
