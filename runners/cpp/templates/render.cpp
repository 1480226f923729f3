// Renders chat templates for tests: each line of the input is a template and a request, in hexadecimal, and `name=text` of special
// tokens; each line of the output is "ok" and the parts, or "error" and the message.
#include <iostream>
#include <sstream>

#include "template_engine.h"

namespace {

std::string from_hex(const std::string& text) {
  std::string bytes;
  for (size_t index = 0; index + 1 < text.size(); index += 2) bytes += static_cast<char>(std::stoi(text.substr(index, 2), nullptr, 16));
  return bytes;
}

std::string to_hex(const std::string& bytes) {
  std::string text;
  for (const unsigned char byte : bytes) {
    text += "0123456789abcdef"[byte / 16];
    text += "0123456789abcdef"[byte % 16];
  }
  return text;
}

}  // namespace

int main() {
  using namespace exportable_cache;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string text, request;
    words >> text >> request;
    std::vector<std::pair<std::string, std::string>> specials;
    std::vector<std::string> control;
    for (std::string word; words >> word;) {
      const size_t cut = word.find('=');
      specials.emplace_back(word.substr(0, cut), word.substr(cut + 1));
      control.push_back(word.substr(cut + 1));
    }
    const auto parts = render_template(from_hex(text), specials, control, from_hex(request));
    if (!parts.ok()) {
      std::cout << "error " << to_hex(parts.error().message) << std::endl;
      continue;
    }
    std::cout << "ok";
    for (const ChatPart& part : *parts) std::cout << " " << (part.is_said ? "said:" : "text:") << to_hex(part.text);
    std::cout << std::endl;
  }
  return 0;
}
