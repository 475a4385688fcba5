// The order in which the CPU adds up a request's keys, so that a row's bits are those that it would have one row a
// call:
//   column of a prefix key = its place in the text        column of a node = prefix + level
//   level of a node = the nodes that it sees, less itself: the place that it takes behind the prefix if it is accepted
// Tiles are columns [64 t, 64 (t + 1)), chunks some tiles, from column 0 on. A node that a row does not see weighs 0,
// which changes no sum, and a row sees its path in the order of the text. So whatever else lies in a tile, a row adds
// the same numbers in the same groups. (A tile that would hold more than kTileKeys keys is cut; its rows may then
// differ in rounding.)
// A row with a list has tiles of its own: a listed key's column is its place in the list. So its bits are those of its
// list, and a list of all that a row sees changes none.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/attention.h"
#include "core/attention_lists.h"

namespace pass_ext {

constexpr int32_t kTileColumns = 64;

// Tiles of a chunk, whose rows are summed alone and merged: each chunk of each key head can have a thread of its own.
// For the rows of a step the model decides alone, because the length or the number of rows would move the cuts; a
// prompt, of many rows, has at most 16 chunks, because each has memory for all of them.
inline int32_t chunk_tiles(int32_t kv_heads, int32_t nodes, int32_t tiles) {
  int32_t each = kv_heads < 8 ? 8 : 16;
  while (nodes > kTileColumns && tiles > 16 * each) each *= 2;
  return each;
}

// The keys of a request by place: the prefix, then its nodes by the tile of their column, in their own order within a
// tile.
class AttentionTiles {
 public:
  AttentionTiles(const AttentionProblem& problem, const AttentionRequest& request)
      : prefix_(request.prefix), begin_(request.begin), first_node_tile_(request.prefix / kTileColumns) {
    std::vector<int32_t> tile_of(request.nodes);
    columns_.resize(request.nodes);
    for (int32_t node = 0; node < request.nodes; ++node) {
      columns_[node] = request.prefix + level_of(problem, request, node);
      const int32_t tile = columns_[node] / kTileColumns - first_node_tile_;
      if (tile >= static_cast<int32_t>(ends_.size())) ends_.resize(tile + 1);
      ++ends_[tile_of[node] = tile];
    }
    for (size_t tile = 1; tile < ends_.size(); ++tile) ends_[tile] += ends_[tile - 1];
    if (std::is_sorted(tile_of.begin(), tile_of.end())) return;
    nodes_.resize(request.nodes);
    for (int32_t node = 0; node < request.nodes; ++node) nodes_[node] = node;
    std::stable_sort(nodes_.begin(), nodes_.end(), [&](int32_t a, int32_t b) { return tile_of[a] < tile_of[b]; });
  }

  // Of one row with a list.
  AttentionTiles(const AttentionProblem& problem, const AttentionRequest& request, const KeyLists& lists, int32_t node)
      : prefix_(request.prefix), begin_(0), first_node_tile_(0), is_listed_(true) {
    for (int32_t i = 0; i < lists.size; ++i) {
      const int32_t key = listed_key(problem, request, lists, node, i);
      if (key >= 0) listed_.push_back(key);
    }
  }

  bool is_listed() const { return is_listed_; }
  int32_t first_tile() const { return begin_ / kTileColumns; }
  int32_t end_tile() const {
    return is_listed_ ? (listed() + kTileColumns - 1) / kTileColumns
                      : first_node_tile_ + static_cast<int32_t>(ends_.size());
  }
  // The first place of a tile, or the number of keys.
  int32_t first_place(int32_t tile) const {
    if (is_listed_) return std::min(tile * kTileColumns, listed());
    if (tile <= first_node_tile_) return std::max(begin_, tile * kTileColumns);
    return prefix_ + ends_[tile - 1 - first_node_tile_];
  }
  // The places from `place` on, at most `most`, whose keys follow each other, in the prefix or behind it.
  int32_t run_at(int32_t place, int32_t most) const {
    const int32_t first = key_at(place), in_prefix = prefix_ - first;
    if (is_listed_) {
      int32_t run = 1;
      while (run < most && run != in_prefix && key_at(place + run) == first + run) ++run;
      return run;
    }
    if (nodes_.empty()) return most;
    return in_prefix > 0 ? std::min(most, in_prefix) : 1;
  }
  // The key at a place.
  int32_t key_at(int32_t place) const {
    if (is_listed_) return listed_[place];
    return nodes_.empty() || place < prefix_ ? place : prefix_ + nodes_[place - prefix_];
  }

  // The column of the key at a place.
  int32_t column_at(int32_t place) const {
    return is_listed_ || place < prefix_ ? place : columns_[key_at(place) - prefix_];
  }
  // True if the keys at places [first, first + count) are in columns that follow each other.
  bool are_columns(int32_t first, int32_t count) const {
    for (int32_t place = std::max(first, prefix_); !is_listed_ && place < first + count; ++place)
      if (column_at(place) - column_at(first) != place - first) return false;
    return true;
  }

  // True if every node of the task sees all keys at places [first, first + count).
  bool all_see(const AttentionProblem& problem, const AttentionRequest& request, int32_t first, int32_t count) const {
    return is_listed_ || pass_ext::all_see<true>(problem, request, first, count);
  }

  // The keys at places [first, first + 64) that a node sees: bit i for place first + i.
  uint64_t visible(const AttentionProblem& problem, const AttentionRequest& request, int32_t node,
                   int32_t first) const {
    if (is_listed_) return ~uint64_t{0};
    const uint64_t seen = visible_keys<true>(problem, request, node, first);
    if (nodes_.empty() || first + 64 <= prefix_) return seen;
    uint64_t word = seen & ones_below(int64_t{prefix_} - first);
    const int32_t end = static_cast<int32_t>(between(int64_t{first} + 64, 0, prefix_ + nodes_.size()));
    for (int32_t place = std::max(first, prefix_); place < end; ++place)
      word |= (visible_keys<true>(problem, request, node, key_at(place)) & 1) << (place - first);
    return word;
  }

 private:
  static int32_t level_of(const AttentionProblem& problem, const AttentionRequest& request, int32_t node) {
    int32_t seen = 0;
    for (int32_t i = 0; 64 * i < request.nodes; ++i)
      seen +=
          __builtin_popcountll(visible_word(problem, request, node, i) & ones_below(int64_t{request.nodes} - 64 * i));
    return std::max(seen - 1, 0);
  }

  int32_t listed() const { return static_cast<int32_t>(listed_.size()); }

  int32_t prefix_, begin_, first_node_tile_;
  bool is_listed_ = false;
  std::vector<int32_t> listed_;   // keys by place
  std::vector<int32_t> columns_;  // of each node
  std::vector<int32_t> ends_;     // the nodes up to each tile's end, from the tile of column prefix on
  std::vector<int32_t> nodes_;    // nodes by place; empty if they lie in their own order
};

}  // namespace pass_ext
