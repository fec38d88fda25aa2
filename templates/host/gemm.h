// Launching GEMM kernels.
#pragma once
#include "call.h"

namespace coda::host {

constexpr int kThreads = 384;

// Clusters walk the tiles, `tile_rows` of them below each other, in groups: a group's rows of A and columns of B stay in
// L2. Batches come one after the other.
inline Schedule schedule(Call const& call, Kernel const& kernel, DeviceState const& device, int64_t tile_rows) {
  Variant const& v = *call.variant;
  int const max_clusters = device.max_clusters[v.kernel];
  Schedule s{};
  s.clusters_m = int32_t(tile_rows / kernel.cluster_m);
  s.clusters_n = int32_t(ceil_div(ceil_div(call.columns, v.columns), kernel.cluster_n));
  s.along_n = v.along_n;
  int32_t across = s.along_n ? s.clusters_m : s.clusters_n;
  s.swizzle = across < v.swizzle ? across : v.swizzle;
  int64_t resident = device.multiprocessors / (kernel.cluster_m * kernel.cluster_n);
  if (max_clusters > 0 && max_clusters < resident) resident = max_clusters;
  int64_t all = int64_t(s.clusters_m) * s.clusters_n * call.batches;
  s.grid_clusters = int32_t(all < resident ? all : resident);
  return s;
}

template <int kMaps, int kOperands, int kOutputs, int kTerms>
int bind_launch(Call& call, Launch<kMaps, kOperands, kOutputs, kTerms>& p) {
  Program const& program = *call.program;
  Gemm const& gemm = *call.step->gemm;
  p.m = int32_t(call.rows);
  p.n = int32_t(call.columns * gemm.lanes);
  Frame frame{program, gemm, *call.variant, call.views, call.rows, call.columns, call.batches};
  for (int i = 0; i < kTerms; ++i) {
    int64_t k = call.sizes.value(gemm.terms[i].contraction);
    p.k[i] = int32_t(k);
    if (int status = bind_term(frame, gemm.terms[i], k, p.a[i], p.b[i], p.swap_lanes)) return status;
  }
  for (int i = 0; i < gemm.operand_count; ++i) {
    Operand const& spec = gemm.operands[i];
    if (int status = bind_operand(program, call.views, call.sizes, call.columns, spec, p.operands[i])) return status;
    if (spec.map < 0 || !frame.views[spec.arg].present) continue;
    if (int status = bind_tile_map(frame, spec, p.tiles[spec.map])) return status;
  }
  for (int i = 0; i < call.step->store_count; ++i) {
    Store const& store = call.step->stores[i];
    p.outputs[i] = in_workspace(store) ? partial_output(slot(call, i), store, counts(call, i).length)
                                       : bind_output(call.views, call.rows, call.columns, store);
  }
  return CODA_OK;
}

// The same for each batch. What is absent, and so has no data, has no step either.
template <int kMaps, int kOperands, int kOutputs, int kTerms>
int bind_launch(Call& call, BatchedLaunch<kMaps, kOperands, kOutputs, kTerms>& p) {
  Launch<kMaps, kOperands, kOutputs, kTerms>& of_first = p;
  if (int status = bind_launch(call, of_first)) return status;
  p.batches = int32_t(call.batches);
  Gemm const& gemm = *call.step->gemm;
  auto const step = [&](auto const& spec) {
    View const& v = call.views[spec.arg];
    return batch_pitch(v, spec, call.rows, call.columns) * v.itemsize();
  };
  for (int i = 0; i < gemm.operand_count; ++i)
    if (p.operands[i].data) p.operand_step[i] = step(gemm.operands[i]);
  for (int i = 0; i < call.step->store_count; ++i) {
    Store const& store = call.step->stores[i];
    p.output_step[i] = in_workspace(store) ? partial_step(call, i) : step(store);
  }
  return CODA_OK;
}

// The GEMM kernel of a step, and of the kMembers - 1 steps behind it, which it runs as well: they multiply with the same
// right operand, at the tile of the first.
template <int kMembers, class Launch_> int launch_group(Call& call, DeviceState const& device, cudaStream_t stream) {
  Step const* const steps = call.step;
  Variant const* const variant = call.variant;
  Kernel const& kernel = call.program->image->kernels[variant->kernel];
  Launches<Launch_, kMembers> p{};
  int64_t tile_rows = 0;
  for (int i = 0; i < kMembers; ++i) {
    if (i > 0) begin(call, steps[i]), call.variant = variant;
    p.first[i] = int32_t(tile_rows);
    if (call.rows == 0 || call.columns == 0 || call.batches == 0) continue;
    if (int status = bind_launch(call, p.each[i])) return status;
    tile_rows += round_up(ceil_div(call.rows, variant->tile_m), kernel.cluster_m);
  }
  if (tile_rows == 0) return CODA_OK;
  p.each[0].schedule = schedule(call, kernel, device, tile_rows);
  dim3 grid(kernel.cluster_m, kernel.cluster_n * p.each[0].schedule.grid_clusters, 1);
  return launch(call, variant->kernel, grid, dim3(kThreads), stream, &p);
}

// Of these counts. Step::launch points to an instance of one of the two.
template <int kMembers, int kMaps, int kOperands, int kOutputs, int kTerms>
int launch_gemm(Call& call, DeviceState const& device, cudaStream_t stream) {
  return launch_group<kMembers, Launch<kMaps, kOperands, kOutputs, kTerms>>(call, device, stream);
}
template <int kMembers, int kMaps, int kOperands, int kOutputs, int kTerms>
int launch_batched(Call& call, DeviceState const& device, cudaStream_t stream) {
  return launch_group<kMembers, BatchedLaunch<kMaps, kOperands, kOutputs, kTerms>>(call, device, stream);
}

}  // namespace coda::host
