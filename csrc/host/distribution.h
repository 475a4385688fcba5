// Checks logits and sampling parameters, the same on every device, and packs them into the structs of
// core/distribution.h.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "core/distribution.h"
#include "host/checks.h"
#include "host/tensor.h"

namespace pass_ext {

constexpr int64_t kMostVocabulary = 1 << 22;  // integer masses and counters are sized for it

// The tensor and the count that a per-request or per-row argument must match.
struct PerRow {
  const char* op;
  const Tensor& logits;  // for the device
  const char* logits_name;
  int64_t count;
  const char* meaning;  // `count` in words
};

inline LogitType logit_type_of(const Tensor& logits) {
  return logits.scalar_type() == ScalarType::BFloat16 ? LogitType::bfloat16
         : logits.scalar_type() == ScalarType::Half   ? LogitType::float16
                                                      : LogitType::float32;
}

inline void check_logits(const char* op, const char* argument, const Tensor& logits, int64_t dim, const char* shape) {
  check_dtype(op, argument, logits, {ScalarType::BFloat16, ScalarType::Half, ScalarType::Float});
  check_dim(op, argument, logits, dim, shape);
  check_contiguous_rows(op, argument, logits);
  const int64_t vocabulary = logits.size(dim - 1);
  if (vocabulary < 1 || vocabulary > kMostVocabulary)
    refuse(op, argument, " must have a vocabulary of 1 to ", kMostVocabulary, ", got ", describe(logits));
}

inline void check_column(const PerRow& rows, const char* argument, const Tensor& column, ScalarType type) {
  check_dtype(rows.op, argument, column, {type});
  check_dim(rows.op, argument, column, 1, "[n], one number each");
  check_size(rows.op, argument, column, 0, rows.count, rows.meaning);
  check_same_device(rows.op, argument, column, rows.logits_name, rows.logits);
  if (!column.is_contiguous())
    refuse(rows.op, argument, " must be contiguous, got ", describe(column), " with stride ", column.stride(0));
}

// The data of an optional vector with one number per row, or null.
template <typename T>
const T* column_of(const PerRow& rows, const char* argument, const OptionalTensor& column, ScalarType type) {
  if (!column.has_value()) return nullptr;
  check_column(rows, argument, *column, type);
  return data_of<T>(rows.op, argument, *column);
}

struct SamplingArguments {
  const OptionalTensor &temperature, &top_k, &top_p, &min_p;
};

inline SamplingParameterArrays sampling_parameters_of(const PerRow& rows, const SamplingArguments& sampling,
                                                      bool draft = false) {
  return {column_of<float>(rows, draft ? "draft_temperature" : "temperature", sampling.temperature, ScalarType::Float),
          column_of<int32_t>(rows, draft ? "draft_top_k" : "top_k", sampling.top_k, ScalarType::Int),
          column_of<float>(rows, draft ? "draft_top_p" : "top_p", sampling.top_p, ScalarType::Float),
          column_of<float>(rows, draft ? "draft_min_p" : "min_p", sampling.min_p, ScalarType::Float)};
}

// A mask of `rows` rows of ceil(vocabulary / 32) words, or null.
inline const int32_t* allowed_of(const char* op, const char* argument, const OptionalTensor& allowed,
                                 const Tensor& logits, const char* logits_name, int64_t rows) {
  if (!allowed.has_value()) return nullptr;
  const int64_t words = (logits.size(logits.dim() - 1) + 31) / 32;
  check_dtype(op, argument, *allowed, {ScalarType::Int});
  check_same_device(op, argument, *allowed, logits_name, logits);
  if (allowed->dim() < 2 || allowed->size(allowed->dim() - 1) != words || allowed->numel() != rows * words)
    refuse(op, argument, " must have shape [", rows, ", ", words, "] (a word for 32 tokens), got ", describe(*allowed));
  if (!allowed->is_contiguous()) refuse(op, argument, " must be contiguous, got ", describe(*allowed));
  return data_of<int32_t>(op, argument, *allowed);
}

// The rows of a matrix; for a batch of matrices, those of the first.
inline LogitRows logit_rows_of(const char* op, const char* argument, const Tensor& logits, const int32_t* allowed) {
  const int64_t dim = logits.dim();
  return {data_of<void>(op, argument, logits), allowed, logits.stride(dim - 2), logit_type_of(logits),
          static_cast<int32_t>(logits.size(dim - 1))};
}

}  // namespace pass_ext
