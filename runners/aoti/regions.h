// Which machine code a method calls, with what, in which order: regions.json, as the Python package wrote it.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace exportable_cache {

// One region's turn over numbered places.
struct Call {
  size_t region;                // whose code
  std::vector<size_t> sources;  // places of what it is given
  size_t results;               // how many values it gives: they take the next places
  std::vector<size_t> done;     // places that nothing reads afterwards
};

// The calls of one method. The first places are its inputs, the next ones `tensors`, and those behind what calls give.
struct MethodCalls {
  size_t inputs = 0;
  std::vector<std::string> tensors;  // names in constants.pt
  std::vector<Call> calls;
  std::vector<size_t> outputs;
};

struct RegionTable {
  // Of each region, the tensors that it is given when it is loaded: its own name -> name in constants.pt.
  std::vector<std::map<std::string, std::string>> regions;
  std::map<std::string, MethodCalls> methods;
};

// Reads a table. Throws std::invalid_argument if there is none, or if a name or place in it is wrong.
RegionTable read_region_table(const std::string& path, const std::function<bool(const std::string&)>& has_tensor);

}  // namespace exportable_cache
