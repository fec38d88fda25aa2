// Row and map kernels: a team of threads owns a row at a time, or a part of it where nothing is reduced. A kernel has one
// or more parts, each with rows, columns and math of its own, which share the blocks of a launch.
//
// A thread computes eight neighbouring columns at a time, an octet, which it loads and stores in 16-byte pieces where
// memory allows. Octet i of thread t begins at column 8 * (t + i * threads). A kernel for kOctets > 0 holds the row's
// operands in registers through all its reductions; kOctets = 0 reads them again for each. kVector: all octets are whole
// and all accesses of 16 bytes; the launcher knows.
//
// Host and device: tests run the generated code of a row with a team of one thread.
#pragma once
#include <type_traits>

#include "chain.h"
#include "operand.h"

namespace coda {

// ---- rows ----

// A row by the counters of its loops. Rows from `end` on repeat the last one, so that all threads reach every barrier; what
// they compute is not stored.
template <int kLevels> struct Place {
  int32_t index[kLevels > 0 ? kLevels : 1] = {};
  bool active;

  template <class Launch> CODA_FN Place(Launch const& p, int64_t row, int64_t end) : active(row < end) {
    uint32_t rest = uint32_t(active ? row : end - 1);
    CODA_UNROLL
    for (int l = kLevels - 1; l > 0; --l) {
      index[l] = int32_t(rest % uint32_t(p.sizes[l]));
      rest /= uint32_t(p.sizes[l]);
    }
    index[0] = int32_t(rest);
  }
  CODA_FN int64_t begin(RowTensor const& t) const {
    int64_t offset = 0;
    CODA_UNROLL
    for (int l = 0; l < kLevels; ++l) offset += index[l] * t.level[l];
    return offset;
  }
};

// A row of a tensor. `data` is null for an absent operand, which is `value` everywhere, and for a position outside a
// table, which is NaN: a wrong position shows.
template <class D> struct Line {
  using T = decltype(load((D const*)nullptr));
  D* data;
  int64_t column;
  int vector;
  T value;
};

template <class T> CODA_FN T constant(RowTensor const& t) {
  if constexpr (std::is_floating_point_v<T>) return T(t.value);
  else return T(t.integer);
}

template <class D, int kLevels> CODA_FN Line<D> line(RowTensor const& t, Place<kLevels> const& at) {
  using T = typename Line<D>::T;
  return {t.data ? static_cast<D*>(t.data) + at.begin(t) : nullptr, t.column, t.vector, constant<T>(t)};
}
template <class D, int kLevels> CODA_FN Line<D> gathered_line(RowTensor const& t, Place<kLevels> const& at, int64_t position) {
  using T = typename Line<D>::T;
  T const outside = std::is_floating_point_v<T> ? T(NAN) : T(0);
  if (position < 0 || position >= t.extent) return {nullptr, 0, 0, outside};
  return {static_cast<D*>(t.data) + at.begin(t) + position * t.gather, t.column, t.vector, T(0)};
}
// The value of a row.
// The value of a row that partial results of another program add up to.
template <class R, int kLevels> CODA_FN float finished(RowTensor const& t, Place<kLevels> const& at) {
  Operand o{};
  o.data = static_cast<float*>(t.data) + at.begin(t), o.column = t.gather, o.extent = t.extent;
  return load_partials<R>(o, 0, 1);
}
template <class D> CODA_FN typename Line<D>::T first(Line<D> const& x) { return x.data ? load(x.data) : x.value; }

// ---- octets ----

struct __attribute__((aligned(16), may_alias)) Chunk { uint32_t words[4]; };

template <class D, int kBytes = sizeof(D)> struct alignas(16) Octet {
  using T = decltype(load((D const*)nullptr));
  T x[8];
  CODA_FN Two<T> pair(int j) const { return {x[2 * j], x[2 * j + 1]}; }
  CODA_FN void set(int j, Two<T> v) { x[2 * j] = v.x, x[2 * j + 1] = v.y; }
  CODA_FN void set_element(int e, T v) { x[e] = v; }
  CODA_FN void put_element(int e, D* p) const { put(p, x[e]); }
  // Every second element of two octets, and two octets of which every second element is given.
  CODA_FN void take(Octet const (&both)[2], int lane) {
    CODA_UNROLL
    for (int e = 0; e < 8; ++e) x[e] = both[e / 4].x[2 * (e % 4) + lane];
  }
  CODA_FN static void interleave(Octet const& a, Octet const& b, Octet (&both)[2]) {
    CODA_UNROLL
    for (int e = 0; e < 8; ++e) both[e / 4].x[2 * (e % 4)] = a.x[e], both[e / 4].x[2 * (e % 4) + 1] = b.x[e];
  }
};
// 16-bit values stay packed, as in memory.
template <class D> struct alignas(16) Octet<D, 2> {
  uint32_t words[4];
  CODA_FN Two<float> pair(int j) const { return unpack<D>(words[j]); }
  CODA_FN void set(int j, uint32_t word) { words[j] = word; }
  CODA_FN void set_element(int e, float v) {
    uint32_t const half = pack<D>(v) & 0xffffu, shift = 16 * (e & 1);
    words[e / 2] = (words[e / 2] & ~(0xffffu << shift)) | half << shift;
  }
  CODA_FN void put_element(int e, D* p) const { p->bits = uint16_t(words[e / 2] >> 16 * (e & 1)); }
  CODA_FN void take(Octet const (&both)[2], int lane) {
    CODA_UNROLL
    for (int j = 0; j < 4; ++j) {
      uint32_t const one = both[j / 2].words[2 * (j % 2)], other = both[j / 2].words[2 * (j % 2) + 1];
      words[j] = lane ? one >> 16 | (other & 0xffff0000u) : (one & 0xffffu) | other << 16;
    }
  }
  CODA_FN static void interleave(Octet const& a, Octet const& b, Octet (&both)[2]) {
    CODA_UNROLL
    for (int j = 0; j < 4; ++j) {
      both[j / 2].words[2 * (j % 2)] = (a.words[j] & 0xffffu) | b.words[j] << 16;
      both[j / 2].words[2 * (j % 2) + 1] = a.words[j] >> 16 | (b.words[j] & 0xffff0000u);
    }
  }
};
template <class D> CODA_FN void load_octet(Octet<D>& octet, D const* p) {
  CODA_UNROLL
  for (int i = 0; i < int(sizeof(octet) / sizeof(Chunk)); ++i) reinterpret_cast<Chunk*>(&octet)[i] = reinterpret_cast<Chunk const*>(p)[i];
}
template <class D> CODA_FN void store_octet(Octet<D> const& octet, D* p) {
  CODA_UNROLL
  for (int i = 0; i < int(sizeof(octet) / sizeof(Chunk)); ++i) reinterpret_cast<Chunk*>(p)[i] = reinterpret_cast<Chunk const*>(&octet)[i];
}

// Columns n to n + 7; zero beyond the last one.
template <bool kVector, class D> CODA_FN Octet<D> read(Line<D> const& x, int n, int columns) {
  using T = typename Line<D>::T;
  Octet<D> octet{};
  if (!x.data) {
    CODA_UNROLL
    for (int e = 0; e < 8; ++e) octet.set_element(e, x.value);
  } else if (kVector || (x.vector == 1 && n + 8 <= columns)) {
    load_octet(octet, x.data + n);
  } else if (x.vector > 1 && n + 8 <= columns) {  // of pairs, both are read
    int const lane = x.vector - 2;
    Octet<D> both[2];
    D const* const p = x.data - lane + 2 * n;
    load_octet(both[0], p), load_octet(both[1], p + 8);
    octet.take(both, lane);
  } else {
    CODA_UNROLL
    for (int e = 0; e < 8; ++e) octet.set_element(e, n + e < columns ? load(x.data + (n + e) * x.column) : T(0));
  }
  return octet;
}

template <bool kVector, class D> CODA_FN void write(Line<D> const& y, int n, int columns, Octet<D> const& octet) {
  if (kVector || (y.vector == 1 && n + 8 <= columns)) {
    store_octet(octet, y.data + n);
  } else {
    CODA_UNROLL
    for (int e = 0; e < 8; ++e)
      if (n + e < columns) octet.put_element(e, y.data + (n + e) * y.column);
  }
}

// Both columns of pairs at once.
template <class D>
CODA_FN void write_pairs(Line<D> const& first, Line<D> const& second, int n, int columns, Octet<D> const& a, Octet<D> const& b) {
  if (first.vector == 2 && n + 8 <= columns) {
    Octet<D> both[2];
    Octet<D>::interleave(a, b, both);
    store_octet(both[0], first.data + 2 * n), store_octet(both[1], first.data + 2 * n + 8);
  } else {
    write<false>(first, n, columns, a);
    write<false>(second, n, columns, b);
  }
}

// The octets of a thread: f(i, n) for the i-th, which begins at column n.
template <int kOctets, class Team, class F> CODA_FN void for_octets(Team const& team, int columns, F const& f) {
  if constexpr (kOctets > 0) {
    CODA_UNROLL
    for (int i = 0; i < kOctets; ++i) {
      int const n = 8 * (team.first + i * team.threads);
      if (n < columns) f(i, n);
    }
  } else {
    for (int n = 8 * team.first; n < columns; n += 8 * team.threads) f(0, n);
  }
}

// An operand of the row, loaded at once and held for all stages.
template <class D, int kOctets, bool kVector> struct Held {
  Octet<D> octets[kOctets];
  template <class Team> CODA_FN Held(Line<D> const& x, Team const& team, int columns) {
    for_octets<kOctets>(team, columns, [&](int i, int n) { octets[i] = read<kVector>(x, n, columns); });
  }
  CODA_FN Octet<D> octet(int i, int, int) const { return octets[i]; }
};
template <class D, bool kVector> struct Held<D, 0, kVector> {
  Line<D> x;
  template <class Team> CODA_FN Held(Line<D> const& x_, Team const&, int) : x(x_) {}
  CODA_FN Octet<D> octet(int, int n, int columns) const { return read<kVector>(x, n, columns); }
};

// ---- reductions over the columns ----

// Adds the columns n to n + 7; those beyond the last one count as the identity.
template <class R, bool kVector> CODA_FN void accumulate(typename R::State& total, Two<float> const (&v)[4], int n, int columns) {
  float x[8];
  CODA_UNROLL
  for (int e = 0; e < 8; ++e) {
    float const value = e & 1 ? v[e / 2].y : v[e / 2].x;
    x[e] = kVector || n + e < columns ? value : R::value(R::identity());
  }
  if constexpr (sizeof(typename R::State) > sizeof(float)) {
    total = R::add(total, x);
  } else {  // a tree
    CODA_UNROLL
    for (int half = 4; half > 0; half /= 2)
      CODA_UNROLL
      for (int e = 0; e < half; ++e) x[e] = R::combine(x[e], x[e + half]);
    total = R::combine(total, x[0]);
  }
}

// ---- reductions over the rows: partial results of a block ----

// For each column: a thread adds up its own columns over all rows of its team.
template <class R, int kOctets> struct ColumnTotals {
  using State = typename R::State;
  State state[kOctets][8];
  CODA_FN ColumnTotals() {
    CODA_UNROLL
    for (int e = 0; e < 8 * kOctets; ++e) state[e / 8][e % 8] = R::identity();
  }
  CODA_FN void add(bool active, int i, int j, Two<float> v) {
    if (!active) return;
    state[i][2 * j] = R::combine(state[i][2 * j], R::of(v.x));
    state[i][2 * j + 1] = R::combine(state[i][2 * j + 1], R::of(v.y));
  }
  template <class Team> CODA_FN void store(Team& team, RowTensor const& t, int columns) {
    CODA_UNROLL
    for (int i = 0; i < kOctets; ++i) team.template join<R>(state[i]);
    if (!team.stores_totals()) return;
    State* const row = static_cast<State*>(t.data) + int64_t(team.block) * columns;
    for_octets<kOctets>(team, columns, [&](int i, int n) {
      CODA_UNROLL
      for (int e = 0; e < 8; ++e)
        if (n + e < columns) row[n + e] = state[i][e];
    });
  }
};

// Of a value of each row.
template <class R> struct RowTotal {
  using State = typename R::State;
  State state[1] = {R::identity()};
  CODA_FN void add(bool active, float v) {
    if (active) state[0] = R::combine(state[0], R::of(v));
  }
  template <class Team> CODA_FN void store(Team& team, RowTensor const& t) {
    team.template join<R>(state);
    if (team.stores_totals() && team.leads()) static_cast<State*>(t.data)[team.block] = state[0];
  }
};

template <class... Parts> using launch_of = RowParts<typename Parts::Launch...>;

// ---- teams and kernels ----
#if defined(__CUDACC__)

constexpr int kRowThreads = 512;

__device__ __forceinline__ float exchanged(float x, int mask) { return __shfl_xor_sync(~0u, x, mask); }
__device__ __forceinline__ LogSumExp::State exchanged(LogSumExp::State s, int mask) {
  return {exchanged(s.max, mask), exchanged(s.sum, mask)};
}
__device__ __forceinline__ float from_leader(float x, int width) { return __shfl_sync(~0u, x, 0, width); }
__device__ __forceinline__ LogSumExp::State from_leader(LogSumExp::State s, int width) {
  return {from_leader(s.max, width), from_leader(s.sum, width)};
}

// The threads that share a row: a power of two. Threads of a block are several teams. Every thread of a team gets the
// same total, to the bit, whatever the order in which warps run.
template <int kSlots> struct RowTeam {
  int threads, thread, index, teams;
  int first;   // octet
  int block;   // of those that leave partial results
  bool chunk0; // the first part of the row
  int phase = 0;
  float2 (*slots)[kSlots][kRowThreads / 32];  // two of them, so that one barrier for each reduction is enough
  float* joined;

  __device__ RowTeam(float2 (*slots_)[kSlots][kRowThreads / 32], float* joined_, int threads_, int octets, int block_, int chunk)
      : threads(threads_), thread(int(threadIdx.x) & (threads_ - 1)), index(int(threadIdx.x) / threads_),
        teams(int(blockDim.x) / threads_), first(chunk * octets * threads_ + thread), block(block_), chunk0(chunk == 0),
        slots(slots_), joined(joined_) {}

  __device__ bool leads() const { return thread == 0 && chunk0; }
  __device__ bool stores_totals() const { return index == 0; }

  // Reduce a state over the team: begin each of several, wait once, end each.
  template <class R> __device__ void begin(int slot, typename R::State& s) const {
    int const width = threads < 32 ? threads : 32;
    for (int mask = width / 2; mask > 0; mask /= 2) s = R::combine(s, exchanged(s, mask));
    s = from_leader(s, width);
    int const warp = (index * threads + thread) / 32;
    if (threads > 32 && thread % 32 == 0) reinterpret_cast<typename R::State&>(slots[phase][slot][warp]) = s;
  }
  __device__ void wait() const {
    if (threads > 32) __syncthreads();
  }
  template <class R> __device__ void end(int slot, typename R::State& s) const {
    if (threads <= 32) return;
    int const warps = threads / 32;
    s = R::identity();
    for (int w = 0; w < warps; ++w)
      s = R::combine(s, reinterpret_cast<typename R::State const&>(slots[phase][slot][index * warps + w]));
  }
  __device__ void next() { phase ^= 1; }

  // Adds what the teams of a block have, in order; the first team gets it.
  template <class R, int kCount> __device__ void join(typename R::State (&state)[kCount]) const {
    using State = typename R::State;
    constexpr int kAtOnce = (kCount * sizeof(float) + sizeof(State) - 1) / sizeof(State);  // `joined` has room for floats
    State* const shared = reinterpret_cast<State*>(joined) + thread;
    for (int other = 1; other < teams; ++other)
      for (int first = 0; first < kCount; first += kAtOnce) {
        if (index == other)
          for (int e = 0; e < kAtOnce; ++e) shared[e * threads] = state[first + e];
        __syncthreads();
        if (index == 0)
          for (int e = 0; e < kAtOnce; ++e) state[first + e] = R::combine(state[first + e], shared[e * threads]);
        __syncthreads();
      }
  }
};

// Part: Launch, kSlots, Totals<kOctets>, row<kOctets, kVector>(p, team, at, totals), as coda/target/emit_rows.py writes
// it. `block` is that of the part: (group, block of the group, chunk of the row).
template <class Part, int kOctets, bool kVector> __device__ void run_rows(typename Part::Launch const& p, float* joined, int block) {
  follow_predecessor();
  __shared__ float2 slots[2][Part::kSlots][kRowThreads / 32];
  int const chunk = block % p.chunks, of_rows = block / p.chunks, group = of_rows % p.groups, in_group = of_rows / p.groups;
  RowTeam<Part::kSlots> team(slots, joined, p.threads, kOctets, of_rows, chunk);
  typename Part::template Totals<kOctets> totals;
  int64_t const begin = int64_t(p.rows / p.groups) * group, end = begin + p.rows / p.groups;
  for (int64_t row = begin + int64_t(in_group) * team.teams; row < end; row += int64_t(p.blocks) * team.teams)
    Part::template row<kOctets, kVector>(p, team, Place<Part::Launch::kLevels>(p, row + team.index, end), totals);
  totals.store(p, team);
}

// The part that a block belongs to: each has the blocks behind those of the one before.
template <int kOctets, bool kVector, class Part, class... Others, class Launch>
__device__ void run_parts(Launch const& p, float* joined, int block) {
  if constexpr (sizeof...(Others) > 0) {
    int const blocks = p.part.groups * p.part.blocks * p.part.chunks;
    if (block >= blocks) return run_parts<kOctets, kVector, Others...>(p.others, joined, block - blocks);
  }
  run_rows<Part, kOctets, kVector>(p.part, joined, block);
}

// Where teams are several, they are of at most half a block's threads.
#define CODA_ROW_KERNEL(symbol, octets, vector, ...)                                                                  \
  extern "C" __global__ void __launch_bounds__(coda::kRowThreads)                                                     \
      symbol(__grid_constant__ coda::launch_of<__VA_ARGS__> const p) {                                                \
    __shared__ float joined[8 * coda::kRowThreads / 2];                                                               \
    coda::run_parts<octets, vector, __VA_ARGS__>(p, joined, int(blockIdx.x));                                         \
  }
#endif

}  // namespace coda
