// Tiles: eight registers of up to 16 rows of 64 bytes, as Intel's AMX has them. Tiles of bfloat16 numbers are
// multiplied in pairs k of neighbours:
//   sums[m][n] += sum over k of left[m][2k] right[k][2n] + sum over k of left[m][2k + 1] right[k][2n + 1]
// in fp32: either sum from 0 on in the order of k, each product fused, then their sum, then the addition; every result
// rounded to nearest, denormal numbers taken and given as 0 (Intel's manual, TDPBF16PS). A number of `sums` depends on
// its own row and column alone.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "core/half.h"

namespace pass_ext {

// function(integral constant) for 0 to count - 1.
template <typename Function, int... i>
void each_of(std::integer_sequence<int, i...>, Function&& function) {
  (function(std::integral_constant<int, i>{}), ...);
}

// function(integral constants) for one tile or two on either side.
template <typename Function>
void with_tiles(bool two_left, bool two_right, Function&& function) {
  using One = std::integral_constant<int, 1>;
  using Two = std::integral_constant<int, 2>;
  if (two_left)
    two_right ? function(Two{}, Two{}) : function(Two{}, One{});
  else
    two_right ? function(One{}, Two{}) : function(One{}, One{});
}

// The shapes of the tiles, in the form of the instruction LDTILECFG.
struct TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};  // of a row
  uint8_t rows[16] = {};

  constexpr void set(int tile, int rows_of_tile, int bytes_of_row) {
    rows[tile] = static_cast<uint8_t>(rows_of_tile);
    bytes[tile] = static_cast<uint16_t>(bytes_of_row);
  }
};
static_assert(sizeof(TileShapes) == 64, "");

#if defined(__x86_64__)
// The processor's tiles, from construction to the end. They are a thread's own, and of whoever shaped them last, so
// they are shaped for each use. Released, they cost the system nothing when it changes threads.
struct ProcessorTiles {
  // Every one reads or writes memory for all that the compiler knows, so that it keeps their order.
  explicit ProcessorTiles(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes) : "memory"); }
  ~ProcessorTiles() { asm volatile("tilerelease" ::: "memory"); }
  ProcessorTiles(const ProcessorTiles&) = delete;

  template <int tile>
  void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(tile) : "memory");
  }
  // Rows that lie `apart` bytes from each other.
  template <int tile>
  void load(const void* from, int64_t apart) {
    asm volatile("tileloadd (%1, %2), %%tmm%c0" ::"i"(tile), "r"(from), "r"(apart) : "memory");
  }
  template <int tile>
  void store(void* to, int64_t apart) {
    asm volatile("tilestored %%tmm%c0, (%1, %2)" ::"i"(tile), "r"(to), "r"(apart) : "memory");
  }
  template <int sums, int left, int right>
  void add_products() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(left), "i"(right) : "memory");
  }
};
#endif

// The same bits in plain C++, for tests on any processor.
class EmulatedTiles {
 public:
  explicit EmulatedTiles(const TileShapes& shapes) : shapes_(shapes) {}

  template <int tile>
  void zero() {
    memset(words_[tile], 0, sizeof words_[tile]);
  }
  template <int tile>
  void load(const void* from, int64_t apart) {
    zero<tile>();
    for (int row = 0; row < shapes_.rows[tile]; ++row)
      memcpy(words_[tile][row], static_cast<const char*>(from) + row * apart, shapes_.bytes[tile]);
  }
  template <int tile>
  void store(void* to, int64_t apart) {
    for (int row = 0; row < shapes_.rows[tile]; ++row)
      memcpy(static_cast<char*>(to) + row * apart, words_[tile][row], shapes_.bytes[tile]);
  }
  template <int sums, int left, int right>
  void add_products() {
    add(words_[sums], words_[left], words_[right], shapes_.rows[sums], shapes_.bytes[left] / 4,
        shapes_.bytes[sums] / 4);
    if (shapes_.rows[sums] != shapes_.rows[left] || shapes_.bytes[sums] != shapes_.bytes[right] ||
        shapes_.bytes[left] / 4 != shapes_.rows[right])
      __builtin_trap();  // as the processor does
  }

 private:
  using Words = uint32_t[16][16];

  __attribute__((noinline)) static void add(Words& sums, const Words& left, const Words& right, int rows, int pairs,
                                            int columns) {
    for (int m = 0; m < rows; ++m)
      for (int n = 0; n < columns; ++n) {
        float even = 0.0f, odd = 0.0f;
        for (int k = 0; k < pairs; ++k) {
          even = flushed(__builtin_fmaf(lower(left[m][k]), lower(right[k][n]), even));
          odd = flushed(__builtin_fmaf(upper(left[m][k]), upper(right[k][n]), odd));
        }
        sums[m][n] = bits_of(flushed(flushed(float_of(sums[m][n])) + flushed(even + odd)));
      }
  }
  static float flushed(float value) {
    const uint32_t bits = bits_of(value);
    return (bits & 0x7f800000u) == 0 ? float_of(bits & 0x80000000u) : value;
  }
  static float lower(uint32_t pair) { return flushed(float_of(pair << 16)); }
  static float upper(uint32_t pair) { return flushed(float_of(pair & 0xffff0000u)); }

  TileShapes shapes_;
  Words words_[8] = {};
};

}  // namespace pass_ext
