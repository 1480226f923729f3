#include "regions.h"

#include <fstream>
#include <iterator>
#include <stdexcept>

#include "json.h"

namespace exportable_cache {
namespace {

constexpr int64_t kVersion = 1;
constexpr int64_t kMostResults = 10'000;

class Reader {
 public:
  Reader(std::string path, const std::function<bool(const std::string&)>& has_tensor)
      : path_(std::move(path)), has_tensor_(has_tensor) {}

  RegionTable read() const {
    std::ifstream file(path_, std::ios::binary);
    if (!file) {
      throw std::invalid_argument(
          "cannot open " + path_ + ": the bundle was written by an earlier release, which compiled each method as a whole; export the model "
          "again");
    }
    const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    const auto parsed = Json::parse(text);
    if (!parsed.ok()) damaged(parsed.error().message);
    const auto version = (*parsed)["version"].integer();
    if (version == nullptr || *version != kVersion) {
      throw std::invalid_argument(
          path_ + " is not of version " + std::to_string(kVersion) + ", which this program reads; export the model again");
    }
    RegionTable table;
    for (const auto& held : array((*parsed)["regions"], "regions")) {
      auto& names = table.regions.emplace_back();
      for (const auto& [own, stored] : object(held, "regions")) names[own] = tensor(stored, "regions");
    }
    for (const auto& [name, fields] : object((*parsed)["methods"], "methods")) {
      table.methods[name] = method(fields, "methods." + name, table.regions.size());
    }
    return table;
  }

 private:
  MethodCalls method(const Json& fields, const std::string& where, size_t regions) const {
    MethodCalls method;
    method.inputs = number(fields["inputs"], where + ".inputs", kMostResults);
    for (const auto& name : array(fields["tensors"], where + ".tensors")) {
      method.tensors.push_back(tensor(name, where + ".tensors"));
    }
    // A value may be read from the call that writes it until the call after which it is released.
    std::vector<bool> filled(method.inputs + method.tensors.size(), true);
    const auto slots = [&](const Json& value, const std::string& which) {
      std::vector<size_t> found;
      for (const auto& slot : array(value, which)) {
        found.push_back(number(slot, which, static_cast<int64_t>(filled.size()) - 1));
        if (!filled[found.back()]) damaged(which + ": slot " + std::to_string(found.back()) + " is empty");
      }
      return found;
    };
    for (const auto& call : array(fields["calls"], where + ".calls")) {
      const auto which = where + ".calls." + std::to_string(method.calls.size());
      Call read;
      read.region = number(call["region"], which + ".region", static_cast<int64_t>(regions) - 1);
      read.sources = slots(call["sources"], which + ".sources");
      read.results = number(call["results"], which + ".results", kMostResults);
      read.done = slots(call["done"], which + ".done");
      for (const auto slot : read.done) filled[slot] = false;
      filled.resize(filled.size() + read.results, true);
      method.calls.push_back(std::move(read));
    }
    method.outputs = slots(fields["outputs"], where + ".outputs");
    if (method.outputs.empty()) damaged(where + ".outputs must not be empty");
    return method;
  }

  std::string tensor(const Json& name, const std::string& where) const {
    if (name.string() == nullptr) damaged(where + ": has a name that is not a string");
    if (!has_tensor_(*name.string())) damaged("no tensor of constants.pt is named '" + *name.string() + "'");
    return *name.string();
  }

  size_t number(const Json& value, const std::string& where, int64_t most) const {
    const auto found = value.integer();
    if (found == nullptr || *found < 0 || *found > most) {
      damaged(where + ": there should be a number from 0 to " + std::to_string(most));
    }
    return static_cast<size_t>(*found);
  }

  const Json::Array& array(const Json& value, const std::string& where) const {
    if (value.array() == nullptr) damaged(where + ": there should be a list");
    return *value.array();
  }

  const Json::Object& object(const Json& value, const std::string& where) const {
    if (value.object() == nullptr) damaged(where + ": there should be an object");
    return *value.object();
  }

  [[noreturn]] void damaged(const std::string& problem) const {
    throw std::invalid_argument(path_ + " is damaged: " + problem + "; export the model again");
  }

  std::string path_;
  const std::function<bool(const std::string&)>& has_tensor_;
};

}  // namespace

RegionTable read_region_table(const std::string& path, const std::function<bool(const std::string&)>& has_tensor) {
  return Reader(path, has_tensor).read();
}

}  // namespace exportable_cache
