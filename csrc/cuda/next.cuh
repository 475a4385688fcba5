// The rows of the next step on the GPU, in one launch: a block for each request. The formulas: core/next_tree.h.
//
// Candidates are taken one by one, because the most probable one decides about the next. For each of them all warps
// score the tokens offered below it, and one warp makes chances of the scores and takes the next candidate. Then each
// thread values some shapes. Where rows are kept, all warps score the tokens below one node after the other, and one
// warp takes the children's.
//
// Malformed input raises nothing, because an error message would need a synchronisation: malformed parents are the
// root, and an accepted node or slots that do not exist offer nothing.
#pragma once

#include <cstdint>

#include "core/next_tree.h"
#include "cuda/block.cuh"
#include "cuda/next_offers.cuh"
#include "cuda/primitives.cuh"
#include "cuda/recall_counts.cuh"

namespace pass_ext::gpu {

constexpr int kTreeThreads = 256;
constexpr int kTreeWarps = kTreeThreads / 32;

// Shared memory of a block; behind it [row_count, count] scores, as many chances, and the counts of recall.
struct TreeShared {
  int64_t costs[kMostChosenRows];
  uint64_t mass[kMostChosenSlots];
  TreeChoice best[kTreeWarps];
  JudgedRows judged;
  int32_t first_slots[kMostChosenRows];
  TreeNodes nodes;
  TreeOpening open[kMostChosenRows];
  TreeWorth worth;
  NextRoot root;
};

inline size_t next_tree_bytes(const NextTreeProblem& problem) {
  const NextProblem& step = problem.step;
  const int64_t recall = step.text == nullptr ? 0 : recall_numbers(step.count);
  return sizeof(TreeShared) + sizeof(float) * (2 * step.row_count * step.count + recall);
}

// The offers below a node.
struct NodeOffers {
  WarpOffers list;
  float* chances;
  const float* given;  // the slot's own scores
};

PASS_EXT_DEVICE NodeOffers offers_below(const NextTreeProblem& problem, TreeShared* shared, int64_t request,
                                        const SlotRows& slots, int32_t node) {
  const NextProblem& step = problem.step;
  float* const scores = reinterpret_cast<float*>(shared + 1) + node * step.count;
  const int64_t row = request * step.slots + slots.first + shared->nodes.depth[node];
  return {{step.offered + row * step.count, scores, step.count},
          scores + step.row_count * step.count,
          step.scores + row * step.count};
}

// A warp for each slot: the mass of its offered tokens.
PASS_EXT_DEVICE void sum_masses(const NextTreeProblem& problem, TreeShared& shared, int64_t request,
                                const SlotRows& slots) {
  const NextProblem& step = problem.step;
  for (int32_t slot = static_cast<int32_t>(warp_index()); slot < slots.count; slot += kTreeWarps) {
    const float* const given = step.scores + (request * step.slots + slots.first + slot) * step.count;
    uint64_t mass = 0;
    for (int32_t k = static_cast<int32_t>(lane_index()); k < step.count; k += 32) mass += offered_mass(given[k]);
    mass = sum_words_of_warp(mass);
    if (lane_index() == 0) shared.mass[slot] = mass;
  }
}

// All warps: counts what the text recalls behind a node's path. Behind it a barrier, then recall_of reads the counts.
PASS_EXT_DEVICE RecallCounts recall_below(const NextTreeProblem& problem, TreeShared* shared, int64_t request,
                                          const NextRoot& root, const NodeOffers& offers, int32_t node) {
  const NextProblem& step = problem.step;
  const TreeNodes& nodes = shared->nodes;
  const int32_t thread = static_cast<int32_t>(thread_rank());
  float* const scores = reinterpret_cast<float*>(shared + 1);
  const RecallCounts counts = carve_recall(reinterpret_cast<int32_t*>(scores + 2 * step.row_count * step.count));
  const RecallText text = text_of(step, request, root);
  const RecallContext path = path_behind(
      text, root, node, [&](int32_t at) { return int64_t{nodes.token[at]}; },
      [&](int32_t at) { return nodes.parent[at]; });
  clear_recall(counts, step.count, thread, kTreeThreads);
  sync_block();
  count_recall(counts, text, path, offers.list.tokens, step.count, thread, kTreeThreads);
  return counts;
}

// All warps: the slot's scores of the tokens offered below a node, and those of their transitions.
PASS_EXT_DEVICE void score_below(const NextTreeProblem& problem, const NodeOffers& offers, int64_t before) {
  const NextProblem& step = problem.step;
  if (step.left == nullptr) {
    for (int32_t k = static_cast<int32_t>(thread_rank()); k < step.count; k += kTreeThreads)
      offers.list.scores[k] = has_transition(step, offers.list.tokens[k]) ? offers.given[k] : -kInfinity;
    return;
  }
  const float* const left = step.left + before * step.left_stride;
#pragma unroll 2
  for (int32_t k = static_cast<int32_t>(warp_index()); k < step.count; k += kTreeWarps)
    score_offered(step, offers.list, offers.given, left, k);
}

// All warps: the scores of the tokens offered below a node. Behind it a barrier.
PASS_EXT_DEVICE void rank_below(const NextTreeProblem& problem, TreeShared* shared, int64_t request,
                                const NextRoot& root, const SlotRows& slots, int32_t node) {
  const NodeOffers below = offers_below(problem, shared, request, slots, node);
  score_below(problem, below, shared->nodes.token[node]);
  if (problem.step.text == nullptr) return;
  const RecallCounts counts = recall_below(problem, shared, request, root, below, node);
  sync_block();
#pragma unroll 1
  for (int32_t k = static_cast<int32_t>(thread_rank()); k < below.list.count; k += kTreeThreads)
    below.list.scores[k] += recall_of(counts.places, counts.followed + k, below.list.count);
}

// A warp: takes the open child of the largest reach; false if none is worth a row.
PASS_EXT_DEVICE bool take_next(TreeShared& shared) {
  const int32_t lane = static_cast<int32_t>(lane_index()), count = shared.nodes.count;
  float reach = 0.0f;
  int32_t parent = INT32_MAX;
  for (int32_t node = lane; node < count; node += 32)
    if (is_taken_before(shared.open[node].reach, node, reach, parent)) {
      reach = shared.open[node].reach;
      parent = node;
    }
  const Best best = best_of_warp({reach, parent});
  if (chance_units(best.score) < kLeastReach) return false;
  sync_warp();
  if (lane == 0) take_child(shared.nodes, best.id, shared.open[best.id]);
  sync_warp();
  return true;
}

// All threads of the block: the candidates.
PASS_EXT_DEVICE void fill_tree(const NextTreeProblem& problem, TreeShared* shared, int64_t request,
                               const NextRoot& root, const SlotRows& slots, int32_t levels) {
  TreeNodes& nodes = shared->nodes;
  for (int32_t node = 0; node < problem.step.row_count - 1; ++node) {  // as long as there are rows for one more
    const bool has_children = may_have_children(problem, nodes, node, slots.count, levels);
    if (has_children) rank_below(problem, shared, request, root, slots, node);
    sync_block();
    if (warp_index() == 0) {
      TreeOpening opening = nothing_open(), sibling = nothing_open();
      if (has_children) {
        NodeOffers below = offers_below(problem, shared, request, slots, node);
        race(below.list, problem.step, request, root.length + nodes.depth[node]);
        sync_warp();  // set_chances reads what the race wrote
        set_chances(below.list, shared->mass[nodes.depth[node]], is_raced(problem.step, request), below.chances);
        sync_warp();  // chances are read by all lanes
        opening = opening_behind(below.list, below.chances, before_all(), nodes.reach[node]);
      }
      const int32_t parent = nodes.parent[node];
      if (node > 0) {
        const NodeOffers beside = offers_below(problem, shared, request, slots, parent);
        sibling = opening_behind(beside.list, beside.chances, shared->open[parent].offer, nodes.reach[parent]);
      }
      sync_warp();  // all lanes have read the parent's opening
      if (lane_index() == 0) {
        shared->open[node] = opening;
        if (node > 0) shared->open[parent] = sibling;
      }
      sync_warp();
      take_next(*shared);
    }
    sync_block();
    if (nodes.count == node + 1) return;
  }
}

// All threads of the block: the tokens of rows that are kept. Parents come first.
PASS_EXT_DEVICE void fill_kept(const NextTreeProblem& problem, TreeShared* shared, int64_t request,
                               const NextRoot& root, const SlotRows& slots, int32_t levels) {
  TreeNodes& nodes = shared->nodes;
  const int32_t row_count = problem.step.row_count;
  for (int32_t node = 0; node < row_count; ++node) {
    if (!may_have_children(problem, nodes, node, slots.count, levels)) continue;
    int32_t child = child_behind(shared->judged, node, node, row_count);
    if (child == row_count) continue;
    rank_below(problem, shared, request, root, slots, node);
    sync_block();
    if (warp_index() == 0) {
      NodeOffers below = offers_below(problem, shared, request, slots, node);
      race(below.list, problem.step, request, root.length + nodes.depth[node]);
      sync_warp();
      Offer last = below.list.best(before_all());
      while (child < row_count && last.id >= 0) {
        if (lane_index() == 0) nodes.token[child] = last.id;
        child = child_behind(shared->judged, node, child, row_count);
        last = below.list.best(last);
      }
    }
    sync_block();
  }
}

// All threads of the block: the best shape.
PASS_EXT_DEVICE TreeChoice best_choice(const NextTreeProblem& problem, TreeShared& shared, int32_t levels) {
  TreeChoice best = no_choice();
  const int32_t forms = count_forms(problem.slots, shared.nodes.chain_length);
  for (int32_t form = static_cast<int32_t>(thread_rank()); form < forms; form += kTreeThreads) {
    const TreeChoice choice = best_of_form(shared.nodes, shared.worth, shared.costs, form_at(form, problem.slots),
                                           problem.step.row_count, levels);
    if (is_better_choice(choice, best)) best = choice;
  }
  for (int step = 16; step > 0; step /= 2) {
    const TreeChoice other{shuffle_xor(best.value, step), shuffle_xor(best.key, step)};
    if (is_better_choice(other, best)) best = other;
  }
  if (lane_index() == 0) shared.best[warp_index()] = best;
  sync_block();
  for (const TreeChoice& other : shared.best)
    if (is_better_choice(other, best)) best = other;
  return best;
}

// kKeeps: the rows of a request are kept.
template <bool kKeeps>
PASS_EXT_KERNEL PASS_EXT_LAUNCH_BOUNDS(kTreeThreads) next_tree_kernel(PASS_EXT_PARAMETER NextTreeProblem problem) {
  begin_kernel(problem);
  TreeShared& shared = *dynamic_shared<TreeShared>();
  const NextProblem& step = problem.step;
  const int64_t request = block_index().x;
  const int32_t thread = static_cast<int32_t>(thread_rank()), row_count = step.row_count;
  constexpr int32_t kWorths = kMostChosenSlots + 1;
  const NextRoot& root = shared.root;  // not in registers, of which a tree takes many
  if (thread == 0) shared.root = next_root(step, request);
  if (thread < row_count) {
    read_judged(problem, request, thread, shared.judged);
    if constexpr (!kKeeps) shared.costs[thread] = cost_of_rows(problem, thread + 1);
  }
  if (!kKeeps && thread < kWorths * kWorths)
    shared.worth.of[thread / kWorths][thread % kWorths] = worth_of_slots(problem, thread / kWorths, thread % kWorths);
  if (!kKeeps && thread == 0) begin_tree(shared.nodes, root);
  const int32_t drafted = sync_block_count(thread > 0 && thread < row_count && *token_of(step, request, thread) >= 0);
  if (thread < row_count) shared.first_slots[thread] = first_slot_behind(shared.judged, thread, row_count);
  const int32_t levels = levels_left(problem, request, root);
  report_step<kTreeThreads>(step, request, root, drafted);
  if (kKeeps && thread == 0) keep_tree(shared.nodes, root, shared.judged, row_count);
  if (step.text != nullptr && root.moves)
    for (int32_t i = thread; i <= step.num_accepted[request]; i += kTreeThreads) write_text(step, request, root, i);
  sync_block();
  const SlotRows slots =
      slots_behind(problem, shared.judged, root.last, [&](int32_t node) { return shared.first_slots[node]; });
  int32_t rows = row_count, nodes = 0;
  TreeRow values;
  if constexpr (kKeeps) {
    fill_kept(problem, &shared, request, root, slots, levels);
    if (thread < row_count) values = kept_row(shared.nodes, shared.judged, root, thread);
    if (thread == 0) nodes = count_tokens(shared.nodes);
  } else {
    sum_masses(problem, shared, request, slots);
    fill_tree(problem, &shared, request, root, slots, levels);
    const TreeShape shape = shape_of(best_choice(problem, shared, levels));
    if (thread < row_count) values = tree_row(shared.nodes, shape, root, thread);
    rows = shape.rows;
    nodes = shape.nodes;
  }
  if (thread < row_count) write_tree_row(problem, request, root, thread, values);
  if (thread > 0) return;
  step.lengths[request] = root.length;
  step.prefix_lens[request] = static_cast<int32_t>(root.length - 1);
  int64_t* const report = step.report + request * (kReportNumbers + step.report_width);
  report[3] = rows;
  report[4] = nodes;
}

inline void launch_next_tree(const NextTreeProblem& problem, Stream stream) {
  const LaunchShape shape{{problem.step.requests}, {kTreeThreads}, next_tree_bytes(problem)};
  launch("next_tree_", problem.rates == nullptr ? next_tree_kernel<true> : next_tree_kernel<false>, shape, stream,
         problem);
}

}  // namespace pass_ext::gpu
