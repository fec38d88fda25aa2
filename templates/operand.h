// Epilogue operands that are read straight from memory: scalars, one value for each row, pairs of column values.
// Host and device. Tile operands come through shared memory instead: see tile_operand.h.
#pragma once
#include <type_traits>

#include "batch.h"
#include "launch.h"
#include "quantize.h"
#include "random.h"
#include "reduce.h"
#include "scalar.h"

namespace coda {

// What an operand without data stands for.
template <class T> CODA_FN T constant(Operand const& o) {
  if constexpr (std::is_floating_point_v<T>) return T(o.value);
  else return T(o.integer);
}

template <class D> CODA_FN auto load_scalar(Operand const& o) -> decltype(load((D const*)nullptr)) {
  using T = decltype(load((D const*)nullptr));
  return o.data ? load(static_cast<D const*>(o.data)) : constant<T>(o);
}

template <class D> CODA_FN auto load_row(Operand const& o, int row, int rows, int lane = 0) -> decltype(load((D const*)nullptr)) {
  using T = decltype(load((D const*)nullptr));
  if (!o.data) return constant<T>(o);
  return row < rows ? load(static_cast<D const*>(o.data) + row * o.row + lane * o.lane) : T(0);
}

// How many running results a reduction of partials has, and joins in a tree: the order is that of a finish kernel, where
// threads share a row.
constexpr int kPartialDepth = 16;

// The reduction of a row's partials, [extent][rows] in memory.
template <class R> CODA_FN float load_partials(Operand const& o, int row, int rows) {
  float total[kPartialDepth];
  CODA_UNROLL
  for (int d = 0; d < kPartialDepth; ++d) total[d] = R::identity();
  float const* p = static_cast<float const*>(o.data) + int64_t(row) * o.row;
  for (int first = 0; row < rows && first < o.extent; first += kPartialDepth)
    CODA_UNROLL
    for (int d = 0; d < kPartialDepth; ++d)
      if (first + d < o.extent) total[d] = R::combine(total[d], p[(first + d) * o.column]);
  CODA_UNROLL
  for (int half = kPartialDepth / 2; half > 0; half /= 2)
    CODA_UNROLL
    for (int d = 0; d < half; ++d) total[d] = R::combine(total[d], total[d + half]);
  return R::value(total[0]);
}

// Columns `column` and `column + 1`; zero beyond the last one.
template <class D>
CODA_FN auto load_columns(Operand const& o, int column, int columns, int lane = 0)
    -> Two<decltype(load((D const*)nullptr))> {
  using T = decltype(load((D const*)nullptr));
  if (!o.data) return {constant<T>(o), constant<T>(o)};
  D const* p = static_cast<D const*>(o.data) + column * o.column + lane * o.lane;
  return {column < columns ? load(p) : T(0), column + 1 < columns ? load(p + o.column) : T(0)};
}

// Head-wise operands: `lane` is the stride from head to head.
template <class D> CODA_FN auto load_head(Operand const& o, int head, int column) -> decltype(load((D const*)nullptr)) {
  using T = decltype(load((D const*)nullptr));
  return o.data ? load(static_cast<D const*>(o.data) + head * o.lane + column * o.column) : T(o.value);
}
template <class D>
CODA_FN auto load_head_columns(Operand const& o, int head, int column) -> Two<decltype(load((D const*)nullptr))> {
  return {load_head<D>(o, head, column), load_head<D>(o, head, column + 1)};
}
// What a position outside a table selects: NaNs of every dtype, as many as a head can have columns. A wrong position
// shows, and no element asks for it.
struct alignas(16) NanRow {
  uint32_t words[256];
  constexpr NanRow() : words() {
    for (int i = 0; i < 256; ++i) words[i] = 0x7fc07fc0u;
  }
};
#if defined(__CUDACC__)
static __device__ NanRow const nan_row;
#else
static NanRow const nan_row;
#endif

// Where row `row` of a table begins.
template <class D> CODA_FN D const* gathered_row(Operand const& o, int64_t row) {
#if !defined(__CUDACC__) || defined(__CUDA_ARCH__)
  if (row < 0 || row >= o.extent) return reinterpret_cast<D const*>(nan_row.words);
#endif
  return static_cast<D const*>(o.data) + row * o.row;
}
// Two columns of such a row, one aligned word (legality.py).
template <class D> CODA_FN Two<float> load_gathered(D const* row, int column) {
  struct alignas(2 * sizeof(D)) Pair { D x, y; };
  Pair const pair = *reinterpret_cast<Pair const*>(row + column);
  return {load(&pair.x), load(&pair.y)};
}
// Columns of a table that a thread of a strip has, in pairs; `kPairs` is 4 or 2.
template <class D, int kPairs> struct TableRun {
  Two<float> pairs[kPairs];
};
// 16 bytes at a time where the table lies so.
template <class D, int kPairs> CODA_FN TableRun<D, kPairs> load_run(D const* row, int column) {
  constexpr int kBytes = 2 * kPairs * int(sizeof(D)), kWide = kBytes < 16 ? kBytes : 16;
  constexpr int kEach = kWide / int(2 * sizeof(D));  // pairs in an access
  struct alignas(kWide) Wide { D values[2 * kEach]; };
  D const* const from = row + column;
  TableRun<D, kPairs> run;
  if (reinterpret_cast<uintptr_t>(from) % kWide == 0) {
    CODA_UNROLL
    for (int i = 0; i < kPairs / kEach; ++i) {
      Wide const wide = reinterpret_cast<Wide const*>(from)[i];
      CODA_UNROLL
      for (int j = 0; j < kEach; ++j) run.pairs[i * kEach + j] = {load(&wide.values[2 * j]), load(&wide.values[2 * j + 1])};
    }
  } else {
    CODA_UNROLL
    for (int j = 0; j < kPairs; ++j) run.pairs[j] = load_gathered(row, column + 2 * j);
  }
  return run;
}
// One of its columns.
template <class D> CODA_FN float load_gathered_element(D const* row, int column) { return load(row + column); }

// Element i of an operand in a finish kernel: of a row or column operand, where one of the two strides is 0, or of one
// that is counted by two loops (Finish in launch.h).
template <class D> CODA_FN auto load_element(Operand const& o, int i) -> decltype(load((D const*)nullptr)) {
  using T = decltype(load((D const*)nullptr));
  if (!o.data) return constant<T>(o);
  int64_t const at = o.extent ? i / o.extent * o.lane + i % o.extent * o.row : i * (o.row + o.column);
  return load(static_cast<D const*>(o.data) + at);
}

// The element of a column operand at an index of its own; 0 outside the operand, where nothing is read.
template <class D> CODA_FN auto load_at(Operand const& o, int64_t index, int64_t columns) -> decltype(load((D const*)nullptr)) {
  using T = decltype(load((D const*)nullptr));
  if (index < 0 || index >= columns) return T(0);
  return o.data ? load(static_cast<D const*>(o.data) + index * o.column) : constant<T>(o);
}

// What the epilogue picked in row i (store_pick); 0 where there were no columns, hence no epilogue.
CODA_FN float load_picked(Operand const& o, int i) { return o.extent ? static_cast<float const*>(o.data)[i] : 0.0f; }

}  // namespace coda
