// The host of the visitors: a collective epilogue that hands a visitor all accumulators of its thread.
//
// CUTLASS's own epilogue visits 32 or 64 columns at a time through CuTe partitioning, which can neither change the
// width of the output nor see a whole head, and costs most of the compile time. Here the position of every register
// is known:
//
//   acc[slab * TileN / 2 + i]: row  = slab * kSlabRows + warp * 16 + lane / 4 + 8 * ((i >> 1) & 1)
//                              column = 8 * (i >> 2) + 2 * (lane & 3) + (i & 1)
//
// With two lanes, groups of eight accumulator columns alternate between lane 0 and lane 1 (mainloop.h).
#pragma once
#include <cutlass/cutlass.h>
#include <cutlass/epilogue/dispatch_policy.hpp>
#include <cutlass/pipeline/sm90_pipeline.hpp>

#include "group.h"
#include "heads.h"
#include "operand.h"
#include "store.h"
#include "tile_operand.h"

namespace coda {

// A thread's place in the output tile. `column` is the first column of the tile in its lane.
struct Position {
  int row, column, q, lane, band, tile_n, tiles_n;
};

// What a visitor's generated step is given: kWidth columns of one lane starting at `column`.
template <int kWidth, int kLanes>
struct Step {
  static constexpr int kGroups = kWidth / 8;
  float const* acc;
  StepPosition at;
  bool swap_lanes;
  // The two accumulators of lane l, group j, row half rr.
  template <int l> CUTLASS_DEVICE Two<float> product(int j, int rr) const {
    if constexpr (kLanes == 1) return pair(j, rr);
    else {
      Two<float> const low = pair(2 * j, rr), high = pair(2 * j + 1, rr);
      return (l == 0) != swap_lanes ? low : high;
    }
  }

 private:
  CUTLASS_DEVICE Two<float> pair(int group, int rr) const { return {acc[4 * group + 2 * rr], acc[4 * group + 2 * rr + 1]}; }
};

// A tile operand stream: one lane of operand `kOperand`, through map `kMap`. A map over both lanes has a dim more, and so
// has one over batches.
template <class D_, int kOperand_, int kMap_, int kLane_, bool kLaned_, bool kBatched_ = false>
struct Stream {
  using D = D_;
  static constexpr int kOperand = kOperand_, kMap = kMap_, kLane = kLane_;
  static constexpr bool kLaned = kLaned_, kBatched = kBatched_;
};
template <class... S> struct Streams {
  static constexpr int kCount = sizeof...(S);
};

template <class Visitor, class Config>
struct Epilogue {
  using Launch = typename Visitor::Launch;
  using Launches = typename Config::Launches;
  static constexpr int kTileM = Config::kTileM, kTileN = Config::kTileN, kLanes = Visitor::kLanes;
  static constexpr int kColumns = kTileN / kLanes, kSlabRows = Config::kSlabRows, kSlabs = kTileM / kSlabRows;
  static constexpr int kChunk = Config::kChunk, kChunks = (kColumns + kChunk - 1) / kChunk;
  static constexpr bool kHasTiles = Visitor::kBytesPerElement > 0;
  static constexpr int kStageBytes = kSlabRows * kChunk * Visitor::kBytesPerElement;
  static constexpr int kStages = Config::kOperandStages;
  static constexpr int kThreads = kSlabRows * 2;  // of the consumers of one tile
  using Row = typename Visitor::Row;
  using Columns = typename Visitor::Columns;
  static constexpr int kHead = Visitor::kHead, kHeads = kHead > 0 ? kColumns / kHead : 0;  // heads of a tile
  static_assert(kHead == 0 || kHeads * kHead == kColumns, "a tile holds whole heads");
  static constexpr bool kHasRows = !cute::is_empty_v<Row>, kHasColumns = !cute::is_empty_v<Columns>;
  static_assert(kColumns % 32 == 0 || kColumns % 32 == 16, "steps are 32 columns, the last one may be 16");

  // What GemmUniversal asks of a collective epilogue.
  using ElementC = void;
  using ElementD = void;
  using StrideC = cute::Stride<int64_t, cute::_1, int64_t>;
  using StrideD = StrideC;
  using LoadPipeline = OperandPipeline<kStages>;
  using LoadPipelineState = cutlass::PipelineState<kStages>;
  using StorePipeline = cutlass::PipelineTmaStore<1>;
  using StorePipelineState = cutlass::PipelineState<1>;
  using PipelineStorage = typename LoadPipeline::SharedStorage;
  // 1024: the 128-byte swizzle repeats every 8 rows, and the mainloop's stages follow.
  struct alignas(1024) TensorStorage {
    uint8_t chunks[kHasTiles ? kStages * kStageBytes : 16];
    Row rows[kHasRows ? kTileM : 1];
    Columns columns[kHasColumns ? kColumns / 2 : 1];
    alignas(16) char slots[kHead > 0 ? kHeads * Visitor::kSlotBytes + 1 : 1];  // column values of heads
  };
  static_assert(sizeof(TensorStorage) <= Config::epilogue_bytes(kStages));
  struct SharedStorage {
    TensorStorage tensors;
    PipelineStorage pipeline;
  };
  static constexpr bool RequiresTransactionBytes = false;
  struct Arguments {};
  struct Params {
    Launches const* group;
  };
  template <class T> CUTLASS_HOST_DEVICE static constexpr int get_load_pipe_increment(T) { return kSlabs * kChunks; }
  template <class T> CUTLASS_HOST_DEVICE static constexpr int get_store_pipe_increment(T) { return 1; }
  CUTLASS_DEVICE static void prefetch_tma_descriptors(Params const&) {}

  CUTLASS_DEVICE Epilogue(Params const& p, TensorStorage& s)
      : group_(*p.group), p_(&p.group->each[0]), smem_(cute::cast_smem_ptr_to_uint(s.chunks)), rows_(s.rows), columns_(s.columns), slots_(s.slots) {}
  CUTLASS_DEVICE bool is_producer_load_needed() const { return kHasTiles && Visitor::needs_tiles(seen()); }

  // The producer warp: one chunk a stage, all streams behind one barrier.
  template <class ProblemShape, class TileShape, class Coord, class... Rest>
  CUTLASS_DEVICE auto load(LoadPipeline pipe, LoadPipelineState state, ProblemShape const&, TileShape, Coord const& coord, Rest&&...) {
    if constexpr (kHasTiles) {
      int const tile_row = enter(coord);
      bool const leader = cute::elect_one_sync();
      CUTLASS_PRAGMA_NO_UNROLL
      for (int i = 0; i < kSlabs * kChunks; ++i, ++state) {
        if (!leader) continue;
        pipe.producer_acquire(state);
        uint64_t* barrier = reinterpret_cast<uint64_t*>(pipe.producer_get_barrier(state));
        int const row = tile_row * kTileM + i / kChunks * kSlabRows;
        int const column = int(cute::get<1>(coord)) * kColumns + i % kChunks * kChunk;
        cutlass::arch::ClusterTransactionBarrier::arrive_and_expect_tx(
            reinterpret_cast<cutlass::arch::ClusterTransactionBarrier::ValueType*>(barrier), stage_bytes(typename Visitor::Streams{}));
        copy(typename Visitor::Streams{}, barrier, smem_ + state.index() * kStageBytes, column, row);
      }
    }
    return state;
  }
  CUTLASS_DEVICE void load_tail(LoadPipeline pipe, LoadPipelineState state) {
    if constexpr (kHasTiles) {
      if (cute::elect_one_sync()) pipe.producer_tail(state);
    }
  }

  // The consumer warp group: steps of 32 columns over every slab of its tile.
  template <class StoreState, class ProblemShape, class TileShape, class Coord, class Accumulators, class Mma, class Storage>
  CUTLASS_DEVICE auto store(LoadPipeline pipe, LoadPipelineState state, StorePipeline, StoreState store_state,
                            ProblemShape const&, TileShape, Coord const& coord, Accumulators& accumulators, Mma, int thread,
                            Storage&, int = -1) {
    constexpr int kAccumulators = kSlabs * kTileN / 2;
    static_assert(decltype(cute::size(accumulators))::value == kAccumulators);
    float const* acc = &accumulators(0);
    int const tile_row = enter(coord);
    int const warp = thread >> 5, lane = thread & 31;
    Position const x{tile_row * kTileM + warp * 16 + (lane >> 2), int(cute::get<1>(coord)) * kColumns,
                     lane & 3, lane, tile_row * (kTileM / 16) + warp, int(cute::get<1>(coord)),
                     (p_->n + kTileN - 1) / kTileN};
    ChunkReader<LoadPipeline, kStageBytes> reader{
        cute::cast_smem_ptr_to_uint(pipe.producer_get_barrier(LoadPipelineState{})), smem_, state, thread};
    bool const tiles = kHasTiles && Visitor::needs_tiles(seen());
    auto const uniform = Visitor::uniform(seen().operands, p_->m, p_->n / kLanes);
    stage(uniform, tile_row * kTileM, x.column, thread);
    CUTLASS_PRAGMA_UNROLL
    for (int slab = 0; slab < kSlabs; ++slab) {
      Row const* row = rows_ + warp * 16 + (lane >> 2) + slab * kSlabRows;
      Row const rows[2] = {row[0], row[kHasRows ? 8 : 0]};
      if constexpr (kHead > 0) visit_heads(acc + slab * kTileN / 2, x, x.row + slab * kSlabRows, uniform, rows);
      else visit_columns(acc + slab * kTileN / 2, slab, x, uniform, rows, reader, tiles);
    }
    return cute::make_tuple(state, store_state);
  }
  template <class LoadState, class StoreState>
  CUTLASS_DEVICE auto store_tail(LoadPipeline, LoadState load_state, StorePipeline, StoreState store_state) {
    return cute::make_tuple(load_state, store_state);
  }

 private:
  Launches const& group_;
  Launch const* p_;  // of the tile at hand
  int batch_ = 0;
  uint32_t smem_;
  Row* rows_;
  Columns* columns_;
  char* slots_;

  // The row of a tile within the launch that it belongs to, which is at hand from here on.
  template <class Coord> CUTLASS_DEVICE int enter(Coord const& coord) {
    int tile_row = int(cute::get<0>(coord));
    p_ = &launch_of(group_, tile_row);
    if constexpr (Launch::kBatched) batch_ = int(cute::get<3>(coord));
    return tile_row;
  }

  // What a visitor sees of the launch: all of it, or the batch at hand.
  CUTLASS_DEVICE decltype(auto) seen() const {
    if constexpr (Launch::kBatched) return Batch<Launch>(*p_, batch_);
    else return *p_;
  }

  // Values of rows and columns go through shared memory: each is loaded and computed once a tile, at any alignment, and
  // read back without a branch. The first barrier waits for the readers of the tile before (cooperative; in ping-pong
  // the order of the two warp groups' epilogues does, and each tile is one group's).
  template <class Uniform> CUTLASS_DEVICE void stage(Uniform const& uniform, int row, int column, int thread) const {
    if constexpr (kHasRows || kHasColumns || Visitor::kSlotBytes > 0) {
      auto const sync = [] { cutlass::arch::NamedBarrier::sync(kThreads, cutlass::arch::ReservedNamedBarriers::EpilogueBarrier); };
      sync();
      if constexpr (kHasRows)
        for (int i = thread; i < kTileM; i += kThreads) rows_[i] = Visitor::row(seen().operands, uniform, row + i, p_->m);
      if constexpr (kHasColumns)
        for (int i = thread; i < kColumns / 2; i += kThreads)
          columns_[i] = Visitor::columns(seen().operands, uniform, column + 2 * i, p_->n / kLanes);
      if constexpr (Visitor::kSlotBytes > 0)
        for (int i = thread; i < kColumns / 2; i += kThreads) {
          int const head = i / (kHead / 2), pair = i % (kHead / 2);
          Visitor::dispatch(column / kHead + head, p_->n / kHead, [&](auto segment, auto const& where, int g) {
            decltype(segment)::stage(where, slots_ + head * Visitor::kSlotBytes, p_->operands, uniform, g, pair);
          });
        }
      sync();
    }
  }

  // All columns of a slab, in steps.
  template <class Uniform, class Reader>
  CUTLASS_DEVICE void visit_columns(float const* acc, int slab, Position const& x, Uniform const& uniform,
                                    Row const (&rows)[2], Reader& reader, bool tiles) {
    typename Visitor::Totals totals;
    CUTLASS_PRAGMA_UNROLL
    for (int first = 0; first + 32 <= kColumns; first += 32)
      step<32>(acc, first, slab, x, uniform, rows, reader, tiles, totals);
    if constexpr (kColumns % 32 == 16) step<16>(acc, kColumns - 16, slab, x, uniform, rows, reader, tiles, totals);
    Visitor::store_rows(seen(), totals, x.row + slab * kSlabRows, x);
  }

  // The heads of a slab, each by the segment it belongs to.
  template <class Uniform>
  CUTLASS_DEVICE void visit_heads(float const* acc, Position const& x, int row, Uniform const& uniform, Row const (&rows)[2]) {
    CUTLASS_PRAGMA_UNROLL
    for (int h = 0; h < kHeads; ++h)
      Visitor::dispatch(x.column / kHead + h, p_->n / kHead, [&](auto segment, auto const& where, int g) {
        HeadView const view{acc + h * kHead / 2};
        decltype(segment)::visit(where, view, *p_, uniform, rows, slots_ + h * Visitor::kSlotBytes, g, row, x.q);
      });
  }

  template <int kWidth, class Uniform, class Reader, class Totals>
  CUTLASS_DEVICE void step(float const* acc, int first, int slab, Position const& x, Uniform const& uniform,
                           Row const (&rows)[2], Reader& reader, bool tiles, Totals& totals) {
    typename Visitor::template Fetched<kWidth, kChunk> fetched;
    if constexpr (kHasTiles) {
      if (tiles) {
        if (first % kChunk == 0) reader.wait();
        fetched.template fetch<kSlabRows>(reader, first % kChunk);
        if (first % kChunk + kWidth >= kChunk || first + kWidth >= kColumns) reader.release();
      }
    }
    StepPosition const at{x.row + slab * kSlabRows, x.column + first, p_->m, p_->n / kLanes, x.q};
    Step<kWidth, kLanes> const s{acc + first * kLanes / 2, at, p_->swap_lanes != 0};
    Visitor::step(s, seen(), uniform, rows, columns_ + first / 2 + x.q, fetched, totals, x.band + slab * (kSlabRows / 16), x.lane);
  }

  template <class... S> CUTLASS_DEVICE uint32_t stage_bytes(Streams<S...>) const {
    return ((p_->operands[S::kOperand].data ? kSlabRows * kChunk * uint32_t(sizeof(typename S::D)) : 0u) + ... + 0u);
  }
  template <class... S>
  CUTLASS_DEVICE void copy(Streams<S...>, uint64_t* barrier, uint32_t to, int column, int row) const {
    uint32_t offset = 0;
    (copy_stream<S>(barrier, to, offset, column, row), ...);
  }
  template <class S> CUTLASS_DEVICE void copy_stream(uint64_t* barrier, uint32_t to, uint32_t& offset, int column, int row) const {
    uint64_t const hint = uint64_t(cute::TMA::CacheHintSm90::EVICT_FIRST);
    uint32_t const bar = cute::cast_smem_ptr_to_uint(barrier);
    if (p_->operands[S::kOperand].data) {
      if constexpr (S::kLaned && S::kBatched)
        asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                     "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to + offset), "l"(&p_->tiles[S::kMap]), "r"(bar),
                     "r"(column), "r"(S::kLane), "r"(row), "r"(batch_), "l"(hint) : "memory");
      else if constexpr (S::kLaned || S::kBatched)
        asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                     "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to + offset), "l"(&p_->tiles[S::kMap]), "r"(bar),
                     "r"(column), "r"(S::kLaned ? S::kLane : row), "r"(S::kLaned ? row : batch_), "l"(hint) : "memory");
      else
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                     "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to + offset), "l"(&p_->tiles[S::kMap]), "r"(bar),
                     "r"(column), "r"(row), "l"(hint) : "memory");
    }
    offset += kSlabRows * kChunk * sizeof(typename S::D);
  }
};

}  // namespace coda
