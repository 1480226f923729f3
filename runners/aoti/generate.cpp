// generate FOLDER COUNT TOKEN...: greedy continuation of a prompt of token ids; a line has an id and its logit.
#include <exception>
#include <iostream>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>
#include <c10/core/GradMode.h>

#include "session.h"

int main(int argc, char** argv) {
  if (argc < 4) {
    std::cerr << "usage: generate FOLDER COUNT TOKEN...\n";
    return 2;
  }
  try {
    const c10::NoGradGuard no_grad;
    exportable_cache::Session session(argv[1]);
    const int64_t count = std::stoll(argv[2]);
    std::vector<int64_t> prompt;
    for (int index = 3; index < argc; ++index) {
      prompt.push_back(std::stoll(argv[index]));
    }
    auto logits = session.prefill(at::tensor(prompt, at::kLong).unsqueeze(0));
    for (int64_t step = 0; step < count; ++step) {
      const auto [logit, token] = logits.max(-1);
      std::cout << token.item<int64_t>() << ' ' << logit.item<double>() << '\n';
      if (step + 1 < count) {
        logits = session.decode(token);
      }
    }
  } catch (const std::exception& error) {
    std::cerr << "generate: " << error.what() << '\n';
    return 1;
  }
}
