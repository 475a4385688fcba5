// On ARM: level neon_dot beside level portable, bit by bit, and products of packed weights beside exact sums. Prints
// what differs; returns 1 if any does.
#include <sys/auxv.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <random>
#include <vector>

#define PASS_EXT_KERNELS "neon_kernels-inl.h"
#include "cpu/each_isa.h"

namespace {

using namespace pass_ext;

int failures = 0;
std::mt19937 random_bits(1);

template <typename T>
void same(const char* what, const std::vector<T>& expected, const std::vector<T>& got) {
  for (size_t i = 0; i < expected.size(); ++i) {
    if (memcmp(&expected[i], &got[i], sizeof(T)) == 0) continue;
    uint32_t bits[2] = {0, 0};
    memcpy(&bits[0], &expected[i], sizeof(T)), memcpy(&bits[1], &got[i], sizeof(T));
    printf("%s: number %zu is %08" PRIx32 ", expected %08" PRIx32 "\n", what, i, bits[1], bits[0]);
    ++failures;
    return;
  }
}

template <typename From, typename To, typename Function>
void compare(const char* what, const std::vector<From>& in, Function&& at_level) {
  std::vector<To> expected(in.size()), got(in.size());
  at_level(false, in.data(), expected.data(), static_cast<int64_t>(in.size()));
  at_level(true, in.data(), got.data(), static_cast<int64_t>(in.size()));
  same(what, expected, got);
}
#define COMPARE(From, To, in, function)                                                                     \
  compare<From, To>(#function " " #From " " #To, in, [](bool neon, const auto* from, auto* to, int64_t n) { \
    neon ? neon_dot::function(from, to, n) : portable::function(from, to, n);                               \
  })

std::vector<uint32_t> words(size_t count) {
  std::vector<uint32_t> result(count);
  for (uint32_t& word : result) word = random_bits();
  return result;
}

void operations() {
  std::vector<bfloat16> narrow;
  std::vector<float16> half;
  std::vector<float> floats, positive;
  for (uint32_t i = 0; i < 0x10000; ++i) {
    const bfloat16 b{static_cast<uint16_t>(i)};
    const float16 h{static_cast<uint16_t>(i)};
    if (to_float(b) == to_float(b)) narrow.push_back(b);
    if (to_float(h) == to_float(h)) half.push_back(h);
  }
  for (const uint32_t word : words(1 << 18)) {
    const float value = float_of(word);
    if (value == value) floats.push_back(value);  // which NaN it is may differ
  }
  for (const uint32_t word : words(1 << 16)) positive.push_back(float_of(0x20000000 + word % 0x40000000));
  for (uint32_t i = 0; i < 0x10000; ++i)  // around and between the 16-bit floats
    for (const uint32_t offset : {0x0u, 0xfffu, 0x1000u, 0x1001u, 0x7fffu, 0x8000u, 0x8001u}) {
      const float value = float_of((i << 16) + offset);
      if (value == value) floats.push_back(value);
    }
  for (auto* list : {&floats, &positive}) list->resize(list->size() / 8 * 8);
  narrow.resize(narrow.size() / 8 * 8), half.resize(half.size() / 8 * 8);
  COMPARE(bfloat16, float, narrow, convert);
  COMPARE(float16, float, half, convert);
  COMPARE(float, bfloat16, floats, convert);
  COMPARE(float, float16, floats, convert);
  COMPARE(float, float, positive, logarithms);
  std::vector<float> powers;
  for (const float value : positive) powers.push_back(-std::min(value, 100.0f));
  COMPARE(float, float, powers, exponentials);
  COMPARE(uint32_t, float, words(1 << 16), exponential_variates);
  compare<uint32_t, uint32_t>("philox", words(1 << 12), [](bool neon, const uint32_t* in, uint32_t* out, int64_t n) {
    neon ? neon_dot::philox_words(in, out, 0x299f31d0a4093822, n)
         : portable::philox_words(in, out, 0x299f31d0a4093822, n);
  });
  for (int i = 0; i < 1000; ++i) {
    const std::vector<uint32_t> in = words(64);
    std::vector<uint32_t> expected(512), got(512);
    expected.resize(portable::rest(in.data(), expected.data())), got.resize(neon_dot::rest(in.data(), got.data()));
    if (expected.size() != got.size()) return void(++failures);
    same("rest", expected, got);
  }
}

constexpr int64_t kMostRows = 7, kIn = 256, kOutputs = 48;

template <typename T>
std::vector<float> product(bool neon, const LinearRows<T>& problem) {
  std::vector<float> memory(kMostRows * kIn * 2), sums(kMostRows * kGroupOutputs);
  std::vector<float> scratch(LinearScratch::floats(kMostRows, false));
  neon ? neon_dot::product(problem, memory.data(), scratch.data(), sums.data())
       : portable::product(problem, memory.data(), scratch.data(), sums.data());
  return sums;
}

std::vector<float> normal_numbers(size_t count) {
  std::normal_distribution<float> normal;
  std::vector<float> result(count);
  for (float& number : result) number = normal(random_bits);
  return result;
}

template <typename T>
void dense_products(const char* name) {
  std::vector<T> x, weight;
  for (const float number : normal_numbers(kMostRows * kIn)) x.push_back(from_float<T>(number));
  for (const float number : normal_numbers(kOutputs * kIn)) weight.push_back(from_float<T>(number));
  for (int64_t rows = 1; rows <= kMostRows; ++rows)
    for (const int64_t in : {kIn, kIn - 5}) {
      const LinearRows<T> problem{x.data(), weight.data(), nullptr, nullptr, rows, in, kOutputs, kIn, kIn};
      same(name, product(false, problem), product(true, problem));
    }
}

// Blocks of random bytes, with scales and offsets that are numbers.
template <typename Block>
std::vector<Block> random_blocks(bool is_plain, int code) {
  std::vector<Block> blocks(kOutputs / kPackedOutputs * kIn / kPackedInputs / Block::kSteps);
  for (Block& block : blocks) {
    auto* const bytes = reinterpret_cast<uint8_t*>(&block);
    for (size_t i = 0; i < sizeof block; ++i) bytes[i] = code < 0 ? random_bits() & 255 : code;
    for (int64_t o = 0; o < kPackedOutputs; ++o) {
      using Scale = std::decay_t<decltype(block.scale[0])>;
      block.scale[o] = from_float<Scale>(is_plain ? 1.0f : 0.01f + 0.001f * static_cast<float>(random_bits() % 64));
      block.offset[o] = from_float<Scale>(is_plain ? 0.0f : 0.01f * static_cast<float>(random_bits() % 64) - 0.3f);
    }
    if constexpr (Block::kSteps > 1)
      for (auto& factors : block.factors)
        if (is_plain) memset(&factors, 1, sizeof factors);
  }
  return blocks;
}

template <typename Block>
int value_of(const Block&, uint32_t code) {
  return static_cast<int>(code);
}
template <typename Scale>
int value_of(const PackedTableBlock<Scale>& block, uint32_t code) {
  return block.table[code];
}
template <typename Block>
int code_of(const Block& block, int64_t input, int64_t output) {
  constexpr int kInWord = 32 / Block::kBits;
  const int64_t place = input % kInWord, half = place % 2;
  const auto& codes = block.codes[input / kPackedInputs];
  const uint32_t word = codes[input % kPackedInputs / kInWord][output] >> (16 * half + place / 2 * Block::kBits);
  return value_of(block, word & ((1u << Block::kBits) - 1));
}

// Rows of whole numbers, 32512 among each 32, are their own digits; scales are 1: the sum over each part of each 32 is
// exact, and rounded once.
template <typename Block>
void exact_product(const char* name, int code, int extreme) {
  constexpr int64_t kInputs = kPackedInputs * Block::kSteps, kOfPart = kPackedInputs / Block::kParts;
  const std::vector<Block> blocks = random_blocks<Block>(true, code);
  std::vector<float> x(kInputs);
  for (int64_t i = 0; i < kInputs; ++i)
    x[i] = extreme != 0             ? static_cast<float>(extreme)
           : i % kPackedInputs == 5 ? 32512.0f
                                    : static_cast<float>(random_bits() % 65025) - 32512.0f;
  LinearRows<float> problem{x.data(), nullptr, nullptr, nullptr, 1, kInputs, kPackedOutputs, kInputs, 0};
  problem.packed = blocks.data(), problem.form = packed_form_of(kPackedBytes<Block>);
  std::vector<float> expected(kMostRows * kGroupOutputs);
  for (int64_t o = 0; o < kPackedOutputs; ++o)
    for (int64_t first = 0; first < kInputs; first += kOfPart) {
      int64_t sum = 0;
      for (int64_t i = first; i < first + kOfPart; ++i)
        sum += int64_t{code_of(blocks[0], i, o)} * static_cast<int64_t>(x[i]);
      expected[o] += static_cast<float>(sum);
    }
  for (const bool neon : {false, true}) same(name, expected, product(neon, problem));
}

template <typename Block>
void packed_products(const char* name) {
  for (const int code : {-1, 0, 255})
    for (const int extreme : {0, 32512, -32512})
      for (int i = 0; i < (code < 0 ? 50 : 1); ++i) exact_product<Block>(name, code, extreme);
  const std::vector<Block> blocks = random_blocks<Block>(false, -1);
  std::vector<float> x = normal_numbers(kMostRows * kIn);
  std::fill_n(x.begin() + kIn, 32, 0.0f);                  // a block of zeros
  x[2 * kIn + 40] = __builtin_inff(), x[3 * kIn] = 1e30f;  // a row that is not finite, and a large number
  for (int64_t rows = 1; rows <= kMostRows; ++rows) {
    LinearRows<float> problem{x.data(), nullptr, nullptr, nullptr, rows, kIn, kOutputs, kIn, 0};
    problem.packed = blocks.data(), problem.form = packed_form_of(kPackedBytes<Block>);
    std::vector<float> expected = product(false, problem), got = product(true, problem);
    for (auto* sums : {&expected, &got})
      for (float& sum : *sums) sum = sum == sum ? sum : 0.0f;  // which NaN it is may differ
    same(name, expected, got);
  }
}

}  // namespace

int main() {
  if (!(getauxval(AT_HWCAP) & 1 << 20)) return puts("no dot products of bytes here"), 77;
  operations();
  dense_products<float>("float32 rows");
  dense_products<bfloat16>("bfloat16 rows");
  dense_products<float16>("float16 rows");
  packed_products<PackedFour>("four");
  packed_products<PackedFourWide>("four_wide");
  packed_products<PackedTable>("table");
  packed_products<PackedTableWide>("table_wide");
  packed_products<PackedEight>("eight");
  packed_products<PackedEightWide>("eight_wide");
  packed_products<PackedFourK>("four_k");
  packed_products<PackedFourKHalves>("four_k_halves");
  packed_products<PackedEightK>("eight_k");
  packed_products<PackedEightKHalves>("eight_k_halves");
  printf("%d differ\n", failures);
  return failures != 0;
}
