// torch.ops.pass_ext.lookahead_embed and its gradient on the CPU: checks, parallel split, registration.
// The inner loops: cpu/lookahead_kernels-inl.h. Rows of a packed table (core/linear.h) are unpacked here, number by
// number.
#include "host/lookahead.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "cpu/linear.h"
#include "cpu/workers.h"
#include "host/linear.h"

#define PASS_EXT_KERNELS "cpu/lookahead_kernels-inl.h"
#include "cpu/each_isa.h"

namespace pass_ext {
namespace {

// Below this many bytes a second thread costs more than it saves.
constexpr int64_t kBytesPerTask = 128 * 1024;
constexpr int64_t kPackedRowsPerTask = 16;  // of a packed table

// Refuses the first id outside [-slots, vocabulary), before anything is written.
template <typename Problem>
void check_ids(const Problem& problem) {
  for (int64_t n = 0; n < problem.rows; ++n) {
    const int64_t id = problem.ids[n];
    if (id < -problem.slots || id >= problem.vocabulary)
      refuse("lookahead_embed", "ids must be in [", -problem.slots, ", ", problem.vocabulary, ") (", problem.slots,
             " look-ahead slots, ", problem.vocabulary, " table rows), got ", id, " at flat index ", n);
  }
}

// ---- a packed table ----

// The code of input i of a block's step, of the output in this lane. A word has those of even inputs in front.
template <typename Block>
uint32_t code_at(const Block& block, int64_t step, int64_t lane, int i) {
  constexpr int kCodes = 32 / Block::kBits;  // in a word
  const int place = i % 2 * (kCodes / 2) + i % kCodes / 2;
  return block.codes[step][i / kCodes][lane] >> place * Block::kBits & ((1u << Block::kBits) - 1);
}

template <typename Block>
uint32_t number_of(const Block&, uint32_t code) {
  return code;
}
template <typename Scale>
uint32_t number_of(const PackedTableBlock<Scale>& block, uint32_t code) {
  return block.table[code];
}

template <typename Block, typename T>
void unpack_row(const Block* blocks, int64_t steps, int64_t lane, T* to) {
  constexpr int kNumbers = kPackedInputs / Block::kParts;  // that share factors
  for (int64_t s = 0; s < steps; ++s) {
    const Block& block = blocks[s / Block::kSteps];
    const int64_t step = s % Block::kSteps;
    for (int part = 0; part < Block::kParts; ++part) {
      float scale = to_float(block.scale[lane]), offset = to_float(block.offset[lane]);
      if constexpr (Block::kSteps > 1) {
        scale *= static_cast<float>(block.factors[step].scale[part][lane]);
        offset *= static_cast<float>(block.factors[step].offset[part][lane]);
      }
      for (int i = part * kNumbers; i < (part + 1) * kNumbers; ++i) {
        const uint32_t number = number_of(block, code_at(block, step, lane, i));
        *to++ = from_float<T>(static_cast<float>(number) * scale + offset);
      }
    }
  }
}

// Rows of a packed table, in the dtype of the slots.
Tensor embed_packed(const Tensor& ids, const Tensor& table, const Tensor& lookahead) {
  constexpr const char* op = "lookahead_embed";
  check_packed_weight(op, "table", table);
  check_lookahead_ids(ids, table);
  check_dtype(op, "lookahead", lookahead, {ScalarType::BFloat16, ScalarType::Half, ScalarType::Float});
  check_lookahead_slots(table, lookahead, inputs_of(table));
  const Tensor flat_ids = contiguous_of(op, "ids", ids), slots = contiguous_of(op, "lookahead", lookahead);
  const Tensor out = empty_lookahead_embed(ids, lookahead);
  const void* const packed = data_of<void>(op, "table", table);
  dispatch_up_to_float32(lookahead.scalar_type(), [&](auto value) {
    dispatch_index(ids.scalar_type(), [&](auto index) {
      using T = type_of<decltype(value)>;
      using Id = type_of<decltype(index)>;
      const LookaheadEmbed<T, T, Id> problem{data_of<Id>(op, "ids", flat_ids),
                                             nullptr,
                                             data_of<T>(op, "lookahead", slots),
                                             output_of<T>(out),
                                             flat_ids.numel(),
                                             lookahead.size(1),
                                             outputs_of(table),
                                             lookahead.size(0),
                                             0};
      check_ids(problem);
      const int64_t steps = table.size(1);
      with_blocks(packed, packed_form_of(table.size(2)), [&](const auto* blocks) {
        const int64_t group = steps / std::remove_reference_t<decltype(*blocks)>::kSteps;  // blocks of 16 outputs
        for_ranges(problem.rows, kPackedRowsPerTask, [&](int64_t begin, int64_t end) {
          for (int64_t n = begin; n < end; ++n) {
            const int64_t id = problem.ids[n];
            T* const to = problem.out + n * problem.dim;
            if (id < 0)
              std::copy_n(problem.lookahead + (-1 - id) * problem.dim, problem.dim, to);
            else
              unpack_row(blocks + id / kPackedOutputs * group, steps, id % kPackedOutputs, to);
          }
        });
      });
    });
  });
  return out;
}

// ---- the ops ----

Tensor lookahead_embed(const Tensor& ids, const Tensor& table, const Tensor& lookahead) {
  if (is_packed(table)) return embed_packed(ids, table, lookahead);
  check_lookahead_embed(ids, table, lookahead);
  constexpr const char* op = "lookahead_embed";
  const Tensor flat_ids = contiguous_of(op, "ids", ids), slots = contiguous_of(op, "lookahead", lookahead);
  const Tensor out = empty_lookahead_embed(ids, table);
  with_lookahead_embed(flat_ids, table, slots, out, [](const auto& problem) {
    check_ids(problem);
    const int64_t row_bytes = std::max<int64_t>(1, problem.dim * sizeof(*problem.out));
    const int64_t rows_per_task = std::max<int64_t>(1, kBytesPerTask / row_bytes);
    for_ranges(problem.rows, rows_per_task,
               [&](int64_t begin, int64_t end) { PASS_EXT_AT_ISA(embed_rows(problem, begin, end)); });
  });
  return out;
}

// The positions of the ids that pick each row, grouped by row and in order within a row (a counting sort):
// those of row r are positions[start[r]] … positions[start[r + 1] - 1].
struct PositionsByRow {
  std::vector<int64_t> start, positions;
};

template <typename Id>
PositionsByRow group_positions(const Id* ids, int64_t count, bool slots, int64_t rows) {
  PositionsByRow groups{std::vector<int64_t>(rows + 1, 0), {}};
  for (int64_t n = 0; n < count; ++n) {
    const int64_t row = row_of_id(ids[n], slots, rows);
    if (row >= 0) ++groups.start[row + 1];
  }
  for (int64_t row = 0; row < rows; ++row) groups.start[row + 1] += groups.start[row];
  groups.positions.resize(groups.start[rows]);
  std::vector<int64_t> next(groups.start.begin(), groups.start.end() - 1);
  for (int64_t n = 0; n < count; ++n) {
    const int64_t row = row_of_id(ids[n], slots, rows);
    if (row >= 0) groups.positions[next[row]++] = n;
  }
  return groups;
}

Tensor lookahead_embed_backward(const Tensor& grad, const Tensor& ids, int64_t rows, bool slots, ScalarType dtype) {
  check_lookahead_embed_backward(grad, ids, rows, dtype);
  constexpr const char* op = "lookahead_embed_backward";
  const Tensor flat_ids = contiguous_of(op, "ids", ids), flat_grad = contiguous_of(op, "grad", grad);
  const std::vector<int64_t> shape{rows, grad.size(grad.dim() - 1)};
  const Tensor out = empty_of_shape(op, grad, shape, dtype);
  with_lookahead_embed_backward(flat_grad, flat_ids, out, slots, [](const auto& problem) {
    const PositionsByRow groups = group_positions(problem.ids, problem.rows, problem.slots, problem.out_rows);
    // A task is one block of columns of one row: every element has one owner and one order, whatever the thread count.
    constexpr int64_t kColumns = 512;
    const int64_t blocks = (problem.dim + kColumns - 1) / kColumns;
    const int64_t tasks = problem.out_rows * blocks;
    const int64_t rows_per_task =
        static_cast<int64_t>(groups.positions.size()) / std::max<int64_t>(1, problem.out_rows);
    const int64_t task_bytes = (1 + rows_per_task) * std::min(kColumns, problem.dim) * sizeof(*problem.grad);
    const auto run = [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) {
        const int64_t row = task / blocks, column = task % blocks * kColumns;
        PASS_EXT_AT_ISA(sum_rows(problem.out + row * problem.dim, problem.grad, problem.dim,
                                 groups.positions.data() + groups.start[row], groups.start[row + 1] - groups.start[row],
                                 column, std::min(column + kColumns, problem.dim)));
      }
    };
    const int64_t tasks_per_thread = std::max<int64_t>(1, kBytesPerTask / std::max<int64_t>(1, task_bytes));
    for_ranges(tasks, tasks_per_thread, run);
  });
  return out;
}

}  // namespace
}  // namespace pass_ext

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CPU, library) {
  library.impl("lookahead_embed", TORCH_BOX(&pass_ext::lookahead_embed));
  library.impl("lookahead_embed_backward", TORCH_BOX(&pass_ext::lookahead_embed_backward));
}
