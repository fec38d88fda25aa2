// All that templates/store.h needs of CUTLASS and CUDA. A warp is 32 threads of the host; a shuffle is where they meet.
#pragma once
#include <pthread.h>

#include <cstdint>
#include <type_traits>

#define CUTLASS_DEVICE inline
#define CUTLASS_PRAGMA_UNROLL

struct uint2 { uint32_t x, y; };
struct uint4 { uint32_t x, y, z, w; };
struct float2 { float x, y; };
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }

inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  uint64_t const bytes = uint64_t(high) << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= uint32_t(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return result;
}

namespace warp {
inline thread_local int lane;
inline pthread_barrier_t barrier;
inline uint64_t exchanged[32];
}  // namespace warp

template <class T> T __shfl_xor_sync(unsigned, T value, int mask) {
  static_assert(sizeof(T) == 4);
  __builtin_memcpy(&warp::exchanged[warp::lane], &value, 4);
  pthread_barrier_wait(&warp::barrier);
  T other;
  __builtin_memcpy(&other, &warp::exchanged[warp::lane ^ mask], 4);
  pthread_barrier_wait(&warp::barrier);
  return other;
}

// f(lane) in each thread of a warp.
template <class F> void run_warp(F const& f) {
  pthread_barrier_init(&warp::barrier, nullptr, 32);
  struct Start { F const* f; int lane; } starts[32];
  pthread_t threads[32];
  for (int i = 0; i < 32; ++i) {
    starts[i] = {&f, i};
    pthread_create(&threads[i], nullptr, [](void* p) -> void* {
      auto const& start = *static_cast<Start*>(p);
      warp::lane = start.lane;
      (*start.f)(start.lane);
      return nullptr;
    }, &starts[i]);
  }
  for (pthread_t thread : threads) pthread_join(thread, nullptr);
  pthread_barrier_destroy(&warp::barrier);
}

namespace cute {
template <int kValue> using Int = std::integral_constant<int, kValue>;
template <class T> constexpr bool is_empty_v = std::is_empty_v<T>;
}  // namespace cute
