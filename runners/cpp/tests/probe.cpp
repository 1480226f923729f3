// Driver of tests/runners/test_cpp.py: one command per line on stdin, one reply per line on stdout.
//
// Fields are separated by tabs, text is in hexadecimal. A reply is "ok" with values, or "error", the kind and the message.
#include <cstdlib>
#include <functional>
#include <iostream>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include <exportable_cache/batch_session.h>

#include "json.h"

namespace {

using namespace exportable_cache;
using Fields = std::vector<std::string>;

std::optional<Session> session;
std::optional<BatchSession> batch;

std::string to_hex(std::string_view bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const unsigned char byte : bytes) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

std::string from_hex(std::string_view text) {
  std::string bytes;
  for (size_t index = 0; index + 1 < text.size(); index += 2) {
    bytes += static_cast<char>(std::stoi(std::string(text.substr(index, 2)), nullptr, 16));
  }
  return bytes;
}

int64_t integer(const std::string& text) { return std::stoll(text); }

std::vector<int64_t> integers(const std::string& text) {
  std::vector<int64_t> values;
  std::istringstream stream(text);
  for (int64_t value; stream >> value;) values.push_back(value);
  return values;
}

template <class T>
std::string join(const T& values) {
  std::ostringstream text;
  text.precision(9);
  const char* between = "";
  for (const auto& value : values) {
    text << between << value;
    between = " ";
  }
  return text.str();
}

void reply(const Fields& values) {
  std::cout << "ok";
  for (const std::string& value : values) std::cout << "\t" << value;
  std::cout << std::endl;
}

void reply(const Error& error) { std::cout << "error\t" << to_string(error.code) << "\t" << error.message << std::endl; }

void reply(const Status& status) { status.ok() ? reply(Fields()) : reply(status.error()); }

GenerateOptions options_of(const Fields& fields, size_t first) {
  GenerateOptions options;
  for (size_t index = first; index < fields.size(); ++index) {
    const size_t equals = fields[index].find('=');
    const std::string name = fields[index].substr(0, equals);
    const std::string value = fields[index].substr(equals + 1);
    if (name == "max_new_tokens") options.max_new_tokens = integer(value);
    if (name == "prompt_lookup") options.prompt_lookup = integer(value);
    if (name == "draft_tokens") options.draft_tokens = integer(value);
    if (name == "temperature") options.sampling.temperature = std::stod(value);
    if (name == "top_k") options.sampling.top_k = integer(value);
    if (name == "top_p") options.sampling.top_p = std::stod(value);
    if (name == "min_p") options.sampling.min_p = std::stod(value);
    if (name == "repetition_penalty") options.sampling.repetition_penalty = std::stod(value);
    if (name == "from_checkpoint") options.sampling.from_checkpoint = value == "1";
    if (name == "shift_when_full") options.shift_when_full = true;
    if (name == "protected") options.protected_tokens = integer(value);
    if (name == "presence_penalty") options.sampling.presence_penalty = std::stod(value);
    if (name == "frequency_penalty") options.sampling.frequency_penalty = std::stod(value);
    if (name == "counted") options.sampling.counted_tokens = integers(value);
    if (name == "bias") options.sampling.logit_bias.emplace_back(integer(value.substr(0, value.find(':'))), std::stod(value.substr(value.find(':') + 1)));
    if (name == "seed") options.sampling.seed = std::stoull(value);
    if (name == "multiples_of") {
      options.allowed_tokens = [step = static_cast<size_t>(integer(value))](std::span<const int64_t>, std::span<uint32_t> mask) {
        for (size_t token = 0; token < 32 * mask.size(); token += step) mask[token / 32] |= uint32_t{1} << token % 32;
        return Result<bool>(true);
      };
    }
    if (name == "cached_tokens") options.cached_tokens = integer(value);
    if (name == "stop_token") options.stop_tokens.push_back(integer(value));
    if (name == "stop") options.stop_strings.push_back(from_hex(value));
  }
  return options;
}

void reply(const Generation& generation, const std::string& pieces) {
  const Statistics& statistics = generation.statistics;
  reply({join(generation.tokens), to_string(generation.reason), pieces,
         join(std::vector<int64_t>{statistics.prompt_tokens, statistics.generated_tokens}),
         join(std::vector<double>{statistics.time_to_first_token, statistics.decode_seconds, statistics.prefill_tokens_per_second(),
                                  statistics.decode_tokens_per_second()}),
         join(std::vector<int64_t>{statistics.proposed_tokens, statistics.accepted_tokens})});
}

void reply(const Result<std::span<const float>>& logits) { logits.ok() ? reply({join(*logits)}) : reply(logits.error()); }

std::optional<int64_t> position_of(const Fields& fields) {
  return fields.size() > 2 ? std::optional(integer(fields[2])) : std::nullopt;
}

// Prompts "1 2 3,4 5", one per row.
std::vector<std::vector<int64_t>> rows_of(const std::string& text) {
  std::vector<std::vector<int64_t>> rows;
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) rows.push_back(integers(part));
  return rows;
}

// Per row: tokens, stop reason, the callback's arguments, and the number of prompt tokens.
void reply(const Result<std::vector<Generation>>& answers, const std::vector<std::string>& given) {
  if (!answers.ok()) return reply(answers.error());
  Fields fields;
  for (size_t row = 0; row < answers->size(); ++row) {
    const Generation& answer = (*answers)[row];
    fields.insert(fields.end(), {join(answer.tokens), to_string(answer.reason), given[row], std::to_string(answer.statistics.prompt_tokens)});
  }
  reply(fields);
}

const std::map<std::string, std::function<void(const Fields&)>> kCommands = {
    {"open_batch", [](const Fields& fields) {
       Result<BatchSession> opened = BatchSession::open(fields[1]);
       if (!opened.ok()) return reply(opened.error());
       batch.emplace(std::move(*opened));
       reply({std::to_string(batch->rows()), std::to_string(batch->max_length().value_or(-1))});
     }},
    {"rows_prefill", [](const Fields& fields) { reply(batch->prefill(rows_of(fields[1]))); }},
    {"rows_decode", [](const Fields& fields) { reply(batch->decode(integers(fields[1]))); }},
    {"rows_rewind", [](const Fields& fields) { reply(batch->rewind(integer(fields[1]))); }},
    {"rows_reset", [](const Fields&) { batch->reset(), reply(Fields()); }},
    {"rows_length", [](const Fields&) { reply({join(batch->lengths()), std::to_string(batch->room().value_or(-1))}); }},
    {"rows_generate", [](const Fields& fields) {  // "end=R:N" ends row R at its callback's Nth token, "cancel=N" all at the Nth
       std::vector<std::vector<int64_t>> seen(batch->rows());
       size_t row_ended = batch->rows(), after = 0;
       int64_t left = -1;
       for (const std::string& field : fields) {
         if (field.starts_with("cancel=")) left = integer(field.substr(7));
         if (field.starts_with("end=")) {
           row_ended = static_cast<size_t>(integer(field.substr(4)));
           after = static_cast<size_t>(integer(field.substr(field.find(':') + 1)));
         }
       }
       const auto answers = batch->generate(rows_of(fields[1]), options_of(fields, 2), [&](size_t row, int64_t token) {
         seen[row].push_back(token);
         if (--left == 0) batch->cancel();
         return row != row_ended || seen[row].size() < after;
       });
       std::vector<std::string> given;
       for (const auto& tokens : seen) given.push_back(join(tokens));
       reply(answers, given);
     }},
    {"rows_text", [](const Fields& fields) {  // prompts in hexadecimal, "-" for an empty one
       std::vector<std::string> prompts, given(batch->rows());
       std::istringstream words(fields[1]);
       for (std::string word; words >> word;) prompts.push_back(from_hex(word == "-" ? "" : word));
       const auto answers = batch->generate_text(prompts, options_of(fields, 2), [&given](size_t row, std::string_view piece) {
         given[row] += to_hex(piece);
         return true;
       });
       reply(answers, given);
     }},
    {"open", [](const Fields& fields) {
       Result<Session> opened = Session::open(fields[1]);
       if (!opened.ok()) return reply(opened.error());
       session.emplace(std::move(*opened));
       reply({std::to_string(session->max_length().value_or(-1))});
     }},
    {"prefill", [](const Fields& fields) { reply(session->prefill(integers(fields[1]), position_of(fields))); }},
    {"decode", [](const Fields& fields) { reply(session->decode(integer(fields[1]), position_of(fields))); }},
    {"shift", [](const Fields& fields) { reply(session->shift(integer(fields[1]), integer(fields[2]))); }},
    {"rewind", [](const Fields& fields) { reply(session->rewind(integer(fields[1]))); }},
    {"encode_ids", [](const Fields& fields) { reply(session->encode_input(std::span<const int64_t>(integers(fields[1])))); }},
    {"encode_numbers", [](const Fields& fields) {
       std::vector<float> values;
       std::istringstream text(fields[1]);
       for (float value; text >> value;) values.push_back(value);
       reply(session->encode_input(std::span<const float>(values)));
     }},
    {"add", [](const Fields& fields) {  // name, "float32" or "int64", shape, values
       Input input{fields[1], integers(fields[3]), integers(fields[4])};
       if (fields[2] == "float32") {
         std::vector<float> values;
         std::istringstream words(fields[4]);
         for (std::string word; words >> word;) values.push_back(std::strtof(word.c_str(), nullptr));
         input.values = std::move(values);
       }
       reply(session->add_input(input));
     }},
    {"chat", [](const Fields& fields) {  // question and system message in hexadecimal
       std::string text;
       const auto generation = session->chat(from_hex(fields[1]), from_hex(fields[2]), options_of(fields, 3), [&text](std::string_view piece) {
         text += piece;
         return true;
       });
       generation.ok() ? reply(*generation, text) : reply(generation.error());
     }},
    {"messages", [](const Fields& fields) {  // the request in hexadecimal
       std::string text;
       const auto generation = session->chat_messages(from_hex(fields[1]), options_of(fields, 2), [&text](std::string_view piece) {
         text += piece;
         return true;
       });
       generation.ok() ? reply(*generation, text) : reply(generation.error());
     }},
    {"load_adapter", [](const Fields& fields) { reply(session->load_adapter(fields[1], fields[2])); }},
    {"unload_adapter", [](const Fields& fields) { reply(session->unload_adapter(fields[1])); }},
    {"use_adapter", [](const Fields& fields) { reply(session->use_adapter(fields[1])); }},
    {"render", [](const Fields& fields) {
       const auto text = session->render(from_hex(fields[1]));
       text.ok() ? reply({to_hex(*text)}) : reply(text.error());
     }},
    {"save", [](const Fields& fields) { reply(session->save_state(fields[1])); }},
    {"load", [](const Fields& fields) { reply(session->load_state(fields[1])); }},
    {"cancelled", [](const Fields& fields) {  // after so many tokens
       int64_t left = integer(fields[2]);
       const auto generation = session->generate(integers(fields[1]), options_of(fields, 3), [&left](int64_t) {
         if (--left == 0) session->cancel();
         return true;
       });
       generation.ok() ? reply(*generation, "") : reply(generation.error());
     }},
    {"reset", [](const Fields&) { session->reset(), reply(Fields()); }},
    {"length", [](const Fields&) { reply({std::to_string(session->length()), std::to_string(session->room().value_or(-1))}); }},
    {"generate", [](const Fields& fields) {
       std::vector<int64_t> seen;
       const auto generation = session->generate(integers(fields[1]), options_of(fields, 2), [&seen](int64_t token) {
         seen.push_back(token);
         return true;
       });
       generation.ok() ? reply(*generation, join(seen)) : reply(generation.error());
     }},
    {"text", [](const Fields& fields) {
       Fields pieces;
       const auto generation = session->generate_text(from_hex(fields[1]), options_of(fields, 2), [&pieces](std::string_view piece) {
         pieces.push_back(to_hex(piece));
         return true;
       });
       generation.ok() ? reply(*generation, join(pieces)) : reply(generation.error());
     }},
    {"take", [](const Fields& fields) {
       int64_t left = integer(fields[2]);
       const auto generation = session->generate(integers(fields[1]), {}, [&left](int64_t) { return --left > 0; });
       generation.ok() ? reply(*generation, "") : reply(generation.error());
     }},
    {"encode", [](const Fields& fields) {
       const Result<Tokenizer> tokenizer = Tokenizer::open(fields[1]);
       if (!tokenizer.ok()) return reply(tokenizer.error());
       const auto ids = tokenizer->encode(from_hex(fields[2]), fields[3] == "1");
       ids.ok() ? reply({join(*ids)}) : reply(ids.error());
     }},
    {"detokenize", [](const Fields& fields) {
       const Result<Detokenizer> vocabulary = Detokenizer::open(fields[1]);
       if (!vocabulary.ok()) return reply(vocabulary.error());
       TextStream stream(*vocabulary);
       Fields pieces;
       for (const int64_t token : integers(fields[2])) pieces.push_back(to_hex(stream.push(token)));
       pieces.push_back(to_hex(stream.finish()));
       reply(pieces);
     }},
    {"answer", [](const Fields& fields) {
       const Result<Detokenizer> vocabulary = Detokenizer::open(fields[1]);
       if (!vocabulary.ok()) return reply(vocabulary.error());
       std::vector<std::string> strings;
       std::istringstream words(fields[3]);
       for (std::string word; words >> word;) strings.push_back(from_hex(word));
       AnswerText text(*vocabulary, strings, fields[2] == "1");
       Fields pieces;
       for (const int64_t token : integers(fields[4])) {
         if (!text.stopped()) pieces.push_back(to_hex(text.push(token)));
       }
       if (!text.stopped()) pieces.push_back(to_hex(text.finish()));
       reply(pieces);
     }},
    {"utf8", [](const Fields& fields) {
       Utf8Stream stream;
       Fields pieces;
       for (size_t index = 1; index < fields.size(); ++index) pieces.push_back(to_hex(stream.push(from_hex(fields[index]))));
       pieces.push_back(to_hex(stream.finish()));
       reply(pieces);
     }},
    {"stops", [](const Fields& fields) {
       std::vector<std::string> strings;
       std::istringstream words(fields[1]);
       for (std::string word; words >> word;) strings.push_back(from_hex(word));
       StopStrings stops(strings);
       Fields pieces;
       for (size_t index = 2; index < fields.size() && !stops.stopped(); ++index) {
         pieces.push_back(to_hex(stops.push(from_hex(fields[index]))));
       }
       pieces.push_back(stops.stopped() ? "stopped" : to_hex(stops.finish()));
       reply(pieces);
     }},
    {"rollback", [](const Fields& fields) {
       LayerSpec layer{fields[1]};
       if (fields[2] != "-") layer.capacity = integer(fields[2]);
       if (fields[3] != "-") layer.window = integer(fields[3]);
       layer.rollback_slots = integer(fields[4]);
       layer.sinks = integer(fields[5]);
       layer.has_states = fields[6] == "1";
       const Result<CacheLimits> limits = CacheLimits::make({layer});
       if (!limits.ok()) return reply(limits.error());
       reply({std::to_string(limits->max_length().value_or(-1)),
              std::to_string(limits->max_rollback(integer(fields[7]), integer(fields[8])).tokens)});
     }},
    {"sample", [](const Fields& fields) {
       std::vector<float> logits;
       // Parsed by strtof, which reads infinities too.
       std::istringstream words(fields[1]);
       for (std::string word; words >> word;) logits.push_back(std::strtof(word.c_str(), nullptr));
       const Sampling asked = options_of(fields, 3).sampling;
       Result<Sampler> sampler = Sampler::make(session ? session->manifest().settings.sampling_for(asked) : asked);
       if (!sampler.ok()) return reply(sampler.error());
       std::vector<int64_t> tokens(static_cast<size_t>(integer(fields[2])));
       for (int64_t& token : tokens) token = sampler->choose(logits);
       reply({join(tokens)});
     }},
    {"json", [](const Fields& fields) {
       const Result<Json> parsed = Json::parse(from_hex(fields[1]), fields.size() > 2 ? from_hex(fields[2]) : "");
       if (!parsed.ok()) return reply(parsed.error());
       const Json& value = (*parsed)["key"];
       reply({value.string() != nullptr    ? "string " + to_hex(*value.string())
              : value.integer() != nullptr ? "integer " + std::to_string(*value.integer())
              : value.number() != nullptr  ? "number " + join(std::vector<double>{*value.number()})
              : value.boolean() != nullptr ? std::string(*value.boolean() ? "true" : "false")
              : value.array() != nullptr   ? "array " + std::to_string(value.array()->size())
              : value.object() != nullptr  ? "object " + std::to_string(value.object()->size())
                                           : "null"});
     }},
};

}  // namespace

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    Fields fields(1);
    for (const char character : line) {
      character == '\t' ? static_cast<void>(fields.emplace_back()) : fields.back().push_back(character);
    }
    const auto command = kCommands.find(fields[0]);
    if (command == kCommands.end()) return 3;
    command->second(fields);
  }
  return 0;
}
