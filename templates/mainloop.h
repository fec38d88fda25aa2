// CUTLASS's TMA warp-specialised mainloop with a producer of our own.
//
// The consumer (wgmma, its pipeline and its register discipline) is CUTLASS's, untouched. The producer issues the
// bulk tensor copies itself instead of going through CuTe's TMA partitioning: descriptors then come ready-made from
// the host, which therefore needs no CUTLASS, and it may fetch what is no single matrix:
//
//   two lanes  B is seen as (K, 8, 2, F / 8): groups of eight rows of the gate weight alternate with the same rows of
//              the up weight, wherever those lie in memory, so a thread's neighbouring accumulators are partners and
//              no weight is ever re-packed.
//   side by side  The columns of q, k and v come from three weights: each tile reads the one it lies in.
//   strips     A tile holds strips of heads: runs of columns that lie half a head apart, each a box of its own, which
//              may come from a weight of its own. A run of 32 rows of B is seen as (2, 4, 4) rows, and the last two
//              change places: a thread's accumulators are eight columns that are neighbours in memory.
//   a sum      The terms of x @ v.T + y @ w.T follow each other along K: the descriptors switch where a term ends, at
//              a tile of K that TMA fills up with zeros.
//   batches    The batch is the last coordinate of A and B.
#pragma once
#include <cute/arch/copy_sm90_tma.hpp>
#include <cutlass/gemm/collective/sm90_mma_tma_gmma_ss_warpspecialized.hpp>

#include "chain.h"
#include "group.h"
#include "wgmma.h"

namespace coda {

template <class Base, class Visitor, class Launches>
struct Mainloop : Base {
  using Launch = typename Visitor::Launch;
  using typename Base::ElementA;
  using typename Base::MainloopPipeline;
  using typename Base::PipelineState;
  using typename Base::TensorStorage;
  using ClusterShape = typename Base::DispatchPolicy::ClusterShape;
  static constexpr int kLanes = Visitor::kLanes;
  static constexpr int kTileM = cute::size<0>(typename Base::TileShape{});
  static constexpr int kTileN = cute::size<1>(typename Base::TileShape{});
  static constexpr int kTileK = cute::size<2>(typename Base::TileShape{});
  static constexpr int kClusterM = cute::size<0>(ClusterShape{}), kClusterN = cute::size<1>(ClusterShape{});
  static_assert(kTileK * sizeof(ElementA) == 128, "a stage is one 128-byte swizzle atom wide");
  static_assert(kLanes == 1 || Visitor::kMajorB == Major::K, "lanes are interleaved in groups of eight rows");
  static constexpr int kRuns = Visitor::kRun > 0 ? kTileN / Visitor::kRun / kClusterM : 0;  // of strips, in a share of B
  static_assert(kRuns * Visitor::kRun * kClusterM == (kRuns > 0 ? kTileN : 0), "blocks of a cluster share whole runs");

  struct Arguments {};
  struct Params {
    Launches const* group;
    uint32_t tma_transaction_bytes = Base::TmaTransactionBytes;
  };

  CUTLASS_DEVICE static void prefetch_tma_descriptors(Params const& p) {
    for (Launch const& launch : p.group->each) {
      CUTLASS_PRAGMA_UNROLL
      for (int term = 0; term < Launch::kTerms; ++term) {
        cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&launch.a[term]));
        cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&launch.b[term]));
      }
    }
  }

  // Of all terms that are summed: each begins with a tile of its own.
  CUTLASS_DEVICE static int k_tiles(Launch const& p) {
    if constexpr (Visitor::kJoined) return tiles(p.k[0], kTileK);
    int count = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int term = 0; term < Launch::kTerms; ++term) count += tiles(p.k[term], kTileK);
    return count;
  }

  // Every thread comes by here, its barriers set up and nothing of the operands touched yet.
  //
  // The kernel reads only tile counts from these: shapes (BLK_M, BLK_K, m, k, l) and (BLK_N, BLK_K, n, k, l).
  template <class ProblemShape> CUTLASS_DEVICE auto load_init(ProblemShape const&, Params const& p) const {
    using cute::_1;
    follow_predecessor();
    constexpr int kLast = Launches::kMembers - 1;
    Launch const& last = p.group->each[kLast];
    int const m = p.group->first[kLast] + tiles(last.m, kTileM), n = tiles(last.n, kTileN), k = k_tiles(last);
    auto const batches = [&] {
      if constexpr (Launch::kBatched) return last.batches;
      else return _1{};
    }();
    return cute::make_tuple(cute::make_identity_tensor(cute::make_shape(_1{}, _1{}, m, k, batches)),
                            cute::make_identity_tensor(cute::make_shape(_1{}, _1{}, n, k, batches)));
  }

  template <class Inputs, class BlockCoord, class KTiles>
  CUTLASS_DEVICE void load(Params const& p, MainloopPipeline pipeline, PipelineState state, Inputs const&,
                           BlockCoord const& coord, KTiles, int, int, uint32_t rank, TensorStorage& smem) {
    if (!cute::elect_one_sync()) return;
    int const cm = int(rank) % kClusterM, cn = int(rank) / kClusterM;
    int tile_row = int(cute::get<0>(coord));
    Launch const& launch = launch_of(*p.group, tile_row);
    int const row_a = tile_row * kTileM;
    int row_b = int(cute::get<1>(coord)) * kTileN, first_term = 0, end_term = Launch::kTerms;
    Runs runs;
    if constexpr (kRuns > 0) {
      runs.place(launch, row_b + cm * kRuns * Visitor::kRun), end_term = 1;
    } else if constexpr (Visitor::kJoined) {
      first_term = term_of(row_b);
      row_b -= Visitor::first_column(first_term), end_term = first_term + 1;
    }
    uint16_t mask_a = 0, mask_b = 0;  // blocks with the same tile row; with the same tile column
    CUTLASS_PRAGMA_UNROLL
    for (int n = 0; n < kClusterN; ++n) mask_a |= uint16_t(1 << (cm + n * kClusterM));
    CUTLASS_PRAGMA_UNROLL
    for (int m = 0; m < kClusterM; ++m) mask_b |= uint16_t(1 << (m + cn * kClusterM));

    auto const copy_terms = [&](auto... batch) {
      CUTLASS_PRAGMA_NO_UNROLL
      for (int term = first_term; term < end_term; ++term) {
        int const k_end = launch.k[term];
        CUTLASS_PRAGMA_NO_UNROLL
        for (int k = 0; k < k_end; k += kTileK, ++state) {
          pipeline.producer_acquire(state);
          uint64_t* barrier = reinterpret_cast<uint64_t*>(pipeline.producer_get_barrier(state));
          copy_tile<Visitor::kMajorA, 1, kTileM, kClusterN>(&launch.a[term], barrier, mask_a,
                                                            smem.smem_A.data() + state.index() * kTileM * kTileK, row_a, k, cn, batch...);
          ElementA* const to_b = smem.smem_B.data() + state.index() * kTileN * kTileK;
          if constexpr (kRuns > 0) runs.copy(barrier, mask_b, to_b + cm * kRuns * Visitor::kRun * kTileK, k);
          else copy_tile<Visitor::kMajorB, kLanes, kTileN, kClusterM>(&launch.b[term], barrier, mask_b, to_b, row_b, k, cm, batch...);
        }
      }
    };
    if constexpr (Launch::kBatched) copy_terms(int(cute::get<3>(coord)));
    else copy_terms();
  }

  template <class Accumulators>
  CUTLASS_DEVICE void mma(MainloopPipeline pipeline, PipelineState state, Accumulators& acc, int k_tile_count,
                          int thread, TensorStorage& smem, Params const& p) {
    // The base takes its own Params and ignores them.
    Base::mma(pipeline, state, acc, k_tile_count, thread, smem, reinterpret_cast<typename Base::Params const&>(p));
  }

 private:
  CUTLASS_DEVICE static int tiles(int size, int tile) { return (size + tile - 1) / tile; }

  // Of terms that lie side by side, the one that a column belongs to.
  CUTLASS_DEVICE static int term_of(int column) {
    int found = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int term = 1; term < Launch::kTerms; ++term)
      if (column >= Visitor::first_column(term)) found = term;
    return found;
  }

  // The runs of this block's share of B. A head of kHeadColumns is kParts parts, of which a strip has a run each.
  struct Runs {
    CUtensorMap const* maps[kRuns > 0 ? kRuns : 1];
    int at[kRuns > 0 ? kRuns : 1];  // in their weights, counted in runs

    // The share begins at this column of the tiles.
    CUTLASS_DEVICE void place(Launch const& launch, int first) {
      constexpr int kRun = Visitor::kRun, kParts = Visitor::kParts, kHeadColumns = Visitor::kHeadColumns;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRuns; ++i) {
        int const run = first / kRun + i, strip = run / kParts, strips = kHeadColumns / (kRun * kParts);
        int const row = strip / strips * kHeadColumns + run % kParts * (kHeadColumns / kParts) + strip % strips * kRun;
        maps[i] = launch.b, at[i] = row / kRun;
        if constexpr (Visitor::kJoined) {
          int const term = term_of(row);
          maps[i] += term, at[i] -= Visitor::first_column(term) / kRun;
        }
      }
    }
    CUTLASS_DEVICE void copy(uint64_t* barrier, uint16_t mask, ElementA* to, int k) const {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRuns; ++i)
        Mainloop::copy<kClusterM>(maps[i], barrier, mask, to + i * Visitor::kRun * kTileK, k, 0, 0, 0, at[i]);
    }
  };

  // This block's part of kRows x kTileK of A or B. Of the kSharers blocks of a cluster that need the same rows each
  // fetches a share, number `share`, and multicasts it to all: rows of a K-major operand, every kSharers-th block of an
  // MN-major one, which lie in shared memory one after the other.
  template <Major kMajor, int kLanesOf, int kRows, int kSharers, class... Batch>
  CUTLASS_DEVICE static void copy_tile(CUtensorMap const* map, uint64_t* barrier, uint16_t mask, ElementA* to, int row,
                                       int k, int share, Batch... batch) {
    if constexpr (kMajor == Major::MN) {
      constexpr int kBlock = block_rows(kRows);
      static_assert(kRows % kBlock == 0);
      CUTLASS_PRAGMA_UNROLL
      for (int first = 0; first < kRows / kBlock; first += kSharers)
        if (int const block = first + share; block < kRows / kBlock)
          copy<kSharers>(map, barrier, mask, to + block * kBlock * kTileK, row + block * kBlock, k, batch...);
    } else {
      constexpr int kShare = kRows / kSharers;
      static_assert(kShare % (8 * kLanesOf) == 0, "a share holds whole groups of all lanes");
      row += share * kShare, to += share * kShare * kTileK;
      if constexpr (kLanesOf == 1) copy<kSharers>(map, barrier, mask, to, k, row, batch...);
      else copy<kSharers>(map, barrier, mask, to, k, 0, 0, row / 16, batch...);
    }
  }

  template <int kReceivers, class... Coordinates>
  CUTLASS_DEVICE static void copy(CUtensorMap const* map, uint64_t* barrier, uint16_t mask, void* to, Coordinates... at) {
    uint64_t const hint = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);
    if constexpr (kReceivers == 1) cute::SM90_TMA_LOAD::copy(map, barrier, hint, to, at...);
    else cute::SM90_TMA_LOAD_MULTICAST::copy(map, barrier, mask, hint, to, at...);
  }
};

}  // namespace coda
