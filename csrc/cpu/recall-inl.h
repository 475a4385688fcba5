// Recall behind one path on the CPU, at one instruction set (see each_isa.h): raises scores[k] by that of tokens[k].
// followed: memory for 3 · count numbers.

// Writes the places in [begin, end) that hold the token, and returns how many: without a branch on what they hold,
// which no processor could foresee.
inline int32_t places_of(const int64_t* tokens, int64_t begin, int64_t end, int64_t token, int64_t* found) {
  int32_t count = 0;
  for (int64_t place = begin; place < end; ++place) {
    found[count] = place;
    count += tokens[place] == token;
  }
  return count;
}

inline bool is_among(const int64_t* tokens, int64_t begin, int64_t end, int64_t token) {
  int64_t equal = 0;
  for (int64_t place = begin; place < end; ++place) equal |= tokens[place] == token;
  return equal != 0;
}

inline void recall_below(const RecallText& text, const RecallContext& context, const int64_t* tokens, int32_t count,
                         int32_t* followed, float* scores) {
  constexpr int64_t kBlock = 64;  // compared at once: most blocks of a text do not hold a token
  int32_t places[kRecallTokens] = {};
  bool is_cleared = false;
  for (int64_t begin = text.begin; begin + 1 < text.end; begin += kBlock) {
    const int64_t end = begin + kBlock < text.end - 1 ? begin + kBlock : text.end - 1;
    if (!is_among(text.tokens, begin, end, context.last[0])) continue;
    int64_t found[kBlock + 1];
    const int32_t found_count = places_of(text.tokens, begin, end, context.last[0], found);
    for (int32_t i = 0; i < found_count; ++i) {
      const int32_t n = recalled_at(text, context, found[i]);
      if (n == 0) continue;
      if (!is_cleared) memset(followed, 0, sizeof(int32_t) * kRecallTokens * count);
      is_cleared = true;
      ++places[n - 1];
      int32_t* const row = followed + int64_t{n - 1} * count;
      const int64_t behind = text.tokens[found[i] + 1];
      for (int32_t k = 0; k < count; ++k) row[k] += tokens[k] == behind;
    }
  }
  if (!is_cleared) return;
  for (int32_t k = 0; k < count; ++k) scores[k] += recall_of(places, followed + k, count);
}
