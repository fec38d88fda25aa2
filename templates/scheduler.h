// A persistent tile scheduler that computes no padding.
//
// CUTLASS's PersistentTileSchedulerSm90 rounds the tile grid up to a multiple of swizzle x cluster in both directions
// and treats the padding as work: at N = 4096, TileN = 192 and swizzle 8, 22 tile columns become 24. Here clusters are
// numbered, the last group is simply narrower, and the swizzle may be any number (Schedule in launch.h).
#pragma once
#include <cutlass/gemm/kernel/tile_scheduler.hpp>

#include "launch.h"

namespace coda {

// The scheduler tag of GemmUniversal. With batches, one comes after the other.
template <bool kBatched> struct GroupedRaster {};

template <int kClusterM, int kClusterN, bool kBatched>
class Scheduler : public cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90 {
  using Base = cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90;

 public:
  using WorkTileInfo = Base::WorkTileInfo;
  struct Params : Base::Params {
    Schedule schedule;
    int batches = 1;
  };

  CUTLASS_DEVICE explicit Scheduler(Params const& p)
      : s_(p.schedule), batches_(p.batches), id_(int(blockIdx.y) / kClusterN) {}

  CUTLASS_DEVICE WorkTileInfo get_current_work() const {
    if (id_ >= clusters()) return WorkTileInfo::invalid_work_tile();
    int const of_each = s_.clusters_m * s_.clusters_n;
    int const batch = kBatched ? id_ / of_each : 0, id = id_ - batch * of_each;
    int const minors = s_.along_n ? s_.clusters_m : s_.clusters_n, majors = s_.along_n ? s_.clusters_n : s_.clusters_m;
    int const group = id / (s_.swizzle * majors), in_group = id - group * s_.swizzle * majors;
    int const width = min(s_.swizzle, minors - group * s_.swizzle);
    int const major = in_group / width, minor = group * s_.swizzle + in_group - major * width;
    int const m = s_.along_n ? minor : major, n = s_.along_n ? major : minor;
    return {m * kClusterM + int(blockIdx.x), n * kClusterN + int(blockIdx.y) % kClusterN, batch, true};
  }
  template <class ClusterShape> CUTLASS_DEVICE WorkTileInfo initial_work_tile_info(ClusterShape) {
    return get_current_work();
  }
  CUTLASS_DEVICE void advance_to_next_work(uint32_t count = 1) { id_ += s_.grid_clusters * int(count); }
  CUTLASS_DEVICE bool is_last_tile(WorkTileInfo&, uint32_t count = 1) const {
    return id_ + s_.grid_clusters * int(count) >= clusters();
  }
  template <class... Rest> CUTLASS_DEVICE auto fetch_next_work(WorkTileInfo, Rest&&...) {
    advance_to_next_work();
    return cute::make_tuple(get_current_work(), true);
  }

 private:
  Schedule s_;
  int batches_, id_;

  CUTLASS_DEVICE int clusters() const { return s_.clusters_m * s_.clusters_n * (kBatched ? batches_ : 1); }
};

}  // namespace coda

template <bool kBatched, class Arch, class TileShape, class ClusterShape, uint32_t Stages>
struct cutlass::gemm::kernel::detail::TileSchedulerSelector<coda::GroupedRaster<kBatched>, Arch, TileShape, ClusterShape, Stages> {
  using Scheduler = coda::Scheduler<cute::size<0>(ClusterShape{}), cute::size<1>(ClusterShape{}), kBatched>;
};
