// linear_rows for bfloat16 weights by tiles (cpu/tiles.h).
#pragma once

#include "cpu/linear.h"

namespace pass_ext {

// x rows [first, first + rows) in the order of multiplication, in no more than arranged_bytes.
void arrange_for_tiles(const LinearRows<bfloat16>& problem, int64_t first, int64_t rows, void* memory);

// The sums [rows, kGroupOutputs] of arranged rows for outputs [begin, end), at most kGroupOutputs of them.
template <typename Tiles>
void multiply_by_tiles(const LinearRows<bfloat16>& problem, int64_t rows, const void* arranged,
                       const LinearScratch& scratch, float* sums, int64_t begin, int64_t end);

#if defined(__x86_64__)
// Whether the processor's tiles give the sums of the emulated ones, for a product with every kind of edge.
bool tiles_are_right();

// In tiles as many products as vectors of 16 numbers make in `steps` steps (cpu/unit_kernels-inl.h).
void multiply_in_tiles(int64_t steps, float* lanes);
#endif

}  // namespace pass_ext
