// Whether the instructions of a program.pte are of what the file has, which ExecuTorch's own verification does not look at.
#pragma once

#include <cstdint>
#include <set>
#include <span>
#include <string>

namespace exportable_cache {

/// What is wrong with a file, or nothing: an instruction that names an operator, a delegate, a value or an instruction that there is
/// not, or a name that is no UTF-8. The rules are those of exportable_cache/backends/executorch/pte/instructions.py; the runtime (seen
/// in 1.4.1) ends the process over some of them.
std::string program_problem(std::span<const uint8_t> file);

/// Operators that a method of a file without a problem calls, such as "aten::add.out".
std::set<std::string> called_operators(std::span<const uint8_t> file, const std::string& method);

/// Backends that it hands parts to, such as "XnnpackBackend".
std::set<std::string> called_delegates(std::span<const uint8_t> file, const std::string& method);

}  // namespace exportable_cache
