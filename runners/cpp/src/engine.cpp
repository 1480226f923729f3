#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <set>

#include <executorch/runtime/backend/backend_options_map.h>
#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/backend/options.h>
#include <executorch/runtime/core/data_loader.h>
#include <executorch/runtime/core/error.h>
#include <executorch/runtime/core/hierarchical_allocator.h>
#include <executorch/runtime/core/memory_allocator.h>
#include <executorch/runtime/executor/memory_manager.h>
#include <executorch/runtime/executor/method.h>
#include <executorch/runtime/executor/program.h>
#include <executorch/runtime/kernel/operator_registry.h>
#include <executorch/runtime/platform/runtime.h>

#include "arena.h"
#include "engine.h"
#include "open_programs.h"
#include "program_check.h"

namespace exportable_cache {
namespace {

namespace et = executorch::runtime;

// A mapped file that releases packed weights. ExecuTorch has a loader of mapped files, but the wheel does not ship its header.
class MappedFile final : public et::DataLoader {
 public:
  explicit MappedFile(const std::string& path) {
    const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) return;
    struct stat status;
    if (::fstat(file, &status) == 0 && status.st_size > 0) {
      void* address = ::mmap(nullptr, static_cast<size_t>(status.st_size), PROT_READ, MAP_PRIVATE, file, 0);
      if (address != MAP_FAILED) {
        data_ = static_cast<const char*>(address);
        size_ = static_cast<size_t>(status.st_size);
      }
    }
    ::close(file);
  }
  ~MappedFile() override {
    if (data_ != nullptr) ::munmap(const_cast<char*>(data_), size_);
  }
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  bool is_open() const { return data_ != nullptr; }
  std::span<const uint8_t> bytes() const { return {reinterpret_cast<const uint8_t*>(data_), size_}; }

  et::Result<et::FreeableBuffer> load(size_t offset, size_t size, const SegmentInfo&) const override {
    if (!contains(offset, size)) return et::Error::InvalidArgument;
    return et::FreeableBuffer(data_ + offset, size, give_back);
  }

  et::Error load_into(size_t offset, size_t size, const SegmentInfo&, void* buffer) const override {
    if (!contains(offset, size)) return et::Error::InvalidArgument;
    std::memcpy(buffer, data_ + offset, size);
    return et::Error::Ok;
  }

  et::Result<size_t> size() const override { return size_; }

 private:
  // Weights that a delegate has packed are not read again, so their pages are released.
  static void give_back(void*, void* data, size_t size) {
    const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE)), begin = reinterpret_cast<uintptr_t>(data);
    const uintptr_t first = (begin + page - 1) / page * page, end = (begin + size) / page * page;
    if (first < end) (void)::madvise(reinterpret_cast<void*>(first), end - first, MADV_DONTNEED);
  }

  bool contains(size_t offset, size_t size) const { return offset <= size_ && size <= size_ - offset; }

  const char* data_ = nullptr;
  size_t size_ = 0;
};

// Allocates as much as is requested, and frees everything at once.
class HeapAllocator final : public et::MemoryAllocator {
 public:
  HeapAllocator() : MemoryAllocator(0, nullptr) {}
  ~HeapAllocator() override { reset(); }

  void* allocate(size_t size, size_t alignment = kDefaultAlignment) override {
    void* block = nullptr;
    if (::posix_memalign(&block, std::max(alignment, sizeof(void*)), std::max<size_t>(size, 1)) != 0) return nullptr;
    blocks_.push_back(block);
    return block;
  }

  void reset() override {
    for (void* block : blocks_) std::free(block);
    blocks_.clear();
  }

 private:
  std::vector<void*> blocks_;
};

class MethodEngine final : public Engine {
 public:
  explicit MethodEngine(const std::string& path) : path_(path), file_(path) {}

  Status open(const std::vector<std::string>& names) {
    et::runtime_init();
    if (!file_.is_open()) return fail(ErrorCode::kBundle, "cannot read ", path_, "; copy the bundle again");
    // If this ExecuTorch was built with verification, its tables are valid afterwards.
    et::Result<et::Program> program = et::Program::load(&file_, et::Program::Verification::InternalConsistency);
    if (!program.ok()) return cannot_load(path_, program.error());
    if (const std::string problem = program_problem(file_.bytes()); !problem.empty()) {
      return fail(ErrorCode::kBundle, path_, " is damaged, or made to do harm: ", problem, "; get it again, or export the model again");
    }
    program_ = std::make_unique<et::Program>(std::move(program.get()));

    shares_weights_ = names.size() > 1;
    return plan_arenas(names);
  }

  Status load(const std::vector<std::string>& names) override {
    // With it, XNNPACK keeps one packed copy of the weights for all methods.
    et::BackendOptions<1> share_weights;
    et::LoadBackendOptionsMap options;
    if (share_weights.set_option("weight_cache_enabled", true) != et::Error::Ok ||
        options.set_options("XnnpackBackend", share_weights.view()) != et::Error::Ok) {
      return fail(ErrorCode::kRuntime, "cannot set an option of XnnpackBackend");
    }
    for (const std::string& name : names) {
      if (methods_.count(name) > 0) continue;
      if (const Status status = check_operators(name); !status.ok()) return status;
      auto method = program_->load_method(name.c_str(), memory_.get(), nullptr, nullptr, shares_weights_ ? &options : nullptr);
      if (!method.ok()) return cannot_load_method(name, method.error());
      methods_.emplace(name, std::move(method.get()));
    }
    return {};
  }

  et::Result<et::MethodMeta> meta(const std::string& method) override { return program_->method_meta(method.c_str()); }

  et::Result<std::vector<et::EValue>> execute(const std::string& name, std::span<const et::EValue> inputs) override {
    et::Method& method = methods_.find(name)->second;
    for (size_t index = 0; index < inputs.size(); ++index) {
      if (const et::Error error = method.set_input(inputs[index], index); error != et::Error::Ok) return error;
    }
    if (const et::Error error = method.execute(); error != et::Error::Ok) return error;
    std::vector<et::EValue> outputs;
    for (size_t index = 0; index < method.outputs_size(); ++index) outputs.push_back(method.get_output(index));
    return outputs;
  }

  std::span<uint8_t> cache() override {
    if (arenas_.size() <= kCacheArena) return {};
    return {arenas_[kCacheArena].data(), arenas_[kCacheArena].size()};
  }

  void clear_cache() override {
    if (arenas_.size() > kCacheArena) arenas_[kCacheArena].clear();
  }

 private:
  // Memory planning with `share_mutable_buffers`, which the exporter requests, puts persistent buffers here.
  static constexpr size_t kCacheArena = 1;

  // One set of arenas for all methods, each of the largest requested size, so that they share the cache.
  Status plan_arenas(const std::vector<std::string>& names) {
    std::vector<std::string> found;
    for (size_t index = 0; index < program_->num_methods(); ++index) {
      if (const auto name = program_->get_method_name(index); name.ok()) found.emplace_back(name.get());
    }
    std::vector<size_t> sizes;
    for (const std::string& name : names) {
      if (std::find(found.begin(), found.end(), name) == found.end()) return no_such_method(path_, name, found);
      const auto meta = program_->method_meta(name.c_str());
      if (!meta.ok()) return cannot_load("method '" + name + "' of " + path_, meta.error());
      sizes.resize(std::max(sizes.size(), meta->num_memory_planned_buffers()));
      for (size_t index = 0; index < meta->num_memory_planned_buffers(); ++index) {
        const auto size = meta->memory_planned_buffer_size(index);
        if (!size.ok()) return cannot_load("method '" + name + "' of " + path_, size.error());
        sizes[index] = std::max(sizes[index], static_cast<size_t>(size.get()));
      }
    }
    for (const size_t size : sizes) {
      const Arena& arena = arenas_.emplace_back(size);
      if (arena.data() == nullptr) {
        return fail(ErrorCode::kRuntime, "cannot allocate ", size, " bytes for the cache and what ", path_,
                    " computes; export the model with a smaller max_cache_len or prefill_chunk");
      }
      spans_.emplace_back(arena.data(), arena.size());
    }
    planned_ = std::make_unique<et::HierarchicalAllocator>(et::Span<et::Span<uint8_t>>(spans_.data(), spans_.size()));
    memory_ = std::make_unique<et::MemoryManager>(&allocator_, planned_.get(), &temporary_);
    return {};
  }

  // Checked before ExecuTorch does, because it logs a page for each missing operator.
  Status check_operators(const std::string& name) const {
    std::set<std::string> registered;
    for (const et::Kernel& kernel : et::get_registered_kernels()) registered.insert(kernel.name_);
    const auto has = [&](const std::string& one) { return registered.count(one) > 0; };
    const std::string missing = not_among(called_operators(file_.bytes(), name), has);
    if (missing.empty()) return {};
    const std::string what = "method '" + name + "' of " + path_ + " calls " + missing + ", which this program was built without; ";
    if (missing.find("exportable_cache::") != std::string::npos) {
#ifdef EC_OVER_WHEEL
      return fail(ErrorCode::kBundle, what, "build it with -DEC_KERNELS=PATH, the kernels that `exportable-cache native build` "
                  "compiles, next to a runner that has them, or export the model again without kernels=native "
                  "and linears=native");
#else
      return fail(ErrorCode::kBundle, what, "build it with -DEC_NATIVE_KERNELS=ON, or export the model again without kernels=native and "
                  "linears=native");
#endif
    }
#ifdef EC_OVER_WHEEL
    return fail(ErrorCode::kBundle, what, "build it with the release of executorch that the model was exported with, or export the "
                "model again");
#else
    return fail(ErrorCode::kBundle, what, "build it with -DEC_OPERATORS=LIST, where `exportable-cache operators` lists this bundle, "
                "too, or without a list");
#endif
  }

  // Lists the operators that this program was built without.
  Error cannot_load_method(const std::string& name, et::Error error) const {
    const std::string what = "method '" + name + "' of " + path_;
    if (error == et::Error::NotFound) {
      const auto has = [](const std::string& one) { return et::get_backend_class(one.c_str()) != nullptr; };
      const std::string missing = not_among(called_delegates(file_.bytes(), name), has);
      if (!missing.empty()) {
        return fail(ErrorCode::kBundle, what, " is for ", missing, ", which this program was built without; build it with "
                    "-DEC_DELEGATES=..., or export the model for another delegate");
      }
    }
    return cannot_load(what, error);
  }

  template <class Has>
  static std::string not_among(const std::set<std::string>& needed, Has has) {
    std::string missing;
    for (const std::string& one : needed) {
      if (!has(one)) missing += (missing.empty() ? "" : ", ") + one;
    }
    return missing;
  }

  // In order of dependencies, so that destruction runs in reverse.
  OpenProgram open_;
  std::string path_;
  MappedFile file_;
  std::unique_ptr<et::Program> program_;
  std::deque<Arena> arenas_;
  std::vector<et::Span<uint8_t>> spans_;
  std::unique_ptr<et::HierarchicalAllocator> planned_;
  HeapAllocator allocator_;
  HeapAllocator temporary_;
  std::unique_ptr<et::MemoryManager> memory_;
  bool shares_weights_ = false;
  std::map<std::string, et::Method> methods_;
};

}  // namespace

std::string describe(executorch::runtime::Error error) {
  std::ostringstream text;
  text << executorch::runtime::to_string(error) << " (0x" << std::hex << static_cast<uint32_t>(error) << ")";
  return text.str();
}

Error no_such_method(const std::string& path, const std::string& method, const std::vector<std::string>& found) {
  std::string names;
  for (const std::string& name : found) names += (names.empty() ? "" : ", ") + name;
  return fail(ErrorCode::kBundle, path, " has no method '", method, "' but ", names.empty() ? "none" : names,
              "; it is not the program of this manifest: copy the bundle again");
}

Error cannot_load(const std::string& what, executorch::runtime::Error error) {
  return fail(ErrorCode::kBundle, "ExecuTorch cannot load ", what, ": ", describe(error),
              "; link the kernels and backends it was exported for, or export the model again");
}

Result<std::unique_ptr<Engine>> Engine::open(const std::string& path, const std::vector<std::string>& methods,
                                             const std::vector<std::string>& later) {
  auto engine = std::make_unique<MethodEngine>(path);
  std::vector<std::string> all = methods;
  all.insert(all.end(), later.begin(), later.end());
  if (const Status status = engine->open(all); !status.ok()) return status.error();
  if (const Status status = engine->load(methods); !status.ok()) return status.error();
  return std::unique_ptr<Engine>(std::move(engine));
}

}  // namespace exportable_cache
