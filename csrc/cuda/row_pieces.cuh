// Eight neighbouring logits at once. Loading and converting are apart: a lane asks for all its pieces first and waits
// once, so as many bytes are on their way as it has pieces.
// A row that does not begin at a multiple of 16 bytes is read in 16-byte loads all the same, each piece from two (of
// float32: three) of them; what such loads would touch outside the row is read element by element.
#pragma once

#include <cstdint>

#include "core/distribution.h"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

constexpr int kPiece = 8;

// A piece as it lies in memory; of 16-bit types the first four words.
struct RawPiece {
  uint32_t word[8];
};

// The first `kWords` words behind the first `shift` bytes (a multiple of 2, below 16) of so many and four more.
template <int kWords>
PASS_EXT_DEVICE void move_words(uint32_t (&word)[12], unsigned shift) {
  for (int i = 0; i < kWords + 2; ++i) word[i] = shift & 8 ? word[i + 2] : word[i];
  for (int i = 0; i < kWords + 1; ++i) word[i] = shift & 4 ? word[i + 1] : word[i];
  for (int i = 0; i < kWords; ++i) word[i] = shift & 2 ? word[i] >> 16 | word[i + 1] << 16 : word[i];
}

template <int kWords>
PASS_EXT_DEVICE RawPiece load_shifted(const char* from, unsigned shift) {
  uint32_t word[12] = {};
  for (int k = 0; k <= kWords / 4; ++k) {
    const Bytes16 bytes = load16(from - shift + 16 * k);
    for (int i = 0; i < 4; ++i) word[4 * k + i] = bytes.word[i];
  }
  move_words<kWords>(word, shift);
  RawPiece raw{};
  for (int i = 0; i < kWords; ++i) raw.word[i] = word[i];
  return raw;
}

PASS_EXT_DEVICE uint32_t lowest_bits(LogitType type) {  // of -inf
  return type == LogitType::float32 ? 0xff800000u : type == LogitType::bfloat16 ? 0xff80u : 0xfc00u;
}

PASS_EXT_DEVICE RawPiece load_elements(const LogitRow& row, int32_t first) {
  RawPiece raw{};
  for (int i = 0; i < kPiece; ++i) {
    uint32_t bits = lowest_bits(row.type);
    if (first + i < row.vocabulary)
      bits = row.type == LogitType::float32 ? static_cast<const uint32_t*>(row.logits)[first + i]
                                            : static_cast<const uint16_t*>(row.logits)[first + i];
    if (row.type == LogitType::float32)
      raw.word[i] = bits;
    else
      raw.word[i / 2] |= bits << 16 * (i % 2);
  }
  return raw;
}

PASS_EXT_DEVICE unsigned shift_of(const LogitRow& row) {
  return reinterpret_cast<uintptr_t>(row.logits) % 16;  // and of its pieces, which are multiples of 16 bytes
}

PASS_EXT_DEVICE const char* piece_address(const LogitRow& row, int32_t first) {
  return static_cast<const char*>(row.logits) + static_cast<int64_t>(first) * (row.type == LogitType::float32 ? 4 : 2);
}

// Whether the 16-byte loads that hold elements [first, first + count) lie inside the row.
PASS_EXT_DEVICE bool is_inside(const LogitRow& row, int32_t first, int32_t count, unsigned shift) {
  const int32_t behind = row.vocabulary - first - count;
  return behind >= 0 && (shift == 0 || (first > 0 && behind >= kPiece));
}

PASS_EXT_DEVICE RawPiece load_aligned(const LogitRow& row, int32_t first) {
  RawPiece raw{};
  const Bytes16 low = load16_streaming(piece_address(row, first));
  for (int i = 0; i < 4; ++i) raw.word[i] = low.word[i];
  if (row.type == LogitType::float32) {
    const Bytes16 high = load16_streaming(piece_address(row, first) + 16);
    for (int i = 0; i < 4; ++i) raw.word[4 + i] = high.word[i];
  }
  return raw;
}

PASS_EXT_DEVICE RawPiece load_between(const LogitRow& row, int32_t first, unsigned shift) {
  const char* from = piece_address(row, first);
  return row.type == LogitType::float32 ? load_shifted<8>(from, shift) : load_shifted<4>(from, shift);
}

// The row by value: what a call gets by reference lies in memory for the caller too.
PASS_EXT_DEVICE_CALL RawPiece load_any(LogitRow row, int32_t first) {
  const unsigned shift = shift_of(row);
  return is_inside(row, first, kPiece, shift) ? load_between(row, first, shift) : load_elements(row, first);
}

// The piece from `first` on, a multiple of 8; -inf behind the end.
PASS_EXT_DEVICE RawPiece load_raw(const LogitRow& row, int32_t first) {
  return shift_of(row) == 0 && first + kPiece <= row.vocabulary ? load_aligned(row, first) : load_any(row, first);
}

// One warp: `count` pieces a lane, 256 elements from `first` on each. What is asked is the same for all lanes, so the
// loads of all pieces are on their way together.
template <int count>
PASS_EXT_DEVICE void load_pieces(const LogitRow& row, int32_t first, RawPiece (&raw)[count]) {
  const unsigned shift = shift_of(row);
  const int32_t own = first + static_cast<int32_t>(lane_index()) * kPiece;
  if (is_inside(row, first, count * 32 * kPiece, shift)) {
    if (shift == 0) {
#pragma unroll
      for (int k = 0; k < count; ++k) raw[k] = load_aligned(row, own + k * 32 * kPiece);
    } else {
#pragma unroll
      for (int k = 0; k < count; ++k) raw[k] = load_between(row, own + k * 32 * kPiece, shift);
    }
  } else {
#pragma unroll
    for (int k = 0; k < count; ++k) raw[k] = load_raw(row, own + k * 32 * kPiece);
  }
}

PASS_EXT_DEVICE void convert(LogitType type, const RawPiece& raw, float (&z)[kPiece]) {
  if (type == LogitType::float32) {
    for (int i = 0; i < kPiece; ++i) z[i] = float_of(raw.word[i]);
  } else if (type == LogitType::bfloat16) {
    for (int i = 0; i < 4; ++i) {
      z[2 * i] = unpack_low<bfloat16>(raw.word[i]);
      z[2 * i + 1] = unpack_high<bfloat16>(raw.word[i]);
    }
  } else {
    for (int i = 0; i < 4; ++i) {
      z[2 * i] = unpack_low<float16>(raw.word[i]);
      z[2 * i + 1] = unpack_high<float16>(raw.word[i]);
    }
  }
}

// Which of a piece's tokens are allowed, a bit each.
PASS_EXT_DEVICE uint32_t load_allowed(const LogitRow& row, int32_t first) {
  return row.allowed == nullptr || first >= row.vocabulary ? 0xffu : row.allowed[first / 32] >> first % 32;
}

PASS_EXT_DEVICE void forbid(uint32_t allowed, float (&z)[kPiece]) {
  for (int i = 0; i < kPiece; ++i) z[i] = allowed >> i & 1u ? z[i] : -kInfinity;
}

// Eight logits from `first` on, a multiple of 8; -inf for what is not allowed or behind the end.
PASS_EXT_DEVICE void load_piece(const LogitRow& row, int32_t first, float (&z)[kPiece]) {
  const RawPiece raw = load_raw(row, first);
  const uint32_t allowed = load_allowed(row, first);
  convert(row.type, raw, z);
  if (row.allowed != nullptr) forbid(allowed, z);
}

}  // namespace pass_ext::gpu
