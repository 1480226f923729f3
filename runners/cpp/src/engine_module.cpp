// The engine over executorch::extension::Module.
#include <algorithm>

#include <executorch/extension/module/module.h>
#include <executorch/runtime/backend/backend_options_map.h>
#include <executorch/runtime/backend/options.h>

#include "engine.h"

namespace exportable_cache {
namespace {

namespace et = executorch::runtime;
using executorch::extension::Module;

class ModuleEngine final : public Engine {
 public:
  explicit ModuleEngine(const std::string& path)
      // The last argument, share_memory_arenas, is how the methods share the cache.
      : path_(path), module_(path, Module::LoadMode::Mmap, nullptr, nullptr, nullptr, true) {}

  Status load(const std::vector<std::string>& names) {
    et::Error error = et::Error::Ok;
    if (names.size() > 1) {
      // Without it each method packs its own copy of the weights: XNNPACK then keeps one for all.
      et::BackendOptions<1> share_weights;
      et::LoadBackendOptionsMap options;
      if (share_weights.set_option("weight_cache_enabled", true) != et::Error::Ok ||
          options.set_options("XnnpackBackend", share_weights.view()) != et::Error::Ok) {
        return fail(ErrorCode::kRuntime, "cannot set an option of XnnpackBackend");
      }
      error = module_.load(options);
    } else {
      error = module_.load();
    }
    if (error != et::Error::Ok) return cannot_load(path_, error);
    const auto found = module_.method_names();
    if (!found.ok()) return cannot_load(path_, found.error());
    for (const std::string& name : names) {
      if (!found->contains(name)) return no_such_method(path_, name, {found->begin(), found->end()});
      error = module_.load_method(name);
      if (error != et::Error::Ok) return cannot_load("method '" + name + "' of " + path_, error);
    }
    return {};
  }

  et::Result<et::MethodMeta> meta(const std::string& method) override { return module_.method_meta(method); }

  et::Result<et::EValue> execute(const std::string& method, const et::EValue& tokens, const et::EValue& position) override {
    return module_.get(method, {tokens, position});
  }

 private:
  std::string path_;
  Module module_;
};

}  // namespace

Result<std::unique_ptr<Engine>> Engine::open(const std::string& path, const std::vector<std::string>& methods) {
  auto engine = std::make_unique<ModuleEngine>(path);
  if (const Status status = engine->load(methods); !status.ok()) return status.error();
  return std::unique_ptr<Engine>(std::move(engine));
}

}  // namespace exportable_cache
