// Attention to listed keys: a row sees, of the keys that its bits, window and chunk leave, those that its list names.
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

// The key that entry i of a row's list names, or -1.
PASS_EXT_HOST_DEVICE int32_t named_key(const AttentionRequest& request, const KeyLists& lists, int32_t node,
                                       int32_t i) {
  const int32_t* const list = lists.keys + (request.first + node) * lists.stride;
  const int32_t key = list[i];
  return key < 0 || key >= request.keys() || (i > 0 && key <= list[i - 1]) ? -1 : key;
}

// The same if the row sees the key.
PASS_EXT_HOST_DEVICE int32_t listed_key(const AttentionProblem& problem, const AttentionRequest& request,
                                        const KeyLists& lists, int32_t node, int32_t i) {
  const int32_t key = named_key(request, lists, node, i);
  return key >= 0 && (visible_keys<true>(problem, request, node, key) & 1) ? key : -1;
}

}  // namespace pass_ext
