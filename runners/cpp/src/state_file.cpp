#include "state_file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

namespace exportable_cache {
namespace {

// Values are in the processor's byte order; the last byte is the format's version.
static_assert(std::endian::native == std::endian::little);
constexpr char kMagic[8] = {'E', 'C', 'S', 'T', 'A', 'T', 'E', 2};
constexpr size_t kBlock = 4096;
constexpr size_t kMostPlaced = 1 << 16;
constexpr size_t kDigest = 64;  // SHA-256 in hexadecimal

struct Header {
  char magic[8];
  char program[kDigest];
  int64_t length;
  int64_t max_len_ever;
  int64_t pending;      // -1 for none
  uint64_t memory;      // bytes of the cache
  uint64_t runs;        // runs of non-zero memory, each with its offset before it
  uint64_t placed;      // number of images
};

static_assert(sizeof(Placed) == 3 * sizeof(int64_t));

struct Run {
  uint64_t offset;
  uint64_t size;
};

// FNV-1a over words of eight bytes: detects damage, not manipulation.
class Checksum {
 public:
  void add(const void* data, size_t size) {
    const auto* bytes = static_cast<const uint8_t*>(data);
    for (; size >= 8; bytes += 8, size -= 8) {
      uint64_t word;
      std::memcpy(&word, bytes, 8);
      value_ = (value_ ^ word) * 0x100000001b3;
    }
    for (; size > 0; ++bytes, --size) value_ = (value_ ^ *bytes) * 0x100000001b3;
  }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0xcbf29ce484222325;
};

struct Closer {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using File = std::unique_ptr<std::FILE, Closer>;

bool is_zero(const uint8_t* block, size_t size) {
  return block[0] == 0 && std::memcmp(block, block + 1, size - 1) == 0;
}

std::vector<Run> filled(std::span<const uint8_t> memory) {
  std::vector<Run> runs;
  for (size_t offset = 0; offset < memory.size(); offset += kBlock) {
    const size_t size = std::min(kBlock, memory.size() - offset);
    if (is_zero(memory.data() + offset, size)) continue;
    if (!runs.empty() && runs.back().offset + runs.back().size == offset) {
      runs.back().size += size;
    } else {
      runs.push_back({offset, size});
    }
  }
  return runs;
}

Error damaged(const std::string& path, const char* what) {
  return fail(ErrorCode::kInput, path, " is not a readable state: ", what, "; save it again");
}

// The bytes of a file, if they are not more than the state of that much memory.
Result<std::vector<uint8_t>> bytes_of(const std::string& path, size_t memory) {
  const File file(std::fopen(path.c_str(), "rb"));
  struct stat status;
  if (!file || ::fstat(::fileno(file.get()), &status) != 0) {
    return fail(ErrorCode::kInput, "cannot read ", path, ": ", std::strerror(errno));
  }
  if (!S_ISREG(status.st_mode)) return damaged(path, "it is not a regular file");
  const size_t most = sizeof(Header) + memory + (memory / kBlock + 1) * sizeof(Run) + kMostPlaced * sizeof(Placed) + sizeof(uint64_t);
  const auto size = static_cast<uint64_t>(status.st_size);
  if (size > most) return damaged(path, "it is larger than the cache");
  std::vector<uint8_t> bytes(size);
  if (std::fread(bytes.data(), 1, bytes.size(), file.get()) != bytes.size()) return damaged(path, "it ends early");
  return bytes;
}

}  // namespace

Status write_state(const std::string& path, const std::string& program, const Place& place, std::span<const uint8_t> memory) {
  if (place.placed.size() > kMostPlaced) {
    return fail(ErrorCode::kInput, "the session holds ", place.placed.size(), " images, a state at most ", kMostPlaced, "; rewind it first");
  }
  struct stat status;
  if (::stat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode)) {
    return fail(ErrorCode::kInput, "cannot write ", path, ": it is not a regular file, and would be replaced; choose another path");
  }
  const std::vector<Run> runs = filled(memory);
  Header header{};
  std::memcpy(header.magic, kMagic, sizeof kMagic);
  std::memcpy(header.program, program.data(), std::min(program.size(), kDigest));
  header.length = place.length;
  header.max_len_ever = place.max_len_ever;
  header.pending = place.pending.value_or(-1);
  header.memory = memory.size();
  header.runs = runs.size();
  header.placed = place.placed.size();

  const std::string beside = path + ".part";
  Checksum checksum;
  bool good = false;
  {
    File file(std::fopen(beside.c_str(), "wb"));
    const auto put = [&](const void* data, size_t size) {
      checksum.add(data, size);
      // An empty list has no address, which fwrite requires.
      return size == 0 || std::fwrite(data, 1, size, file.get()) == size;
    };
    good = file != nullptr && put(&header, sizeof header) && put(place.placed.data(), place.placed.size() * sizeof(Placed));
    for (size_t index = 0; good && index < runs.size(); ++index) {
      good = put(&runs[index], sizeof(Run)) && put(memory.data() + runs[index].offset, runs[index].size);
    }
    const uint64_t sum = checksum.value();
    good = good && std::fwrite(&sum, sizeof sum, 1, file.get()) == 1 && std::fflush(file.get()) == 0 &&
           ::fsync(::fileno(file.get())) == 0;
  }
  if (good && std::rename(beside.c_str(), path.c_str()) == 0) return {};
  const int problem = errno;
  std::remove(beside.c_str());
  return fail(ErrorCode::kInput, "cannot write ", path, ": ", std::strerror(problem));
}

Result<Place> read_state(const std::string& path, const std::string& program, std::span<uint8_t> memory,
                         const std::function<bool(const Place&)>& accepts, const std::function<void()>& clear) {
  const Result<std::vector<uint8_t>> bytes = bytes_of(path, memory.size());
  if (!bytes.ok()) return bytes.error();
  Header header;
  uint64_t sum;
  if (bytes->size() < sizeof header + sizeof sum) return damaged(path, "it ends early");
  std::memcpy(&header, bytes->data(), sizeof header);
  if (std::memcmp(header.magic, kMagic, sizeof kMagic) != 0) return damaged(path, "it is not a state of this version");
  const size_t end = bytes->size() - sizeof sum;
  std::memcpy(&sum, bytes->data() + end, sizeof sum);
  Checksum checksum;
  // Read in the runs in which it was written.
  size_t at = sizeof header;
  checksum.add(&header, sizeof header);
  if (header.placed > (end - at) / sizeof(Placed)) return damaged(path, "it ends early");
  std::vector<Placed> placed(header.placed);
  const size_t listed = placed.size() * sizeof(Placed);
  if (listed > 0) std::memcpy(placed.data(), bytes->data() + at, listed);
  checksum.add(bytes->data() + at, listed);
  at += listed;
  std::vector<std::pair<Run, size_t>> runs;
  uint64_t behind = 0;  // end of the previous run
  for (uint64_t index = 0; index < header.runs; ++index) {
    Run run;
    if (end - at < sizeof run) return damaged(path, "it ends early");
    std::memcpy(&run, bytes->data() + at, sizeof run);
    checksum.add(&run, sizeof run);
    at += sizeof run;
    if (run.offset < behind || run.offset > header.memory || run.size > header.memory - run.offset) {
      return damaged(path, "a run lies outside the cache");
    }
    if (end - at < run.size) return damaged(path, "it ends early");
    checksum.add(bytes->data() + at, run.size);
    runs.emplace_back(run, at);
    at += run.size;
    behind = run.offset + run.size;
  }
  if (at != end || checksum.value() != sum) return damaged(path, "its checksum does not match");
  const std::string saved(header.program, strnlen(header.program, kDigest));
  if (saved != program || header.memory != memory.size()) {
    return fail(ErrorCode::kInput, path, " is the state of another program (", saved.substr(0, 12), "..., this is ", program.substr(0, 12),
                "...); load it with the bundle that it was saved with");
  }
  Place place{header.length, header.max_len_ever, header.pending < 0 ? std::nullopt : std::optional(header.pending), std::move(placed)};
  if (place.length < 0 || place.max_len_ever < place.length || !accepts(place)) return damaged(path, "its lengths are invalid");
  clear();
  for (const auto& [run, from] : runs) std::memcpy(memory.data() + run.offset, bytes->data() + from, run.size);
  return place;
}

}  // namespace exportable_cache
