// Recall behind one path on the CPU, at one instruction set (see each_isa.h): raises scores[k] by that of tokens[k].
// followed: memory for 3 · count numbers.

inline void recall_below(const RecallText& text, const RecallContext& context, const int64_t* tokens, int32_t count,
                         int32_t* followed, float* scores) {
  int32_t places[kRecallTokens] = {};
  for (int64_t place = text.begin; place + 1 < text.end; ++place) {
    if (text.tokens[place] != context.last[0]) continue;
    const int32_t n = recalled_at(text, context, place);
    if (n == 0) continue;
    if (places[0] + places[1] + places[2] == 0) memset(followed, 0, sizeof(int32_t) * kRecallTokens * count);
    ++places[n - 1];
    int32_t* const row = followed + int64_t{n - 1} * count;
    const int64_t behind = text.tokens[place + 1];
    for (int32_t k = 0; k < count; ++k) row[k] += tokens[k] == behind;
  }
  if (places[0] + places[1] + places[2] == 0) return;
  for (int32_t k = 0; k < count; ++k) scores[k] += recall_of(places, followed + k, count);
}
