#include <exportable_cache/batch_session.h>

#include <algorithm>
#include <limits>

#include "checks.h"

namespace exportable_cache {
namespace {

std::string joined(std::span<const int64_t> values) {
  std::string text;
  for (const int64_t value : values) text += (text.empty() ? "" : ", ") + std::to_string(value);
  return text;
}

std::vector<int64_t> sizes_of(std::span<const std::vector<int64_t>> prompts) {
  std::vector<int64_t> sizes;
  for (const std::vector<int64_t>& prompt : prompts) sizes.push_back(static_cast<int64_t>(prompt.size()));
  return sizes;
}

// Columns of prompts that end together, [start, end), in which the same rows have tokens.
struct Segment {
  int64_t start;
  int64_t end;
};

std::vector<Segment> segments_of(std::span<const int64_t> sizes) {
  const int64_t longest = *std::max_element(sizes.begin(), sizes.end());
  std::vector<int64_t> starts;
  for (const int64_t size : sizes) starts.push_back(longest - size);
  std::sort(starts.begin(), starts.end());
  starts.erase(std::unique(starts.begin(), starts.end()), starts.end());
  std::vector<Segment> segments;
  for (size_t index = 0; index < starts.size(); ++index) {
    segments.push_back({starts[index], index + 1 < starts.size() ? starts[index + 1] : longest});
  }
  return segments;
}

}  // namespace

BatchSession::BatchSession(Manifest manifest, CacheLimits limits, Program program)
    : manifest_(std::move(manifest)), limits_(std::move(limits)), program_(std::move(program)), text_(manifest_) {
  reset();
}

Result<BatchSession> BatchSession::open(const std::string& folder) {
  Result<Manifest> manifest = Manifest::read(folder);
  if (!manifest.ok()) return manifest.error();
  if (manifest->encoder || !manifest->items.empty()) {
    return fail(ErrorCode::kBundle, folder, manifest->encoder ? " has an encoder" : " takes images, video or audio", ", and batches take "
                "token ids alone; export it with batch_size=1 and open it as a Session");
  }
  Result<CacheLimits> limits = CacheLimits::make(manifest->layers);
  if (!limits.ok()) return limits.error();
  Result<Program> program = Program::open(*manifest);
  if (!program.ok()) return program.error();
  return BatchSession(std::move(*manifest), std::move(*limits), std::move(*program));
}

std::optional<int64_t> BatchSession::room() const {
  const std::optional<int64_t> limit = max_length();
  return limit ? std::optional<int64_t>(*limit - *std::max_element(lengths_.begin(), lengths_.end())) : std::nullopt;
}

void BatchSession::reset() {
  const auto rows = static_cast<size_t>(manifest_.batch_size);
  lengths_.assign(rows, 0);
  max_lens_ever_.assign(rows, 0);
  pending_.assign(rows, std::nullopt);
}

Status BatchSession::rewind(int64_t tokens) {
  if (tokens < 0) return fail(ErrorCode::kInput, "cannot rewind ", tokens, " tokens; pass at least 0");
  const int64_t least = *std::min_element(lengths_.begin(), lengths_.end());
  if (tokens > least) {
    return fail(ErrorCode::kInput, "cannot rewind ", tokens, " tokens, rows hold ", joined(lengths_), "; rewind at most ", least);
  }
  for (size_t row = 0; row < rows(); ++row) {
    if (tokens == lengths_[row]) continue;  // it restarts, so its layers need not keep anything
    const auto [allowed, reason] = limits_.max_rollback(lengths_[row], max_lens_ever_[row]);
    if (tokens > allowed) {
      return fail(ErrorCode::kInput, "cannot rewind ", tokens, " tokens at a length of ", lengths_[row], " in row ", row, ": ", reason,
                  ", at most ", allowed, " can be taken back; reset() and prefill the tokens to keep");
    }
  }
  for (size_t row = 0; row < rows(); ++row) {
    lengths_[row] -= tokens;
    if (lengths_[row] == 0) max_lens_ever_[row] = 0;
    pending_[row].reset();
  }
  return {};
}

Result<std::span<const float>> BatchSession::prefill(std::span<const std::vector<int64_t>> prompts) {
  if (const Status status = check_prompts(prompts, {}); !status.ok()) return status.error();
  return feed(prompts);
}

Result<std::span<const float>> BatchSession::decode(std::span<const int64_t> tokens) {
  if (const Status status = check_count(tokens.size(), "tokens"); !status.ok()) return status.error();
  std::vector<std::vector<int64_t>> prompts;
  for (const int64_t token : tokens) prompts.push_back({token});
  return prefill(prompts);
}

Result<std::span<const float>> BatchSession::feed(std::span<const std::vector<int64_t>> prompts, bool may_stop) {
  const std::vector<int64_t> sizes = sizes_of(prompts);
  const int64_t longest = *std::max_element(sizes.begin(), sizes.end());
  for (const Segment& segment : segments_of(sizes)) {
    std::vector<bool> counted;
    for (const int64_t size : sizes) counted.push_back(longest - size <= segment.start);
    int64_t start = segment.start;
    for (const int64_t size : chunk_sizes(segment.end - segment.start)) {
      if (may_stop && is_cancelled()) return std::span<const float>(logits_);
      std::vector<int64_t> tokens;
      for (size_t row = 0; row < rows(); ++row) {
        // A waiting row is fed its own first token, which its later steps overwrite.
        const auto from = counted[row] ? prompts[row].begin() + (start - longest + sizes[row]) : prompts[row].begin();
        if (counted[row]) tokens.insert(tokens.end(), from, from + size);
        if (!counted[row]) tokens.insert(tokens.end(), static_cast<size_t>(size), *from);
      }
      if (const auto logits = step(tokens, size, counted); !logits.ok()) return logits.error();
      start += size;
    }
  }
  return std::span<const float>(logits_);
}

Result<std::span<const float>> BatchSession::step(std::span<const int64_t> tokens, int64_t size, const std::vector<bool>& counted) {
  const int64_t end = *std::max_element(lengths_.begin(), lengths_.end()) + size;
  const MethodSpec* method = program_.method_for(size, end, {});
  if (method == nullptr) {
    return fail(ErrorCode::kBundle, "no method of the program takes ", size, " tokens at position ", end - size, "; export the model again");
  }
  for (size_t row = 0; row < rows(); ++row) {
    // A row that waits at position 0 restarts there. Its length is set before the run, because the run may fail.
    if (counted[row] || lengths_[row] > 0) max_lens_ever_[row] = std::max(max_lens_ever_[row], lengths_[row] + size);
  }
  const Status status = program_.run(*method, {.tokens = tokens, .length = size, .positions = lengths_}, 1, logits_);
  if (!status.ok()) return status.error();
  for (size_t row = 0; row < rows(); ++row) {
    if (counted[row]) lengths_[row] += size;
    pending_[row].reset();
  }
  return std::span<const float>(logits_);
}

std::vector<int64_t> BatchSession::chunk_sizes(int64_t length) const {
  constexpr int64_t kAnywhere = std::numeric_limits<int64_t>::max();
  std::vector<int64_t> sizes;
  for (int64_t done = 0; done < length; done += sizes.back()) {
    const int64_t size = std::min(length - done, program_.max_step());
    sizes.push_back(program_.method_for(size, kAnywhere, {}) == nullptr ? 1 : size);
  }
  return sizes;
}

// -- checks --------------------------------------------------------------------------------------------------------------

Status BatchSession::check_count(size_t given, const char* what) const {
  if (given == rows()) return {};
  return fail(ErrorCode::kInput, "got ", given, " ", what, ", this program runs ", rows(), " rows; pass one per row, or export with batch_size=",
              std::max<size_t>(given, 1));
}

Status BatchSession::check_prompts(std::span<const std::vector<int64_t>> prompts, std::optional<int64_t> max_new_tokens) const {
  if (const Status status = check_count(prompts.size(), "prompts"); !status.ok()) return status;
  for (size_t row = 0; row < rows(); ++row) {
    const Status status = check_tokens(prompts[row], manifest_, "prompts[" + std::to_string(row) + "]");
    if (!status.ok()) return status;
  }
  const std::vector<int64_t> sizes = sizes_of(prompts);
  size_t fullest = 0;
  for (size_t row = 1; row < rows(); ++row) {
    if (lengths_[row] + sizes[row] > lengths_[fullest] + sizes[fullest]) fullest = row;
  }
  const Status fits = check_room(max_length(), lengths_[fullest], sizes[fullest], max_new_tokens);
  if (!fits.ok()) return fits;
  if (std::all_of(sizes.begin(), sizes.end(), [&sizes](int64_t size) { return size == sizes.front(); })) return {};
  if (manifest_.equal_rows) {
    return fail(ErrorCode::kInput, "the prompts have ", joined(sizes), " tokens, and the rows of this model hold as many as each other; "
                "pass prompts of one length, or run them one by one");
  }
  return check_waiting(prompts);
}

Status BatchSession::check_waiting(std::span<const std::vector<int64_t>> prompts) const {
  const std::vector<int64_t> sizes = sizes_of(prompts);
  const int64_t longest_prompt = *std::max_element(sizes.begin(), sizes.end());
  for (size_t row = 0; row < rows(); ++row) {
    int64_t longest = 0;
    for (const Segment& segment : segments_of(sizes)) {
      if (longest_prompt - sizes[row] <= segment.start) continue;
      for (const int64_t size : chunk_sizes(segment.end - segment.start)) longest = std::max(longest, size);
    }
    // A row at position 0 restarts there.
    if (lengths_[row] == 0 || longest == 0) continue;
    const int64_t end = lengths_[row] + longest;
    const bool has_room = !max_length() || end <= *max_length();
    if (has_room && limits_.max_rollback(end, std::max(end, max_lens_ever_[row])).tokens >= longest) continue;
    return fail(ErrorCode::kInput, "row ", row, " holds ", lengths_[row], " tokens and waits while a longer row is fed ", longest,
                " at once, and ", has_room ? "would lose some of them" : "these do not fit after them",
                "; feed every row as many tokens, or reset() and prefill whole sequences");
  }
  return {};
}

}  // namespace exportable_cache
