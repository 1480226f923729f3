#include "session.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <limits>
#include <stdexcept>

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

namespace exportable_cache {
namespace {

std::vector<char> read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw std::invalid_argument("cannot open " + path + "; export the model with --target aoti");
  }
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

std::optional<int64_t> optional_int(const c10::IValue& value) {
  return value.isNone() ? std::nullopt : std::optional<int64_t>(value.toInt());
}

}  // namespace

Session::Session(const std::string& folder) {
  const auto stored = torch::jit::pickle_load(read_file(folder + "/constants.pt")).toGenericDict();
  for (const auto& entry : stored.at("weights").toGenericDict()) {
    tensors_[entry.key().toStringRef()] = entry.value().toTensor();
  }
  for (const auto& entry : stored.at("state").toGenericDict()) {
    const auto& name = entry.key().toStringRef();
    const auto shape = entry.value().toTensor();
    tensors_[name] = at::zeros(shape.sizes(), shape.options());
    state_names_.push_back(name);
  }
  const auto limits = stored.at("limits").toGenericDict();
  batch_size_ = limits.at("batch_size").toInt();
  vocab_size_ = limits.at("vocab_size").toInt();
  max_length_ = optional_int(limits.at("max_length"));
  auto table = read_region_table(
      folder + "/regions.json", [this](const std::string& name) { return tensors_.count(name) > 0; });
  for (size_t number = 0; number < table.regions.size(); ++number) {
    // Calls depend on each other, so one thread runs them.
    regions_.push_back(std::make_unique<torch::inductor::AOTIModelPackageLoader>(
        folder + "/program.pt2", "region_" + std::to_string(number), /*run_single_threaded=*/true));
    if (!table.regions[number].empty()) {
      std::unordered_map<std::string, at::Tensor> constants;
      for (const auto& [own, name] : table.regions[number]) constants[own] = tensors_.at(name);
      // It keeps raw pointers, so that all methods write one cache; tensors_ owns the tensors.
      regions_.back()->load_constants(constants, /*use_inactive=*/false, /*check_full_update=*/true, /*user_managed=*/true);
    }
  }
  for (const auto& entry : stored.at("methods").toGenericDict()) {
    const auto& name = entry.key().toStringRef();
    const auto found = table.methods.find(name);
    if (found == table.methods.end() || found->second.inputs != 2) {
      throw std::invalid_argument(folder + "/regions.json has no method '" + name + "' of two inputs; export the model again");
    }
    const auto range = entry.value().toTupleRef().elements();
    Method method{name, range[0].toInt(), range[1].toInt(), optional_int(range[2]), std::move(found->second), {}};
    for (const auto& tensor : method.table.tensors) method.tensors.push_back(tensors_.at(tensor));
    methods_.push_back(std::move(method));
  }
}

Session::~Session() = default;

void Session::reset() {
  length_ = 0;
  for (const auto& name : state_names_) {
    tensors_.at(name).zero_();
  }
}

at::Tensor Session::prefill(const at::Tensor& input_ids) {
  check(input_ids, 2);
  int64_t longest = 1;
  for (const auto& method : methods_) {
    longest = method.kv_read_len ? longest : std::max(longest, method.max_length);
  }
  at::Tensor logits;
  for (int64_t position = 0; position < input_ids.size(1);) {
    const int64_t left = input_ids.size(1) - position;
    // The last step has more than one token, because some models take one token for the end of the prompt (`SlotPolicy.keeps_prompt`).
    const int64_t size = left == longest + 1 && longest > 2 ? longest - 1 : std::min(longest, left);
    logits = step(input_ids.slice(1, position, position + size).contiguous());
    position += size;
  }
  return logits;
}

at::Tensor Session::decode(const at::Tensor& tokens) {
  check(tokens, 1);
  return step(tokens.unsqueeze(1));
}

at::Tensor Session::step(const at::Tensor& input_ids) {
  const int64_t size = input_ids.size(1);
  const auto& method = method_for(size, length_ + size);
  const auto input_pos = at::full({batch_size_}, length_, at::kLong);
  const auto logits = call(method, input_ids, input_pos);
  length_ += size;
  return logits;
}

at::Tensor Session::call(const Method& method, at::Tensor input_ids, at::Tensor input_pos) {
  std::vector<at::Tensor> values{std::move(input_ids), std::move(input_pos)};
  values.insert(values.end(), method.tensors.begin(), method.tensors.end());
  std::vector<at::Tensor> given;
  for (const auto& call : method.table.calls) {
    given.clear();
    for (const auto place : call.sources) given.push_back(values[place]);
    auto results = regions_[call.region]->run(given);
    if (results.size() != call.results) {
      throw std::runtime_error(
          "region " + std::to_string(call.region) + " gives " + std::to_string(results.size()) + " values, of " +
          std::to_string(call.results) + "; export the model again");
    }
    std::move(results.begin(), results.end(), std::back_inserter(values));
    for (const auto place : call.done) values[place] = at::Tensor();
  }
  return values[method.table.outputs.front()];
}

const Method& Session::method_for(int64_t size, int64_t end) const {
  const auto cost = [](const Method& method) {
    return std::pair(method.kv_read_len.value_or(std::numeric_limits<int64_t>::max()), method.max_length);
  };
  const Method* best = nullptr;
  for (const auto& method : methods_) {
    const bool serves = method.min_length <= size && size <= method.max_length && end <= method.kv_read_len.value_or(end);
    if (serves && (best == nullptr || cost(method) < cost(*best))) {
      best = &method;
    }
  }
  if (best == nullptr) {
    throw std::invalid_argument("no method takes " + std::to_string(size) + " tokens");
  }
  return *best;
}

void Session::check(const at::Tensor& ids, int64_t dims) const {
  if (ids.dim() != dims || ids.size(0) != batch_size_ || ids.numel() == 0 || ids.scalar_type() != at::kLong) {
    throw std::invalid_argument(
        "token ids must be int64 with " + std::to_string(batch_size_) + " rows and " + std::to_string(dims) +
        " dimensions, and not empty");
  }
  const auto smallest = ids.min().item<int64_t>();
  const auto largest = ids.max().item<int64_t>();
  if (smallest < 0 || largest >= vocab_size_) {
    throw std::invalid_argument(
        "token id " + std::to_string(smallest < 0 ? smallest : largest) + " is outside the vocabulary of 0 to " +
        std::to_string(vocab_size_ - 1));
  }
  const int64_t size = dims == 2 ? ids.size(1) : 1;
  if (max_length_ && length_ + size > *max_length_) {
    throw std::invalid_argument(
        "the cache holds " + std::to_string(length_) + " of at most " + std::to_string(*max_length_) + " tokens, " +
        std::to_string(size) + " more do not fit; reset it, or export with a larger max_cache_len");
  }
}

}  // namespace exportable_cache
