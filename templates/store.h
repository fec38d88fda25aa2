// Sinks: results go from registers to memory, 16 bytes a lane where the output allows it.
//
// Positions: a thread holds, for each group j of eight columns and each row half rr, two neighbouring columns
// 8j + 2q, q = lane & 3; words[2 * j + rr] is that pair of 16-bit values, or of 8-bit values in the low half.
#pragma once
#include <cutlass/cutlass.h>

#include "launch.h"
#include "reduce.h"
#include "scalar.h"

namespace coda {

// Where a step's results lie: the row of row half 0, the first column of the step, and the limits of the output.
struct StepPosition {
  int row, column, rows, columns, q;
  int64_t offset[2];  // elements to the beginning of the two rows of a thread, in the output that is stored
};

// Transpose within a quad: out[i] = lane i's in[q].
CUTLASS_DEVICE void transpose4(uint32_t (&r)[4], int q) {
  bool const odd = q & 1, high = q & 2;
  uint32_t s0 = odd ? r[0] : r[1], s1 = odd ? r[2] : r[3];
  s0 = __shfl_xor_sync(~0u, s0, 1), s1 = __shfl_xor_sync(~0u, s1, 1);
  if (odd) r[0] = s0, r[2] = s1;
  else r[1] = s0, r[3] = s1;
  s0 = high ? r[0] : r[2], s1 = high ? r[1] : r[3];
  s0 = __shfl_xor_sync(~0u, s0, 2), s1 = __shfl_xor_sync(~0u, s1, 2);
  if (high) r[0] = s0, r[1] = s1;
  else r[2] = s0, r[3] = s1;
}

// An element of an output whose rows come in one run: partial results.
template <class T> CUTLASS_DEVICE T* element(Output const& o, int row, int column, int lane) {
  return static_cast<T*>(o.data) + row * o.row + column * o.column + lane * o.lane;
}

// The position of a step in one output: where its two rows begin.
CUTLASS_DEVICE StepPosition at_rows(Output const& o, StepPosition at) {
  at.offset[0] = at.row * o.row, at.offset[1] = at.offset[0] + 8 * o.row;
  return at;
}
// The same where rows come in batches, [B, H, T, d].
CUTLASS_DEVICE int64_t batched_row(Output const& o, int row) {
  if (o.rows_per_batch == 0) return row * o.row;
  int const batch = row / o.rows_per_batch;
  return batch * o.batch + (row - batch * o.rows_per_batch) * o.row;
}

// Adjacent columns (`vector`).
template <class T> CUTLASS_DEVICE T* adjacent(Output const& o, int64_t row_offset, int column, int lane) {
  return static_cast<T*>(o.data) + (row_offset + lane * o.lane) + column;
}

template <class T> CUTLASS_DEVICE T first_of(uint32_t w) { return T(w); }
template <class T> CUTLASS_DEVICE T second_of(uint32_t w) { return T(w >> 8 * sizeof(T)); }
template <class T> CUTLASS_DEVICE T first_of(Two<float> v) { return v.x; }
template <class T> CUTLASS_DEVICE T second_of(Two<float> v) { return v.y; }

// One element at a time: any strides, any width.
template <class T, class Value, int kPairs>
CUTLASS_DEVICE void store_scattered(Output const& o, int lane, Value const (&values)[kPairs], StepPosition const& at) {
  CUTLASS_PRAGMA_UNROLL
  for (int rr = 0; rr < 2; ++rr) {
    int column = at.column + 2 * at.q;
    T* p = static_cast<T*>(o.data) + (at.offset[rr] + lane * o.lane) + column * o.column;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kPairs / 2; ++j, column += 8, p += 8 * o.column) {
      bool const inside = at.row + 8 * rr < at.rows;
      if (inside && column < at.columns) p[0] = first_of<T>(values[2 * j + rr]);
      if (inside && column + 1 < at.columns) p[o.column] = second_of<T>(values[2 * j + rr]);
    }
  }
}
CUTLASS_DEVICE void store_words(Output const& o, int64_t row_offset, int column, int lane, uint32_t const (&r)[4]) {
  *reinterpret_cast<uint4*>(adjacent<uint16_t>(o, row_offset, column, lane)) = make_uint4(r[0], r[1], r[2], r[3]);
}

// A step of one lane of a 16-bit output; kColumns is 32 or 16.
template <int kColumns>
CUTLASS_DEVICE void store16(Output const& o, int lane, uint32_t const (&words)[kColumns / 4], StepPosition const& at) {
  if (!o.vector) return store_scattered<uint16_t>(o, lane, words, at);
  if constexpr (kColumns == 32) {  // 8 rows x 64 bytes an instruction
    CUTLASS_PRAGMA_UNROLL
    for (int rr = 0; rr < 2; ++rr) {
      uint32_t r[4] = {words[rr], words[2 + rr], words[4 + rr], words[6 + rr]};
      transpose4(r, at.q);
      int const row = at.row + 8 * rr, column = at.column + 8 * at.q;
      if (row < at.rows && column < at.columns)
        store_words(o, at.offset[rr], column, lane, r);
    }
  } else {  // 16 rows x 32 bytes
    static_assert(kColumns == 16);
    uint32_t r[4] = {words[0], words[2], words[1], words[3]};
    transpose4(r, at.q);
    int const row = at.row + 8 * (at.q >> 1), column = at.column + 8 * (at.q & 1);
    if (row < at.rows && column < at.columns)
      store_words(o, at.offset[at.q >> 1], column, lane, r);
  }
}

// Both lanes of an interleaved 16-bit output (F s): eight bytes a thread, 32 a quad.
template <int kColumns>
CUTLASS_DEVICE void store16_interleaved(Output const& o, uint32_t const (&first)[kColumns / 4],
                                        uint32_t const (&second)[kColumns / 4], StepPosition const& at) {
  if (!o.vector) {
    store_scattered<uint16_t>(o, 0, first, at);
    return store_scattered<uint16_t>(o, 1, second, at);
  }
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kColumns / 4; ++i) {
    int const row = at.row + 8 * (i & 1), column = at.column + 8 * (i >> 1) + 2 * at.q;
    uint2 const v = make_uint2(__byte_perm(first[i], second[i], 0x5410), __byte_perm(first[i], second[i], 0x7632));
    if (row < at.rows && column < at.columns) 
      *reinterpret_cast<uint2*>(adjacent<uint16_t>(o, at.offset[i & 1], 2 * column, 0)) = v;
  }
}

// A step of one lane of an 8-bit output.
template <int kColumns>
CUTLASS_DEVICE void store8(Output const& o, int lane, uint32_t const (&words)[kColumns / 4], StepPosition const& at) {
  if (!o.vector) return store_scattered<uint8_t>(o, lane, words, at);
  if constexpr (kColumns == 32) {  // 16 rows x 32 bytes: lane q stores half q & 1 of row half q >> 1
    uint32_t r[4] = {words[0] | words[2] << 16, words[4] | words[6] << 16, words[1] | words[3] << 16,
                     words[5] | words[7] << 16};
    transpose4(r, at.q);  // r[i]: columns 2i, 2i + 1 and 8 + 2i, 8 + 2i + 1 of the half
    int const row = at.row + 8 * (at.q >> 1), column = at.column + 16 * (at.q & 1);
    if (row < at.rows && column < at.columns)
      *reinterpret_cast<uint4*>(adjacent<uint8_t>(o, at.q & 2 ? at.offset[1] : at.offset[0], column, lane)) =
          make_uint4(__byte_perm(r[0], r[1], 0x5410), __byte_perm(r[2], r[3], 0x5410), __byte_perm(r[0], r[1], 0x7632),
                     __byte_perm(r[2], r[3], 0x7632));
  } else {  // 16 rows x 16 bytes, half of it a lane
    static_assert(kColumns == 16);
    uint32_t r[4] = {words[0], words[2], words[1], words[3]};
    transpose4(r, at.q);
    int const row = at.row + 8 * (at.q >> 1), column = at.column + 8 * (at.q & 1);
    if (row < at.rows && column < at.columns)
      *reinterpret_cast<uint2*>(adjacent<uint8_t>(o, at.q & 2 ? at.offset[1] : at.offset[0], column, lane)) =
          make_uint2(__byte_perm(r[0], r[1], 0x5410), __byte_perm(r[2], r[3], 0x5410));
  }
}

// Both lanes of an interleaved 8-bit output: four bytes a thread, 16 a quad.
template <int kColumns>
CUTLASS_DEVICE void store8_interleaved(Output const& o, uint32_t const (&first)[kColumns / 4],
                                       uint32_t const (&second)[kColumns / 4], StepPosition const& at) {
  if (!o.vector) {
    store_scattered<uint8_t>(o, 0, first, at);
    return store_scattered<uint8_t>(o, 1, second, at);
  }
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kColumns / 4; ++i) {
    int const row = at.row + 8 * (i & 1), column = at.column + 8 * (i >> 1) + 2 * at.q;
    if (row < at.rows && column < at.columns)
      *reinterpret_cast<uint32_t*>(adjacent<uint8_t>(o, at.offset[i & 1], 2 * column, 0)) =
          __byte_perm(first[i], second[i], 0x5140);
  }
}

// A step of one lane of an f32 output.
template <int kColumns>
CUTLASS_DEVICE void store32(Output const& o, int lane, Two<float> const (&values)[kColumns / 4],
                            StepPosition const& at) {
  if (!o.vector) return store_scattered<float>(o, lane, values, at);
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kColumns / 4; ++i) {
    int const row = at.row + 8 * (i & 1), column = at.column + 8 * (i >> 1) + 2 * at.q;
    if (row < at.rows && column < at.columns)
      *reinterpret_cast<float2*>(adjacent<float>(o, at.offset[i & 1], column, lane)) = {values[i].x, values[i].y};
  }
}

// A row's columns of a strip that a thread has, neighbours in memory from `column` on: 2 * kPairs of them.
template <class T, class Value, int kPairs>
CUTLASS_DEVICE void store_run(Output const& o, int lane, Value const (&values)[kPairs], int64_t row_offset, int column) {
  constexpr int kBytes = 2 * kPairs * int(sizeof(T)), kWords = kBytes / 4;
  T* const to = static_cast<T*>(o.data) + (row_offset + lane * o.lane) + column * o.column;
  if (!o.vector) {
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kPairs; ++j) {
      to[2 * j * o.column] = first_of<T>(values[j]);
      to[(2 * j + 1) * o.column] = second_of<T>(values[j]);
    }
    return;
  }
  uint32_t words[kWords];
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kWords; ++i) {
    if constexpr (sizeof(T) == 1) words[i] = __byte_perm(values[2 * i], values[2 * i + 1], 0x5410);
    else if constexpr (sizeof(T) == 2) words[i] = values[i];
    else words[i] = bits(i % 2 ? values[i / 2].y : values[i / 2].x);
  }
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i + 4 <= kWords; i += 4)
    reinterpret_cast<uint4*>(to)[i / 4] = make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
  if constexpr (kWords == 2) *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
  if constexpr (kWords == 1) *reinterpret_cast<uint32_t*>(to) = words[0];
}

// ---- reductions ----
CUTLASS_DEVICE float exchange(float x, int mask) { return __shfl_xor_sync(~0u, x, mask); }
CUTLASS_DEVICE LogSumExp::State exchange(LogSumExp::State s, int mask) {
  return {exchange(s.max, mask), exchange(s.sum, mask)};
}

// Over the quad that shares a row.
template <class R> CUTLASS_DEVICE typename R::State quad_combine(typename R::State v) {
  v = R::combine(v, exchange(v, 1));
  return R::combine(v, exchange(v, 2));
}

// Over the columns a thread has seen of one row: add a pair, columns beyond the output count as the identity.
template <class R> CUTLASS_DEVICE void accumulate_row(float& total, Two<float> v, int column, int columns) {
  total = R::combine(total, column < columns ? v.x : R::identity());
  total = R::combine(total, column + 1 < columns ? v.y : R::identity());
}
// The same for a whole step of a log-sum-exp.
template <int kColumns>
CUTLASS_DEVICE void accumulate_step(LogSumExp::State (&totals)[2], Two<float> const (&values)[kColumns / 4],
                                    StepPosition const& at) {
  CUTLASS_PRAGMA_UNROLL
  for (int rr = 0; rr < 2; ++rr) {
    float x[kColumns / 4];
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kColumns / 8; ++j) {
      int const column = at.column + 8 * j + 2 * at.q;
      x[2 * j] = column < at.columns ? values[2 * j + rr].x : -INFINITY;
      x[2 * j + 1] = column + 1 < at.columns ? values[2 * j + rr].y : -INFINITY;
    }
    totals[rr] = LogSumExp::add(totals[rr], x);
  }
}
// Of the quad that shares a row; the partial of tile column `tile` goes to element (tile, row).
template <class R>
CUTLASS_DEVICE void store_row_partial(Output const& o, typename R::State total, int row, int rows, int tile, int tiles, int q) {
  total = quad_combine<R>(total);
  if (q == 0 && row < rows && tile < tiles) *element<typename R::State>(o, row, tile, 0) = total;
}

// The element of each row at an index of its own: the thread that holds it stores it. An index outside the output gives
// 0, from the first step of the first tile.
template <int kColumns>
CUTLASS_DEVICE void store_pick(Output const& o, Two<float> const (&values)[kColumns / 4], int64_t const (&index)[2],
                               StepPosition const& at) {
  CUTLASS_PRAGMA_UNROLL
  for (int rr = 0; rr < 2; ++rr) {
    int const row = at.row + 8 * rr;
    bool const outside = index[rr] < 0 || index[rr] >= at.columns;
    int const held = outside ? -1 : int(index[rr]) - at.column - 2 * at.q;  // among the columns of this thread: 8j or 8j + 1
    bool stores = outside && at.column == 0 && at.q == 0;
    float picked = 0.0f;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kColumns / 8; ++j) {
      if (held == 8 * j) picked = values[2 * j + rr].x, stores = true;
      if (held == 8 * j + 1) picked = values[2 * j + rr].y, stores = true;
    }
    if (stores && row < at.rows) *element<float>(o, row, 0, 0) = picked;
  }
}

// A value of each row, from the first step of the first tile.
template <class D>
CUTLASS_DEVICE void store_each(Output const& o, Two<float> const (&values)[2], StepPosition const& at) {
  if (at.column != 0 || at.q != 0) return;
  CUTLASS_PRAGMA_UNROLL
  for (int rr = 0; rr < 2; ++rr) {
    int const row = at.row + 8 * rr;
    if (row < at.rows) put(static_cast<D*>(o.data) + row * o.row, values[rr].x);
  }
}

// Over the 16 rows of a warp's band: halve the columns a lane holds while halving the rows it has yet to add, so a
// step of 32 columns takes 7 shuffles. The partial of band `band` goes to element (band, column); a band beyond the
// last row, which a cluster may cover, stores nothing.
template <class R, int kColumns>
CUTLASS_DEVICE void store_column_partials(Output const& o, Two<float> const (&values)[kColumns / 4],
                                          StepPosition const& at, int band, int lane_id) {
  constexpr int kGroups = kColumns / 8;
  if (16 * band >= at.rows) return;  // also bands of a tile that only pads the cluster: they have no place in the output
  bool const in0 = at.row < at.rows, in1 = at.row + 8 < at.rows;
  using State = typename R::State;
  State v[2 * kGroups];  // v[2 * j + e]: column 8j + 2q + e
  CUTLASS_PRAGMA_UNROLL
  for (int j = 0; j < kGroups; ++j) {
    auto const both = [&](float a, float b) {
      return R::combine(in0 ? R::of(a) : R::identity(), in1 ? R::of(b) : R::identity());
    };
    v[2 * j] = both(values[2 * j].x, values[2 * j + 1].x);
    v[2 * j + 1] = both(values[2 * j].y, values[2 * j + 1].y);
  }
  int const r = lane_id >> 2;  // row within the band; bits 2, 1, 0 of r choose which half of the columns a lane keeps
  int kept = 0;                // index into v of the first column this lane keeps
  CUTLASS_PRAGMA_UNROLL
  for (int width = kGroups, bit = 4; bit > 0; width /= 2, bit /= 2) {
    bool const upper = r & bit;
    if (width >= 1) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < width; ++i) {
        State const mine = upper ? v[width + i] : v[i], other = upper ? v[i] : v[width + i];
        v[i] = R::combine(mine, exchange(other, 4 * bit));
      }
      kept += upper ? width : 0;
    } else {
      v[0] = R::combine(v[0], exchange(v[0], 4 * bit));
    }
  }
  // 16 columns leave two lanes with the same sum; the lower one stores.
  int const column = at.column + 8 * (kept >> 1) + 2 * at.q + (kept & 1);
  bool const stores = 16 * band < at.rows && column < at.columns && (kGroups == 4 || !(r & 1));
  if (stores) *element<State>(o, band, column, 0) = v[0];
}

}  // namespace coda
