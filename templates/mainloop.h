// CUTLASS's TMA warp-specialised mainloop with a producer of our own.
//
// The consumer (wgmma, its pipeline and its register discipline) is CUTLASS's, untouched. The producer issues the
// bulk tensor copies itself instead of going through CuTe's TMA partitioning: descriptors then come ready-made from
// the host, which therefore needs no CUTLASS, and B may be any four-dimensional view. With two lanes B is seen as
// (K, 8, 2, F / 8): groups of eight rows of the gate weight alternate with the same rows of the up weight, wherever
// those lie in memory, so a thread's neighbouring accumulators are partners and no weight is ever re-packed.
#pragma once
#include <cute/arch/copy_sm90_tma.hpp>
#include <cutlass/gemm/collective/sm90_mma_tma_gmma_ss_warpspecialized.hpp>

#include "launch.h"

namespace coda {

template <class Base, int kLanes>
struct Mainloop : Base {
  using typename Base::ElementA;
  using typename Base::MainloopPipeline;
  using typename Base::PipelineState;
  using typename Base::TensorStorage;
  using ClusterShape = typename Base::DispatchPolicy::ClusterShape;
  static constexpr int kTileM = cute::size<0>(typename Base::TileShape{});
  static constexpr int kTileN = cute::size<1>(typename Base::TileShape{});
  static constexpr int kTileK = cute::size<2>(typename Base::TileShape{});
  static constexpr int kClusterM = cute::size<0>(ClusterShape{}), kClusterN = cute::size<1>(ClusterShape{});
  // Each block of a cluster fetches its share of a tile and multicasts it to the blocks that need the same rows.
  static constexpr int kShareA = kTileM / kClusterN, kShareB = kTileN / kClusterM;
  static_assert(kTileK * sizeof(ElementA) == 128, "a stage is one 128-byte swizzle atom wide");
  static_assert(kShareB % (8 * kLanes) == 0, "a share of B holds whole groups of both lanes");

  struct Arguments {};
  struct Params {
    CUtensorMap const *a, *b;
    int m_tiles, n_tiles, k_tiles;
    uint32_t tma_transaction_bytes = Base::TmaTransactionBytes;
  };

  CUTLASS_DEVICE static void prefetch_tma_descriptors(Params const& p) {
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(p.a));
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(p.b));
  }

  // The kernel reads only tile counts from these: shapes (BLK_M, BLK_K, m, k, l) and (BLK_N, BLK_K, n, k, l).
  template <class ProblemShape> CUTLASS_DEVICE auto load_init(ProblemShape const&, Params const& p) const {
    using cute::_1;
    return cute::make_tuple(cute::make_identity_tensor(cute::make_shape(_1{}, _1{}, p.m_tiles, p.k_tiles, _1{})),
                            cute::make_identity_tensor(cute::make_shape(_1{}, _1{}, p.n_tiles, p.k_tiles, _1{})));
  }

  template <class Inputs, class BlockCoord, class KTiles>
  CUTLASS_DEVICE void load(Params const& p, MainloopPipeline pipeline, PipelineState state, Inputs const&,
                           BlockCoord const& coord, KTiles, int k_tile_count, int, uint32_t rank, TensorStorage& smem) {
    if (!cute::elect_one_sync()) return;
    int const cm = int(rank) % kClusterM, cn = int(rank) / kClusterM;
    int const row_a = int(cute::get<0>(coord)) * kTileM + cn * kShareA;
    int const row_b = int(cute::get<1>(coord)) * kTileN + cm * kShareB;
    uint16_t mask_a = 0, mask_b = 0;  // blocks with the same tile row; with the same tile column
    CUTLASS_PRAGMA_UNROLL
    for (int n = 0; n < kClusterN; ++n) mask_a |= uint16_t(1 << (cm + n * kClusterM));
    CUTLASS_PRAGMA_UNROLL
    for (int m = 0; m < kClusterM; ++m) mask_b |= uint16_t(1 << (m + cn * kClusterM));

    CUTLASS_PRAGMA_NO_UNROLL
    for (int k = 0; k < k_tile_count; ++k, ++state) {
      pipeline.producer_acquire(state);
      uint64_t* barrier = reinterpret_cast<uint64_t*>(pipeline.producer_get_barrier(state));
      auto* to_a = smem.smem_A.data() + (state.index() * kTileM + cn * kShareA) * kTileK;
      auto* to_b = smem.smem_B.data() + (state.index() * kTileN + cm * kShareB) * kTileK;
      copy_rows<kClusterN>(p.a, barrier, mask_a, to_a, k * kTileK, row_a);
      if constexpr (kLanes == 1) copy_rows<kClusterM>(p.b, barrier, mask_b, to_b, k * kTileK, row_b);
      else copy_groups<kClusterM>(p.b, barrier, mask_b, to_b, k * kTileK, row_b / 16);
    }
  }

  template <class Accumulators>
  CUTLASS_DEVICE void mma(MainloopPipeline pipeline, PipelineState state, Accumulators& acc, int k_tile_count,
                          int thread, TensorStorage& smem, Params const& p) {
    // The base takes its own Params and ignores them.
    Base::mma(pipeline, state, acc, k_tile_count, thread, smem, reinterpret_cast<typename Base::Params const&>(p));
  }

 private:
  static constexpr uint64_t kCacheHint = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);

  template <int kReceivers>
  CUTLASS_DEVICE static void copy_rows(CUtensorMap const* map, uint64_t* barrier, uint16_t mask, void* to, int k, int row) {
    if constexpr (kReceivers == 1) cute::SM90_TMA_LOAD_2D::copy(map, barrier, kCacheHint, to, k, row);
    else cute::SM90_TMA_LOAD_MULTICAST_2D::copy(map, barrier, mask, kCacheHint, to, k, row);
  }
  template <int kReceivers>
  CUTLASS_DEVICE static void copy_groups(CUtensorMap const* map, uint64_t* barrier, uint16_t mask, void* to, int k, int group) {
    if constexpr (kReceivers == 1) cute::SM90_TMA_LOAD_4D::copy(map, barrier, kCacheHint, to, k, 0, 0, group);
    else cute::SM90_TMA_LOAD_MULTICAST_4D::copy(map, barrier, mask, kCacheHint, to, k, 0, 0, group);
  }
};

}  // namespace coda
