#include <exportable_cache/manifest.h>

#include <algorithm>
#include <fstream>
#include <iterator>

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

// Collects the first thing that is not as it should be, so that fields can be read one after the other.
class Reader {
 public:
  explicit Reader(std::string path) : path_(std::move(path)) {}

  int64_t integer(const Json& value, const std::string& where, int64_t least) {
    const int64_t* number = value.integer();
    if (number == nullptr || *number < least) complain(where + " is no integer of at least " + std::to_string(least));
    return number == nullptr ? least : *number;
  }

  std::string text(const Json& value, const std::string& where) {
    if (value.string() == nullptr) complain(where + " is no text");
    return value.string() == nullptr ? std::string() : *value.string();
  }

  void must_be(const Json& value, const std::string& where, const std::string& expected) {
    const std::string found = text(value, where);
    if (found != expected) complain(where + " is '" + found + "', this library runs '" + expected + "'");
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

std::vector<int64_t> token_ids(const Json& ids, Reader& reader) {
  std::vector<int64_t> tokens;
  if (ids.is_null()) return tokens;
  if (ids.array() == nullptr) return {reader.integer(ids, "generation_config.eos_token_id", 0)};
  for (const Json& id : *ids.array()) tokens.push_back(reader.integer(id, "generation_config.eos_token_id", 0));
  return tokens;
}

// Whether a method is a step. Others, such as an encoder, are not needed.
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
    reader.complain(where + ".inputs is no list of at least one");
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
  if (encoder.shape.empty()) reader.complain(where + ".inputs.0.shape is no list of at least two");
  return encoder;
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

std::string Manifest::tokenizer_path() const { return folder + "/tokenizer/tokenizer.json"; }

Result<Manifest> Manifest::read(const std::string& folder) {
  const std::string path = folder + "/manifest.json";
  Result<std::string> text = read_file(path);
  if (!text.ok()) return text.error();
  Result<Json> parsed = Json::parse(*text);
  if (!parsed.ok()) return fail(ErrorCode::kBundle, path, " is ", parsed.error().message, "; copy the bundle again");
  const Json& fields = *parsed;

  Reader reader(path);
  // Before anything else: other versions have other fields.
  const int64_t version = reader.integer(fields["schema_version"], "schema_version", 1);
  if (version != kSchemaVersion) {
    reader.complain("schema_version is " + std::to_string(version) + ", this library reads " + std::to_string(kSchemaVersion));
  }
  const Json& program = fields["program"];
  reader.must_be(fields["target"], "target", "executorch");
  reader.must_be(program["form"], "program.form", "resident");
  reader.must_be(program["logits"], "program.logits", "last");
  if (reader.integer(program["batch_size"], "program.batch_size", 1) != 1) {
    reader.complain("program.batch_size is " + std::to_string(*program["batch_size"].integer()) + ", this library runs 1");
  }

  Manifest manifest;
  manifest.folder = folder;
  manifest.source = reader.text(fields["source"], "source");
  manifest.vocab_size = reader.integer(fields["vocab_size"], "vocab_size", 1);
  const Json& logits_size = fields["logits_size"];
  manifest.logits_size = logits_size.is_null() ? manifest.vocab_size : reader.integer(logits_size, "logits_size", 1);
  manifest.program_sha256 = reader.text(fields["files"]["program.pte"]["sha256"], "files.program.pte.sha256");
  manifest.has_tokenizer = fields["tokenizer"].string() != nullptr;
  manifest.end_tokens = token_ids(fields["generation_config"]["eos_token_id"], reader);

  manifest.chat = chat_of(fields["files"]["tokenizer/tokenizer.json"]["details"]["chat_turns"], reader);
  manifest.encoder = encoder_of(program["methods"]["encode"], reader);
  const Json& start = fields["generation_config"]["decoder_start_token_id"];
  if (!start.is_null()) manifest.start_token = reader.integer(start, "generation_config.decoder_start_token_id", 0);

  const Json::Object no_methods;
  const Json::Object* methods = program["methods"].object();
  for (const auto& [name, method] : methods == nullptr ? no_methods : *methods) {
    const std::string where = "program.methods." + name;
    if (!gives_logits(method)) continue;
    const int64_t least = reader.integer(method["min_length"], where + ".min_length", 1);
    MethodSpec spec{name, least, reader.integer(method["max_length"], where + ".max_length", least)};
    if (!method["read_length"].is_null()) spec.kv_read_len = reader.integer(method["read_length"], where + ".read_length", 1);
    const Json& scored = method["scored_tokens"];
    if (!scored.is_null()) spec.scored_tokens = reader.integer(scored, where + ".scored_tokens", 0);
    spec.takes_encoded = takes(method, "encoder_hidden_states");
    manifest.methods.push_back(std::move(spec));
  }

  const Json::Array no_layers;
  const Json::Array* layers = fields["layers"].array();
  if (layers == nullptr || layers->empty()) reader.complain("layers is no list of at least one");
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
