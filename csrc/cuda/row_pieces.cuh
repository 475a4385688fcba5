// A piece: eight neighbouring logits. Loading and converting are separate functions: if all loads of a lane come before
// the first conversion, they are in flight together and the lane stalls once.
// A row that does not begin at a multiple of 16 bytes is read with aligned 16-byte loads too, two for each piece
// (float32: three). Pieces for which such a load would reach outside the row are read element by element.
#pragma once

#include <cstdint>

#include "core/distribution.h"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

constexpr int kPiece = 8;

// A piece's bits as in memory. A 16-bit type uses the first four words only.
struct RawPiece {
  uint32_t word[8];
};

// Moves `word` down by `shift` bytes, a multiple of 2 below 16: of kWords + 4 words the first kWords are then valid.
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

PASS_EXT_DEVICE uint32_t lowest_bits(LogitType type) {  // the bits of -inf
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

// The bytes between a 16-byte boundary and the row, or any of its pieces: a piece's size is a multiple of 16 bytes.
PASS_EXT_DEVICE unsigned shift_of(const LogitRow& row) { return reinterpret_cast<uintptr_t>(row.logits) % 16; }

PASS_EXT_DEVICE const char* piece_address(const LogitRow& row, int32_t first) {
  return static_cast<const char*>(row.logits) + static_cast<int64_t>(first) * (row.type == LogitType::float32 ? 4 : 2);
}

// True if the 16-byte loads that hold elements [first, first + count) lie inside the row.
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

// By value: this call is not inlined, so a reference would force the caller to hold its row in memory.
PASS_EXT_DEVICE_CALL RawPiece load_any(LogitRow row, int32_t first) {
  const unsigned shift = shift_of(row);
  return is_inside(row, first, kPiece, shift) ? load_between(row, first, shift) : load_elements(row, first);
}

// The piece from `first` on, a multiple of 8; -inf behind the row's end.
PASS_EXT_DEVICE RawPiece load_raw(const LogitRow& row, int32_t first) {
  return shift_of(row) == 0 && first + kPiece <= row.vocabulary ? load_aligned(row, first) : load_any(row, first);
}

// One warp: loads `count` pieces per lane; piece k of all lanes is 256 elements from first + 256 k on. The conditions
// are the same for all lanes, so no branch separates the loads of the pieces.
template <int count>
PASS_EXT_DEVICE void load_pieces(const LogitRow& row, int32_t first, RawPiece (&raw)[count]) {
  const unsigned shift = shift_of(row);
  const int32_t lane_first = first + static_cast<int32_t>(lane_index()) * kPiece;
  if (is_inside(row, first, count * 32 * kPiece, shift)) {
    if (shift == 0) {
#pragma unroll
      for (int k = 0; k < count; ++k) raw[k] = load_aligned(row, lane_first + k * 32 * kPiece);
    } else {
#pragma unroll
      for (int k = 0; k < count; ++k) raw[k] = load_between(row, lane_first + k * 32 * kPiece, shift);
    }
  } else {
#pragma unroll
    for (int k = 0; k < count; ++k) raw[k] = load_raw(row, lane_first + k * 32 * kPiece);
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

// A piece's allowed tokens: bit i is set if token first + i is allowed.
PASS_EXT_DEVICE uint32_t load_allowed(const LogitRow& row, int32_t first) {
  return row.allowed == nullptr || first >= row.vocabulary ? 0xffu : row.allowed[first / 32] >> first % 32;
}

PASS_EXT_DEVICE void forbid(uint32_t allowed, float (&z)[kPiece]) {
  for (int i = 0; i < kPiece; ++i) z[i] = allowed >> i & 1u ? z[i] : -kInfinity;
}

// function(i, z[i]) for the elements that meet condition(z[i]), in order. There is one copy of the function's code, not
// eight: few elements pass, and code that no cache holds costs more than the search for the next element.
template <typename Condition, typename Function>
PASS_EXT_DEVICE void for_each_element(const float (&z)[kPiece], const Condition& condition, const Function& function) {
  unsigned passing = 0;
#pragma unroll
  for (int i = 0; i < kPiece; ++i) passing |= condition(z[i]) ? 1u << i : 0u;
#pragma unroll 1
  for (; passing != 0; passing &= passing - 1) {
    const int place = first_set_bit(passing);
    float element = z[0];
#pragma unroll
    for (int i = 1; i < kPiece; ++i) element = i == place ? z[i] : element;  // an index would put z into local memory
    function(place, element);
  }
}

// Eight logits from `first` on, a multiple of 8; -inf for tokens that are not allowed or lie behind the row's end.
PASS_EXT_DEVICE void load_piece(const LogitRow& row, int32_t first, float (&z)[kPiece]) {
  const RawPiece raw = load_raw(row, first);
  const uint32_t allowed = load_allowed(row, first);
  convert(row.type, raw, z);
  if (row.allowed != nullptr) forbid(allowed, z);
}

}  // namespace pass_ext::gpu
