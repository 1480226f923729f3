#include <exportable_cache.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <string>

#include <exportable_cache/session.h>
#include <exportable_cache/threads.h>

using namespace exportable_cache;

struct ec_session {
  Session session;
};

namespace {

thread_local std::string last_error;

static_assert(static_cast<int>(ErrorCode::kInput) + 1 == EC_INPUT && static_cast<int>(ErrorCode::kRuntime) + 1 == EC_RUNTIME);
static_assert(static_cast<int>(StopReason::kEndToken) == EC_STOP_END_TOKEN &&
              static_cast<int>(StopReason::kWhole) == EC_STOP_WHOLE);

ec_status failed(const Error& error) {
  last_error = error.message;
  return static_cast<ec_status>(static_cast<int>(error.code) + 1);
}

ec_status result_of(const Status& status) { return status.ok() ? EC_OK : failed(status.error()); }

Error null(const char* what) { return fail(ErrorCode::kInput, what, " is null; pass a value"); }

ec_status missing(const char* what) { return failed(null(what)); }

// Options of a caller that was compiled with fewer or more of them.
Result<GenerateOptions> options_of(const ec_options* given) {
  ec_options known;
  ec_options_init(&known, sizeof known);
  if (given != nullptr) {
    const size_t size = given->size;
    if (size < sizeof(size_t)) return fail(ErrorCode::kInput, "options->size is ", size, "; call ec_options_init first");
    const auto* bytes = reinterpret_cast<const unsigned char*>(given);
    if (size > sizeof known && std::any_of(bytes + sizeof known, bytes + size, [](unsigned char byte) { return byte != 0; })) {
      return fail(ErrorCode::kInput, "options has fields that this library does not know; use the one that came with the header");
    }
    std::memcpy(&known, given, std::min(size, sizeof known));
  }
  if (known.stop_token_count > 0 && known.stop_tokens == nullptr) return null("options->stop_tokens");
  if (known.stop_string_count > 0 && known.stop_strings == nullptr) return null("options->stop_strings");
  GenerateOptions options;
  if (known.max_new_tokens != 0) options.max_new_tokens = known.max_new_tokens;
  options.sampling.temperature = known.temperature;
  if (known.top_k != 0) options.sampling.top_k = known.top_k;
  if (known.top_p != 1) options.sampling.top_p = known.top_p;
  if (known.has_seed != 0) options.sampling.seed = known.seed;
  options.stop_tokens.assign(known.stop_tokens, known.stop_tokens + known.stop_token_count);
  for (size_t index = 0; index < known.stop_string_count; ++index) {
    if (known.stop_strings[index] == nullptr) return null("a stop string");
    options.stop_strings.emplace_back(known.stop_strings[index]);
  }
  options.prompt_lookup = known.prompt_lookup;
  options.draft_tokens = known.draft_tokens;
  if (known.min_p != 0) options.sampling.min_p = known.min_p;
  if (known.repetition_penalty != 0) options.sampling.repetition_penalty = known.repetition_penalty;
  options.sampling.from_checkpoint = known.from_checkpoint != 0;
  if (known.bias_count > 0 && (known.bias_tokens == nullptr || known.bias_values == nullptr)) return null("options->bias_tokens or bias_values");
  if (known.counted_token_count > 0 && known.counted_tokens == nullptr) return null("options->counted_tokens");
  for (size_t index = 0; index < known.bias_count; ++index) {
    options.sampling.logit_bias.emplace_back(known.bias_tokens[index], known.bias_values[index]);
  }
  options.sampling.presence_penalty = known.presence_penalty;
  options.sampling.frequency_penalty = known.frequency_penalty;
  options.sampling.counted_tokens.assign(known.counted_tokens, known.counted_tokens + known.counted_token_count);
  options.shift_when_full = known.shift_when_full != 0;
  options.protected_tokens = known.protected_tokens;
  options.cached_tokens = known.cached_tokens;
  options.alternatives = known.alternatives;
  if (known.on_logprobs != nullptr) {
    options.on_logprobs = [give = known.on_logprobs, user = known.logprobs_user](double logprob, std::span<const int64_t> tokens,
                                                                                 std::span<const double> logprobs) {
      give(logprob, tokens.data(), logprobs.data(), tokens.size(), user);
    };
  }
  if (known.allowed_tokens != nullptr) {
    options.allowed_tokens = [allow = known.allowed_tokens, user = known.allowed_user](std::span<const int64_t> tokens,
                                                                                       std::span<uint32_t> mask) -> Result<bool> {
      const int said = allow(tokens.data(), tokens.size(), mask.data(), mask.size(), user);
      if (said >= 0) return said != 0;
      return fail(ErrorCode::kInput, "allowed_tokens failed with ", said, " after ", tokens.size(), " new tokens");
    };
  }
  return options;
}

ec_status done(const Result<Generation>& generation, ec_statistics* statistics) {
  if (!generation.ok()) return failed(generation.error());
  if (statistics == nullptr) return EC_OK;
  const Statistics& found = generation->statistics;
  ec_statistics whole{};
  whole.size = statistics->size;
  whole.prompt_tokens = found.prompt_tokens;
  whole.generated_tokens = found.generated_tokens;
  whole.time_to_first_token = found.time_to_first_token;
  whole.decode_seconds = found.decode_seconds;
  whole.proposed_tokens = found.proposed_tokens;
  whole.accepted_tokens = found.accepted_tokens;
  whole.stop = static_cast<int32_t>(generation->reason);
  std::memcpy(statistics, &whole, std::min(whole.size, sizeof whole));
  return EC_OK;
}

Session::OnText giver(ec_on_text on_text, void* user) {
  return [on_text, user](std::string_view piece) {
    const std::string text(piece);  // adds a zero byte at the end
    return on_text == nullptr || on_text(text.c_str(), text.size(), user) != 0;
  };
}

}  // namespace

uint32_t ec_abi_version(void) { return EC_ABI_VERSION; }

const char* ec_error(void) { return last_error.c_str(); }

ec_status ec_set_threads(int64_t threads) { return result_of(set_threads(threads)); }

ec_status ec_open(const char* folder, ec_session** session) {
  if (folder == nullptr || session == nullptr) return missing(folder == nullptr ? "folder" : "session");
  *session = nullptr;
  Result<Session> opened = Session::open(folder);
  if (!opened.ok()) return failed(opened.error());
  *session = new (std::nothrow) ec_session{std::move(*opened)};
  return *session == nullptr ? failed(fail(ErrorCode::kRuntime, "not enough memory for a session; close another")) : EC_OK;
}

void ec_close(ec_session* session) { delete session; }

ec_status ec_prefill(ec_session* session, const int64_t* tokens, size_t count, const float** logits, size_t* vocab) {
  if (session == nullptr || tokens == nullptr) return missing(session == nullptr ? "session" : "tokens");
  const auto found = session->session.prefill({tokens, count});
  if (!found.ok()) return failed(found.error());
  if (logits != nullptr) *logits = found->data();
  if (vocab != nullptr) *vocab = found->size();
  return EC_OK;
}

ec_status ec_encode_tokens(ec_session* session, const int64_t* tokens, size_t count) {
  if (session == nullptr || tokens == nullptr) return missing(session == nullptr ? "session" : "tokens");
  return result_of(session->session.encode_input(std::span<const int64_t>(tokens, count)));
}

ec_status ec_encode_values(ec_session* session, const float* values, size_t count) {
  if (session == nullptr || values == nullptr) return missing(session == nullptr ? "session" : "values");
  return result_of(session->session.encode_input(std::span<const float>(values, count)));
}

ec_status ec_add_input(ec_session* session, const char* name, const void* data, int dtype, const int64_t* shape, size_t dims) {
  if (session == nullptr || name == nullptr) return missing(session == nullptr ? "session" : "name");
  if (data == nullptr || shape == nullptr) return missing(data == nullptr ? "data" : "shape");
  int64_t count = 1;
  for (size_t index = 0; index < dims; ++index) {
    // As many values are read as the sizes multiply to, which must not exceed the address space.
    if (shape[index] < 1 || count > PTRDIFF_MAX / 8 / shape[index]) {
      return failed(fail(ErrorCode::kInput, "shape[", index, "] is ", shape[index], "; each size is at least 1, and all together an array's"));
    }
    count *= shape[index];
  }
  Input input{name, {shape, shape + dims}, {}};
  if (dtype == EC_FLOAT32) {
    const auto* values = static_cast<const float*>(data);
    input.values = std::vector<float>(values, values + count);
  } else if (dtype == EC_INT64) {
    const auto* values = static_cast<const int64_t*>(data);
    input.values = std::vector<int64_t>(values, values + count);
  } else {
    return failed(fail(ErrorCode::kInput, "dtype must be EC_FLOAT32 or EC_INT64, got ", dtype));
  }
  return result_of(session->session.add_input(input));
}

ec_status ec_rewind(ec_session* session, int64_t tokens) {
  return session == nullptr ? missing("session") : result_of(session->session.rewind(tokens));
}

ec_status ec_shift(ec_session* session, int64_t count, int64_t first) {
  return session == nullptr ? missing("session") : result_of(session->session.shift(count, first));
}

ec_status ec_reset(ec_session* session) {
  if (session == nullptr) return missing("session");
  session->session.reset();
  return EC_OK;
}

ec_status ec_length(const ec_session* session, int64_t* held, int64_t* most) {
  if (session == nullptr) return missing("session");
  if (held != nullptr) *held = session->session.length();
  if (most != nullptr) *most = session->session.max_length().value_or(-1);
  return EC_OK;
}

void ec_options_init(ec_options* options, size_t size) {
  if (options == nullptr || size < sizeof(size_t)) return;
  std::memset(options, 0, size);
  ec_options known{};
  known.top_p = 1;
  known.size = size;
  std::memcpy(options, &known, std::min(size, sizeof known));
}

ec_status ec_generate(ec_session* session, const int64_t* prompt, size_t count, const ec_options* options, ec_on_token on_token,
                      void* user, ec_statistics* statistics) {
  if (session == nullptr || prompt == nullptr) return missing(session == nullptr ? "session" : "prompt");
  const Result<GenerateOptions> how = options_of(options);
  if (!how.ok()) return failed(how.error());
  const auto give = [on_token, user](int64_t token) { return on_token == nullptr || on_token(token, user) != 0; };
  return done(session->session.generate({prompt, count}, *how, give), statistics);
}

ec_status ec_generate_text(ec_session* session, const char* prompt, const ec_options* options, ec_on_text on_text, void* user,
                           ec_statistics* statistics) {
  if (session == nullptr || prompt == nullptr) return missing(session == nullptr ? "session" : "prompt");
  const Result<GenerateOptions> how = options_of(options);
  if (!how.ok()) return failed(how.error());
  return done(session->session.generate_text(prompt, *how, giver(on_text, user)), statistics);
}

ec_status ec_chat(ec_session* session, const char* question, const char* system, const ec_options* options, ec_on_text on_text,
                  void* user, ec_statistics* statistics) {
  if (session == nullptr || question == nullptr) return missing(session == nullptr ? "session" : "question");
  const Result<GenerateOptions> how = options_of(options);
  if (!how.ok()) return failed(how.error());
  const std::string told = system == nullptr ? "" : system;
  return done(session->session.chat(question, told, *how, giver(on_text, user)), statistics);
}

ec_status ec_load_adapter(ec_session* session, const char* path, const char* name) {
  if (session == nullptr || path == nullptr) return missing(session == nullptr ? "session" : "path");
  return name == nullptr ? missing("name") : result_of(session->session.load_adapter(path, name));
}

ec_status ec_unload_adapter(ec_session* session, const char* name) {
  if (session == nullptr || name == nullptr) return missing(session == nullptr ? "session" : "name");
  return result_of(session->session.unload_adapter(name));
}

ec_status ec_use_adapter(ec_session* session, const char* name) {
  return session == nullptr ? missing("session") : result_of(session->session.use_adapter(name == nullptr ? "" : name));
}

ec_status ec_render(ec_session* session, const char* request, ec_on_text on_text, void* user) {
  if (session == nullptr || request == nullptr) return missing(session == nullptr ? "session" : "request");
  const Result<std::string> text = session->session.render(request);
  if (!text.ok()) return failed(text.error());
  giver(on_text, user)(*text);
  return EC_OK;
}

ec_status ec_chat_messages(ec_session* session, const char* request, const ec_options* options, ec_on_text on_text, void* user,
                           ec_statistics* statistics) {
  if (session == nullptr || request == nullptr) return missing(session == nullptr ? "session" : "request");
  const Result<GenerateOptions> how = options_of(options);
  if (!how.ok()) return failed(how.error());
  return done(session->session.chat_messages(request, *how, giver(on_text, user)), statistics);
}

ec_status ec_tokenize(ec_session* session, const char* text, int starts, int64_t* tokens, size_t capacity, size_t* count) {
  if (session == nullptr || text == nullptr) return missing(session == nullptr ? "session" : "text");
  if (count == nullptr) return missing("count");
  if (tokens == nullptr && capacity > 0) return missing("tokens");
  const auto found = session->session.encode(text, starts != 0);
  if (!found.ok()) return failed(found.error());
  *count = found->size();
  std::copy_n(found->begin(), std::min(capacity, found->size()), tokens);
  return EC_OK;
}

void ec_cancel(ec_session* session) {
  if (session != nullptr) session->session.cancel();
}

ec_status ec_save_state(const ec_session* session, const char* path) {
  if (session == nullptr || path == nullptr) return missing(session == nullptr ? "session" : "path");
  return result_of(session->session.save_state(path));
}

ec_status ec_load_state(ec_session* session, const char* path) {
  if (session == nullptr || path == nullptr) return missing(session == nullptr ? "session" : "path");
  return result_of(session->session.load_state(path));
}
