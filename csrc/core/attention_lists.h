// Which single keys a row sees, as visible_keys of core/attention.h says it of 64 at a time, and attention to listed
// keys: a row sees, of the keys that its bits, window and chunk leave, those that its list names.
// A list is ascending numbers of keys as core/attention.h counts them, with -1 behind the last. An entry that names no
// key of the request, or none above the entry before it, names nothing.
#pragma once

#include "core/attention.h"

namespace pass_ext {

struct KeyLists {
  const int32_t* keys = nullptr;  // [rows, size]; null: rows see all that is visible
  int64_t stride = 0;
  int32_t size = 0;
};

// The nodes of the request that a row's bits name, of those 64 from 64 word on; window and chunk aside.
PASS_EXT_HOST_DEVICE uint64_t named_nodes(const AttentionProblem& problem, const AttentionRequest& request,
                                          int32_t node, int32_t word) {
  return visible_word(problem, request, node, word) & ones_below(int64_t{request.nodes} - 64 * word);
}

// True if window and chunk leave the key to the row.
PASS_EXT_HOST_DEVICE bool is_in_reach(const AttentionProblem& problem, const AttentionRequest& request, int32_t node,
                                      int32_t key) {
  if (!has_reach<true>(problem)) return true;
  const int32_t depth = depth_of(problem, request, node);
  const int32_t window = window_at<true>(problem, request.prefix + depth);
  if (key < request.prefix) return key > int64_t{request.prefix} + depth - window;
  return depth - depth_of(problem, request, key - request.prefix) < window;
}

// The key that entry i of a row's list names, or -1 if the row does not see it.
PASS_EXT_HOST_DEVICE int32_t listed_key(const AttentionProblem& problem, const AttentionRequest& request,
                                        const KeyLists& lists, int32_t node, int32_t i) {
  const int32_t* const list = lists.keys + (request.first + node) * lists.stride;
  const int32_t key = list[i], other = key - request.prefix;
  if (key < 0 || key >= request.keys() || (i > 0 && key <= list[i - 1])) return -1;
  if (other >= 0 && !(named_nodes(problem, request, node, other / 64) >> other % 64 & 1)) return -1;
  return is_in_reach(problem, request, node, key) ? key : -1;
}

}  // namespace pass_ext
