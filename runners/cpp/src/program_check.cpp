#include "program_check.h"

#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

#include "utf8.h"

namespace exportable_cache {
namespace {

// Fields of the tables of ExecuTorch's program.fbs and XNNPACK's schema.fbs, by their index.
constexpr int kPlans = 1, kSegments = 4, kNamedData = 7;
constexpr int kName = 0, kValues = 2, kInputs = 3, kOutputs = 4, kChains = 5, kOperators = 6, kDelegates = 7;
constexpr int kInstructions = 2;
constexpr int kProcessed = 1, kCompileSpecs = 2;
constexpr int kTensorInfo = 9, kTensorName = 1;
constexpr int kConstants = 8, kConstantName = 2;
// The unions of values and of instructions.
enum Value { kTensor = 5, kString = 6, kTensorList = 10, kOptionalTensorList = 11 };
enum Instruction { kKernelCall = 1, kDelegateCall = 2, kMove = 3, kJump = 4, kFree = 5 };
// Offsets of the segments in the file's header, and of the tables in XNNPACK's.
constexpr uint64_t kSegmentBase = 24, kXnnpackTables = 10;
// The limit of total reads, in multiples of the file, because tables can share lists, and many that share a long one take very long.
constexpr uint64_t kTimes = 16, kAtLeast = 1 << 16;

// The file, and its first problem: a read past its end returns 0, so that readers need not stop.
class Bytes {
 public:
  explicit Bytes(std::span<const uint8_t> bytes) : bytes_(bytes), left_(kTimes * bytes.size() + kAtLeast) {}

  bool has(uint64_t at, uint64_t size) const { return at <= bytes_.size() && bytes_.size() - at >= size; }

  template <class T>
  T number(uint64_t at) {
    T value = 0;
    if (!has(at, sizeof(T))) {
      complain("an offset in it is past its end");
    } else {
      std::memcpy(&value, bytes_.data() + at, sizeof(T));
    }
    return value;
  }

  std::string_view text(uint64_t at, uint64_t size) {
    if (!has(at, size)) {
      complain("an offset in it is past its end");
      return {};
    }
    if (!spend(size)) return {};
    return {reinterpret_cast<const char*>(bytes_.data()) + at, static_cast<size_t>(size)};
  }

  // True if that many more bytes of lists and names in the file may be read.
  bool spend(uint64_t size) {
    if (size > left_) {
      left_ = 0;
      complain("its tables share more lists and names than any program's");
      return false;
    }
    left_ -= size;
    return true;
  }

  void complain(std::string problem) {
    if (problem_.empty()) problem_ = std::move(problem);
  }
  const std::string& problem() const { return problem_; }

 private:
  std::span<const uint8_t> bytes_;
  uint64_t left_;
  std::string problem_;
};

// A table of a flatbuffer.
class Table {
 public:
  Table(Bytes& file, uint64_t at) : file_(&file), at_(at) {}

  bool is_null() const { return at_ == 0; }

  template <class T = int32_t>
  T number(int field) const {
    const uint64_t at = place(field);
    return at == 0 ? T{0} : file_->number<T>(at);
  }

  Table table(int field) const {
    const uint64_t at = place(field);
    return {*file_, at == 0 ? 0 : indirect(at)};
  }

  std::vector<Table> tables(int field) const {
    std::vector<Table> found;
    const auto [start, count] = vector(field);
    for (uint64_t index = 0; index < count; ++index) found.emplace_back(*file_, indirect(start + 4 * index));
    return found;
  }

  std::vector<int32_t> numbers(int field) const {
    std::vector<int32_t> found;
    const auto [start, count] = vector(field);
    for (uint64_t index = 0; index < count; ++index) found.push_back(file_->number<int32_t>(start + 4 * index));
    return found;
  }

  // A string, "" if it is not stored.
  std::string text(int field) const {
    const uint64_t at = place(field);
    if (at == 0) return {};
    const uint64_t start = indirect(at);
    const std::string_view found = file_->text(start + 4, file_->number<uint32_t>(start));
    if (valid_utf8(found) != found.size()) file_->complain("a name is not valid UTF-8");
    return std::string(found);
  }

 private:
  // The offset of a field, 0 if it is not stored.
  uint64_t place(int field) const {
    if (at_ == 0) return 0;
    const auto fields = static_cast<uint64_t>(static_cast<int64_t>(at_) - file_->number<int32_t>(at_));
    const uint64_t entry = 4 + 2 * static_cast<uint64_t>(field);
    if (entry >= file_->number<uint16_t>(fields)) return 0;
    const auto offset = file_->number<uint16_t>(fields + entry);
    return offset == 0 ? 0 : at_ + offset;
  }

  uint64_t indirect(uint64_t at) const { return at + file_->number<uint32_t>(at); }

  // The offset and the size of a list of four-byte elements.
  std::pair<uint64_t, uint64_t> vector(int field) const {
    const uint64_t at = place(field);
    if (at == 0) return {0, 0};
    const uint64_t start = indirect(at), count = file_->number<uint32_t>(start);
    if (file_->has(start + 4, 4 * count)) return {start + 4, file_->spend(4 * count) ? count : 0};
    file_->complain("a list of " + std::to_string(count) + " goes past the end");
    return {0, 0};
  }

  Bytes* file_;
  uint64_t at_;
};

Table root(Bytes& file, uint64_t start) { return {file, start + file.number<uint32_t>(start)}; }

void within(Bytes& file, const std::vector<int32_t>& indices, size_t size, const std::string& what, int32_t least = 0) {
  for (const int32_t index : indices) {
    if (index < least || index >= static_cast<int64_t>(size)) {
      return file.complain(what + ": index " + std::to_string(index) + " is out of range (" + std::to_string(size) + " entries)");
    }
  }
}

// Names of the weights that XNNPACK looks up, for a payload in a segment.
void check_payload(Bytes& file, const std::vector<Table>& segments, const Table& processed) {
  if (processed.is_null() || processed.number<uint8_t>(0) == 0) return;
  const auto index = processed.number<uint32_t>(1);
  if (index >= segments.size()) return file.complain("a payload is in segment " + std::to_string(index) + ", which there is not");
  const uint64_t start = file.number<uint64_t>(kSegmentBase) + segments[index].number<uint64_t>(0);
  if (!file.has(start, 8) || file.text(start, 8).substr(4) != "XH00") return;
  for (const Table& constant : root(file, start + file.number<uint32_t>(start + kXnnpackTables)).tables(kConstants)) {
    constant.text(kConstantName);
  }
}

void check_values(Bytes& file, const std::vector<Table>& values, const std::string& name) {
  for (const Table& value : values) {
    const auto kind = value.number<uint8_t>(0);
    const Table held = value.table(1);
    if (kind == 0 || held.is_null()) continue;
    if (kind == kString) held.text(0);
    if (kind == kTensor) held.table(kTensorInfo).text(kTensorName);
    if (kind == kTensorList || kind == kOptionalTensorList) {
      within(file, held.numbers(0), values.size(), "a list of '" + name + "'", kind == kTensorList ? 0 : -1);
    }
  }
}

struct Sizes {
  size_t operators;
  size_t delegates;
  size_t values;
  size_t instructions;
};

void check_instruction(Bytes& file, const Table& instruction, const Sizes& sizes, const std::string& what) {
  const auto kind = instruction.number<uint8_t>(0);
  const Table call = instruction.table(1);
  if (kind == 0 || call.is_null()) return file.complain(what + " does nothing");
  switch (kind) {
    case kKernelCall:
    case kDelegateCall:
      within(file, {call.number(0)}, kind == kKernelCall ? sizes.operators : sizes.delegates, what);
      return within(file, call.numbers(1), sizes.values, what);
    case kMove: return within(file, {call.number(0), call.number(1)}, sizes.values, what);
    case kJump:
      within(file, {call.number(0)}, sizes.values, what);
      // An index one past the last instruction ends the method.
      return within(file, {call.number(1)}, sizes.instructions + 1, what);
    case kFree: return within(file, {call.number(0)}, sizes.values, what);
    default: file.complain(what + " is of kind " + std::to_string(kind) + ", which there is not");
  }
}

// The result of `read` for the plan of a method, in a checked file.
template <class Read>
std::set<std::string> of_plan(std::span<const uint8_t> bytes, const std::string& method, Read read) {
  Bytes file(bytes);
  std::set<std::string> found;
  for (const Table& plan : root(file, 0).tables(kPlans)) {
    if (plan.text(kName) == method) found.merge(read(plan));
  }
  return found;
}

}  // namespace

std::set<std::string> called_operators(std::span<const uint8_t> bytes, const std::string& method) {
  return of_plan(bytes, method, [](const Table& plan) {
    std::set<std::string> found;
    for (const Table& one : plan.tables(kOperators)) {
      const std::string overload = one.text(1);
      found.insert(overload.empty() ? one.text(0) : one.text(0) + "." + overload);
    }
    return found;
  });
}

std::set<std::string> called_delegates(std::span<const uint8_t> bytes, const std::string& method) {
  return of_plan(bytes, method, [](const Table& plan) {
    std::set<std::string> found;
    for (const Table& one : plan.tables(kDelegates)) found.insert(one.text(0));
    return found;
  });
}

std::string program_problem(std::span<const uint8_t> bytes) {
  Bytes file(bytes);
  const Table program = root(file, 0);
  for (const Table& named : program.tables(kNamedData)) named.text(0);
  const std::vector<Table> segments = program.tables(kSegments);
  for (const Table& plan : program.tables(kPlans)) {
    const std::string name = plan.text(kName);
    const auto operators = plan.tables(kOperators), delegates = plan.tables(kDelegates), values = plan.tables(kValues);
    for (const Table& one : operators) one.text(0), one.text(1);
    for (const Table& delegate : delegates) {
      if (delegate.text(0) == "XnnpackBackend") check_payload(file, segments, delegate.table(kProcessed));
      for (const Table& spec : delegate.tables(kCompileSpecs)) spec.text(0);
    }
    check_values(file, values, name);
    within(file, plan.numbers(kInputs), values.size(), "inputs of '" + name + "'");
    within(file, plan.numbers(kOutputs), values.size(), "outputs of '" + name + "'");
    for (const Table& chain : plan.tables(kChains)) {
      const auto instructions = chain.tables(kInstructions);
      const Sizes sizes{operators.size(), delegates.size(), values.size(), instructions.size()};
      for (const Table& one : instructions) check_instruction(file, one, sizes, "an instruction of '" + name + "'");
    }
    if (!file.problem().empty()) break;
  }
  return file.problem();
}

}  // namespace exportable_cache
