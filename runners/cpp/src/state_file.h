// A session's state as a file: what its cache holds, without the pages that nothing was written to.
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

/// Where a session is.
struct Place {
  int64_t length = 0;
  int64_t max_len_ever = 0;
  std::optional<int64_t> pending{};
  std::vector<Placed> placed{};
};

/// Write a state, whole or not at all: beside `path` first, then put in its place.
///
/// `program` is the checksum of the program that `memory` belongs to. Error kInput if the file cannot be written.
Status write_state(const std::string& path, const std::string& program, const Place& place, std::span<const uint8_t> memory);

/// Read a state into `memory`, which `clear` fills with zeros, if the session `accepts` its place.
///
/// Error kInput if the file cannot be read, is damaged, or is of another program; `memory` is as it was then.
Result<Place> read_state(const std::string& path, const std::string& program, std::span<uint8_t> memory,
                         const std::function<bool(const Place&)>& accepts, const std::function<void()>& clear);

}  // namespace exportable_cache
