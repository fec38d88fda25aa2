// Stands in for templates/finish.h where a host compiler takes a finish kernel: a call is one thread, and the partials
// of an element are combined one after the other.
#pragma once
#include "operand.h"

#define __global__
#define __launch_bounds__(threads)
#define __grid_constant__

struct ThreadIndex {
  int x, y;
};
inline ThreadIndex blockIdx, threadIdx;

namespace coda {

constexpr int kFinishWidth = 32;

struct Sum {
  static constexpr float kIdentity = 0.0f;
  static float combine(float a, float b) { return a + b; }
};
struct Max {
  static constexpr float kIdentity = -INFINITY;
  static float combine(float a, float b) { return max(a, b); }
};
struct Min {
  static constexpr float kIdentity = INFINITY;
  static float combine(float a, float b) { return min(a, b); }
};

template <class R> float combine_partials(Operand const& slot, int length, int count, int i) {
  float total = R::kIdentity;
  for (int c = 0; c < count; ++c) total = R::combine(total, static_cast<float const*>(slot.data)[c * length + i]);
  return total;
}

template <class D, class T> void store_result(Output const& o, int i, T value) {
  put(static_cast<D*>(o.data) + i * (o.row + o.column), value);
}

}  // namespace coda
