// A rectangle of words turned, for tiles (cpu/tiles.h): to[column][row] = from[row][column].
// Of `from` there are `rows_there` rows of `bytes_there` bytes, `from_row` bytes apart; what is missing is 0. The text
// belongs inside a level's namespace.
#include "cpu/transpose-inl.h"

inline void turn_words(const char* from, int64_t from_row, int64_t rows_there, int64_t bytes_there, int64_t rows,
                       int64_t columns, uint32_t* to, int64_t to_row) {
  for (int64_t column = 0; column < columns; column += Words::width)
    for (int64_t row = 0; row < rows; row += Words::width) {
      Words block[Words::width];
      const int64_t bytes = bytes_there - column * 4;
#pragma GCC unroll 16
      for (int i = 0; i < Words::width; ++i) {
        uint32_t words[Words::width] = {};
        const char* const first = from + (row + i) * from_row + column * 4;
        if (row + i < rows_there && bytes >= static_cast<int64_t>(sizeof words))
          memcpy(words, first, sizeof words);
        else if (row + i < rows_there && bytes > 0)
          memcpy(words, first, bytes);
        block[i] = load_words(words);
      }
      transpose(block);
      const int64_t count = rows - row;
      for (int i = 0; i < Words::width && column + i < columns; ++i) {
        uint32_t* const place = to + (column + i) * to_row + row;
        if (count >= Words::width) {
          store_words(place, block[i]);
        } else {
          uint32_t words[Words::width];
          store_words(words, block[i]);
          memcpy(place, words, count * sizeof words[0]);
        }
      }
    }
}
