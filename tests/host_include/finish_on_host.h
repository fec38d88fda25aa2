// Stands in for templates/finish.h where a host compiler takes a finish kernel: a call is one thread, and the partials
// of an element are combined one after the other.
#pragma once
#include "operand.h"
#include "reduce.h"

#define __global__
#define __launch_bounds__(threads)
#define __grid_constant__

struct ThreadIndex {
  int x, y;
};
inline ThreadIndex blockIdx, threadIdx;

namespace coda {

constexpr int kFinishWidth = 32;

inline void follow_predecessor() {}

template <class R, class Stored = typename R::State>
typename R::State combine_partials(Operand const& slot, int length, int i) {
  typename R::State total = R::identity();
  for (int c = 0; c < slot.extent; ++c)
    total = R::combine(total, R::of(static_cast<Stored const*>(slot.data)[c * length + i]));
  return total;
}

template <class R, class Stored = typename R::State> float combine_all(Operand const& slot) {
  return R::value(combine_partials<R, Stored>(slot, 1, 0));
}

template <class D, class T> void store_result(Output const& o, int i, T value) {
  int64_t const inner = o.rows_per_batch;
  put(static_cast<D*>(o.data) + (inner ? i / inner * o.batch + i % inner * o.row : i * (o.row + o.column)), value);
}

}  // namespace coda
