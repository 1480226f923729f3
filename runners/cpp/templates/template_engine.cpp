// The only file that calls the engine. It is compiled with exceptions, and none leaves it.
#include "template_engine.h"

#include <json.h>
#include <jinja/lexer.h>
#include <jinja/parser.h>
#include <jinja/runtime.h>

#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <new>
#include <set>

namespace exportable_cache {
namespace {

constexpr size_t kMostTemplate = size_t{1} << 20;
constexpr size_t kMostOutput = 1'000'000;
constexpr size_t kOutputPerRequestByte = 4;
constexpr int kMostSeconds = 10;
constexpr rlim_t kMoreMemory = rlim_t{1} << 30;
constexpr size_t kMostReason = 300;
// First byte of the child's reply.
constexpr char kRendered = 'r', kRefused = 'e';

// Messages without keys that have no value, because many templates write "None" for these. Reasoning has every name that templates
// read. See `render_chat` in exportable_cache/generation/templates.py.
common_json as_rendered(const common_json& messages) {
  common_json found = common_json::array();
  for (const common_json& message : messages) {
    if (!message.is_object()) throw std::runtime_error("messages must be objects");
    common_json one = common_json::object();
    const bool calls = message.contains("tool_calls") && !message.at("tool_calls").is_null() && !message.at("tool_calls").empty();
    const common_json* reasoning = nullptr;
    for (const char* name : {"reasoning_content", "thinking", "reasoning"}) {
      if (reasoning == nullptr && message.contains(name) && !message.at(name).is_null()) reasoning = &message.at(name);
    }
    if (reasoning != nullptr) one["thinking"] = *reasoning;
    for (const auto& entry : message.items()) {
      if (!entry.value().is_null() || (entry.key() == "content" && calls)) one[entry.key()] = entry.value();
    }
    if (reasoning != nullptr) one["reasoning_content"] = *reasoning;
    found.push_back(one);
  }
  return found;
}

// A character for private use that the request does not have.
std::string unused_mark(const std::string& request) {
  for (char last = '\x80'; last < '\xC0'; ++last) {
    const std::string mark = std::string("\xF3\xB0\x80") + last;
    if (request.find(mark) == std::string::npos) return mark;
  }
  throw std::runtime_error("the messages have too many characters for private use");
}

// A copy of a value with a mark after the first character of each control token that its strings spell.
common_json marked(const common_json& value, const std::vector<std::string>& control, const std::string& mark) {
  if (value.is_string()) {
    const std::string text = value.get<std::string>();
    std::set<size_t> places;
    for (const std::string& name : control) {
      size_t first = 1;
      while (first < name.size() && (static_cast<unsigned char>(name[first]) & 0xC0) == 0x80) ++first;
      for (size_t found = text.find(name); found != std::string::npos; found = text.find(name, found + 1)) places.insert(found + first);
    }
    std::string found;
    size_t start = 0;
    for (const size_t place : places) {
      found += text.substr(start, place - start) + mark;
      start = place;
    }
    return found + text.substr(start);
  }
  if (value.is_array()) {
    common_json found = common_json::array();
    for (const common_json& one : value) found.push_back(marked(one, control, mark));
    return found;
  }
  if (!value.is_object()) return value;
  common_json found = common_json::object();
  for (const auto& entry : value.items()) found[entry.key()] = marked(entry.value(), control, mark);
  return found;
}

void append_part(std::string& reply, const std::string& text, bool is_said) {
  const uint64_t size = text.size();
  if (size == 0) return;
  reply += is_said ? '1' : '0';
  reply.append(reinterpret_cast<const char*>(&size), sizeof size);
  reply += text;
}

std::string rendered(const std::string& text, const std::vector<std::pair<std::string, std::string>>& specials,
                     const std::vector<std::string>& control, const std::string& request) {
  common_json given = common_json::parse(request);
  if (given.is_array()) given = common_json::object({{"messages", given}});
  if (!given.is_object() || !given.contains("messages") || !given.at("messages").is_array()) {
    throw std::runtime_error("the request must have a list of messages");
  }
  const std::string mark = unused_mark(given.dump());
  common_json variables = common_json::object({{"tools", nullptr}, {"documents", nullptr}, {"add_generation_prompt", true}});
  for (const auto& [name, token] : specials) variables[name] = token;
  for (const auto& entry : given.items()) {
    // An empty list of tools is passed as null, as in Python.
    const bool is_none = entry.key() == "tools" && entry.value().empty();
    if (entry.key() != "messages" && !is_none) variables[entry.key()] = entry.value();
  }
  jinja::lexer lexer;
  const jinja::lexer_result tokens = lexer.tokenize(text);
  const jinja::program program = jinja::parse_from_tokens(tokens);
  jinja::context context(tokens.source);
  jinja::global_from_json(context, variables, false);
  jinja::global_from_json(context, common_json::object({{"messages", marked(as_rendered(given.at("messages")), control, mark)}}), true);
  const auto parts = jinja::runtime::gather_string_parts(jinja::runtime(context).execute(program));
  std::string reply(1, kRendered);
  for (const auto& part : parts->val_str.parts) {
    // Filters such as tojson and join lose which text came from messages, so a character before a mark is always said.
    std::string whole;
    size_t start = 0;
    for (size_t found = part.val.find(mark); found != std::string::npos; found = part.val.find(mark, start)) {
      size_t first = found;
      while (first > start && (static_cast<unsigned char>(part.val[--first]) & 0xC0) == 0x80) {
      }
      if (part.is_input) first = found;
      whole += part.val.substr(start, first - start);
      if (!part.is_input) {
        append_part(reply, whole, false);
        append_part(reply, part.val.substr(first, found - first), true);
        whole.clear();
      }
      start = found + mark.size();
    }
    append_part(reply, whole + part.val.substr(start), part.is_input);
  }
  return reply;
}

// The engine quotes the template before the reason.
std::string reason_of(const std::string& message) {
  constexpr std::string_view kBefore = "Error: ", kRaised = "Jinja Exception: ";
  const size_t found = message.rfind(kBefore);
  std::string reason = found == std::string::npos ? message : message.substr(found + kBefore.size());
  if (reason.starts_with(kRaised)) reason.erase(0, kRaised.size());
  if (reason == std::bad_alloc().what()) reason = "it takes too much memory";
  return reason.substr(0, kMostReason);
}

// Bytes of the address space of this process; 0 where the system does not tell.
rlim_t address_space() {
  unsigned long long pages = 0;
  if (std::FILE* file = std::fopen("/proc/self/statm", "r")) {
    if (std::fscanf(file, "%llu", &pages) != 1) pages = 0;
    std::fclose(file);
  }
  return static_cast<rlim_t>(pages) * static_cast<rlim_t>(sysconf(_SC_PAGESIZE));
}

void limit(int what, rlim_t value) {
  const rlimit both{value, value};
  setrlimit(what, &both);
}

void write_all(int pipe, const std::string& bytes) {
  for (size_t done = 0; done < bytes.size();) {
    const ssize_t count = write(pipe, bytes.data() + done, bytes.size() - done);
    if (count < 0 && errno != EINTR) return;
    if (count > 0) done += static_cast<size_t>(count);
  }
}

// Everything after the fork.
[[noreturn]] void serve(int pipe, rlim_t memory, const std::string& text, const std::vector<std::pair<std::string, std::string>>& specials,
                        const std::vector<std::string>& control, const std::string& request) {
  for (const int number : {SIGSEGV, SIGBUS, SIGABRT, SIGFPE, SIGILL, SIGTERM, SIGINT, SIGXCPU}) std::signal(number, SIG_DFL);
  std::signal(SIGPIPE, SIG_IGN);
  limit(RLIMIT_CORE, 0);
  limit(RLIMIT_CPU, kMostSeconds);
  if (memory > 0) limit(RLIMIT_AS, memory);
  std::string reply;
  try {
    reply = rendered(text, specials, control, request);
  } catch (const std::exception& error) {
    reply = kRefused + reason_of(error.what());
  } catch (...) {
    reply = std::string(1, kRefused) + "it has a statement in the wrong place";
  }
  // With its size, because another process may hold a copy of the pipe, so that it has no end.
  const uint64_t size = reply.size();
  write_all(pipe, std::string(reinterpret_cast<const char*>(&size), sizeof size) + reply);
  _exit(0);
}

// The child's reply, empty if it ended before; `late` is set if the deadline passed, and `wants` to the size of a reply that is larger
// than `most` bytes, which is not read.
std::string read_reply(int pipe, uint64_t most, bool& late, uint64_t& wants) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::seconds(kMostSeconds);
  std::string reply;
  std::string buffer(1 << 16, '\0');
  uint64_t size = 0;
  while (true) {
    if (reply.size() >= sizeof size) std::memcpy(&size, reply.data(), sizeof size);
    if (size > most) {
      wants = size;
      return {};
    }
    if (size > 0 && reply.size() - sizeof size >= size) return reply.substr(sizeof size, size);
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    pollfd ready{pipe, POLLIN, 0};
    const int found = left > 0 ? poll(&ready, 1, static_cast<int>(left)) : 0;
    if (found < 0 && errno == EINTR) continue;
    if (found == 0) late = true;
    if (found <= 0) return {};
    const ssize_t count = read(pipe, buffer.data(), buffer.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return {};
    reply.append(buffer, 0, static_cast<size_t>(count));
  }
}

Error exceeded(const std::string& how) {
  return fail(ErrorCode::kInput, "the chat template exceeds a limit: ", how, "; correct it, or pass the prompt as text");
}

Result<std::vector<ChatPart>> parts_of(const std::string& reply) {
  std::vector<ChatPart> parts;
  for (size_t done = 1; done < reply.size();) {
    uint64_t size = 0;
    const size_t start = done + 1 + sizeof size;
    if (start <= reply.size()) std::memcpy(&size, reply.data() + done + 1, sizeof size);
    if (start > reply.size() || size > reply.size() - start) return exceeded("its process ended early");
    parts.push_back({reply.substr(start, size), reply[done] == '1'});
    done = start + size;
  }
  return parts;
}

}  // namespace

Result<std::vector<ChatPart>> render_template(const std::string& text,
                                                  const std::vector<std::pair<std::string, std::string>>& specials,
                                                  const std::vector<std::string>& control, const std::string& request) {
  if (text.size() > kMostTemplate) {
    return exceeded("it has " + std::to_string(text.size()) + " bytes, at most " + std::to_string(kMostTemplate));
  }
  const size_t most = kMostOutput + kOutputPerRequestByte * request.size();
  const rlim_t held = address_space();
  int ends[2];
  // Closed in programs that other threads start meanwhile.
  if (pipe(ends) != 0 || fcntl(ends[0], F_SETFD, FD_CLOEXEC) != 0 || fcntl(ends[1], F_SETFD, FD_CLOEXEC) != 0) {
    return fail(ErrorCode::kRuntime, "cannot open a pipe for the chat template: ", std::strerror(errno), "; close files");
  }
  const pid_t child = fork();
  if (child == 0) {
    close(ends[0]);
    serve(ends[1], held == 0 ? 0 : held + kMoreMemory, text, specials, control, request);
  }
  close(ends[1]);
  if (child < 0) {
    close(ends[0]);
    return fail(ErrorCode::kRuntime, "cannot start a process for the chat template: ", std::strerror(errno), "; pass the prompt as text");
  }
  bool late = false;
  uint64_t wants = 0;
  const std::string reply = read_reply(ends[0], 2 * most, late, wants);
  close(ends[0]);
  kill(child, SIGKILL);
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (wants > 0) return exceeded("it gives " + std::to_string(wants) + " bytes, at most " + std::to_string(most));
  if (late) return exceeded("it took more than " + std::to_string(kMostSeconds) + " seconds");
  if (reply.empty()) {
    return exceeded(WIFSIGNALED(status) && WTERMSIG(status) != SIGKILL
                        ? "its process ended with signal " + std::to_string(WTERMSIG(status)) + ", as deep recursion does"
                        : "its process ended");
  }
  if (reply[0] == kRefused) {
    return fail(ErrorCode::kInput, "the chat template refuses the messages: ", reply.substr(1), "; change them, or pass text instead");
  }
  Result<std::vector<ChatPart>> parts = parts_of(reply);
  if (!parts.ok()) return parts;
  size_t size = 0;
  for (const ChatPart& part : *parts) size += part.text.size();
  if (size > most) return exceeded("it gives " + std::to_string(size) + " bytes, at most " + std::to_string(most));
  return parts;
}

}  // namespace exportable_cache
