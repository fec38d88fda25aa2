// Reductions: what a partial holds (State), that `of` one value, its identity, how two partials combine, and the value of
// a whole. Host and device.
#pragma once
#include "scalar.h"

namespace coda {

struct Sum {
  using State = float;
  CODA_FN static State of(float x) { return x; }
  CODA_FN static State identity() { return 0.0f; }
  CODA_FN static State combine(State a, State b) { return a + b; }
  CODA_FN static float value(State total) { return total; }
};
struct Max {
  using State = float;
  CODA_FN static State of(float x) { return x; }
  CODA_FN static State identity() { return -INFINITY; }
  CODA_FN static State combine(State a, State b) { return max(a, b); }
  CODA_FN static float value(State total) { return total; }
};
struct Min {
  using State = float;
  CODA_FN static State of(float x) { return x; }
  CODA_FN static State identity() { return INFINITY; }
  CODA_FN static State combine(State a, State b) { return min(a, b); }
  CODA_FN static float value(State total) { return total; }
};

// log(sum(exp(x))), online (Milakov and Gimelshein 2018): `sum` is that of exp(x - shift(max)). Its value is -inf over
// nothing and over -inf alone, +inf where one x is +inf, NaN where one is NaN, as torch.logsumexp.
struct LogSumExp {
  struct State { float max, sum; };
  CODA_FN static State of(float x) { return {x, 1.0f}; }
  CODA_FN static State of(State s) { return s; }
  CODA_FN static State identity() { return {-INFINITY, 0.0f}; }
  CODA_FN static float shift(float most) { return abs(most) == INFINITY ? 0.0f : most; }  // inf - inf would be NaN
  CODA_FN static State combine(State a, State b) {
    float const most = max(a.max, b.max), by = shift(most);
    return {most, a.sum * exp(a.max - by) + b.sum * exp(b.max - by)};
  }
  // Several values at once, so that the sum is rescaled once.
  template <int kCount> CODA_FN static State add(State total, float const (&x)[kCount]) {
    float most = total.max;
    CODA_UNROLL
    for (int i = 0; i < kCount; ++i) most = max(most, x[i]);
    float const by = shift(most);
    float sum = total.sum * exp(total.max - by);
    CODA_UNROLL
    for (int i = 0; i < kCount; ++i) sum += exp(x[i] - by);
    return {most, sum};
  }
  CODA_FN static float value(State total) { return shift(total.max) + log(total.sum); }
};

}  // namespace coda
