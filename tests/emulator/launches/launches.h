// What tests can run on the emulator, by op. A pointer arrives as a number, a dtype by its torch name.
// Defined by the <column>.cpp beside this file, which are compiled with the checks on; bound to Python by module.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace emulator {

using Address = uintptr_t;

template <typename T>
T* as(Address address) {
  return reinterpret_cast<T*>(address);
}

using Numbers = std::map<std::string, int64_t>;  // addresses among them; a missing one is 0

// Numbers by name; 0, which as a pointer means "none", for what was not given.
struct Arguments {
  const Numbers& numbers;

  int64_t operator()(const std::string& name) const {
    const auto found = numbers.find(name);
    return found == numbers.end() ? 0 : found->second;
  }
  template <typename T>
  T* at(const std::string& name) const {
    return as<T>(static_cast<Address>((*this)(name)));
  }
};

// primitives.cpp, planted_faults.cpp
void run_primitive(const std::string& name, Address in, Address out, Address out2, Address out3, int a, int b, int c);
void run_planted_fault(const std::string& name, Address in, Address out, bool broken);

// lookahead.cpp
void lookahead_embed(const std::string& dtype, const std::string& slot_dtype, bool wide_ids, Address ids, Address table,
                     Address lookahead, Address out, int64_t rows, int64_t dim, int64_t vocabulary, int64_t slots,
                     int64_t table_stride);
void lookahead_embed_backward(const std::string& dtype, const std::string& out_dtype, bool wide_ids, Address grad,
                              Address ids, Address out, Address partial, int64_t rows, int64_t dim, int64_t out_rows,
                              bool slots);
int64_t lookahead_embed_backward_splits(int64_t rows);

// accept.cpp
int64_t draft_workspace(const Numbers& numbers);
int64_t draft_scan_blocks(const Numbers& numbers);
void draft(const Numbers& numbers);
int64_t accept_workspace(const Numbers& numbers);
void accept(const Numbers& numbers, float threshold, float alpha);

// tree.cpp, attention.cpp, cache.cpp: `name` is the op's
void tree(const std::string& name, const Numbers& numbers);
int64_t attention_workspace(const Numbers& numbers);
void attention(const std::string& name, const Numbers& numbers, float scale, float softcap);
void cache_commit(const Numbers& numbers, const std::vector<Address>& caches, const std::vector<Address>& fresh);

}  // namespace emulator
