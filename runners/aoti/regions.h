// The calls of each method and their arguments: regions.json, as the Python package wrote it.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace exportable_cache {

// A call of one compiled region over indexed values.
struct Call {
  size_t region;                // index of the region
  std::vector<size_t> sources;  // indices of its inputs
  size_t results;               // number of results, which get the next indices
  std::vector<size_t> done;     // values that are not read afterwards
};

// The calls of one method. The first values are its inputs, then `tensors`, then results of calls.
struct MethodCalls {
  size_t inputs = 0;
  std::vector<std::string> tensors;  // names in constants.pt
  std::vector<Call> calls;
  std::vector<size_t> outputs;
};

struct RegionTable {
  // Of each region, the constants it is loaded with: its own name -> name in constants.pt.
  std::vector<std::map<std::string, std::string>> regions;
  std::map<std::string, MethodCalls> methods;
};

// Read a table. Throws std::invalid_argument if there is none, or if a name or index in it is wrong.
RegionTable read_region_table(const std::string& path, const std::function<bool(const std::string&)>& has_tensor);

}  // namespace exportable_cache
