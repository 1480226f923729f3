// A session's state as a file: the contents of its cache, without pages that were never written.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <exportable_cache/items.h>
#include <exportable_cache/result.h>

namespace exportable_cache {

/// Position of a session.
struct Place {
  int64_t length = 0;
  int64_t max_len_ever = 0;
  std::optional<int64_t> pending{};
  std::vector<Placed> placed{};
};

/// Write a state atomically: to a file next to `path`, which is then renamed.
///
/// `program` is the checksum of the program that `memory` belongs to. Error kInput if the file cannot be written.
Status write_state(const std::string& path, const std::string& program, const Place& place, std::span<const uint8_t> memory);

/// Read a state into `memory`, which `clear` fills with zeros, if the session `accepts` its position.
///
/// Error kInput if the file cannot be read, is damaged, or is of another program; `memory` is unchanged then.
Result<Place> read_state(const std::string& path, const std::string& program, std::span<uint8_t> memory,
                         const std::function<bool(const Place&)>& accepts, const std::function<void()>& clear);

}  // namespace exportable_cache
