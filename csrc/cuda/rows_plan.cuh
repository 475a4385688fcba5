// The memory of a step that scans rows of logits, and the number of its blocks, from the number of rows and the GPU's
// size: all rows are scanned by the whole GPU beforehand, or each by the block that reads it.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/accept.h"
#include "core/distribution.h"
#include "core/noise.h"
#include "cuda/primitives.cuh"
#include "cuda/row_champion.cuh"
#include "cuda/row_scan.cuh"

namespace pass_ext::gpu {

constexpr unsigned kScanWarps = 4;
constexpr int kScansPerMultiprocessor = 6;  // blocks
constexpr int64_t kMaxDrawingWaves = 4;   // waves of scanning blocks, one after the other, that draw the noise of races
constexpr int64_t kMaxChunksPerWarp = 4;  // scanned one after the other
constexpr int64_t kMaxRowsBeforehand = 4096;  // their summaries: 40 MB at V 128,256
constexpr int32_t kGroupsInShared = 4096;     // bounds of a race in shared memory: 262,144 tokens
constexpr int kBlocksPerMultiprocessor = 2;
constexpr int32_t kSupport = 64;  // tokens of a filtered row that a later draw finds in a list

// Global memory of one problem. `rows` is the number of rows that are scanned and finished beforehand. If it is 0, a
// block scans a row when it first reads it, and has memory for the summaries of two.
struct RowsWorkspace {
  float* maxima;                // [rows or 2 blocks, groups]
  ChunkSum* chunks;             // [rows or 2 blocks, chunks]
  float* log_firsts;            // [rows, groups] if the scan draws the noise of the races; else null
  Champion* champions;          // [rows, chunks], the same
  float* bounds;                // [the larger of rows and blocks, groups] if shared memory is too small
  Distribution* distributions;  // [rows]
  int32_t* winners;             // [rows], rule coupled: the token that the target draws
  uint64_t* supports;           // [rows, kSupport] keys of filtered rows with so few tokens, for later draws; or null
  int32_t* support_sizes;       // [rows]; 0: the row has more
  Judge* judges;                // [nodes]
  int32_t* divided;             // [1]: 1 if cu_nodes divides the rows, else 0
  int32_t* counters;            // [rows + 1], zero before and after: blocks that have scanned a row; finished rows
  int64_t rows;
  int32_t groups;  // rounded up to a multiple of four, so that four of a row are read at once
  int32_t chunks_per_row, scan_blocks;
#ifdef PASS_EXT_STAMPS
  Stamp* stamps;  // [kStampedBlocks, Phase::count]
#endif
};

// `index`: the summary's index in the workspace.
PASS_EXT_DEVICE RowSummary summary_of(const RowsWorkspace& workspace, int64_t index) {
  return {workspace.maxima + index * workspace.groups, workspace.chunks + index * workspace.chunks_per_row,
          workspace.groups};
}

PASS_EXT_DEVICE RowRace race_of(const RowsWorkspace& workspace, int64_t index) {
  if (workspace.log_firsts == nullptr) return {};
  return {workspace.log_firsts + index * workspace.groups, workspace.champions + index * workspace.chunks_per_row};
}

// The sizes of a RowsWorkspace. All but that of `judges` are limited by what the GPU works on at once, not by the
// number of requests.
struct RowsPlan {
  int64_t rows, blocks, nodes;
  int32_t groups, chunks_per_row, scan_blocks;  // for each row
  bool draws;                                   // the scan draws the noise of the rows' races
  bool lists_supports = false;                  // rows are filtered, and drawn from after the scan
  bool is_one_launch = false;                   // accept: the block that finishes the last row walks

  int64_t summaries() const { return rows > 0 ? rows : 2 * blocks; }
  int64_t bounds() const { return groups <= kGroupsInShared ? 0 : rows > blocks ? rows : blocks; }
  int64_t bytes() const {
    RowsWorkspace workspace{};
    return carve(nullptr, workspace);
  }
  RowsWorkspace carve(void* memory, int32_t* counters) const {
    RowsWorkspace workspace{};
    carve(static_cast<char*>(memory), workspace);
    workspace.counters = counters;
    workspace.rows = rows;
    workspace.groups = groups;
    workspace.chunks_per_row = chunks_per_row;
    workspace.scan_blocks = scan_blocks;
    return workspace;
  }

 private:
  int64_t carve(char* memory, RowsWorkspace& workspace) const {
    int64_t used = 0;
    const auto take = [&](auto*& part, int64_t count) {
      part = reinterpret_cast<std::decay_t<decltype(part)>>(memory + used);
      used += (count * static_cast<int64_t>(sizeof *part) + 15) / 16 * 16;
    };
    take(workspace.judges, nodes);
    take(workspace.distributions, rows);
    take(workspace.chunks, summaries() * chunks_per_row);
    take(workspace.maxima, summaries() * groups);
    take(workspace.log_firsts, draws ? rows * groups : 0);
    take(workspace.champions, draws ? rows * chunks_per_row : 0);
    if (!draws) workspace.log_firsts = nullptr;
    take(workspace.bounds, bounds() * groups);
    take(workspace.winners, rows);
    take(workspace.supports, lists_supports ? rows * kSupport : 0);
    if (!lists_supports) workspace.supports = nullptr;
    take(workspace.support_sizes, lists_supports ? rows : 0);
    take(workspace.divided, 1);
    return used;
  }
};

// The blocks that scan one row, if each warp scans one chunk.
inline int64_t scans_of_row(int32_t vocabulary) {
  return (chunks_of(vocabulary) + int64_t{kScanWarps} - 1) / kScanWarps;
}

// The blocks that scan at the same time on the whole GPU.
inline int64_t resident_scans(int multiprocessors) {
  return kScansPerMultiprocessor * int64_t{multiprocessors > 0 ? multiprocessors : 1};
}

// The number of blocks that scan one row. A warp that scans several chunks locates its row only once, but then there
// are fewer blocks: enough must remain to occupy the whole GPU to the end.
inline int32_t scan_blocks_of(int64_t rows, int32_t vocabulary, int multiprocessors) {
  const int64_t all = scans_of_row(vocabulary);
  int64_t chunks_per_warp = rows * all / (4 * resident_scans(multiprocessors));
  if (chunks_per_warp < 1) chunks_per_warp = 1;
  if (chunks_per_warp > kMaxChunksPerWarp) chunks_per_warp = kMaxChunksPerWarp;
  return static_cast<int32_t>((all + chunks_per_warp - 1) / chunks_per_warp);
}

// `rows`: the rows that may have to be scanned; `visited`: the rows that a block reads for one request. A scan
// beforehand reads all rows with the whole GPU. A block that scans on the way reads only the rows that it visits. On an
// H100 a row of 128,256 then takes 2.3 times as long on a full GPU, and a lone block takes as long for one as the scan
// for some 140. `races`: a scan beforehand knows the noise of the rows' races. It draws that noise only if there are
// few scanning blocks. Then latency decides. With many blocks bandwidth decides, and the scan, which uses half of a
// warp's lanes for noise, would take longer than the block that finishes the row.
inline RowsPlan plan_rows(int64_t rows, int64_t requests, int64_t visited, int64_t nodes, int32_t vocabulary,
                          bool races, int multiprocessors) {
  const int64_t busy = 2 * requests > multiprocessors ? 2 * requests : multiprocessors;
  int64_t max_rows = 32 * static_cast<int64_t>(multiprocessors),
          blocks = kBlocksPerMultiprocessor * int64_t{multiprocessors};
  if (max_rows > kMaxRowsBeforehand) max_rows = kMaxRowsBeforehand;
  if (blocks < 1) blocks = 1;
  const bool beforehand = rows <= max_rows && rows <= visited * busy;
  return {beforehand ? rows : 0,
          requests < blocks ? requests : blocks,
          nodes,
          (groups_of(vocabulary) + 3) / 4 * 4,
          chunks_of(vocabulary),
          beforehand ? scan_blocks_of(rows, vocabulary, multiprocessors) : 0,
          beforehand && races && rows * scans_of_row(vocabulary) <= kMaxDrawingWaves * resident_scans(multiprocessors)};
}

// Threads of a block that works on one row.
inline unsigned threads_for(int32_t vocabulary) { return vocabulary <= 4 * kChunk ? 128 : 256; }

}  // namespace pass_ext::gpu
