// The order in which a block walks the nodes of a tree, and the states that it keeps on the way. Of a node's children
// the one with the most descendants comes last and goes on with the node's state; before each other child the state is
// kept in shared memory, at most nine times at once in a tree of 1,024 nodes.
//
// The block itself orders the nodes, while the state is on its way: about 60 cycles a node by one thread, where a node
// of the walk takes several hundred.
#pragma once

#include "core/tree.h"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

// A node, or at index 0 what stands before all roots. Place: in the order.
struct NodePlan {
  uint32_t largest_child;  // descendants of the child with the most, itself among them, and its index
  int16_t nodes, place;    // nodes: itself and its descendants
};
// The same memory afterwards: what a node's rows share.
struct NodeScalars {
  float decay, beta;
};
static_assert(sizeof(NodePlan) == sizeof(NodeScalars), "they take turns");

constexpr uint32_t kNoState = 15;

// A node in its turn: the kept state that it begins from, and where its own is kept for further children.
struct WalkStep {
  uint32_t bits;

  PASS_EXT_DEVICE static WalkStep of(int32_t node, uint32_t from, uint32_t to) {
    return {static_cast<uint32_t>(node) | from << 16 | to << 20};
  }
  PASS_EXT_DEVICE int32_t node() const { return static_cast<int32_t>(bits & 0xffff); }
  PASS_EXT_DEVICE uint32_t from() const { return bits >> 16 & 15; }  // kNoState: from registers
  PASS_EXT_DEVICE uint32_t to() const { return bits >> 20 & 15; }    // kNoState: nowhere
};

// Kept states of a tree of so many nodes, at most. A child that is not the largest has at most half of the descendants.
PASS_EXT_HOST_DEVICE int32_t most_kept_states(int32_t nodes) {
  int32_t count = 0;
  for (int32_t left = nodes + 1; left >= 3; left = (left - 1) / 2) ++count;
  return count;
}
static_assert(kMaxTreeNodes <= 1024, "at most 9 states, and 16 bits for a node");

struct WalkOrder {
  NodePlan* plans;   // [1 + nodes]
  uint16_t* levels;  // [1 + nodes], the kept states above a node
  int16_t* parents;  // [nodes]
  uint32_t* steps;   // [1 + nodes]; while the order is made, the next free place for a node's children

  PASS_EXT_DEVICE bool is_largest(int32_t node) const {
    return static_cast<int32_t>(plans[1 + parents[node]].largest_child & 0xffff) == node;
  }
  PASS_EXT_DEVICE bool has_several_children(int32_t index) const {
    return (plans[index].largest_child >> 16) + 1 < static_cast<uint32_t>(plans[index].nodes);
  }

  // For one thread.
  PASS_EXT_DEVICE void count_descendants(int32_t nodes) const {
#pragma unroll 1
    for (int32_t i = nodes - 1; i >= 0; --i) {
      NodePlan& parent = plans[1 + parents[i]];
      const uint32_t own = static_cast<uint32_t>(plans[1 + i].nodes) << 16 | static_cast<uint32_t>(i);
      parent.nodes = static_cast<int16_t>(parent.nodes + plans[1 + i].nodes);
      if (own > parent.largest_child) parent.largest_child = own;
    }
  }

  // For one thread: the largest child takes the last places below its parent, the others the next free ones.
  PASS_EXT_DEVICE void choose_places(int32_t nodes) const {
    plans[0].place = -1;
    levels[0] = 0;
    steps[0] = 0;
#pragma unroll 1
    for (int32_t i = 0; i < nodes; ++i) {
      const int32_t parent = 1 + parents[i], own = plans[1 + i].nodes;
      const bool last = is_largest(i);
      const int32_t place =
          last ? plans[parent].place + plans[parent].nodes - own : static_cast<int32_t>(steps[parent]);
      if (!last) steps[parent] = static_cast<uint32_t>(place + own);
      plans[1 + i].place = static_cast<int16_t>(place);
      levels[1 + i] = static_cast<uint16_t>(levels[parent] + !last);
      steps[1 + i] = static_cast<uint32_t>(place + 1);
    }
  }

  // For all threads of the block: `steps` becomes the order.
  PASS_EXT_DEVICE void make(const int32_t* given, int32_t nodes) const {
    const int32_t thread = static_cast<int32_t>(thread_rank()), threads = static_cast<int32_t>(block_size().x);
#pragma unroll 1
    for (int32_t i = thread; i < nodes; i += threads) parents[i] = static_cast<int16_t>(parent_or_root(given[i], i));
#pragma unroll 1
    for (int32_t i = thread; i <= nodes; i += threads) plans[i] = {0, 1, 0};
    sync_block();
    if (thread == 0) {
      count_descendants(nodes);
      choose_places(nodes);
    }
    sync_block();
#pragma unroll 1
    for (int32_t i = thread; i < nodes; i += threads) {
      const int32_t parent = 1 + parents[i];
      const bool follows = plans[1 + i].place == plans[parent].place + 1;
      steps[plans[1 + i].place] =
          WalkStep::of(i, follows ? kNoState : levels[parent], has_several_children(1 + i) ? levels[1 + i] : kNoState)
              .bits;
    }
    sync_block();
  }
};

}  // namespace pass_ext::gpu
