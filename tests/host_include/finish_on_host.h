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

template <class R> typename R::State combine_partials(Operand const& slot, int length, int count, int i) {
  typename R::State total = R::identity();
  for (int c = 0; c < count; ++c)
    total = R::combine(total, static_cast<typename R::State const*>(slot.data)[c * length + i]);
  return total;
}

template <class R> float combine_all(Operand const& slot, int count) { return combine_partials<R>(slot, 1, count, 0); }

template <class D, class T> void store_result(Output const& o, int i, T value) {
  put(static_cast<D*>(o.data) + i * (o.row + o.column), value);
}

}  // namespace coda
