// What attention on the CPU multiplies: numbers in fp32, or pairs of bf16, and the rows of a tile that they are made
// of. The text follows that of product-inl.h and attention_codes-inl.h.

// Numbers in fp32, whatever the storage type T. A tile's rows are keys.
template <typename T>
struct Singles {
  using Query = T;
  using Storage = T;
  using Element = float;
  static constexpr bool has_factors = false;            // each key has one of its scores, and one of its weights
  static constexpr int size = 1;                        // keys, or components, in an element
  static constexpr bool is_stored_so = sizeof(T) == 4;  // cached keys are elements already

  static float query(const T* row, int32_t i) { return to_float(row[i]); }

  static void put_key(float* tile, int32_t key, const T* row, int32_t dim) {
    for (int32_t d = 0; d < dim; d += Floats::width) store(tile + key * dim + d, load(row + d));
  }
  // A vector of columns of one element. rows: the values of its `size` consecutive keys.
  static Floats values(const T* const* rows, int64_t column) { return load(rows[0] + column); }
  // Stores the weights of `size` consecutive keys for a vector of rows. Adds to their total what the product will use.
  static void put_weights(float* to, const Floats* weights, Floats& total) {
    store(to, weights[0]);
    total = total + weights[0];
  }
};

// Keys and values that were codes, beside queries of another type.
template <typename T>
struct Decoded : Singles<float> {
  using Query = T;
  static float query(const T* row, int32_t i) { return to_float(row[i]); }
};

#if PASS_EXT_LEVEL == 3
// Two bf16 in a word: neighbouring components of a query or key, or the values of two keys. The processor adds the
// product of the high halves first, so the earlier key is there: keys then count in their order, wherever those lie
// that weigh 0.
struct Pairs {
  using Query = bfloat16;
  using Storage = bfloat16;
  using Element = uint32_t;
  static constexpr bool has_factors = false;
  static constexpr int size = 2;
  static constexpr bool is_stored_so = true;

  static uint32_t query(const bfloat16* row, int32_t i) {
    return static_cast<uint32_t>(row[2 * i].bits) | static_cast<uint32_t>(row[2 * i + 1].bits) << 16;
  }
  static void put_key(uint32_t* tile, int32_t key, const bfloat16* row, int32_t dim) {
    memcpy(tile + key * (dim / 2), row, dim * sizeof *row);
  }
  static Words values(const bfloat16* const* rows, int64_t column) {
    return interleaved(rows[1] + column, rows[0] + column);
  }
  static void put_weights(uint32_t* to, const Floats* weights, Floats& total) {
    const Words pair = paired(weights[1], weights[0]);
    store_words(to, pair);
    total = sum_of_products(total, pair, constant(pair, 0x3f803f80u));  // times one, one
  }
};

// Codes, which bf16 holds exactly; their scales are factors.
struct CodedPairs : Pairs {
  static constexpr bool has_factors = true;
};
#endif

// The rows of a tile in memory.
template <typename T>
struct TileRows {
  const T *key[kTileKeys], *value[kTileKeys];
  int32_t count = 0;
  bool is_even = false;  // all neighbouring keys are equally far apart, and all neighbouring values

  // Finds the keys at places [first, end).
  void find(const AttentionTask& task, int32_t first, int32_t end) {
    const AttentionProblem& problem = *task.problem;
    const AttentionRequest& request = task.request;
    count = end - first;
    is_even = true;
    for (int32_t i = 0; i < count;) {
      const int32_t place = first + i, from = task.tiles->key_at(place);
      const bool is_fresh = problem.k_new.data && from >= request.prefix;
      int64_t run = task.tiles->run_at(place, end - place);
      if (from < request.prefix && problem.k_new.data) run = minimum_of(run, request.prefix - from);
      if (problem.block_table && !is_fresh) run = minimum_of(run, problem.page_size - from % problem.page_size);
      const int32_t next = static_cast<int32_t>(i + run);
      is_even = is_even && run == count;
      put(key, i, next, key_row<T>(problem, request, problem.k_cache, problem.k_new, from, task.head),
          is_fresh ? problem.k_new.slot : problem.k_cache.slot);
      put(value, i, next, key_row<T>(problem, request, problem.v_cache, problem.v_new, from, task.head),
          is_fresh ? problem.v_new.slot : problem.v_cache.slot);
      i = next;
    }
  }

  // Asks for all rows at once, where no tile before this one could.
  void prefetch(int32_t key_bytes, int32_t value_bytes) const {
    const auto fetch = [](const T* row, int32_t bytes) {
      for (int32_t byte = 0; byte < bytes; byte += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(row) + byte, 0, 2);
    };
    for (int32_t i = 0; i < count; ++i) {
      fetch(key[i], key_bytes);
      fetch(value[i], value_bytes);
    }
  }

 private:
  static void put(const T** rows, int32_t begin, int32_t end, const T* row, int64_t stride) {
    for (int32_t i = begin; i < end; ++i) rows[i] = row + (i - begin) * stride;
  }
};
