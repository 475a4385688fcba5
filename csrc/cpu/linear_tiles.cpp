// Few rows times bfloat16 weights by tiles, see linear_tiles.h: 16 outputs, 32 inputs and up to 16 rows at a time,
//   sums[output][row] += weight[output][input] x[input][row]
// The weights are the left factor, so a tile of them is a rectangle of the weights as they are stored: they are neither
// packed nor copied. x is the right one, whose rows the tiles want side by side: [block][pair of inputs][row of the
// block]. All additions of a sum are its own, in the order of the inputs: no other row or output changes a bit.
#include "cpu/linear_tiles.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "cpu/tiles.h"

#define PASS_EXT_KERNELS "cpu/turn-inl.h"
#include "cpu/each_isa.h"

namespace pass_ext {
namespace {

constexpr int kOutputs = 16, kInputs = 32, kPairs = kInputs / 2, kMostRows = 16;  // of a tile
// Tiles of outputs, and blocks of rows, that are multiplied with each other: tiles 0 to 3 are their sums. More streams
// of weights than those of two tiles the processor does not fetch ahead: four took 1.2 to 1.4 times as long.
constexpr int kTogether = 2;
constexpr int kOfTile = kOutputs * kMostRows;  // sums
constexpr int kX = 4, kWeights = 6;            // their first tiles
constexpr int64_t kAhead = 8;  // steps ahead for which weights are asked for: about what the memory takes to answer

// Rows in blocks of one size; the last may have rows of zeros.
struct Blocks {
  int64_t count, pairs;  // pairs of inputs of a row, with those of the last step
  int rows;

  Blocks(int64_t all_rows, int64_t in)
      : count((all_rows + kMostRows - 1) / kMostRows),
        pairs((in + kInputs - 1) / kInputs * kPairs),
        rows(static_cast<int>((all_rows + count - 1) / count)) {}
  int64_t words() const { return pairs * rows; }
};

// A tile of weights at the end of their rows or behind the last output: a copy, with zeros behind it.
void copy_edge(const LinearRows<bfloat16>& problem, int64_t output, int64_t input,
               bfloat16 (&edge)[kOutputs][kInputs]) {
  memset(edge, 0, sizeof edge);
  const int64_t inputs = std::min<int64_t>(kInputs, problem.in - input);
  for (int64_t o = 0; o < std::min<int64_t>(kOutputs, problem.outputs - output); ++o)
    memcpy(edge[o], problem.weight + (output + o) * problem.weight_row + input, inputs * sizeof(bfloat16));
}

// The sums of some tiles of outputs for some blocks of rows, [block][tile][output][row].
template <int kOutputTiles, int kBlocks, typename Tiles>
void multiply_tiles(const LinearRows<bfloat16>& problem, Tiles& tiles, const uint32_t* x, const Blocks& blocks,
                    int64_t output, bool is_first, float* sums) {
  constexpr auto each_output = std::make_integer_sequence<int, kOutputTiles>{};
  constexpr auto each_block = std::make_integer_sequence<int, kBlocks>{};
  const int64_t row_bytes = problem.weight_row * int64_t{sizeof(bfloat16)};
  const int64_t x_bytes = blocks.rows * int64_t{sizeof(uint32_t)};
  const auto each_sum = [&](auto&& function) {
    each_of(each_output, [&](auto o) { each_of(each_block, [&](auto b) { function(o, b); }); });
  };
  each_sum([&](auto o, auto b) { tiles.template zero<o * kTogether + b>(); });
  for (int64_t input = 0; input < problem.in; input += kInputs) {
    each_of(each_block,
            [&](auto b) { tiles.template load<kX + b>(x + b * blocks.words() + input / 2 * blocks.rows, x_bytes); });
    const bool is_last = input + kAhead * kInputs >= problem.in;
    each_of(each_output, [&](auto o) {
      const int64_t first = output + o * kOutputs;
      const bfloat16* const from = problem.weight + first * problem.weight_row + input;
      if (first + kOutputs <= problem.outputs && input + kInputs <= problem.in) {
        if (is_first) {
          // At the end of the rows come the first weights of the next outputs.
          const char* ahead = reinterpret_cast<const char*>(from + kAhead * kInputs);
          if (is_last) ahead += kOutputTiles * kOutputs * row_bytes - problem.in * int64_t{sizeof(bfloat16)};
          for (int64_t i = 0; i < kOutputs; ++i) __builtin_prefetch(ahead + i * row_bytes, 0, 2);
        }
        tiles.template load<kWeights + o>(from, row_bytes);
      } else {
        bfloat16 edge[kOutputs][kInputs];
        copy_edge(problem, first, input, edge);
        tiles.template load<kWeights + o>(edge, sizeof edge[0]);
      }
    });
    each_sum([&](auto o, auto b) { tiles.template add_products<o * kTogether + b, kWeights + o, kX + b>(); });
  }
  each_sum([&](auto o, auto b) {
    tiles.template store<o * kTogether + b>(sums + (b * kTogether + o) * kOfTile, kMostRows * sizeof(float));
  });
}

TileShapes shapes_for(int rows) {
  TileShapes shapes;
  for (int i = 0; i < kTogether * kTogether; ++i) shapes.set(i, kOutputs, rows * static_cast<int>(sizeof(float)));
  for (int i = 0; i < kTogether; ++i) {
    shapes.set(kX + i, kPairs, rows * static_cast<int>(sizeof(uint32_t)));
    shapes.set(kWeights + i, kOutputs, kInputs * static_cast<int>(sizeof(bfloat16)));
  }
  return shapes;
}

}  // namespace

void arrange_for_tiles(const LinearRows<bfloat16>& problem, int64_t first, int64_t rows, void* memory) {
  const Blocks blocks(rows, problem.in);
  auto* to = static_cast<uint32_t*>(memory);
  for (int64_t row = 0; row < rows; row += blocks.rows, to += blocks.words()) {
    const char* const from = reinterpret_cast<const char*>(problem.x + (first + row) * problem.x_row);
    const int64_t size = sizeof(bfloat16), rows_there = std::min<int64_t>(blocks.rows, rows - row);
    PASS_EXT_AT_ISA(turn_words(from, problem.x_row * size, rows_there, problem.in * size, blocks.rows, blocks.pairs, to,
                               blocks.rows));
  }
}

template <typename Tiles>
void multiply_by_tiles(const LinearRows<bfloat16>& problem, int64_t rows, const void* arranged,
                       const LinearScratch& scratch, float* sums, int64_t begin, int64_t end) {
  const Blocks blocks(rows, problem.in);
  Tiles tiles(shapes_for(blocks.rows));
  for (int64_t output = begin; output < end; output += kTogether * kOutputs) {
    const int64_t outputs = std::min<int64_t>(kTogether * kOutputs, end - output);
    for (int64_t block = 0; block < blocks.count; block += kTogether) {
      const auto* const x = static_cast<const uint32_t*>(arranged) + block * blocks.words();
      with_tiles(outputs > kOutputs, block + 1 < blocks.count, [&](auto o, auto b) {
        multiply_tiles<o, b>(problem, tiles, x, blocks, output, block == 0, scratch.copy);
      });
      for (int64_t b = block; b < std::min(blocks.count, block + kTogether); ++b)
        for (int64_t o = 0; o < outputs; o += kOutputs) {
          const float* const from = scratch.copy + ((b - block) * kTogether + o / kOutputs) * kOfTile;
          auto* const to = reinterpret_cast<uint32_t*>(sums + b * blocks.rows * kGroupOutputs + output - begin + o);
          const int64_t columns = std::min<int64_t>(blocks.rows, rows - b * blocks.rows);
          PASS_EXT_AT_ISA(turn_words(reinterpret_cast<const char*>(from), kMostRows * sizeof(float), kOutputs,
                                     kMostRows * sizeof(float), kOutputs, columns, to, kGroupOutputs));
        }
    }
  }
}

template void multiply_by_tiles<EmulatedTiles>(const LinearRows<bfloat16>&, int64_t, const void*, const LinearScratch&,
                                               float*, int64_t, int64_t);

#if defined(__x86_64__)
template void multiply_by_tiles<ProcessorTiles>(const LinearRows<bfloat16>&, int64_t, const void*, const LinearScratch&,
                                                float*, int64_t, int64_t);

bool tiles_are_right() {
  constexpr int64_t kRows = 19, kIn = 70, kOut = 85;
  std::vector<bfloat16> x(kRows * kIn), weight(kOut * kIn);
  // Small whole numbers, whose sums are exact in any order.
  for (size_t i = 0; i < x.size(); ++i) x[i] = to_bfloat16(static_cast<float>(i * 37 % 31) - 15.0f);
  for (size_t i = 0; i < weight.size(); ++i) weight[i] = to_bfloat16(static_cast<float>(i * 53 % 29) - 14.0f);
  const LinearRows<bfloat16> problem{x.data(), weight.data(), nullptr, nullptr, kRows, kIn, kOut, kIn, kIn};
  std::vector<char> arranged(arranged_bytes(kRows, kIn));
  std::vector<float> memory(LinearScratch::floats(kRows, false)), expected(kRows * kGroupOutputs), got(expected);
  const LinearScratch scratch(memory.data(), kRows, false);
  arrange_for_tiles(problem, 0, kRows, arranged.data());
  multiply_by_tiles<EmulatedTiles>(problem, kRows, arranged.data(), scratch, expected.data(), 0, kOut);
  multiply_by_tiles<ProcessorTiles>(problem, kRows, arranged.data(), scratch, got.data(), 0, kOut);
  return got == expected;
}

void multiply_in_tiles(int64_t steps, float* lanes) {
  constexpr int64_t kProducts = kOutputs * kMostRows * kInputs, kProductsOfStep = 2 * 12 * 16;
  ProcessorTiles tiles(shapes_for(kMostRows));
  const auto each = std::make_integer_sequence<int, kTogether * kTogether>{};
  tiles.load<kX>(lanes, 0);
  tiles.load<kWeights>(lanes, 0);
  each_of(each, [&](auto i) { tiles.zero<i>(); });
  for (int64_t left = steps * kProductsOfStep; left > 0; left -= kTogether * kTogether * kProducts)
    each_of(each, [&](auto i) { tiles.add_products<i, kWeights, kX>(); });
}
#endif

}  // namespace pass_ext
