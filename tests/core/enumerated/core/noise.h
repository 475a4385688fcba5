// Replaces csrc/core/noise.h to enumerate core/accept_walk.h: a coin is not thrown but compared with its bound, and a
// script decides the outcome. Both outcomes are tried in turn, with the probability of each.
#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <utility>
#include <vector>

#include "core/platform.h"

namespace pass_ext {

constexpr int kGroup = 64;

enum class Purpose : uint32_t { coupled, coin, residual, bonus, draft, inverse };

struct Noise {
  uint64_t seed;
  int64_t position;
  Purpose purpose;
  uint32_t node, draw, first_group = 0;
};

// Scripts decide, not seeds.
struct NoiseKey {
  uint64_t seed, position;
};
inline NoiseKey noise_key(const int64_t*, const int64_t*, int64_t) { return {0, 0}; }

// Choices so far, as {taken, number of options}. Behind the end of the script the first option is taken and noted.
struct Script {
  std::vector<std::pair<size_t, size_t>> choices;
  size_t made = 0;
  double probability = 1.0;
  // A walk on shards is repeated with the same coins: node -> its bound and how the coin fell.
  bool repeats = false;
  std::map<int, std::pair<double, bool>> fallen;

  // The place of the chosen option; impossible options are not counted.
  size_t choose(const std::vector<double>& probabilities) {
    std::vector<size_t> options;
    for (size_t i = 0; i < probabilities.size(); ++i)
      if (probabilities[i] > 0.0) options.push_back(i);
    if (made == choices.size()) choices.push_back({0, options.size()});
    const size_t option = options[choices[made++].first];
    probability *= probabilities[option];
    return option;
  }

  // Moves to the next script; false behind the last.
  bool next() {
    made = 0;
    probability = 1.0;
    fallen.clear();
    while (!choices.empty() && choices.back().first + 1 == choices.back().second) choices.pop_back();
    if (choices.empty()) return false;
    ++choices.back().first;
    return true;
  }
};

inline Script* script = nullptr;

// factor u, u uniform in [0, 1)
struct Coin {
  double factor;
  int node;
};
inline Coin operator*(double factor, Coin coin) { return {factor * coin.factor, coin.node}; }
inline Coin operator*(Coin coin, double factor) { return factor * coin; }
inline bool operator<(Coin coin, double bound) {
  const double ratio = bound / coin.factor, below = ratio < 0.0 ? 0.0 : ratio > 1.0 ? 1.0 : ratio;
  if (!(below > 0.0)) return script->repeats ? false : script->choose({0.0, 1.0}) == 0;  // NaN: not known yet
  const auto place = script->repeats ? script->fallen.find(coin.node) : script->fallen.end();
  if (place == script->fallen.end()) {
    const bool is_below = script->choose({below, 1.0 - below}) == 0;
    if (script->repeats) script->fallen[coin.node] = {below, is_below};
    return is_below;
  }
  if (place->second.first != below) throw std::runtime_error("a coin was thrown twice, with different bounds");
  return place->second.second;
}

inline Coin coin(uint64_t, int64_t, int node) { return {1.0, node}; }
inline uint64_t uniform_bits(const Noise&) { return 0; }  // nobody reads it: a script chooses the token

}  // namespace pass_ext
