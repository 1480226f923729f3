#include <exportable_cache/session.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "adapter_file.h"
#include "checks.h"
#include "item_places.h"
#include "prompt_lookup.h"
#include "state_file.h"

namespace exportable_cache {

const char* to_string(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInput: return "input";
    case ErrorCode::kCacheFull: return "cache_full";
    case ErrorCode::kBundle: return "bundle";
    case ErrorCode::kRuntime: return "runtime";
  }
  return "unknown";
}

Session::Session(Manifest manifest, CacheLimits limits, Program program)
    : manifest_(std::move(manifest)),
      limits_(std::move(limits)),
      program_(std::move(program)),
      text_(manifest_),
      items_(manifest_.items) {}

Result<Session> Session::open(const std::string& folder) {
  Result<Manifest> manifest = Manifest::read(folder);
  if (!manifest.ok()) return manifest.error();
  if (manifest->batch_size != 1) {
    return fail(ErrorCode::kBundle, folder, " runs ", manifest->batch_size, " rows at once, and this session one; open it as a ",
                "BatchSession with as many prompts, or export with batch_size=1");
  }
  Result<CacheLimits> limits = CacheLimits::make(manifest->layers);
  if (!limits.ok()) return limits.error();
  Result<Program> program = Program::open(*manifest);
  if (!program.ok()) return program.error();
  return Session(std::move(*manifest), std::move(*limits), std::move(*program));
}

std::optional<int64_t> Session::room() const {
  const std::optional<int64_t> limit = max_length();
  return limit ? std::optional<int64_t>(*limit - length_) : std::nullopt;
}

void Session::reset() {
  items_.clear();
  begin();
}

void Session::begin() {
  length_ = 0;
  max_len_ever_ = 0;
  pending_.reset();
  placed_.clear();
  cached_.clear();
}

void Session::remember(std::span<const int64_t> tokens) {
  const auto held = static_cast<size_t>(length_);
  if (cached_.size() > held) cached_.resize(held);
  if (cached_.size() == held) cached_.insert(cached_.end(), tokens.begin(), tokens.end());
}

Status Session::rewind(int64_t tokens) {
  if (const Status status = check_rewind(tokens); !status.ok()) return status;
  if (tokens == length_) {
    begin();
    return {};
  }
  length_ -= tokens;
  std::erase_if(placed_, [this](const Placed& item) { return item.end > length_; });
  pending_.reset();
  return {};
}

int64_t Session::most_dropped(int64_t first) const {
  return first > length_ ? 0 : limits_.max_dropped(length_, max_len_ever_, first);
}

Status Session::check_shifts(const GenerateOptions& options) const {
  if (!options.shift_when_full || !max_length()) return {};
  if (!manifest_.shifts) {
    return fail(ErrorCode::kBundle, manifest_.folder, " has no method shift, which drops old tokens; export the model with shift=True");
  }
  if (options.protected_tokens < 0 || options.protected_tokens > *max_length() / 2) {
    return fail(ErrorCode::kInput, "protected_tokens must be from 0 to ", *max_length() / 2, ", half of a cache of ", *max_length(),
                " tokens, got ", options.protected_tokens, "; protect fewer");
  }
  return {};
}

Status Session::make_room(int64_t tokens, int64_t first) {
  const std::optional<int64_t> limit = max_length();
  const int64_t over = limit ? length_ + tokens - *limit : 0;
  if (over <= 0) return {};
  // Half of what is not protected, so that the next shift is not soon.
  const int64_t count = std::min(std::max(over, (*limit - first) / 2), most_dropped(first));
  return count < over ? Status() : shift(count, first);
}

Status Session::shift(int64_t count, int64_t first) {
  if (!manifest_.shifts) {
    return fail(ErrorCode::kBundle, manifest_.folder, " has no method shift, which drops old tokens; export the model with shift=True");
  }
  if (count < 1 || first < 0) {
    return fail(ErrorCode::kInput, "count must be at least 1 and first at least 0, got ", count, " and ", first);
  }
  const int64_t most = most_dropped(first);
  if (count > most) {
    return fail(ErrorCode::kInput, "count must be at most ", most, " from position ", first, " on, got ", count, ": the cache holds ",
                length_, " tokens, and the newest ones of a sliding window stay; drop fewer tokens, or protect fewer");
  }
  if (std::any_of(placed_.begin(), placed_.end(), [first](const Placed& item) { return item.end > first; })) {
    return fail(ErrorCode::kInput, "first must be after the images, got ", first, "; reset() and feed the tokens to keep");
  }
  if (const Status status = program_.shift(length_, first, count); !status.ok()) return status;
  max_len_ever_ = std::max(limits_.ever_after(max_len_ever_, first, count), length_ - count);
  const auto known = [this](int64_t index) { return cached_.begin() + std::min(index, static_cast<int64_t>(cached_.size())); };
  cached_.erase(known(first), known(first + count));
  length_ -= count;
  return {};
}

Result<std::span<const float>> Session::prefill(std::span<const int64_t> tokens, std::optional<int64_t> position) {
  if (const Status status = check_tokens(tokens, manifest_, "tokens"); !status.ok()) return status.error();
  const int64_t start = position.value_or(length_);
  if (start > length_) {
    return fail(ErrorCode::kInput, "position ", start, " skips ahead: the cache holds ", length_,
                " tokens, so the next position is at most ", length_, "; feed the tokens between first");
  }
  if (start < 0) return fail(ErrorCode::kInput, "position is ", start, "; it must be from 0 to ", length_);
  // Position 0 is a new sequence, which needs no earlier token.
  if (start > 0) {
    if (const Status status = check_rewind(length_ - start); !status.ok()) return status.error();
  }
  const auto count = static_cast<int64_t>(tokens.size());
  if (const Status status = check_room(max_length(), start, count, {}); !status.ok()) return status.error();
  if (const Status status = check_encoded(start); !status.ok()) return status.error();
  if (const Status status = check_items(tokens); !status.ok()) return status.error();
  if (start == 0) begin();
  length_ = start;
  std::erase_if(placed_, [this](const Placed& item) { return item.end > length_; });
  return feed(tokens);
}

Result<std::span<const float>> Session::decode(int64_t token, std::optional<int64_t> position) {
  return prefill(std::span<const int64_t>(&token, 1), position);
}

Result<std::span<const float>> Session::feed(std::span<const int64_t> tokens, bool may_stop) {
  pending_.reset();
  const bool embeds = !items_.is_empty();
  std::vector<float> embeddings;
  ItemPlaces places;
  if (embeds) {
    Result<ItemPlaces> found = places_of(manifest_.items, *manifest_.embeds, tokens, program_.max_step(true));
    if (!found.ok()) return found.error();
    places = std::move(*found);
    Result<std::vector<float>> given = embedded(tokens);
    if (!given.ok()) return given.error();
    embeddings = std::move(*given);
    items_.clear();
  }
  const int64_t start = length_, delta = rope_delta(placed_, start);
  for (int64_t& position : places.position_ids) position += start + delta;
  const std::vector<Placed> before = placed_;
  const auto total = static_cast<int64_t>(tokens.size());
  const size_t hidden = embeds ? embeddings.size() / tokens.size() : 0;
  size_t chunk = 0;
  for (int64_t done = 0; done < total && !(may_stop && cancelled_->load(std::memory_order_relaxed));) {
    const bool is_given = !places.sizes.empty();
    int64_t size = is_given ? places.sizes[chunk++] : std::min(total - done, program_.max_step(embeds));
    const MethodSpec* method = method_for(size, false, embeds);
    if (method == nullptr && !is_given) {
      size = 1;
      method = method_for(1, false, embeds);
    }
    if (method == nullptr) return no_method(size);
    const auto first = static_cast<size_t>(done), count = static_cast<size_t>(size);
    Step step{.length = size, .positions = {&length_, 1}, .encoded = encoded_ ? &*encoded_ : nullptr, .adapter = adapter_};
    std::vector<int64_t> positions;
    if (embeds) {
      step.embeds = std::span<const float>(embeddings).subspan(first * hidden, count * hidden);
      if (!places.image_ids.empty()) step.image_ids = std::span<const int64_t>(places.image_ids).subspan(first, count);
      for (size_t axis = 0; axis < places.position_ids.size() / tokens.size(); ++axis) {
        const auto from = places.position_ids.begin() + static_cast<int64_t>(axis) * total + done;
        positions.insert(positions.end(), from, from + size);
      }
      step.position_ids = positions;
    } else {
      step.tokens = tokens.subspan(first, count);
      step.rope_delta = rope_delta(placed_, length_);
    }
    // Set before the run, because a run that fails halfway may have written slots.
    max_len_ever_ = std::max(max_len_ever_, length_ + size);
    if (const Status status = program_.run(*method, step, 1, logits_); !status.ok()) return status.error();
    // Images have no ids of their own.
    if (!embeds) remember(tokens.subspan(first, count));
    length_ += size;
    done += size;
    if (places.placed.empty()) continue;
    // Only those whose tokens were fed, because a step may fail.
    placed_ = before;
    for (const Placed& item : places.placed) {
      if (item.start < done) placed_.push_back({item.start + start, item.end + start, item.delta + delta});
    }
  }
  return std::span<const float>(logits_);
}

Result<std::vector<float>> Session::embedded(std::span<const int64_t> tokens) {
  Result<std::vector<float>> embeddings = program_.embed(*manifest_.embeds, tokens);
  if (!embeddings.ok()) return embeddings;
  const auto hidden = static_cast<size_t>(manifest_.embeds->hidden_size);
  for (size_t kind = 0; kind < manifest_.items.size(); ++kind) {
    const ItemSpec& spec = manifest_.items[kind];
    size_t place = 0;
    for (size_t item = 0; item < items_.count(kind); ++item) {
      const Result<std::vector<float>> one = program_.encode_item(items_, kind, item);
      if (!one.ok()) return one.error();
      if (one->size() != static_cast<size_t>(spec.tokens) * hidden) {
        return fail(ErrorCode::kRuntime, "method '", spec.method, "' gave ", one->size(), " numbers, not ", spec.tokens, " embeddings of ",
                    hidden);
      }
      for (size_t row = 0; row < static_cast<size_t>(spec.tokens); ++row, ++place) {
        while (tokens[place] != spec.token_id) ++place;  // as many as `Items::check` counted
        std::copy_n(one->begin() + static_cast<int64_t>(row * hidden), hidden,
                    embeddings->begin() + static_cast<int64_t>(place * hidden));
      }
    }
  }
  return embeddings;
}

Status Session::add_input(const Input& input) { return items_.add(input); }

Result<std::span<const float>> Session::score(std::span<const int64_t> tokens) {
  if (tokens.size() == 1) return feed(tokens);
  pending_.reset();
  const auto size = static_cast<int64_t>(tokens.size());
  const MethodSpec* method = method_for(size, true);
  if (method == nullptr) return no_method(size);
  max_len_ever_ = std::max(max_len_ever_, length_ + size);
  const Step step{.tokens = tokens, .length = size, .positions = {&length_, 1}, .rope_delta = rope_delta(placed_, length_), .adapter = adapter_};
  const Status status = program_.run(*method, step, tokens.size(), logits_);
  if (!status.ok()) return status.error();
  remember(tokens);
  length_ += size;
  return std::span<const float>(logits_);
}

Error Session::no_method(int64_t size) const {
  return fail(ErrorCode::kInput, "no method of the program takes ", size, " tokens at position ", length_,
              manifest_.encoder && !encoded_ ? ", where nothing was encoded yet; call encode_input first" : "; export the model again");
}

const MethodSpec* Session::method_for(int64_t size, bool scores, bool embeds) const {
  const bool encodes = manifest_.encoder && length_ == 0;
  return program_.method_for(size, length_ + size,
                             {.scores = scores, .encodes = encodes, .has_encoded = encoded_.has_value(), .embeds = embeds, .adapted = adapter_ > 0});
}

Status Session::encode_input(std::span<const int64_t> tokens) {
  if (!manifest_.encoder || !manifest_.encoder->takes_ids) {
    return fail(ErrorCode::kInput, manifest_.encoder ? "the encoder takes numbers, not token ids; pass what its processor makes"
                                                     : "this model has no encoder; pass the tokens to prefill");
  }
  const EncoderSpec& encoder = *manifest_.encoder;
  if (const Status status = check_tokens(tokens, manifest_, "tokens"); !status.ok()) return status;
  const auto length = static_cast<int64_t>(tokens.size());
  if (length > encoder.max_length) {
    return fail(ErrorCode::kInput, "the encoder takes at most ", encoder.max_length, " tokens, got ", length,
                "; shorten the input, or export with a larger max_encoder_len");
  }
  const int64_t whole = (length + encoder.multiple - 1) / encoder.multiple * encoder.multiple;
  std::vector<int64_t> padded(tokens.begin(), tokens.end());
  padded.resize(static_cast<size_t>(std::max(whole, encoder.min_length)));
  const auto size = static_cast<int32_t>(padded.size());
  const Status status = encode_input(padded.data(), {1, size}, size - static_cast<int32_t>(length));
  if (status.ok()) encoded_tokens_.assign(tokens.begin(), tokens.end());
  return status;
}

Status Session::encode_input(std::span<const float> values) {
  if (!manifest_.encoder || manifest_.encoder->takes_ids) {
    return fail(ErrorCode::kInput, manifest_.encoder ? "the encoder takes token ids, not numbers"
                                                     : "this model has no encoder; pass the tokens to prefill");
  }
  const EncoderSpec& encoder = *manifest_.encoder;
  int64_t known = 1;
  for (const int64_t size : encoder.shape) known *= size > 0 ? size : 1;
  const bool is_fixed = std::find(encoder.shape.begin(), encoder.shape.end(), -1) == encoder.shape.end();
  const auto count = static_cast<int64_t>(values.size());
  const int64_t length = count / known;
  const bool fits = count % known == 0 && (is_fixed ? length == 1 : length % encoder.multiple == 0 && length >= encoder.min_length &&
                                                                        length <= encoder.max_length);
  if (!fits) {
    std::string shape;
    for (const int64_t size : encoder.shape) shape += (shape.empty() ? "" : ", ") + (size > 0 ? std::to_string(size) : "length");
    return fail(ErrorCode::kInput, "the encoder takes ", encoder.input, " [1, ", shape, "] with a length of ", encoder.min_length, " to ",
                encoder.max_length, " in whole frames of ", encoder.multiple, ", got ", count, " numbers; cut or pad the audio");
  }
  std::vector<int32_t> sizes{1};
  for (const int64_t size : encoder.shape) sizes.push_back(static_cast<int32_t>(size > 0 ? size : length));
  return encode_input(values.data(), std::move(sizes), 0);
}

Status Session::encode_input(const void* values, std::vector<int32_t> sizes, int32_t padding) {
  Result<Encoded> encoded = program_.encode(*manifest_.encoder, values, std::move(sizes), padding);
  if (!encoded.ok()) return encoded.error();
  encoded_ = std::move(*encoded);
  encoded_tokens_.clear();
  begin();
  return {};
}

Result<std::span<const int64_t>> Session::propose(std::span<const int64_t> context, const GenerateOptions& options, int64_t given) {
  int64_t count = std::min(std::max(options.prompt_lookup, options.draft_tokens), program_.scored_tokens() - 1);
  // The newest token is fed with them.
  if (room()) count = std::min(count, *room() - 1);
  if (options.max_new_tokens) count = std::min(count, *options.max_new_tokens - given - 1);
  if (count <= 0) return std::span<const int64_t>();
  if (options.prompt_lookup > 0) return look_up(context, static_cast<size_t>(count));
  drafted_.clear();
  for (int64_t token = context.back(), link = 0; link < count; ++link) {
    // Set before the run, because it writes slots after the cached tokens.
    max_len_ever_ = std::max(max_len_ever_, length_ + link + 1);
    if (const Status status = program_.draft(token, length_ + link, link, draft_logits_); !status.ok()) return status.error();
    // The most probable token only: a proposal that is certain keeps the distribution of sampled tokens.
    const auto best = std::max_element(draft_logits_.begin(), draft_logits_.end());
    token = best - draft_logits_.begin();
    // A head may compute anything, such as not-a-number, which compares with nothing.
    if (token >= manifest_.vocab_size || !std::isfinite(*best)) break;
    drafted_.push_back(token);
  }
  return std::span<const int64_t>(drafted_);
}

Status Session::load_adapter(const std::string& path, const std::string& name) {
  if (!manifest_.lora) {
    return fail(ErrorCode::kBundle, manifest_.folder, " has no slots for adapters; export the model with lora_slots=1 or more");
  }
  if (name.empty()) return fail(ErrorCode::kInput, "name must be a text of at least one character; the empty one is the model itself");
  const auto known = adapters_.find(name);
  int64_t slot = known == adapters_.end() ? 1 : known->second;
  const auto is_used = [this, &slot] {
    return std::any_of(adapters_.begin(), adapters_.end(), [&slot](const auto& one) { return one.second == slot; });
  };
  while (known == adapters_.end() && is_used()) ++slot;
  if (slot > manifest_.lora->slots) {
    return fail(ErrorCode::kInput, "the program has ", manifest_.lora->slots, " slots for adapters, which are all used; unload one of them first");
  }
  const auto tensors = read_adapter(path, *manifest_.lora, manifest_.fingerprint);
  if (!tensors.ok()) return tensors.error();
  if (const Status status = program_.write_adapter(*manifest_.lora, slot, *tensors); !status.ok()) return status;
  adapters_[name] = slot;
  if (slot == adapter_) cached_.clear();
  return {};
}

Status Session::unload_adapter(const std::string& name) {
  const auto found = adapters_.find(name);
  if (found == adapters_.end()) return fail(ErrorCode::kInput, "no adapter is named '", name, "'; load_adapter first");
  if (found->second == adapter_) {
    if (const Status status = use_adapter(""); !status.ok()) return status;
  }
  adapters_.erase(found);
  return {};
}

Status Session::use_adapter(const std::string& name) {
  const auto found = adapters_.find(name);
  if (!name.empty() && found == adapters_.end()) return fail(ErrorCode::kInput, "no adapter is named '", name, "'; load_adapter first");
  const int64_t slot = name.empty() ? 0 : found->second;
  // Tokens of another adapter are not a prefix of the next conversation.
  if (slot != adapter_) cached_.clear();
  adapter_ = slot;
  return {};
}

Status Session::save_state(const std::string& path) const {
  const auto cache = program_.cache();
  if (cache.empty()) {
    return fail(ErrorCode::kBundle, manifest_.program_path(), " does not store its cache separately; export it again");
  }
  // The file does not hold the adapter's name, so a restored state would silently continue with the model itself.
  if (adapter_ > 0) {
    return fail(ErrorCode::kInput, "a state with an adapter in use cannot be saved; use_adapter(\"\") and feed the tokens again first");
  }
  return write_state(path, manifest_.program_sha256, {length_, max_len_ever_, pending_, placed_}, cache);
}

Status Session::load_state(const std::string& path) {
  const auto accepts = [this](const Place& place) {
    const int64_t most = max_length().value_or(std::numeric_limits<int64_t>::max());
    const bool fits = place.placed.empty() || (manifest_.embeds && can_be(manifest_.items, *manifest_.embeds, place.placed, place.length));
    return fits && place.max_len_ever <= most && place.pending.value_or(0) < manifest_.vocab_size;
  };
  Result<Place> place =
      read_state(path, manifest_.program_sha256, program_.cache(), accepts, [this] { program_.clear_cache(); });
  if (!place.ok()) return place.error();
  length_ = place->length;
  cached_.clear();
  // The memory of the slots was replaced, too.
  adapters_.clear();
  adapter_ = 0;
  max_len_ever_ = place->max_len_ever;
  pending_ = place->pending;
  placed_ = std::move(place->placed);
  return {};
}

// -- checks --------------------------------------------------------------------------------------------------------------

Status Session::check_encoded(int64_t position) const {
  if (manifest_.encoder && !encoded_ && position == 0) {
    return fail(ErrorCode::kInput, "nothing was encoded yet; call encode_input first");
  }
  return {};
}

Status Session::check_rewind(int64_t tokens) const {
  if (tokens < 0) return fail(ErrorCode::kInput, "cannot rewind ", tokens, " tokens; pass at least 0");
  if (tokens > length_) {
    return fail(ErrorCode::kInput, "cannot rewind ", tokens, " tokens, the cache holds ", length_, "; rewind at most ", length_);
  }
  // A row without tokens restarts, so its layers need not keep anything.
  if (tokens == length_) return {};
  const auto [allowed, reason] = limits_.max_rollback(length_, max_len_ever_);
  if (tokens > allowed) {
    return fail(ErrorCode::kInput, "cannot rewind ", tokens, " tokens at a length of ", length_, ": ", reason, ", at most ", allowed,
                " can be taken back; reset() and prefill the tokens to keep");
  }
  return check_cut(placed_, length_ - tokens);
}

Status Session::check_cached(int64_t cached, std::span<const int64_t> prompt) const {
  if (cached == 0) return {};
  const auto size = static_cast<int64_t>(prompt.size());
  if (cached < 0 || cached > length_ || cached >= size) {
    return fail(ErrorCode::kInput, "cached_tokens is ", cached, "; it must be from 0 to ", std::min(length_, size - 1), ": the cache holds ",
                length_, " tokens, and the last one of the prompt is always fed");
  }
  if (manifest_.encoder || !items_.is_empty()) {
    return fail(ErrorCode::kInput, "cached_tokens is ", cached, ", but the prompt has an encoder's input or items; reset() and pass 0");
  }
  return check_rewind(length_ - cached);
}

Status Session::check_items(std::span<const int64_t> tokens) const {
  if (const Status status = items_.check(tokens); !status.ok() || items_.is_empty()) return status;
  const auto places = places_of(manifest_.items, *manifest_.embeds, tokens, program_.max_step(true));
  return places.ok() ? Status() : places.error();
}

Status Session::check_lookup(const GenerateOptions& options) const {
  constexpr int64_t kMostDrafted = 15;
  if (options.prompt_lookup < 0) {
    return fail(ErrorCode::kInput, "prompt_lookup is ", options.prompt_lookup, "; it must be at least 1, or 0 for none");
  }
  if (options.draft_tokens < 0 || options.draft_tokens > kMostDrafted) {
    return fail(ErrorCode::kInput, "draft_tokens must be from 0 to ", kMostDrafted, ", got ", options.draft_tokens, "; 0 is for none");
  }
  if (options.prompt_lookup > 0 && options.draft_tokens > 0) {
    return fail(ErrorCode::kInput, "draft_tokens cannot be combined with prompt_lookup; leave one of them out");
  }
  if (options.draft_tokens > 0 && !manifest_.drafts) {
    return fail(ErrorCode::kInput, "draft_tokens must be 0 for a program without a draft head, got ", options.draft_tokens,
                "; export the model with draft='mtp' (--draft)");
  }
  const int64_t most = std::max(options.prompt_lookup, options.draft_tokens);
  const char* what = options.draft_tokens > 0 ? "a draft head" : "prompt lookup";
  if (most > 0) {
    if (program_.scored_tokens() < 2) {
      return fail(ErrorCode::kInput, "the program gives the logits of the last token alone, and ", what, " needs those of several; "
                  "export with -O score_length=", most + 1, ", or leave it out");
    }
    constexpr int64_t kFar = int64_t{1} << 40;
    const int64_t back = std::min(most, program_.scored_tokens() - 1);
    const auto [allowed, reason] = limits_.max_rollback(kFar, kFar);
    if (allowed < back) {
      return fail(ErrorCode::kInput, what, " takes back up to ", back, " tokens, but ", reason, ": at most ", allowed,
                  " can be; export with rollback_slots of at least ", back - 1, " where the layers have a window, or leave it out");
    }
  }
  return {};
}

}  // namespace exportable_cache
