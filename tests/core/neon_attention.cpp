// On ARM: attention at level neon_dot beside level portable, bit by bit, of 1 to 18 rows, in every dtype, over numbers
// and over codes. Prints what differs; returns 1 if any does.
#include <sys/auxv.h>

#include <cstdio>
#include <random>
#include <vector>

#include "cpu/attention.h"

#define PASS_EXT_KERNELS "cpu/attention_kernels-inl.h"
#include "cpu/each_isa.h"

namespace {

using namespace pass_ext;

constexpr int32_t kPrefix = 150, kMostNodes = 9, kHeads = 2, kDim = 80, kSlots = kPrefix + kMostNodes;  // one key head
std::mt19937 random_bits(1);

template <typename T>
std::vector<T> normal_numbers(size_t count) {
  std::normal_distribution<float> normal;
  std::vector<T> result(count);
  for (T& number : result) number = from_float<T>(normal(random_bits));
  return result;
}

// Rows of codes that are numbers, each with a scale.
std::vector<uint8_t> codes(size_t rows) {
  std::vector<uint8_t> result;
  for (size_t row = 0; row < rows; ++row) {
    const float scale = 0.01f + 0.0001f * static_cast<float>(random_bits() % 64);
    result.resize((row + 1) * (kCodeHeader + kDim));
    uint8_t* const at = result.data() + row * (kCodeHeader + kDim);
    memcpy(at, &scale, sizeof scale);
    for (int32_t d = 0; d < kDim; ++d) at[kCodeHeader + d] = random_bits() % 0x58 | (random_bits() & 0x80);
  }
  return result;
}

// The output and, behind it, lse.
template <typename T>
std::vector<float> attended(bool neon, AttentionProblem problem, CodeType type) {
  const int32_t rows = static_cast<int32_t>(problem.rows) * kHeads, padded = kMostBlockRows;
  std::vector<T> out(rows * kDim);
  std::vector<float> lse(rows), values(padded * kDim), rest(3 * padded), row(2 * kDim), scale(kMostBlockRows);
  problem.out = out.data(), problem.lse = lse.data();
  std::vector<uint32_t> queries(kDim * kTaskRows), keys(kTileKeys * kDim), of_values(kTileKeys * kDim);
  std::vector<uint32_t> scores(kTileKeys * kMostBlockRows), weights(scores.size());
  std::vector<float> decoded(kTileKeys * 2 * kDim), sums(3 * 16 * kDim);
  const AttentionRequest request = request_of<true>(problem, 0);
  const AttentionTiles tiles(problem, request);
  const AttentionTask task{&problem, type, request, &tiles, 0, 0, rows, tiles.first_tile(), tiles.end_tile()};
  const AttentionScratch scratch{queries.data(), keys.data(), of_values.data(), scores.data(), weights.data(),
                                 scale.data(),   sums.data(), row.data(),       decoded.data()};
  PartialRows result{values.data(), rest.data(), rest.data() + padded, rest.data() + 2 * padded};
  neon ? neon_dot::attend(task, scratch, result) : portable::attend(task, scratch, result);
  neon ? neon_dot::finish_rows(task, &result, 1) : portable::finish_rows(task, &result, 1);
  for (const T number : out) lse.push_back(to_float(number));
  return lse;
}

template <typename T>
int different(FloatType dtype, CodeType type) {
  int count = 0;
  const std::vector<T> q = normal_numbers<T>(kMostNodes * kHeads * kDim);
  const std::vector<T> k = normal_numbers<T>(kSlots * kDim), v = normal_numbers<T>(kSlots * kDim);
  const std::vector<uint8_t> k_codes = codes(kSlots), v_codes = codes(kSlots);
  const int64_t visible[kMostNodes] = {1, 3, 5, 11, 21, 43, 69, 139, 277};
  for (int32_t nodes = 1; nodes <= kMostNodes; ++nodes)
    for (const float softcap : {0.0f, 20.0f}) {
      const int32_t prefix_lens[] = {kPrefix}, cu_nodes[] = {0, nodes};
      AttentionProblem problem{};
      const bool has_codes = type != CodeType::none;
      const int64_t row = has_codes ? kCodeHeader + kDim : kDim;
      problem.q = q.data();
      problem.k_cache = {has_codes ? static_cast<const void*>(k_codes.data()) : k.data(), kSlots * row, row, row};
      problem.v_cache = {has_codes ? static_cast<const void*>(v_codes.data()) : v.data(), kSlots * row, row, row};
      problem.prefix_lens = prefix_lens, problem.cu_nodes = cu_nodes, problem.visible = visible;
      problem.visible_stride = 1, problem.requests = 1, problem.rows = nodes, problem.slots = kSlots;
      problem.heads = kHeads, problem.kv_heads = 1, problem.group = kHeads;
      problem.head_dim = problem.value_dim = kDim, problem.max_nodes = kMostNodes;
      problem.scale = 0.1f, problem.softcap = softcap, problem.window = problem.chunk = -1, problem.type = dtype;
      const std::vector<float> expected = attended<T>(false, problem, type), got = attended<T>(true, problem, type);
      bool is_right = expected.size() == got.size();
      for (size_t i = 0; is_right && i < got.size(); ++i)
        is_right = got[i] == got[i] && bits_of(got[i]) == bits_of(expected[i]);
      count += !is_right;
      if (!is_right)
        printf("dtype %d, codes %d, %d nodes, softcap %g\n", static_cast<int>(dtype), static_cast<int>(type), nodes,
               softcap);
    }
  return count;
}

}  // namespace

int main() {
  if (!(getauxval(AT_HWCAP) & 1 << 20)) return puts("no dot products of bytes here"), 77;
  int count = 0;
  for (const CodeType type : {CodeType::none, CodeType::int8, CodeType::float8_e4m3, CodeType::float8_e5m2}) {
    count += different<float>(FloatType::float32, type);
    count += different<bfloat16>(FloatType::bfloat16, type);
    count += different<float16>(FloatType::float16, type);
  }
  printf("%d differ\n", count);
  return count != 0;
}
