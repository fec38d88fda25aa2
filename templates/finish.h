// Finish kernels: combine the partials of a reduction in a fixed order, then do the per-row (or per-column) math that
// follows from them. A block owns 32 rows; 16 threads share a row's partials and a tree over shared memory, always the
// same, joins them.
#pragma once
#include "chain.h"
#include "operand.h"
#include "store.h"

namespace coda {

constexpr int kFinishWidth = 32, kFinishDepth = kPartialDepth;

// The reduction of a slot's partials at position i, in every thread with threadIdx.y == 0. What lies in the slot is what
// tiles or blocks have reduced, or plain values.
template <class R, class Stored = typename R::State>
__device__ typename R::State combine_partials(Operand const& slot, int length, int i) {
  using State = typename R::State;
  __shared__ State shared[kFinishDepth][kFinishWidth];
  State total = R::identity();
  if (i < length) {
    Stored const* p = static_cast<Stored const*>(slot.data) + i;
    for (int c = threadIdx.y; c < slot.extent; c += kFinishDepth) total = R::combine(total, R::of(p[int64_t(c) * length]));
  }
  __syncthreads();
  shared[threadIdx.y][threadIdx.x] = total;
  for (int half = kFinishDepth / 2; half > 0; half /= 2) {
    __syncthreads();
    if (int(threadIdx.y) < half)
      shared[threadIdx.y][threadIdx.x] = R::combine(shared[threadIdx.y][threadIdx.x], shared[threadIdx.y + half][threadIdx.x]);
  }
  __syncthreads();
  return shared[0][threadIdx.x];
}

// The reduction of all values of a slot by one block, in every thread.
template <class R, class Stored = typename R::State> __device__ float combine_all(Operand const& slot) {
  constexpr int kThreads = kFinishDepth * kFinishWidth;
  using State = typename R::State;
  __shared__ State shared[kThreads];
  int const thread = threadIdx.y * kFinishWidth + threadIdx.x;
  Stored const* p = static_cast<Stored const*>(slot.data);
  State total = R::identity();
  for (int c = thread; c < slot.extent; c += kThreads) total = R::combine(total, R::of(p[c]));
  __syncthreads();
  shared[thread] = total;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread < half) shared[thread] = R::combine(shared[thread], shared[thread + half]);
  }
  __syncthreads();
  return R::value(shared[0]);
}

template <class D, class T> CUTLASS_DEVICE void store_result(Output const& o, int i, T value) {
  put(static_cast<D*>(o.data) + (o.rows_per_batch ? batched_row(o, i) : i * (o.row + o.column)), value);  // one stride is 0
}

}  // namespace coda
