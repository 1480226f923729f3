#include <exportable_cache/manifest.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <limits>

#include "json.h"

namespace exportable_cache {
namespace {

constexpr int64_t kSchemaVersion = 2;

Result<std::string> read_file(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  std::string content{std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
  if (!stream) return fail(ErrorCode::kBundle, "cannot read ", path, "; pass a folder that export wrote");
  return content;
}

// Collects the first problem, so that fields can be read one after the other.
class Reader {
 public:
  explicit Reader(std::string path) : path_(std::move(path)) {}

  int64_t integer(const Json& value, const std::string& where, int64_t least) {
    const int64_t* number = value.integer();
    if (number == nullptr || *number < least) complain(where + " must be an integer of at least " + std::to_string(least));
    return number == nullptr ? least : *number;
  }

  std::string text(const Json& value, const std::string& where) {
    if (value.string() == nullptr) complain(where + " must be a string");
    return value.string() == nullptr ? std::string() : *value.string();
  }

  void must_be(const Json& value, const std::string& where, const std::string& expected) {
    const std::string found = text(value, where);
    if (found != expected) complain(where + " is '" + found + "', this library supports '" + expected + "'");
  }

  void complain(std::string problem) {
    if (problem_.empty()) problem_ = std::move(problem);
  }

  Status status() const {
    if (problem_.empty()) return {};
    return fail(ErrorCode::kBundle, path_, ": ", problem_, "; export the model again");
  }

 private:
  std::string path_;
  std::string problem_;
};

// One id, several, or none.
std::vector<int64_t> listed(const Json& ids, const std::string& name, Reader& reader) {
  std::vector<int64_t> tokens;
  if (ids.is_null()) return tokens;
  if (ids.array() == nullptr) return {reader.integer(ids, "generation_config." + name, 0)};
  for (const Json& id : *ids.array()) tokens.push_back(reader.integer(id, "generation_config." + name, 0));
  return tokens;
}

double positive(const Json& value, const std::string& name, Reader& reader) {
  const double number = value.integer() != nullptr ? static_cast<double>(*value.integer()) : value.number() != nullptr ? *value.number() : 0;
  if (!(number > 0)) reader.complain("generation_config." + name + " must be a number above 0");
  return number;
}

std::vector<std::vector<int64_t>> sequences(const Json& value, const std::string& name, int64_t vocab_size, Reader& reader) {
  std::vector<std::vector<int64_t>> found;
  const Json::Array none;
  for (const Json& ids : value.array() == nullptr ? none : *value.array()) {
    std::vector<int64_t> tokens = listed(ids, name, reader);
    if (tokens.empty() || *std::max_element(tokens.begin(), tokens.end()) >= vocab_size) {
      reader.complain("generation_config." + name + " must be a list of lists of token ids below " + std::to_string(vocab_size));
    }
    if (!tokens.empty()) found.push_back(std::move(tokens));
  }
  return found;
}

// True if a setting has an effect; false, 0, 1 and null are the values without one.
bool asks(const Json& value, int64_t neutral) {
  if (value.is_null() || (value.boolean() != nullptr && !*value.boolean())) return false;
  if (value.integer() != nullptr) return *value.integer() != neutral;
  if (value.number() != nullptr) return *value.number() != static_cast<double>(neutral);
  return value.array() == nullptr || !value.array()->empty();
}

// How tokens are drawn with do_sample; missing settings have the defaults of transformers' `generate`.
Sampling sampling_of(const Json& fields, Reader& reader) {
  const Json& samples = fields["do_sample"];
  if (samples.is_null()) return {};
  if (samples.boolean() == nullptr) reader.complain("generation_config.do_sample must be true or false");
  if (samples.boolean() == nullptr || !*samples.boolean()) return {};
  const auto number = [&](const char* name, double otherwise, double most) {
    const Json& value = fields[name];
    if (value.is_null()) return otherwise;
    const double found = value.integer() != nullptr ? static_cast<double>(*value.integer()) : value.number() != nullptr ? *value.number() : -1;
    if (!(found >= 0 && found <= most)) {
      reader.complain(std::string("generation_config.") + name + " must be a number of at least 0" + (most == 1 ? " and at most 1" : ""));
    }
    return found;
  };
  constexpr int64_t kTopK = 50;
  Sampling sampling;
  sampling.temperature = number("temperature", 1, std::numeric_limits<double>::max());
  const int64_t top_k = fields["top_k"].is_null() ? kTopK : reader.integer(fields["top_k"], "generation_config.top_k", -1);
  const double top_p = number("top_p", 1, 1), min_p = number("min_p", 0, 1);
  if (sampling.temperature == 0 || top_p == 0) return {};
  if (top_k > 0) sampling.top_k = top_k;
  if (top_p < 1) sampling.top_p = top_p;
  if (min_p > 0) sampling.min_p = min_p;
  return sampling;
}

GenerationSettings settings_of(const Json& fields, int64_t vocab_size, Reader& reader) {
  GenerationSettings settings;
  const auto count = [&](const char* name, int64_t least) -> std::optional<int64_t> {
    if (fields[name].is_null()) return std::nullopt;
    return reader.integer(fields[name], std::string("generation_config.") + name, least);
  };
  const auto penalty = [&](const char* name) { return fields[name].is_null() ? 1 : positive(fields[name], name, reader); };
  settings.max_new_tokens = count("max_new_tokens", 1);
  settings.max_length = count("max_length", 1);
  settings.encoder_repetition_penalty = penalty("encoder_repetition_penalty");
  settings.repetition_penalty = penalty("repetition_penalty");
  settings.no_repeat_ngram_size = count("no_repeat_ngram_size", 0).value_or(0);
  settings.encoder_no_repeat_ngram_size = count("encoder_no_repeat_ngram_size", 0).value_or(0);
  settings.min_new_tokens = count("min_new_tokens", 0).value_or(0);
  // The limit of new tokens takes precedence over that of all tokens.
  if (fields["min_new_tokens"].is_null()) settings.min_length = count("min_length", 0).value_or(0);
  settings.bad_words = sequences(fields["bad_words_ids"], "bad_words_ids", vocab_size, reader);
  const Json::Array none;
  for (const Json& pair : fields["sequence_bias"].array() == nullptr ? none : *fields["sequence_bias"].array()) {
    const Json::Array* both = pair.array();
    const bool is_pair = both != nullptr && both->size() == 2;
    const double* number = is_pair ? (*both)[1].number() : nullptr;
    const int64_t* whole = is_pair ? (*both)[1].integer() : nullptr;
    std::vector<int64_t> tokens = is_pair ? listed((*both)[0], "sequence_bias", reader) : std::vector<int64_t>();
    if (tokens.empty() || (number == nullptr && whole == nullptr)) {
      reader.complain("generation_config.sequence_bias must be a list of pairs of token ids and a number");
      break;
    }
    settings.sequence_bias.emplace_back(std::move(tokens), number != nullptr ? *number : static_cast<double>(*whole));
  }
  settings.forced_begin = count("forced_bos_token_id", 0);
  settings.forced_ends = listed(fields["forced_eos_token_id"], "forced_eos_token_id", reader);
  settings.remove_invalid_values = asks(fields["remove_invalid_values"], 0);
  if (const Json::Array* decay = fields["exponential_decay_length_penalty"].array()) {
    const bool is_pair = decay->size() == 2 && (*decay)[0].integer() != nullptr;
    if (!is_pair) reader.complain("generation_config.exponential_decay_length_penalty must be a pair of an integer and a number");
    if (is_pair) settings.decay = {*(*decay)[0].integer(), positive((*decay)[1], "exponential_decay_length_penalty", reader)};
  }
  // Tokens that the model does not have never occur.
  const auto suppressed = [&](const char* name) {
    std::vector<int64_t> tokens = listed(fields[name], name, reader);
    std::erase_if(tokens, [&](int64_t token) { return token >= vocab_size; });
    return tokens;
  };
  settings.suppressed = suppressed("suppress_tokens");
  settings.suppressed_first = suppressed("begin_suppress_tokens");
  settings.sampling = sampling_of(fields, reader);
  for (const char* name : {"num_beams", "num_beam_groups", "num_return_sequences", "guidance_scale"}) {
    if (asks(fields[name], 1)) settings.unheeded.emplace_back(name);
  }
  for (const char* name : {"diversity_penalty", "penalty_alpha", "dola_layers", "constraints", "force_words_ids", "stop_strings",
                           "max_time", "token_healing", "watermarking_config", "forced_decoder_ids"}) {
    if (asks(fields[name], 0)) settings.unheeded.emplace_back(name);
  }
  if (settings.sampling.temperature != 0) {
    if (asks(fields["typical_p"], 1)) settings.unheeded.emplace_back("typical_p");
    for (const char* name : {"epsilon_cutoff", "eta_cutoff", "top_h"}) {
      if (asks(fields[name], 0)) settings.unheeded.emplace_back(name);
    }
  }
  return settings;
}

// True if a method is a step. Others, such as an encoder, are not needed.
bool gives_logits(const Json& method) {
  const Json::Array* outputs = method["outputs"].array();
  if (outputs == nullptr) return false;
  for (const Json& output : *outputs) {
    if (output["name"].string() != nullptr && *output["name"].string() == "logits") return true;
  }
  return false;
}

bool takes(const Json& method, std::string_view name) {
  const Json::Array* inputs = method["inputs"].array();
  return inputs != nullptr && std::any_of(inputs->begin(), inputs->end(), [name](const Json& input) {
    return input["name"].string() != nullptr && *input["name"].string() == name;
  });
}

std::optional<EncoderSpec> encoder_of(const Json& method, Reader& reader) {
  const std::string where = "program.methods.encode";
  if (method.is_null()) return std::nullopt;
  const Json::Array* inputs = method["inputs"].array();
  if (inputs == nullptr || inputs->empty()) {
    reader.complain(where + ".inputs must be a list of at least one element");
    return std::nullopt;
  }
  const Json& main = inputs->front();
  EncoderSpec encoder{reader.text(main["name"], where + ".inputs.0.name"), false, takes(method, "attention_mask"), {}, 1, 1, 1};
  const std::string dtype = reader.text(main["dtype"], where + ".inputs.0.dtype");
  encoder.takes_ids = dtype == "int64";
  if (!encoder.takes_ids && dtype != "float32") reader.complain(where + " takes " + dtype + ", this library gives int64 or float32");
  if (inputs->size() != (encoder.takes_mask ? 2 : 1)) reader.complain(where + " takes " + std::to_string(inputs->size()) + " inputs");
  encoder.min_length = reader.integer(method["min_length"], where + ".min_length", 1);
  encoder.max_length = reader.integer(method["max_length"], where + ".max_length", encoder.min_length);
  encoder.multiple = method["multiple"].is_null() ? 1 : reader.integer(method["multiple"], where + ".multiple", 1);
  const Json::Array* shape = main["shape"].array();
  for (size_t index = 1; shape != nullptr && index < shape->size(); ++index) {
    const Json& size = (*shape)[index];
    encoder.shape.push_back(size.string() != nullptr ? -1 : reader.integer(size, where + ".inputs.0.shape", 1));
  }
  if (encoder.shape.empty()) reader.complain(where + ".inputs.0.shape must be a list of at least two elements");
  return encoder;
}

// Bounds of a dimension, a position or a token id, so that products and sums do not overflow 64 bits.
int64_t small(const Json& value, const std::string& where, int64_t least, Reader& reader) {
  constexpr int64_t kMost = int64_t{1} << 30;
  const int64_t found = reader.integer(value, where, least);
  if (found > kMost) reader.complain(where + " is " + std::to_string(found) + ", more than anything is");
  return std::min(found, kMost);
}

std::vector<int64_t> shape_of(const Json& sizes, const std::string& where, Reader& reader) {
  std::vector<int64_t> shape;
  if (sizes.array() == nullptr || sizes.array()->empty()) reader.complain(where + " must be a list of at least one element");
  if (sizes.array() == nullptr) return shape;
  for (const Json& size : *sizes.array()) shape.push_back(small(size, where, 1, reader));
  return shape;
}

FixedSpec fixed_of(const std::string& name, const Json& given, const std::string& where, Reader& reader) {
  FixedSpec fixed{name, shape_of(given["shape"], where + ".shape", reader), {}};
  const Json::Array none;
  const Json::Array* values = given["values"].array();
  for (const Json& value : values == nullptr ? none : *values) {
    if (value.integer() != nullptr) {
      fixed.values.push_back(static_cast<double>(*value.integer()));
    } else if (value.number() != nullptr || value.boolean() != nullptr) {
      fixed.values.push_back(value.number() != nullptr ? *value.number() : *value.boolean());
    } else {
      reader.complain(where + ".values must contain numbers only");
    }
  }
  if (fixed.values.empty()) reader.complain(where + ".values must be a list of at least one element");
  return fixed;
}

std::optional<LoraSpec> lora_of(const Json& given, Reader& reader) {
  if (given.is_null()) return std::nullopt;
  LoraSpec lora{small(given["slots"], "program.lora.slots", 1, reader), small(given["rank"], "program.lora.rank", 1, reader),
                reader.text(given["dtype"], "program.lora.dtype"), {}};
  const Json::Array* targets = given["targets"].array();
  if (targets == nullptr || targets->empty()) reader.complain("program.lora.targets must be a list of at least one element");
  const Json::Array none;
  for (const Json& target : targets == nullptr ? none : *targets) {
    const std::string where = "program.lora.targets." + std::to_string(lora.targets.size());
    lora.targets.push_back({reader.text(target["name"], where + ".name"), small(target["inputs"], where + ".inputs", 1, reader),
                            small(target["outputs"], where + ".outputs", 1, reader)});
  }
  return lora;
}

ItemSpec item_of(const std::string& name, const Json& method, Reader& reader) {
  const std::string where = "program.methods." + name;
  const Json& item = method["item"];
  if (item.is_null()) reader.complain(where + " must describe its items");
  ItemSpec spec{name, reader.integer(item["token_id"], where + ".item.token_id", 0), 1};
  const Json::Array none;
  const Json::Array* outputs = method["outputs"].array();
  const std::vector<int64_t> given = outputs == nullptr || outputs->empty()
                                         ? std::vector<int64_t>()
                                         : shape_of(outputs->front()["shape"], where + ".outputs.0.shape", reader);
  if (given.size() != 2) reader.complain(where + ".outputs.0.shape is not [tokens, hidden_size]");
  if (given.size() == 2) spec.tokens = given[0];
  const Json::Array* inputs = method["inputs"].array();
  for (const Json& input : inputs == nullptr ? none : *inputs) {
    ItemInputSpec one{reader.text(input["name"], where + ".inputs.name"), reader.text(input["dtype"], where + ".inputs.dtype"),
                      shape_of(input["shape"], where + ".inputs.shape", reader)};
    static constexpr std::string_view kKnown[] = {"float32", "float16", "bfloat16", "int64", "int32", "bool"};
    if (std::find(std::begin(kKnown), std::end(kKnown), one.dtype) == std::end(kKnown)) {
      reader.complain(where + " takes " + one.dtype + ", which this library does not give");
    }
    spec.inputs.push_back(std::move(one));
  }
  if (spec.inputs.empty()) reader.complain(where + ".inputs must be a list of at least one element");
  const Json::Object no_fixed;
  const Json::Object* fixed = item["fixed"].object();
  for (const auto& [key, value] : fixed == nullptr ? no_fixed : *fixed) {
    spec.fixed.push_back(fixed_of(key, value, where + ".item.fixed." + key, reader));
  }
  const Json::Array* axes = item["positions"].array();
  for (const Json& axis : axes == nullptr ? none : *axes) {
    std::vector<int64_t>& positions = spec.positions.emplace_back();
    for (const Json& position : axis.array() == nullptr ? none : *axis.array()) {
      positions.push_back(small(position, where + ".item.positions", 0, reader));
    }
    if (static_cast<int64_t>(positions.size()) != spec.tokens) reader.complain(where + ".item.positions is not of each of its tokens");
  }
  if (!spec.positions.empty()) spec.advance = small(item["advance"], where + ".item.advance", 0, reader);
  spec.sees = reader.text(item["sees"], where + ".item.sees");
  if (!spec.sees.empty() && spec.sees != "item" && spec.sees != "prompt") {
    reader.complain(where + ".item.sees is '" + spec.sees + "', this library supports 'item' and 'prompt'");
  }
  spec.apart = item["apart"].boolean() != nullptr && *item["apart"].boolean();
  return spec;
}

// Inputs of steps other than embeddings, which must match the items.
void read_items(const Json& methods, Manifest& manifest, Reader& reader) {
  const Json::Object none;
  for (const auto& [name, method] : methods.object() == nullptr ? none : *methods.object()) {
    if (name.starts_with("encode_")) manifest.items.push_back(item_of(name, method, reader));
  }
  const auto step = std::find_if(manifest.methods.begin(), manifest.methods.end(), [](const MethodSpec& one) { return one.takes_embeds; });
  if (manifest.items.empty()) {
    if (step != manifest.methods.end()) reader.complain("program.methods." + step->name + " takes embeddings, which no method gives");
    return;
  }
  const Json& embed = methods["embed"];
  if (step == manifest.methods.end() || embed.is_null()) {
    reader.complain("program.methods has encoders without embed or prefill_embeds");
    return;
  }
  EmbedsSpec embeds{small(embed["max_length"], "program.methods.embed.max_length", 1, reader), 1};
  const Json::Array* inputs = methods[step->name]["inputs"].array();
  for (const Json& input : *inputs) {
    const Json::Array* shape = input["shape"].array();
    if (input["name"].string() == nullptr || shape == nullptr || shape->empty()) continue;
    const std::string& name = *input["name"].string();
    const std::string where = "program.methods." + step->name + "." + name + ".shape";
    if (name == "inputs_embeds") embeds.hidden_size = small(shape->back(), where, 1, reader);
    if (name == "position_ids") embeds.axes = small(shape->front(), where, 1, reader);
    if (name == "image_ids") embeds.sees_items = true;
  }
  for (const ItemSpec& item : manifest.items) {
    if (!item.positions.empty() && static_cast<int64_t>(item.positions.size()) != embeds.axes) {
      reader.complain("program.methods." + item.method + ".item.positions has " + std::to_string(item.positions.size()) +
                      " axes, steps take " + std::to_string(embeds.axes));
    }
    if (!item.sees.empty() && !embeds.sees_items) {
      reader.complain("program.methods." + item.method + ".item.sees is '" + item.sees + "', and steps take no image_ids");
    }
  }
  manifest.embeds = embeds;
}

std::optional<StaticPlan> static_plan_of(const Json& files, const std::vector<LayerSpec>& layers, Reader& reader) {
  const Json& given = files["program.pte"]["details"]["static"];
  if (given.is_null()) return std::nullopt;
  const std::string where = "files.program.pte.details.static.";
  const Json::Array none;
  const auto listed = [&](const char* name) { return given[name].array() == nullptr ? none : *given[name].array(); };
  const auto is_true = [&](const char* name) { return given[name].boolean() != nullptr && *given[name].boolean(); };
  StaticPlan plan{{}, {}, is_true("positions"), is_true("transposed"), reader.integer(files["rope.safetensors"]["bytes"], "files.rope.safetensors.bytes", 1)};
  for (const Json& table : listed("tables")) plan.tables.push_back(reader.text(table, where + "tables"));
  if (const size_t found = listed("layers").size(); found != layers.size()) {
    reader.complain(where + "layers has " + std::to_string(found) + " elements, layers " + std::to_string(layers.size()));
  }
  for (const Json& layer : listed("layers")) {
    const std::string place = where + "layers." + std::to_string(plan.layers.size()) + ".";
    const auto size = [&](const char* name) { return small(layer[name], place + name, 1, reader); };
    StaticLayer one{reader.text(layer["mask"], place + "mask"), size("slots"), std::nullopt, size("heads"), size("key_size"), size("value_size")};
    if (!layer["window"].is_null()) one.window = size("window");
    if (one.mask != "full_attention" && one.mask != "sliding_attention") reader.complain(place + "mask is '" + one.mask + "', this library knows full_attention and sliding_attention");
    for (const StaticLayer& other : plan.layers) {
      if (other.mask == one.mask && (other.slots != one.slots || other.window != one.window)) {
        reader.complain(place + "slots and window differ from those of another layer with the same mask");
      }
    }
    // A session follows the policies, and a step with fewer slots would forget tokens that they promise.
    if (const size_t index = plan.layers.size(); index < layers.size()) {
      const LayerSpec& kept = layers[index];
      const int64_t slots = kept.capacity.value_or(kept.window.value_or(0) + kept.rollback_slots);
      if (one.slots < slots || one.window != kept.window) reader.complain(place + "slots and window differ from those of layers." + std::to_string(index));
    }
    plan.layers.push_back(std::move(one));
  }
  return plan;
}

std::optional<ChatTurns> chat_of(const Json& turns, Reader& reader) {
  if (turns.is_null()) return std::nullopt;
  const std::string where = "files.tokenizer/tokenizer.json.details.chat_turns.";
  ChatTurns chat;
  chat.opening = reader.text(turns["opening"], where + "opening");
  chat.answer = reader.text(turns["answer"], where + "answer");
  chat.question = reader.text(turns["question"], where + "question");
  const Json::Array* system = turns["system"].array();
  chat.takes_system = system != nullptr && system->size() == 2;
  if (chat.takes_system) {
    chat.before_system = reader.text((*system)[0], where + "system");
    chat.after_system = reader.text((*system)[1], where + "system");
  }
  chat.trims = turns["trims"].boolean() != nullptr && *turns["trims"].boolean();
  return chat;
}

}  // namespace

std::string Manifest::program_path() const { return folder + "/program.pte"; }

std::string Manifest::tables_path() const { return folder + "/rope.safetensors"; }

std::string Manifest::tokenizer_path() const { return folder + "/tokenizer/tokenizer.json"; }

Result<Manifest> Manifest::read(const std::string& folder) {
  const std::string path = folder + "/manifest.json";
  Result<std::string> text = read_file(path);
  if (!text.ok()) return text.error();
  Result<Json> parsed = Json::parse(*text);
  if (!parsed.ok()) return fail(ErrorCode::kBundle, path, " is ", parsed.error().message, "; copy the bundle again");
  const Json& fields = *parsed;

  Reader reader(path);
  // Checked first, because other versions have other fields.
  const int64_t version = reader.integer(fields["schema_version"], "schema_version", 1);
  if (version != kSchemaVersion) {
    reader.complain("schema_version is " + std::to_string(version) + ", this library reads " + std::to_string(kSchemaVersion));
  }
  const Json& program = fields["program"];
  reader.must_be(fields["target"], "target", "executorch");
  reader.must_be(program["form"], "program.form", "resident");
  reader.must_be(program["logits"], "program.logits", "last");

  Manifest manifest;
  manifest.folder = folder;
  manifest.source = reader.text(fields["source"], "source");
  manifest.vocab_size = reader.integer(fields["vocab_size"], "vocab_size", 1);
  const Json& logits_size = fields["logits_size"];
  manifest.logits_size = logits_size.is_null() ? manifest.vocab_size : reader.integer(logits_size, "logits_size", 1);
  manifest.batch_size = small(program["batch_size"], "program.batch_size", 1, reader);
  manifest.equal_rows = program["equal_rows"].boolean() != nullptr && *program["equal_rows"].boolean();
  manifest.program_sha256 = reader.text(fields["files"]["program.pte"]["sha256"], "files.program.pte.sha256");
  manifest.has_tokenizer = fields["tokenizer"].string() != nullptr;
  manifest.end_tokens = listed(fields["generation_config"]["eos_token_id"], "eos_token_id", reader);
  manifest.settings = settings_of(fields["generation_config"], manifest.vocab_size, reader);

  manifest.chat = chat_of(fields["files"]["tokenizer/tokenizer.json"]["details"]["chat_turns"], reader);
  manifest.encoder = encoder_of(program["methods"]["encode"], reader);
  const Json& start = fields["generation_config"]["decoder_start_token_id"];
  if (!start.is_null()) manifest.start_token = reader.integer(start, "generation_config.decoder_start_token_id", 0);

  manifest.lora = lora_of(program["lora"], reader);
  if (fields["fingerprint"].string() != nullptr) manifest.fingerprint = *fields["fingerprint"].string();
  const Json::Object no_methods;
  const Json::Object* methods = program["methods"].object();
  for (const auto& [name, method] : methods == nullptr ? no_methods : *methods) {
    const std::string where = "program.methods." + name;
    if (!gives_logits(method) || (takes(method, "adapters") && !manifest.lora)) continue;
    const int64_t least = reader.integer(method["min_length"], where + ".min_length", 1);
    MethodSpec spec{name, least, reader.integer(method["max_length"], where + ".max_length", least)};
    if (!method["read_length"].is_null()) spec.kv_read_len = reader.integer(method["read_length"], where + ".read_length", 1);
    const Json& scored = method["scored_tokens"];
    if (!scored.is_null()) spec.scored_tokens = reader.integer(scored, where + ".scored_tokens", 0);
    spec.takes_encoded = takes(method, "encoder_hidden_states");
    spec.takes_embeds = takes(method, "inputs_embeds");
    spec.takes_adapters = takes(method, "adapters");
    const Json::Array no_inputs;
    const Json::Array* inputs = method["inputs"].array();
    for (const Json& input : inputs == nullptr ? no_inputs : *inputs) {
      spec.inputs.push_back(reader.text(input["name"], where + ".inputs.name"));
    }
    manifest.methods.push_back(std::move(spec));
  }
  const Json& draft = program["methods"]["draft"];
  manifest.drafts = takes(draft, "input_ids") && takes(draft, "input_pos") && takes(draft, "link");
  const Json& shift = program["methods"]["shift"];
  manifest.shifts = takes(shift, "input_pos") && takes(shift, "first") && takes(shift, "count");
  read_items(program["methods"], manifest, reader);

  const Json::Array no_layers;
  const Json::Array* layers = fields["layers"].array();
  if (layers == nullptr || layers->empty()) reader.complain("layers must be a list of at least one element");
  for (const Json& layer : layers == nullptr ? no_layers : *layers) {
    const std::string where = "layers." + std::to_string(manifest.layers.size());
    const Json& policy = layer["policy"];
    LayerSpec spec{reader.text(policy["kind"], where + ".policy.kind")};
    const auto field = [&](const char* name, int64_t least) { return reader.integer(policy[name], where + ".policy." + name, least); };
    if (!policy["capacity"].is_null()) spec.capacity = field("capacity", 1);
    if (!policy["window"].is_null()) spec.window = field("window", 1);
    if (!policy["rollback_slots"].is_null()) spec.rollback_slots = field("rollback_slots", 0);
    if (!policy["sinks"].is_null()) spec.sinks = field("sinks", 0);
    spec.has_states = !layer["states"].is_null();
    manifest.layers.push_back(std::move(spec));
  }

  manifest.static_plan = static_plan_of(fields["files"], manifest.layers, reader);
  const int64_t bytes = reader.integer(fields["files"]["program.pte"]["bytes"], "files.program.pte.bytes", 1);
  if (const Status status = reader.status(); !status.ok()) return status.error();

  std::ifstream file(manifest.program_path(), std::ios::binary | std::ios::ate);
  if (!file) return fail(ErrorCode::kBundle, manifest.program_path(), " is missing; copy the bundle again");
  if (const int64_t found = file.tellg(); found != bytes) {
    return fail(ErrorCode::kBundle, manifest.program_path(), " has ", found, " bytes, the manifest says ", bytes,
                "; copy the bundle again");
  }
  return manifest;
}

}  // namespace exportable_cache
