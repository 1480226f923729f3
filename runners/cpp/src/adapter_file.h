// Files of LoRA adapters that `exportable-cache adapter` writes.
#pragma once

#include <string>
#include <vector>

#include <exportable_cache/manifest.h>

namespace exportable_cache {

/// Read an adapter for the slots of a program, padded with zeros to its rank: two tensors for each target, [inputs, rank] and
/// [rank, outputs].
///
/// Error kInput if the file cannot be read, is damaged, was made for other weights, or does not fit the slots.
Result<std::vector<std::vector<float>>> read_adapter(const std::string& path, const LoraSpec& lora, const std::string& fingerprint);

}  // namespace exportable_cache
