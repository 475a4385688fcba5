// A row of keys or values in 8 bits: 16 bytes, of which the first four are a float32, and behind them a code for each
// number:
//   number = scale * value of its code
// So a row is moved with its scale, starts at a multiple of 16 bytes wherever it did without one, and the values of
// multi-head latent attention, the first numbers of its keys, have the scale of these.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/platform.h"

namespace pass_ext {

// none: numbers in the dtype of the queries.
enum class CodeType : int32_t { none, int8, float8_e4m3, float8_e5m2 };

constexpr int32_t kCodeHeader = 16;  // bytes; pass_ext.ops.quantized.CODE_HEADER

PASS_EXT_HOST_DEVICE float scale_of_codes(const uint8_t* row) {
  float scale;
  memcpy(&scale, row, sizeof scale);
  return scale;
}

}  // namespace pass_ext
