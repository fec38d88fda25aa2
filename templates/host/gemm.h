// Launching GEMM kernels.
#pragma once
#include "call.h"

namespace coda::host {

constexpr int kThreads = 384;

// Clusters walk the tiles in groups: a group's rows of A and columns of B stay in L2.
inline Schedule schedule(Call const& call, Kernel const& kernel, DeviceState const& device, int max_clusters) {
  Variant const& v = *call.variant;
  Schedule s{};
  s.clusters_m = int32_t(ceil_div(ceil_div(call.rows, v.tile_m), kernel.cluster_m));
  s.clusters_n = int32_t(ceil_div(ceil_div(call.columns, v.columns), kernel.cluster_n));
  s.along_n = v.along_n;
  int32_t across = s.along_n ? s.clusters_m : s.clusters_n;
  s.swizzle = across < v.swizzle ? across : v.swizzle;
  int64_t resident = device.multiprocessors / (kernel.cluster_m * kernel.cluster_n);
  if (max_clusters > 0 && max_clusters < resident) resident = max_clusters;
  int64_t all = int64_t(s.clusters_m) * s.clusters_n;
  s.grid_clusters = int32_t(all < resident ? all : resident);
  return s;
}

// The GEMM kernel of a step with these counts; Step::launch points to the instance.
template <int kMaps, int kOperands, int kOutputs, int kTerms>
int launch_gemm(Call& call, DeviceState const& device, cudaStream_t stream) {
  if (call.rows == 0 || call.columns == 0) return CODA_OK;
  Program const& program = *call.program;
  Gemm const& gemm = *call.step->gemm;
  Kernel const& kernel = program.image->kernels[call.variant->kernel];
  Launch<kMaps, kOperands, kOutputs, kTerms> p{};
  p.m = int32_t(call.rows);
  p.n = int32_t(call.columns * gemm.lanes);
  p.schedule = schedule(call, kernel, device, device.max_clusters[call.variant->kernel]);
  Frame frame{program, gemm, *call.variant, call.views, call.rows, call.columns};
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
                                       : bind_output(call.views, call.columns, store);
  }
  dim3 grid(kernel.cluster_m, kernel.cluster_n * p.schedule.grid_clusters, 1);
  return launch(call, call.variant->kernel, grid, dim3(kThreads), stream, &p);
}

}  // namespace coda::host
