// Checks of the instructions of a program.pte, which ExecuTorch's verification does not cover.
#pragma once

#include <cstdint>
#include <set>
#include <span>
#include <string>

namespace exportable_cache {

/// The problem of a file, or nothing: an instruction that names a missing operator, delegate, value or instruction, or a name that is
/// not UTF-8. The rules are those of exportable_cache/backends/executorch/pte/instructions.py. The runtime (1.4.1) aborts the process
/// for some of them.
std::string program_problem(std::span<const uint8_t> file);

/// Operators that a method of a valid file calls, such as "aten::add.out".
std::set<std::string> called_operators(std::span<const uint8_t> file, const std::string& method);

/// Backends that it delegates to, such as "XnnpackBackend".
std::set<std::string> called_delegates(std::span<const uint8_t> file, const std::string& method);

}  // namespace exportable_cache
