// A batch of products: to a visitor, each of them is a launch of its own, whose operands and outputs lie `batch` steps
// further on.
#pragma once
#include <type_traits>

#include "launch.h"
#include "scalar.h"

namespace coda {

// The operands, or the outputs, of one batch.
template <class T> struct OfBatch {
  T const* first;  // of batch 0
  int64_t const* steps;
  int batch;
  CODA_FN T operator[](int i) const {
    T moved = first[i];
    using Bytes = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(moved.data)>>, char const, char>;
    moved.data = static_cast<Bytes*>(moved.data) + steps[i] * batch;
    return moved;
  }
};

// What a visitor reads of a launch, for one batch.
template <class Launch> struct Batch {
  int32_t m, n;
  OfBatch<Operand> operands;
  OfBatch<Output> outputs;
  CODA_FN Batch(Launch const& p, int batch)
      : m(p.m), n(p.n), operands{p.operands, p.operand_step, batch}, outputs{p.outputs, p.output_step, batch} {}
};

}  // namespace coda
