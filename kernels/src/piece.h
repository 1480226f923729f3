// The work of one task: some rows of one key head, over some of its keys.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "attention.h"

namespace exportable_cache::kernels {

// Keys that are scored, weighted and summed at a time: they and their values stay in the L1 and L2 caches.
constexpr int64_t kBlock = 64;
// Rows whose scores are dot products with stored keys; more rows use a transposed copy of the keys.
constexpr int64_t kFewRows = 8;
// Rows of a task.
constexpr int64_t kRows = 96;
// Rows of a register tile.
constexpr int64_t kTileRows = 6;
// Padding of rows in scratch memory: the longest vector of any target.
constexpr int64_t kPad = 16;

constexpr int64_t padded(int64_t numbers) { return (numbers + kPad - 1) / kPad * kPad; }

// Row r of a key head is query token r / groups of its query head r % groups.
struct Piece {
  int64_t batch = 0;
  int64_t kv_head = 0;
  int64_t first_row = 0;
  int64_t rows = 0;
  int64_t first_key = 0;  // index of a key, see sequence.h
  int64_t end_key = 0;
  float* partial =
      nullptr;  // [rows, partial_stride]: maximum score, sum of weights, weighted values; null: write the output
};

constexpr int64_t partial_stride(int64_t value_dim) { return kPad + padded(value_dim); }

// Floats of scratch memory that a piece needs, aligned to 64 bytes.
inline size_t scratch_size(const Attention& a) {
  const int64_t key_dim = padded(a.key_dim), value_dim = padded(a.value_dim);
  const int64_t blocks = kBlock * (key_dim + std::max(key_dim, value_dim));
  // Queries and weights in 16 bits, two per float, and their factors.
  const int64_t whole = kRows * (key_dim + kBlock) / 2 + 2 * padded(kRows);
  return static_cast<size_t>(kRows * (key_dim + value_dim + kBlock) + blocks + 2 * padded(kRows) + whole);
}

void attend_piece(const Attention& attention, const Piece& piece, float* scratch);

// Writes the output of one row from float32 values times `factor`.
void write_row(const Attention& attention, const Piece& piece, int64_t row, const float* values, float factor);

}  // namespace exportable_cache::kernels
