// Generate from a bundle on the command line: text on stdout, speed on stderr.
#include <getopt.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include <exportable_cache/batch_session.h>
#include <exportable_cache/threads.h>

namespace {

using namespace exportable_cache;

constexpr const char* kUsage =
    "usage: exportable_cache_generate BUNDLE (--prompt TEXT | --chat | --messages FILE | --tokens \"1 2 3\") [options]\n"
    "\n"
    "  --prompt TEXT           text to continue; once per row of a bundle with a batch_size, and each response is a line\n"
    "  --chat                  respond to each line of the input, with the model's chat template\n"
    "  --messages FILE         respond to messages: a JSON list, or an object with messages, tools and other variables of the template\n"
    "  --render                print the rendered template of --messages, and generate nothing\n"
    "  --system TEXT           system message of a chat\n"
    "  --tokens \"1 2 3\"        token ids in and out; once per row, too; the decoder's for an encoder-decoder\n"
    "  --encode \"1 2 3\"        token ids for its encoder, with --tokens\n"
    "  --encode-file FILE      float32 values for its encoder, as a speech model's processor makes them, with --tokens\n"
    "  --input NAME=FILE       tensor of the model's processor for images, video or audio, such as pixel_values: raw float32 (or int64)\n"
    "                          values, item after item, with --tokens that have their placeholders; may be given several times\n"
    "  --max-new-tokens N      at most N; by default the checkpoint's limit, or as many as fit\n"
    "  --greedy                the most probable tokens, whatever the checkpoint's generation_config asks for\n"
    "  --temperature T         sample, after dividing logits by T; 0 is greedy; the default is the checkpoint's\n"
    "  --top-k K, --top-p P    sample from the K most probable (0: from all), from the fewest that reach P\n"
    "  --min-p P               sample from tokens at least P times as probable as the most probable one\n"
    "  --seed N                the same draws every time\n"
    "  --presence-penalty P, --frequency-penalty P\n"
    "                          make tokens that were generated less likely: once, or each time\n"
    "  --on-full shift         drop old tokens of a full cache and continue; needs an export with shift=true\n"
    "  --protect N             first tokens that --on-full shift keeps; default 4\n"
    "  --adapter FILE          LoRA adapter that `exportable-cache adapter` wrote; needs an export with lora_slots\n"
    "  --stop TEXT             end before this text; may be given several times\n"
    "  --stop-token N          end with this token; may be given several times\n"
    "  --prompt-lookup N       propose up to N tokens per step from the text itself; needs an export with score_length\n"
    "  --draft N               propose up to N tokens per step by the bundle's draft head; needs an export with --draft\n"
    "  --threads N             compute threads; the number of cores by default\n";

struct Arguments {
  std::string bundle;
  std::vector<std::string> prompts;
  std::vector<std::vector<int64_t>> tokens;
  bool chat = false;
  std::optional<std::string> messages;  // a file
  bool render = false;
  std::optional<std::string> adapter;
  std::string system;
  std::optional<std::vector<int64_t>> encoded_tokens;
  std::optional<std::string> encoded_file;
  std::vector<std::string> inputs;  // NAME=FILE
  GenerateOptions options;
  std::optional<int64_t> threads;
};

int report(const Error& error) {
  std::cerr << "error: " << error.message << "\n";
  return error.code == ErrorCode::kRuntime ? 1 : 2;
}

template <class T>
bool parse(const char* text, T& value) {
  const char* end = text + std::strlen(text);
  const auto [stop, problem] = std::from_chars(text, end, value);
  return problem == std::errc() && stop == end && stop != text;
}

bool parse_list(const char* text, std::vector<int64_t>& values) {
  for (const char* rest = text; *(rest += std::strspn(rest, " ,\n"));) {
    const std::string item(rest, std::strcspn(rest, " ,\n"));
    if (!parse(item.c_str(), values.emplace_back())) return false;
    rest += item.size();
  }
  return true;
}

// The values of a file, float or int64_t.
template <class T>
Result<std::vector<T>> numbers_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (!file || bytes.empty() || bytes.size() % sizeof(T) != 0) {
    return fail(ErrorCode::kInput, path, " cannot be read, or is not of ", sizeof(T) == sizeof(float) ? "float32" : "int64", " numbers");
  }
  std::vector<T> values(bytes.size() / sizeof(T));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

template <class T>
Status add(Session& session, const std::string& name, const std::string& path, std::vector<int64_t> shape) {
  Result<std::vector<T>> values = numbers_of<T>(path);
  if (!values.ok()) return values.error();
  int64_t each = 1;
  for (const int64_t size : shape) each *= size;
  const auto count = static_cast<int64_t>(values->size());
  if (each < 1 || count % each != 0) {
    return fail(ErrorCode::kInput, path, " has ", count, " numbers, and one item of ", name, " takes ", each);
  }
  shape[0] *= count / each;
  return session.add_input({name, std::move(shape), std::move(*values)});
}

// Parse `NAME=FILE`; the shape is the manifest's, and the number of items follows from the file's size.
Status add(Session& session, const std::string& given) {
  const size_t cut = given.find('=');
  if (cut == std::string::npos) return fail(ErrorCode::kInput, "--input got '", given, "'; pass NAME=FILE");
  const std::string name = given.substr(0, cut), path = given.substr(cut + 1);
  for (const ItemSpec& item : session.manifest().items) {
    for (const ItemInputSpec& input : item.inputs) {
      if (input.name != name) continue;
      const bool floats = input.dtype.find("float") != std::string::npos;
      return floats ? add<float>(session, name, path, input.shape) : add<int64_t>(session, name, path, input.shape);
    }
    for (const FixedSpec& fixed : item.fixed) {
      if (fixed.name == name) return add<int64_t>(session, name, path, fixed.shape);
    }
  }
  // The error for an unknown name, with the known names.
  return session.add_input({name, {1}, std::vector<int64_t>{0}});
}

// Fill `arguments`, or return what is wrong with them.
std::optional<std::string> parse_arguments(int argc, char** argv, Arguments& arguments) {
  enum { kPrompt = 1, kChat, kMessages, kRender, kAdapter, kSystem, kTokens, kEncode, kEncodeFile, kInput, kMaxNewTokens, kTemperature, kTopK, kTopP, kMinP, kPresence, kFrequency, kOnFull, kProtect, kGreedy, kSeed, kStop, kStopToken, kPromptLookup, kDraft, kThreads, kHelp };
  static const option kOptions[] = {
      {"prompt", required_argument, nullptr, kPrompt},
      {"chat", no_argument, nullptr, kChat},
      {"messages", required_argument, nullptr, kMessages},
      {"render", no_argument, nullptr, kRender},
      {"adapter", required_argument, nullptr, kAdapter},
      {"system", required_argument, nullptr, kSystem},
      {"tokens", required_argument, nullptr, kTokens},
      {"encode", required_argument, nullptr, kEncode},
      {"encode-file", required_argument, nullptr, kEncodeFile},
      {"input", required_argument, nullptr, kInput},
      {"max-new-tokens", required_argument, nullptr, kMaxNewTokens},
      {"temperature", required_argument, nullptr, kTemperature},
      {"top-k", required_argument, nullptr, kTopK},
      {"top-p", required_argument, nullptr, kTopP},
      {"min-p", required_argument, nullptr, kMinP},
      {"presence-penalty", required_argument, nullptr, kPresence},
      {"frequency-penalty", required_argument, nullptr, kFrequency},
      {"on-full", required_argument, nullptr, kOnFull},
      {"protect", required_argument, nullptr, kProtect},
      {"greedy", no_argument, nullptr, kGreedy},
      {"seed", required_argument, nullptr, kSeed},
      {"stop", required_argument, nullptr, kStop},
      {"stop-token", required_argument, nullptr, kStopToken},
      {"prompt-lookup", required_argument, nullptr, kPromptLookup},
      {"draft", required_argument, nullptr, kDraft},
      {"threads", required_argument, nullptr, kThreads},
      {"help", no_argument, nullptr, kHelp},
      {nullptr, 0, nullptr, 0},
  };
  GenerateOptions& options = arguments.options;
  options.sampling.from_checkpoint = true;
  bool greedy = false;
  std::optional<double> temperature;
  int index = 0;
  for (int found; (found = getopt_long(argc, argv, "", kOptions, &index)) != -1;) {
    bool good = true;
    switch (found) {
      case kPrompt: arguments.prompts.emplace_back(optarg); break;
      case kChat: arguments.chat = true; break;
      case kMessages: arguments.messages = optarg; break;
      case kRender: arguments.render = true; break;
      case kAdapter: arguments.adapter = optarg; break;
      case kSystem: arguments.system = optarg; break;
      case kTokens: good = parse_list(optarg, arguments.tokens.emplace_back()); break;
      case kEncode: good = parse_list(optarg, arguments.encoded_tokens.emplace()); break;
      case kEncodeFile: arguments.encoded_file = optarg; break;
      case kInput: arguments.inputs.emplace_back(optarg); break;
      case kMaxNewTokens: good = parse(optarg, options.max_new_tokens.emplace()); break;
      case kTemperature: good = parse(optarg, temperature.emplace()); break;
      case kTopK: good = parse(optarg, options.sampling.top_k.emplace()); break;
      case kTopP: good = parse(optarg, options.sampling.top_p.emplace()); break;
      case kMinP: good = parse(optarg, options.sampling.min_p.emplace()); break;
      case kPresence: good = parse(optarg, options.sampling.presence_penalty); break;
      case kFrequency: good = parse(optarg, options.sampling.frequency_penalty); break;
      case kOnFull:
        options.shift_when_full = std::strcmp(optarg, "shift") == 0;
        if (!options.shift_when_full && std::strcmp(optarg, "refuse") != 0) return std::string("--on-full must be refuse or shift, got '") + optarg + "'";
        break;
      case kProtect: good = parse(optarg, options.protected_tokens); break;
      case kGreedy: greedy = true; break;
      case kSeed: good = parse(optarg, options.sampling.seed.emplace()); break;
      case kStop: options.stop_strings.emplace_back(optarg); break;
      case kStopToken: good = parse(optarg, options.stop_tokens.emplace_back()); break;
      case kPromptLookup: good = parse(optarg, options.prompt_lookup); break;
      case kDraft: good = parse(optarg, options.draft_tokens); break;
      case kThreads: good = parse(optarg, arguments.threads.emplace()); break;
      case kHelp: std::cout << kUsage; std::exit(0);
      default: return "see --help";
    }
    if (!good) return std::string("--") + kOptions[index].name + " got '" + optarg + "', which is not a valid number for it";
  }
  if (greedy && temperature) return "pass one of --greedy and --temperature";
  options.sampling.temperature = temperature.value_or(0);
  if (greedy || (temperature && *temperature == 0)) options.sampling.from_checkpoint = false;
  if (argc - optind != 1) return "pass one bundle: a folder that export wrote";
  if (!arguments.prompts.empty() + !arguments.tokens.empty() + arguments.chat + arguments.messages.has_value() != 1) {
    return "pass one of --prompt, --chat, --messages and --tokens";
  }
  if (arguments.render && !arguments.messages) return "--render needs --messages";
  const bool are_several = arguments.prompts.size() + arguments.tokens.size() > 1;
  if (are_several && (arguments.encoded_tokens || arguments.encoded_file || !arguments.inputs.empty())) {
    return "several prompts support token ids or text only; pass one prompt with --encode, --encode-file or --input";
  }
  if (!arguments.system.empty() && !arguments.chat) return "--system needs --chat";
  arguments.bundle = argv[optind];
  return std::nullopt;
}

bool print(std::string_view piece) {
  std::cout << piece << std::flush;
  return std::cout.good();
}

int cannot_write() {
  std::cerr << "error: cannot write all of the output; the disk is full, or the pipe is closed\n";
  return 2;
}

std::string quoted(const std::string& text) {
  std::string json = "\"";
  for (const char character : text) {
    const auto code = static_cast<unsigned char>(character);
    if (code < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", static_cast<unsigned>(code));
      json += escape;
    } else {
      if (character == '"' || character == '\\') json += '\\';
      json += character;
    }
  }
  return json + '"';
}

std::string message_of(const std::string& role, const std::string& content) {
  return "{\"role\": \"" + role + "\", \"content\": " + quoted(content) + "}";
}

// Each input line is a question, until the input ends; the whole conversation is rendered for each.
int converse_by_template(Session& session, const Arguments& arguments) {
  std::string messages = arguments.system.empty() ? "" : message_of("system", arguments.system) + ", ";
  for (std::string question; std::getline(std::cin, question);) {
    messages += message_of("user", question);
    std::string answer;
    const Result<Generation> generation = session.chat_messages("[" + messages + "]", arguments.options, [&answer](std::string_view piece) {
      answer += piece;
      return print(piece);
    });
    std::cout << std::endl;
    if (!generation.ok()) return report(generation.error());
    if (!std::cout) return cannot_write();
    messages += ", " + message_of("assistant", answer) + ", ";
  }
  return 0;
}

// Each input line is a question, until the input ends.
int converse(Session& session, const Arguments& arguments) {
  if (!session.manifest().chat) return converse_by_template(session, arguments);
  std::string system = arguments.system;
  for (std::string question; std::getline(std::cin, question);) {
    const Result<Generation> generation = session.chat(question, system, arguments.options, print);
    std::cout << std::endl;
    if (!generation.ok()) return report(generation.error());
    if (!std::cout) return cannot_write();
    system.clear();
  }
  return 0;
}

// Show how tokens are drawn, and name the checkpoint's settings that this runner does not follow.
void note_settings(const Manifest& manifest, const Sampling& asked) {
  const Sampling sampling = manifest.settings.sampling_for(asked);
  if (sampling.temperature != 0) {
    std::cerr << "sampling, temperature " << sampling.temperature;
    if (sampling.top_k) std::cerr << ", top_k " << *sampling.top_k;
    if (sampling.top_p) std::cerr << ", top_p " << *sampling.top_p;
    if (sampling.min_p) std::cerr << ", min_p " << *sampling.min_p;
    if (manifest.settings.repetition_penalty != 1) std::cerr << ", repetition_penalty " << manifest.settings.repetition_penalty;
    std::cerr << "; --greedy takes the most likely token\n";
  }
  for (const std::string& name : manifest.settings.unheeded) {
    std::cerr << "generation_config asks for " << name << ", which is not supported: tokens may differ from those of transformers\n";
  }
}

// Print the responses of a batch, one line each, because rows end at different times.
int answer_rows(const Arguments& arguments) {
  Result<BatchSession> session = BatchSession::open(arguments.bundle);
  if (!session.ok()) return report(session.error());
  note_settings(session->manifest(), arguments.options.sampling);
  std::vector<std::string> texts(arguments.prompts.size());
  const Result<std::vector<Generation>> answers =
      arguments.prompts.empty() ? session->generate(arguments.tokens, arguments.options)
                                : session->generate_text(arguments.prompts, arguments.options, [&texts](size_t row, std::string_view piece) {
                                    texts[row] += piece;
                                    return true;
                                  });
  if (!answers.ok()) return report(answers.error());
  for (size_t row = 0; row < answers->size(); ++row) {
    if (!arguments.prompts.empty()) std::cout << texts[row];
    if (arguments.prompts.empty()) {
      for (const int64_t token : (*answers)[row].tokens) std::cout << token << " ";
    }
    std::cout << "\n";
  }
  std::cout << std::flush;
  if (!std::cout) return cannot_write();
  int64_t after_first = 0;
  double slowest = 0;
  for (const Generation& answer : *answers) {
    const Statistics& statistics = answer.statistics;
    after_first += std::max<int64_t>(0, statistics.generated_tokens - 1);
    slowest = std::max(slowest, statistics.decode_seconds);
    std::fprintf(stderr, "%lld prompt tokens, %lld new, ended by %s\n", static_cast<long long>(statistics.prompt_tokens),
                 static_cast<long long>(statistics.generated_tokens), to_string(answer.reason));
  }
  std::fprintf(stderr, "first tokens after %.4f s, then %.1f tokens/s in all rows\n", answers->front().statistics.time_to_first_token,
               slowest > 0 ? static_cast<double>(after_first) / slowest : 0.0);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  if (const auto problem = parse_arguments(argc, argv, arguments)) {
    std::cerr << "error: " << *problem << "\n\n" << kUsage;
    return 2;
  }
  if (arguments.threads) {
    if (const Status status = set_threads(*arguments.threads); !status.ok()) return report(status.error());
  }
  if (arguments.prompts.size() + arguments.tokens.size() > 1) return answer_rows(arguments);
  Result<Session> session = Session::open(arguments.bundle);
  if (!session.ok()) return report(session.error());
  note_settings(session->manifest(), arguments.options.sampling);

  if (arguments.adapter) {
    for (const Status& status : {session->load_adapter(*arguments.adapter, "adapter"), session->use_adapter("adapter")}) {
      if (!status.ok()) return report(status.error());
    }
  }
  if (arguments.encoded_tokens) {
    if (const Status status = session->encode_input(*arguments.encoded_tokens); !status.ok()) return report(status.error());
  }
  if (arguments.encoded_file) {
    const auto values = numbers_of<float>(*arguments.encoded_file);
    if (!values.ok()) return report(values.error());
    if (const Status status = session->encode_input(*values); !status.ok()) return report(status.error());
  }

  for (const std::string& input : arguments.inputs) {
    if (const Status status = add(*session, input); !status.ok()) return report(status.error());
  }

  if (arguments.chat) return converse(*session, arguments);
  std::string request;
  if (arguments.messages) {
    std::ifstream file(*arguments.messages, std::ios::binary);
    request.assign(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    if (!file || request.empty()) return report(fail(ErrorCode::kInput, "cannot read ", *arguments.messages, "; pass a file of JSON"));
  }
  if (arguments.render) {
    const Result<std::string> text = session->render(request);
    if (!text.ok()) return report(text.error());
    return print(*text) ? 0 : cannot_write();
  }

  Result<Generation> generation =
      arguments.messages ? session->chat_messages(request, arguments.options, print)
      : arguments.tokens.empty()
          ? session->generate_text(arguments.prompts.front(), arguments.options, print)
          : session->generate(arguments.tokens.front(), arguments.options, [](int64_t token) {
              std::cout << token << " " << std::flush;
              return std::cout.good();
            });
  std::cout << std::endl;
  if (!generation.ok()) return report(generation.error());
  if (!std::cout) return cannot_write();
  const Statistics& statistics = generation->statistics;
  std::fprintf(stderr,
               "%lld prompt tokens, %lld new, ended by %s; first token after %.4f s (%.1f tokens/s), then %.1f tokens/s\n",
               static_cast<long long>(statistics.prompt_tokens), static_cast<long long>(statistics.generated_tokens),
               to_string(generation->reason), statistics.time_to_first_token, statistics.prefill_tokens_per_second(),
               statistics.decode_tokens_per_second());
  if (statistics.proposed_tokens > 0) {
    std::fprintf(stderr, "%lld tokens proposed, %lld accepted\n", static_cast<long long>(statistics.proposed_tokens),
                 static_cast<long long>(statistics.accepted_tokens));
  }
  return 0;
}
