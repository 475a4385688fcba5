// How the recurrence walks a request's tree: node after node, depth first, with a copy of a slice of the state wherever
// a node has a further child. cpu/recurrent.cpp plans, cpu/recurrent_kernels-inl.h walks.
#pragma once

#include <cstdint>

namespace pass_ext {

constexpr int64_t kStateColumns = 16;  // value columns that are walked together: dk x 16 numbers, which stay in cache

// A node: its state is computed from that in buffer `from` and lies in buffer `to`, which may be the same. Buffer 0
// begins as the request's state.
struct WalkStep {
  int32_t node, from, to;
  bool is_continued;  // by the next step, which is a child's
};

struct WalkPlan {
  const WalkStep* steps;
  int64_t first, nodes;  // the request's packed rows; as many steps
  int64_t slot;          // of its state
  bool has_one_root;     // the state is read by the first step alone
};

// What a node needs of its own, for all slices of a head: k, q times scale and, unless it belongs to elements, the
// decay.
struct NodeRow {
  const float *k, *q, *decay;
  float beta;
};

// Numbers of a node in the work space: k, q, then one decay or dk, then beta.
inline int64_t node_row_size(int64_t dk) { return 3 * dk + 1; }

}  // namespace pass_ext
