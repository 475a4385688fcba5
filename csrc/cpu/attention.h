// Attention on the CPU as tasks: some rows of one request and key head against one chunk of its keys. A task leaves its
// rows unnormalised, so that chunks can be merged. attention.cpp shares tasks among threads, attention_kernels-inl.h
// computes them.
#pragma once

#include <cstdint>

#include "core/attention.h"
#include "core/attention_lists.h"
#include "core/quantize.h"
#include "cpu/attention_tiles.h"

namespace pass_ext {

constexpr int32_t kTileKeys = 2 * kTileColumns;  // most keys at once: branches share columns
constexpr int32_t kMostBlockRows = 64;           // no level multiplies more rows at once
constexpr int32_t kTaskRows = 256;               // most rows of a task

struct AttentionTask {
  const AttentionProblem* problem;
  CodeType codes;  // of K and V
  AttentionRequest request;
  const AttentionTiles* tiles;  // of the request
  int32_t head;                 // key head
  int32_t first_row, rows;      // among the request's nodes times group
  int32_t first_tile, end_tile;
  bool has_queries = false;  // the scratch holds them already, from another chunk of the same rows

  int32_t node_of(int32_t row) const { return (first_row + row) / problem->group; }
  // The row's index in q and out, [rows, heads].
  int64_t packed_row(int32_t row) const {
    return int64_t{request.first + node_of(row)} * problem->heads + head * problem->group +
           (first_row + row) % problem->group;
  }
};

// A task's rows after its keys: out = values / total, lse = log_of_total(maximum, exact_total).
struct PartialRows {
  float* values;       // [rows, value_dim], times 2^-maximum
  float* maximum;      // [rows], in powers of two
  float* total;        // [rows], sums of the weights as they multiplied the values
  float* exact_total;  // [rows], sums of the weights before they were rounded
};

// Work space of one thread, 64-byte aligned. One element of the first four is a number, or a pair of bf16.
struct AttentionScratch {
  uint32_t* queries;  // [head_dim, kTaskRows]
  uint32_t* keys;     // [kTileKeys, head_dim]
  uint32_t* values;   // [kTileKeys, value_dim]
  uint32_t* scores;   // [kTileKeys, kMostBlockRows]
  uint32_t* weights;  // as scores, and `sums` three of 16 rows of values: by tiles (attention_by_tiles-inl.h)
  float* scale;       // [kMostBlockRows]
  float* sums;
  void* row;       // two of V, of any type
  float* decoded;  // [kTileKeys, head_dim + value_dim], if K and V are codes
};

// Refuses values out of range. On CUDA this check would need a synchronisation.
void check_attention_values(const char* op, const AttentionProblem& problem, const KeyLists& lists = {});
// Fills in problem.out and problem.lse. The values are checked.
void attend_on_cpu(const AttentionProblem& problem, CodeType codes, const KeyLists& lists = {});

}  // namespace pass_ext
