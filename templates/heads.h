// Head-wise epilogues: columns are heads of kHead columns each, and a head may need all of its columns at once
// (QK-norm, RoPE, scales of a quantised block).
//
// The heads of a product fall into segments (q, k, v), each with its own math and outputs. A segment works on one head
// of one slab at a time: it may first reduce over the head's columns, then it maps blocks of them. A block has several
// lanes where columns of different halves belong together: in half RoPE, lane 0 is columns [0, f), lane 1 [f, 2f). All
// columns of a head lie in the registers of one quad, so partners are in one thread.
#pragma once
#include "store.h"

namespace coda {

// A head's accumulators in one slab: `groups(j)` is columns 8j + 2q and the next of the head.
struct HeadView {
  float const* acc;
  CUTLASS_DEVICE Two<float> pair(int group, int rr) const { return {acc[4 * group + 2 * rr], acc[4 * group + 2 * rr + 1]}; }
};

// Steps of 32 columns over a block of kWidth, the last one of 16 where that is left: f(width, first).
template <int kWidth, class F> CUTLASS_DEVICE void for_steps(F const& f) {
  static_assert(kWidth % 16 == 0);
  CUTLASS_PRAGMA_UNROLL
  for (int first = 0; first + 32 <= kWidth; first += 32) f(cute::Int<32>{}, first);
  if constexpr (kWidth % 32 == 16) f(cute::Int<16>{}, kWidth - 16);
}

// One value of each row and head.
template <class D> CUTLASS_DEVICE void store_head_value(Output const& o, int row, int rows, int head, int q, float value) {
  if (q == 0 && row < rows) put(static_cast<D*>(o.data) + batched_row(o, row) + head * o.lane, value);
}

// Column values staged for a head; an empty struct takes no room.
template <class T> constexpr int size_of() { return cute::is_empty_v<T> ? 0 : int(sizeof(T)); }
constexpr int larger(int a, int b) { return a > b ? a : b; }
template <class T> CUTLASS_DEVICE T staged(char const* at, int pair) {
  if constexpr (cute::is_empty_v<T>) return {};
  else return reinterpret_cast<T const*>(at)[pair];
}

}  // namespace coda
