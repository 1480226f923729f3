// A running `aoti` bundle: prefill and decode over one set of weights and one KV cache.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>

#include "regions.h"

namespace torch::inductor {
class AOTIModelPackageLoader;
}

namespace exportable_cache {

// One method, as in the Python package: takes min_length to max_length new tokens per row, for steps after which no row is longer
// than kv_read_len, if it has one.
struct Method {
  std::string name;
  int64_t min_length;
  int64_t max_length;
  std::optional<int64_t> kv_read_len;
  MethodCalls table;
  // Tensors in the order of `table.tensors`.
  std::vector<at::Tensor> tensors;
};

// Every call checks its arguments and the free slots before anything runs, and throws std::invalid_argument with the numbers if it
// refuses: a refused call changes nothing. Not thread-safe.
class Session {
 public:
  // Open program.pt2, regions.json and constants.pt in `folder`, as `exportable-cache export --target aoti` wrote them.
  explicit Session(const std::string& folder);
  ~Session();

  // Feed `input_ids`, int64 [batch, length], after the cached tokens; long prompts are fed in chunks.
  // Returns the logits of each row's last token, [batch, vocab].
  at::Tensor prefill(const at::Tensor& input_ids);

  // Feed one token per row, int64 [batch]. Returns logits [batch, vocab].
  at::Tensor decode(const at::Tensor& tokens);

  // Start again at position 0.
  void reset();

  int64_t length() const { return length_; }
  int64_t batch_size() const { return batch_size_; }
  std::optional<int64_t> max_length() const { return max_length_; }

 private:
  void check(const at::Tensor& ids, int64_t dims) const;
  at::Tensor step(const at::Tensor& input_ids);
  at::Tensor call(const Method& method, at::Tensor input_ids, at::Tensor input_pos);
  const Method& method_for(int64_t size, int64_t end) const;

  std::vector<Method> methods_;
  // Compiled regions, each for all equal layers and methods.
  std::vector<std::unique_ptr<torch::inductor::AOTIModelPackageLoader>> regions_;
  // Tensors that the code reads: weights by name, then the cache.
  std::unordered_map<std::string, at::Tensor> tensors_;
  std::vector<std::string> state_names_;
  int64_t batch_size_ = 0;
  int64_t vocab_size_ = 0;
  std::optional<int64_t> max_length_;
  int64_t length_ = 0;
};

}  // namespace exportable_cache
