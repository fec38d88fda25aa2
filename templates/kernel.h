// One GEMM kernel: CUTLASS's persistent warp-specialised kernel over our mainloop producer, epilogue and scheduler.
//
// Types are written out instead of asking CUTLASS's collective builders, whose instantiation costs compile time.
#pragma once
#include <cutlass/cutlass.h>
#include <cutlass/device_kernel.h>
#include <cutlass/gemm/dispatch_policy.hpp>
#include <cutlass/gemm/gemm.h>
#include <cutlass/numeric_types.h>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>
#include <cutlass/gemm/collective/collective_mma_decl.hpp>
#include <cutlass/gemm/kernel/gemm_universal_decl.h>

#include "scheduler.h"
#include "mainloop.h"
#include "epilogue.h"
#include "wgmma.h"
#include <cutlass/gemm/kernel/sm90_gemm_tma_warpspecialized_cooperative.hpp>
#include <cutlass/gemm/kernel/sm90_gemm_tma_warpspecialized_pingpong.hpp>

namespace coda {

template <class Visitor, int kTileM_, int kTileN_, bool kCooperative, int kClusterM, int kClusterN, int kChunk_, int kMembers = 1>
struct Config {
  using Launches = coda::Launches<typename Visitor::Launch, kMembers>;
  static constexpr int kTileM = kTileM_, kTileN = kTileN_, kTileK = 64, kChunk = kChunk_;
  static constexpr int kSlabRows = kCooperative ? 128 : 64;  // rows of a tile that the wgmmas of one step cover
  static constexpr int kSharedBytes = 232448;                // coda.target.plan.SHARED_BYTES
  static constexpr int kBarrierBytes = 1024;                 // barriers come first, rounded up to the tensors' alignment

  // Shared memory: as many mainloop stages as fit beside the operand chunks, row and column values; up to four chunks,
  // but never at the cost of a mainloop stage (depth beyond three chunks was measured to change nothing).
  static constexpr int kOperandStageBytes = kSlabRows * kChunk * Visitor::kBytesPerElement;
  static constexpr int epilogue_bytes(int operand_stages) {
    int const rows = kTileM * int(sizeof(typename Visitor::Row));
    int const columns = kTileN / Visitor::kLanes / 2 * int(sizeof(typename Visitor::Columns));
    int const slots = Visitor::kHead > 0 ? kTileN / Visitor::kHead * Visitor::kSlotBytes : 0;
    return (96 + operand_stages * kOperandStageBytes + rows + columns + slots + 1023) / 1024 * 1024;
  }
  static constexpr int mainloop_stages(int operand_stages) {
    return (kSharedBytes - kBarrierBytes - epilogue_bytes(operand_stages)) / ((kTileM + kTileN) * kTileK * 2);
  }
  static constexpr int kOperandStages = kOperandStageBytes == 0                    ? 1
                                        : mainloop_stages(4) == mainloop_stages(2) ? 4
                                        : mainloop_stages(3) == mainloop_stages(2) ? 3
                                                                                   : 2;
  static constexpr int kStages = mainloop_stages(kOperandStages);

  using Element = typename Visitor::Element;
  using Tile = cute::Shape<cute::Int<kTileM>, cute::Int<kTileN>, cute::Int<kTileK>>;
  using Cluster = cute::Shape<cute::Int<kClusterM>, cute::Int<kClusterN>, cute::_1>;
  using Policy = cute::conditional_t<kCooperative, cutlass::gemm::KernelTmaWarpSpecializedCooperative,
                                     cutlass::gemm::KernelTmaWarpSpecializedPingpong>;
  static constexpr Major kMajorA = Visitor::kMajorA, kMajorB = Visitor::kMajorB;
  using Mma = decltype(cute::make_tiled_mma(wgmma<Element, kTileN, kMajorA, kMajorB>(),
                                            cute::Layout<cute::Shape<cute::Int<kCooperative ? 2 : 1>, cute::_1, cute::_1>>{}));
  template <Major kMajor>  // as (M or N, K, L)
  using Stride = cute::conditional_t<kMajor == Major::K, cute::Stride<int64_t, cute::_1, int64_t>,
                                     cute::Stride<cute::_1, int64_t, int64_t>>;
  template <Major kMajor, int kRows>
  using Atom = cute::conditional_t<kMajor == Major::MN && block_rows(kRows) == 32,
                                   cute::GMMA::Layout_SW64_Atom<Element, kMajor>,
                                   cute::GMMA::Layout_SW128_Atom<Element, kMajor>>;
  template <int kReceivers>
  using Copy = cute::conditional_t<kReceivers == 1, cute::SM90_TMA_LOAD, cute::SM90_TMA_LOAD_MULTICAST>;
  using Collective = cutlass::gemm::collective::CollectiveMma<
      cutlass::gemm::MainloopSm90TmaGmmaWarpSpecialized<kStages, Cluster, Policy>, Tile, Element, Stride<kMajorA>, Element,
      Stride<kMajorB>, Mma, Copy<kClusterN>, Atom<kMajorA, kTileM>, void, cute::identity, Copy<kClusterM>, Atom<kMajorB, kTileN>, void,
      cute::identity>;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop<Collective, Visitor, Launches>,
                                                      Epilogue<Visitor, Config>, GroupedRaster<Visitor::Launch::kBatched>>;
  static_assert(Kernel::MaxThreadsPerBlock == 384 && Kernel::SharedStorageSize <= kSharedBytes);
};

template <class Config> CUTLASS_DEVICE void run(typename Config::Launches const& p) {
  extern __shared__ char smem[];
  using Kernel = typename Config::Kernel;
  typename Kernel::Params params{};
  auto const& first = p.each[0];
  params.problem_shape = cute::make_shape(first.m, first.n, Config::kTileK * Kernel::CollectiveMainloop::k_tiles(first), 1);
  params.mainloop = {&p};
  params.epilogue = {&p};
  params.scheduler.schedule = first.schedule;
  if constexpr (Config::Launches::Launch::kBatched) params.scheduler.batches = first.batches;
  Kernel kernel;
  kernel(params, smem);
}

}  // namespace coda

#define CODA_KERNEL(symbol, ...) CODA_GROUP_KERNEL(symbol, 1, __VA_ARGS__)
#define CODA_GROUP_KERNEL(symbol, members, Visitor, tile_m, tile_n, cooperative, cluster_m, cluster_n, chunk)         \
  extern "C" __global__ void __launch_bounds__(384, 1)                                                                \
      symbol(__grid_constant__ coda::Launches<Visitor::Launch, members> const p) {                                    \
    coda::run<coda::Config<Visitor, tile_m, tile_n, cooperative, cluster_m, cluster_n, chunk, members>>(p);           \
  }
