// The keys of a row of attention in the order of its text, and the order in which a row's sums are added. The places of
// a row are the prefix and behind it the nodes that its bits name, ascending: on a path, its nodes by depth. So a key
// has the place that it will have in plain decoding, whatever else the step has. With a list of keys the places are
// those of the list.
//   sums go by steps of kPlacesOfStep places, and by shares of whole steps; shares are added one after the other
// Shares begin at fixed places: 128 places each below place 4,096, from there on 16 to each doubling. So few blocks are
// enough for a short text, many work on a long one, and a result does not depend on how many there are.
#pragma once

#include <cstdint>

#include "core/attention.h"
#include "core/attention_lists.h"
#include "cuda/primitives.cuh"

namespace pass_ext::gpu {

constexpr int32_t kPlacesOfStep = 128;

PASS_EXT_HOST_DEVICE uint32_t first_place_of_share(int32_t share) {
  constexpr uint32_t kEqual = 32, kOfDoubling = 16;
  const uint32_t index = static_cast<uint32_t>(share);
  if (index < kEqual) return kPlacesOfStep * index;
  const uint32_t doubling = (index - kEqual) / kOfDoubling, place = (index - kEqual) % kOfDoubling;
  return (4096 + 256 * place) << doubling;
}

// The share of a place.
PASS_EXT_HOST_DEVICE int32_t share_with(uint32_t place) {
  if (place < 4096) return static_cast<int32_t>(place / kPlacesOfStep);
  int32_t doubling = 0;
  while (place >> doubling >= 8192) ++doubling;
  return 32 + 16 * doubling + static_cast<int32_t>((place >> doubling) - 4096) / 256;
}

// The shares of so many places.
PASS_EXT_HOST_DEVICE int32_t shares_of(int64_t places) {
  return places <= 0 ? 0 : share_with(static_cast<uint32_t>(places - 1)) + 1;
}

PASS_EXT_DEVICE int32_t count_bits(uint64_t bits) {
  return count_set_bits(static_cast<uint32_t>(bits)) + count_set_bits(static_cast<uint32_t>(bits >> 32));
}

PASS_EXT_DEVICE int32_t lowest_bit(uint64_t bits) { return count_bits((bits & -bits) - 1); }

// The places of a row.
PASS_EXT_DEVICE int32_t places_of(const AttentionProblem& problem, const AttentionRequest& request,
                                  const KeyLists& lists, int32_t node) {
  if (lists.keys) return lists.size;
  int32_t places = request.prefix;
  for (int32_t i = 0; 64 * i < request.nodes; ++i) places += count_bits(named_nodes(problem, request, node, i));
  return places;
}

// The key at a place of a row, or -1: it is not seen.
PASS_EXT_DEVICE int32_t key_at(const AttentionProblem& problem, const AttentionRequest& request, const KeyLists& lists,
                               int32_t node, int32_t place) {
  if (lists.keys) return listed_key(problem, request, lists, node, place);
  int32_t key = place;
  if (place >= request.prefix) {
    int32_t skipped = place - request.prefix, word = 0;
    uint64_t nodes = named_nodes(problem, request, node, 0);
    for (int32_t count = count_bits(nodes); skipped >= count; count = count_bits(nodes)) {
      skipped -= count;
      nodes = named_nodes(problem, request, node, ++word);
    }
    for (; skipped > 0; --skipped) nodes &= nodes - 1;
    key = request.prefix + 64 * word + lowest_bit(nodes);
  }
  return is_in_reach(problem, request, node, key) ? key : -1;
}

// The first place of a step that a row of the request may see.
PASS_EXT_DEVICE int32_t first_place_in_reach(const AttentionRequest& request, const KeyLists& lists) {
  return lists.keys ? 0 : request.begin / kPlacesOfStep * kPlacesOfStep;
}

struct PlaceRange {
  int32_t begin, end;
};

// A row of q, for one key head.
struct PlacedRow {
  AttentionRequest request;
  PlaceRange seen;     // no place before is one of it, and its begin is that of a step
  int32_t node, head;  // head: of keys
};

// A row of no request, `owner` -1, has no places.
PASS_EXT_DEVICE PlacedRow placed_row(const AttentionProblem& problem, int32_t owner, int32_t node,
                                     const PlaceRange& seen, int32_t head) {
  PlacedRow found{};
  if (owner < 0) return found;
  found.request = request_of<true>(problem, owner);
  found.seen = seen;
  found.node = node;
  found.head = head;
  return found;
}

}  // namespace pass_ext::gpu
