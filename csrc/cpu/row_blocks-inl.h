// Rows of a linear layer cut into blocks, which tiles multiply at once, at one instruction set (see each_isa.h).

// The most rows of a tile: their sums fit the registers. Pairs are multiplied so fast that more rows at once pay.
#if PASS_EXT_LEVEL == 3
constexpr int kTileRows = 9;
#elif PASS_EXT_LEVEL >= 1
constexpr int kTileRows = 6;
#else
constexpr int kTileRows = 2;
#endif

// Calls function(integral constant R).
template <int R>
struct RowCount {
  static constexpr int value = R;
};
template <typename Function>
inline void with_rows(int rows, Function&& function) {
  switch (rows) {
    case 1: return function(RowCount<1>{});
    case 2: return function(RowCount<2>{});
#if PASS_EXT_LEVEL >= 1
    case 3: return function(RowCount<3>{});
    case 4: return function(RowCount<4>{});
    case 5: return function(RowCount<5>{});
    case 6: return function(RowCount<6>{});
#endif
#if PASS_EXT_LEVEL == 3
    case 7: return function(RowCount<7>{});
    case 8: return function(RowCount<8>{});
    case 9: return function(RowCount<9>{});
#endif
  }
}

// Cuts `rows` rows into blocks of nearly equal size, the larger ones first.
struct RowBlocks {
  int64_t rows, count;

  explicit RowBlocks(int64_t rows) : rows(rows), count((rows + kTileRows - 1) / kTileRows) {}
  int64_t begin(int64_t block) const {
    const int64_t larger = rows % count;
    return block * (rows / count) + (block < larger ? block : larger);
  }
  int size(int64_t block) const { return static_cast<int>(begin(block + 1) - begin(block)); }
};
