// Linear layers on the CPU for few rows (core/linear.h), and two of them gated:
//   GatedRows    out = activation(gate product) up product
// Rows of slots may add products of low rank to theirs (core/adapter.h), with the bits of adapter_rows_ behind them.
// linear.cpp cuts the outputs into groups, linear_kernels-inl.h computes them.
#pragma once

#include <cstdint>

#include "core/linear.h"
#include "core/step.h"

namespace pass_ext {

constexpr int kMostTileOutputs = 4;    // outputs whose weights are read side by side
constexpr int64_t kPiece = 768;        // weights of each multiplied before the next piece: fits beside rows of x
constexpr int64_t kGroupOutputs = 96;  // most outputs that a thread takes at once: whole tiles, and vectors
constexpr int64_t kMostStep = 32;      // two vectors of the widest level

template <typename T>
struct SlotAdapter;  // cpu/adapter.h

template <typename T>
struct AdaptedRows : LinearRows<T> {
  const SlotAdapter<T>* adapter = nullptr;
};

// What rows of slots add to a product: scale * hidden[place] up[adapter of the place].
template <typename T>
struct AddedRows {
  const float* hidden;           // [places, rank]; null: nothing
  const T* up;                   // [adapters, rank, outputs]
  const int64_t* place;          // of each row, or -1
  const int64_t *row, *adapter;  // of each place; those of one adapter are neighbours
  int64_t places;
  int64_t adapters, rank, outputs;
  float scale;
};

// Two products of the same rows, of equal shape.
template <typename T>
struct GatedRows {
  AdaptedRows<T> gate, up;
  T* out;  // [rows, outputs]
  Activation activation;
};

constexpr int kMostProducts = 3;  // of the same rows

// What the products behind these read first, the adapters of their rows of slots: each thread asks for it while it
// multiplies, else it would wait for memory that has nothing to do meanwhile.
struct NextAdapters {
  const char* from[kMostProducts] = {};
  int64_t lines[kMostProducts] = {};  // of 64 bytes

  template <typename T>
  void add(int place, const SlotAdapter<T>& adapter, int64_t in);  // cpu/adapter.h
};

// Products of the same rows, shared among threads as one job.
template <typename T>
void multiply(const AdaptedRows<T>* products, int count, const NextAdapters& next = {});
template <typename T>
void multiply(const GatedRows<T>& product, const NextAdapters& next = {});

// Bytes of `rows` rows in the order of multiplication, at most.
constexpr int64_t arranged_bytes(int64_t rows, int64_t in) {
  return rows * ((in + kMostStep - 1) / kMostStep * kMostStep) * int64_t{sizeof(float)};
}

// Calls function(blocks) with a packed weight's memory as blocks of its form.
template <typename Function>
void with_blocks(const void* packed, PackedForm form, Function&& function) {
  switch (form) {
    case PackedForm::none: return;
    case PackedForm::four: return function(static_cast<const PackedFour*>(packed));
    case PackedForm::four_wide: return function(static_cast<const PackedFourWide*>(packed));
    case PackedForm::table: return function(static_cast<const PackedTable*>(packed));
    case PackedForm::table_wide: return function(static_cast<const PackedTableWide*>(packed));
    case PackedForm::eight: return function(static_cast<const PackedEight*>(packed));
    case PackedForm::eight_wide: return function(static_cast<const PackedEightWide*>(packed));
    case PackedForm::four_k: return function(static_cast<const PackedFourK*>(packed));
    case PackedForm::four_k_halves: return function(static_cast<const PackedFourKHalves*>(packed));
    case PackedForm::eight_k: return function(static_cast<const PackedEightK*>(packed));
    case PackedForm::eight_k_halves: return function(static_cast<const PackedEightKHalves*>(packed));
  }
}

// Work space of one thread, 64-byte aligned, for `rows` rows.
struct LinearScratch {
  int64_t rows;
  float* between;  // [rows, kMostTileOutputs, kMostStep / 2]
  float* sums;     // [2, rows, kGroupOutputs]
  float* added;    // [2, rows, kGroupOutputs], sums of what rows of slots add, if any do
  float* copy;     // [kMostTileOutputs, kPiece], of weights; by tiles, sums

  static constexpr int64_t kBetween = kMostTileOutputs * kMostStep / 2;
  static constexpr int64_t floats(int64_t rows, bool has_adapters) {
    return rows * (kBetween + (has_adapters ? 4 : 2) * kGroupOutputs) + kMostTileOutputs * kPiece;
  }
  LinearScratch(float* memory, int64_t rows, bool has_adapters)
      : rows(rows),
        between(memory),
        sums(memory + rows * kBetween),
        added(sums + (has_adapters ? rows * 2 * kGroupOutputs : 0)),
        copy(sums + rows * (has_adapters ? 4 : 2) * kGroupOutputs) {}
};

}  // namespace pass_ext
