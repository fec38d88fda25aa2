// Tile operands: [M, N] inputs of the epilogue, prefetched through shared memory by the epilogue's producer warp.
//
// A chunk is slab_rows x kChunk columns of every stream (a stream is one lane of one operand), in one pipeline stage.
// The producer runs ahead by kStages chunks, also into the next tile. A box is 64 or 128 bytes wide with the matching
// TMA swizzle, so that ldmatrix reads it in accumulator order without bank conflicts.
#pragma once
#include <cute/arch/copy_sm90_tma.hpp>
#include <cutlass/pipeline/sm90_pipeline.hpp>

#include "scalar.h"

namespace coda {

// Consumers arrive once a warp and the producer once, where the kernel passes counts of threads.
template <int kStages>
struct OperandPipeline : cutlass::PipelineTransactionAsync<kStages> {
  using Base = cutlass::PipelineTransactionAsync<kStages>;
  using typename Base::Params;
  using typename Base::SharedStorage;
  CUTLASS_DEVICE OperandPipeline(SharedStorage& storage, Params const& p) : Base(storage, by_warp(p)) {}

 private:
  CUTLASS_DEVICE static Params by_warp(Params p) {
    p.consumer_arv_count /= 32;
    p.producer_arv_count = 1;
    return p;
  }
};

// A consumer's view of the chunks. It keeps raw shared-memory addresses instead of the pipeline object: registers are
// scarce beside 192 accumulators.
template <class Pipeline, int kStageBytes>
struct ChunkReader {
  uint32_t full_barriers, smem;
  typename Pipeline::PipelineState& state;
  int thread;
  uint32_t chunk = 0;

  CUTLASS_DEVICE void wait() {
    uint32_t const barrier = full_barriers + 8 * state.index();
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(barrier), "r"(state.phase()) : "memory");
    chunk = smem + state.index() * kStageBytes;
  }
  CUTLASS_DEVICE void release() {
    // The next TMA write into this chunk goes through the asynchronous proxy: without the fence it overtakes the
    // reads above (seen as whole wrong chunks where the epilogue is the bottleneck).
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    if ((thread & 31) == 0) {
      uint32_t const empty = full_barriers + 8 * (Pipeline::Stages + state.index());  // empty barriers follow the full ones
      asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(empty) : "memory");
    }
    ++state;
  }

  // 16-bit operand, columns 16k .. 16k+15 of the chunk: words[2 * j + rr] holds columns 16k + 8j + 2q and the next.
  template <int kBoxBytes> CUTLASS_DEVICE void read16(uint32_t offset, int k, uint32_t (&words)[4]) const {
    static_assert(kBoxBytes == 64 || kBoxBytes == 128);
    int const lane = thread & 31, row = (thread >> 5) * 16 + (lane & 15);
    uint32_t const address = (chunk + offset + row * kBoxBytes + ((lane >> 4) * 16 ^ swizzle<kBoxBytes>(row))) ^ (k * 32);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(address) : "memory");
  }
  // 32-bit operand: columns 8j + 2q and the next of row half rr.
  template <int kBoxBytes> CUTLASS_DEVICE Two<float> read32(uint32_t offset, int j, int rr) const {
    static_assert(kBoxBytes == 128);
    int const lane = thread & 31, row = (thread >> 5) * 16 + 8 * rr + (lane >> 2), q = lane & 3;
    uint32_t const address = chunk + offset + row * 128 + ((j * 32 + (q >> 1) * 16) ^ swizzle<128>(row)) + (q & 1) * 8;
    Two<float> v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
    return v;
  }

 private:
  template <int kBoxBytes> CUTLASS_DEVICE static uint32_t swizzle(int row) {
    return (kBoxBytes == 128 ? (row & 7) : ((row >> 1) & 3)) * 16;
  }
};

// A step's values of one stream: kColumns columns of one lane, in registers, so that the chunk can be released at once.
template <class D, int kColumns, int kChunk>
struct StreamStep {
  static constexpr int kBoxBytes = kChunk * sizeof(D);
  cute::conditional_t<sizeof(D) == 2, uint32_t, Two<float>> values[kColumns / 4];

  // `first` columns into the chunk, whose stream begins `offset` bytes into the stage.
  template <class Reader> CUTLASS_DEVICE void fetch(Reader const& reader, uint32_t offset, int first) {
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < kColumns / 16; ++k) {
      if constexpr (sizeof(D) == 2) {
        reader.template read16<kBoxBytes>(offset, first / 16 + k, reinterpret_cast<uint32_t(&)[4]>(values[4 * k]));
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 4; ++i) values[4 * k + i] = reader.template read32<kBoxBytes>(offset, (first + 16 * k) / 8 + i / 2, i & 1);
      }
    }
  }
  // Group j of eight columns, row half rr.
  CUTLASS_DEVICE Two<float> at(int j, int rr) const {
    if constexpr (sizeof(D) == 2) return unpack<D>(values[2 * j + rr]);
    else return values[2 * j + rr];
  }
};

}  // namespace coda
