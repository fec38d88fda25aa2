// The launcher of an artifact: everything that does not depend on the program, driven by the constexpr tables that
// coda/build/host.py writes into host.cpp. C++17 for the plain host compiler; no exceptions, no allocation.
//
//   tables      what a program is: arguments, requirements, operands, stores, finishings, variants
//   views.h     DLTensor -> View, and the error sentence of this thread
//   checks.h    the requirements, evaluated; the twin of coda/target/requirements.py
//   device.h    cubin, kernels and limits of each device; filled once by warmup
//   bind.h      views -> coda::Operand, coda::Output, tensor maps
//   launch      here, below
//
// A call allocates nothing, synchronises nothing and asks the driver for nothing but the launch, so it can be captured
// into a CUDA graph. Tensor maps are encoded on every call: optimisers and sharding move weights.
#pragma once
#include "host/bind.h"
#include "host/checks.h"
#include "host/device.h"
#include "host/tables.h"
#include "host/views.h"

namespace coda::host {

constexpr int kThreads = 384;
constexpr int64_t kWorkspaceAlign = 256;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A call whose arguments were accepted.
struct Call {
  Program const* program;
  View views[kMaxArgs];
  Sizes sizes;
  int64_t rows, columns;  // columns of one lane
  Variant const* variant;
};

// The variant with the least waves x tile area, the first of equals. The number of multiprocessors is that of the
// description, not of the device: partial sums and bits must not depend on the board.
inline Variant const& select(Program const& program, int64_t rows, int64_t columns) {
  Variant const* best = nullptr;
  int64_t least = 0;
  for (int i = 0; i < program.variant_count; ++i) {
    Variant const& v = program.variants[i];
    int64_t tiles = ceil_div(rows, v.tile_m) * ceil_div(columns, v.columns);
    int64_t cost = ceil_div(tiles, program.design_sms) * v.tile_m * v.tile_n;
    if (!best || cost < least) best = &v, least = cost;
  }
  return *best;
}

inline int64_t partials(Variant const& v, bool of_rows, int64_t rows, int64_t columns) {
  return of_rows ? ceil_div(columns, v.columns) : ceil_div(rows, kBand);
}

// Views of the arguments, all requirements, the sizes and the variant. False leaves the sentence in last_error.
inline bool accept(Call& call, Program const& program, DLTensor* const* args, int n) {
  call.program = &program;
  if (n != program.arg_count) return refuse("%s, got %d", program.usage, n);
  for (int i = 0; i < n; ++i) call.views[i] = view(args[i]);
  auto counts = [&](bool of_rows) {
    int64_t rows = call.sizes.value(program.rows), columns = call.sizes.value(program.columns);
    return partials(select(program, rows, columns), of_rows, rows, columns);
  };
  if (!check(program, call.views, call.sizes, counts)) return false;
  call.rows = call.sizes.value(program.rows);
  call.columns = call.sizes.value(program.columns);
  call.variant = &select(program, call.rows, call.columns);
  return true;
}

// -- workspace: a slot for each store that a finish kernel reads, f32 partials [count][length], then one for each value
// of a row that a total is made of -----------------------------------------------------------------------------------

inline int64_t store_length(Call const& call, Store const& store) {
  return store.kind == StoreKind::kColumn ? call.columns : call.rows;
}

inline int64_t store_count(Call const& call, Store const& store) {
  if (store.kind == StoreKind::kPick) return 1;
  return partials(*call.variant, store.kind == StoreKind::kRow, call.rows, call.columns);
}

inline bool in_workspace(Store const& store) { return store.arg < 0; }

inline int64_t slot_bytes(Call const& call, int slot) {
  Program const& program = *call.program;
  int64_t floats = call.rows;
  if (slot < program.store_count) {
    Store const& store = program.stores[slot];
    if (!in_workspace(store)) return 0;
    floats = store_count(call, store) * store_length(call, store) * store.floats;
  }
  return ceil_div(floats * int64_t(sizeof(float)), kWorkspaceAlign) * kWorkspaceAlign;
}

// Where a slot begins.
inline int64_t slot_offset(Call const& call, int slot) {
  int64_t offset = 0;
  for (int before = 0; before < slot; ++before) offset += slot_bytes(call, before);
  return offset;
}

inline int64_t workspace_bytes(Call const& call) {
  return slot_offset(call, call.program->store_count + call.program->kept_count);
}

inline void* slot(Call const& call, void* workspace, int index) {
  return static_cast<char*>(workspace) + slot_offset(call, index);
}

inline bool check_workspace(Call const& call, void* workspace, size_t bytes) {
  int64_t need = workspace_bytes(call);
  if (need == 0) return true;
  if (bytes < size_t(need)) return refuse("the workspace has %zu bytes, this call needs %lld", bytes, (long long)need);
  if (!workspace || uintptr_t(workspace) % kWorkspaceAlign)
    return refuse("the workspace must be device memory aligned to %lld bytes", (long long)kWorkspaceAlign);
  return true;
}

// -- launch ----------------------------------------------------------------------------------------------------------

inline int launch(Kernel const& kernel, int index, dim3 grid, dim3 block, cudaStream_t stream, void* parameters) {
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {unsigned(kernel.cluster_m), unsigned(kernel.cluster_n), 1};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = size_t(kernel.shared_bytes);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = kernel.cluster_m > 0 ? 1 : 0;  // a finish kernel has no cluster
  void* pointers[] = {parameters};
  return cuda_status(cudaLaunchKernelExC(&config, state().kernels[index], pointers), kernel.symbol);
}

// Clusters walk the tiles in groups of eight along M: a group's rows of A and columns of B stay in L2.
inline Schedule schedule(Call const& call, Kernel const& kernel, DeviceState const& device, int max_clusters) {
  Variant const& v = *call.variant;
  Schedule s{};
  s.clusters_m = int32_t(ceil_div(ceil_div(call.rows, v.tile_m), kernel.cluster_m));
  s.clusters_n = int32_t(ceil_div(ceil_div(call.columns, v.columns), kernel.cluster_n));
  s.swizzle = s.clusters_m < 8 ? s.clusters_m : 8;
  s.along_n = 1;
  int64_t resident = device.multiprocessors / (kernel.cluster_m * kernel.cluster_n);
  if (max_clusters > 0 && max_clusters < resident) resident = max_clusters;
  int64_t all = int64_t(s.clusters_m) * s.clusters_n;
  s.grid_clusters = int32_t(all < resident ? all : resident);
  return s;
}

// The GEMM kernel of a program with these counts; Program::gemm points to the instance.
template <int kMaps, int kOperands, int kOutputs, int kTerms>
int launch_gemm(Call const& call, DeviceState const& device, void* workspace, cudaStream_t stream) {
  Program const& program = *call.program;
  Kernel const& kernel = program.image->kernels[call.variant->kernel];
  Launch<kMaps, kOperands, kOutputs, kTerms> p{};
  p.m = int32_t(call.rows);
  p.n = int32_t(call.columns * program.lanes);
  p.schedule = schedule(call, kernel, device, device.max_clusters[call.variant->kernel]);
  Frame frame{program, *call.variant, call.views, call.rows, call.columns};
  for (int i = 0; i < kTerms; ++i) {
    int64_t k = call.sizes.value(program.terms[i].contraction);
    p.k[i] = int32_t(k);
    if (int status = bind_term(frame, program.terms[i], k, p.a[i], p.b[i], p.swap_lanes)) return status;
  }
  for (int i = 0; i < program.operand_count; ++i) {
    Operand const& spec = program.operands[i];
    if (int status = bind_operand(frame, spec, p.operands[i])) return status;
    if (spec.map < 0 || !frame.views[spec.arg].present) continue;
    if (int status = bind_tile_map(frame, spec, p.tiles[spec.map])) return status;
  }
  for (int i = 0; i < program.store_count; ++i) {
    Store const& store = program.stores[i];
    p.outputs[i] = in_workspace(store) ? partial_output(slot(call, workspace, i), store, store_length(call, store))
                                       : bind_output(frame, store);
  }
  dim3 grid(kernel.cluster_m, kernel.cluster_n * p.schedule.grid_clusters, 1);
  return launch(kernel, call.variant->kernel, grid, dim3(kThreads), stream, &p);
}

// A finish kernel; Finishing::launch points to the instance. It makes one result for each row or column, or one in all
// from the values of all rows. With an empty GEMM `count` is 0 and the kernel writes what a reduction over nothing is.
template <int kOperands, int kOutputs>
int launch_finish(Call const& call, Finishing const& finishing, void* workspace, cudaStream_t stream) {
  Program const& program = *call.program;
  bool of_rows = finishing.kind == StoreKind::kRow, total = finishing.kind == StoreKind::kTotal;
  Finish<kOperands, kOutputs> p{};
  p.length = total ? 1 : int32_t(of_rows ? call.rows : call.columns);
  p.count = int32_t(total ? call.rows : partials(*call.variant, of_rows, call.rows, call.columns));
  p.extent = of_rows ? call.columns : call.rows;
  if (p.length == 0) return CODA_OK;
  Frame frame{program, *call.variant, call.views, call.rows, call.columns};
  for (int i = 0; i < finishing.partial_count; ++i)
    p.operands[i] = partial_operand(slot(call, workspace, finishing.partials[i]), finishing.kind, p.length);
  for (int i = 0; i < finishing.operand_count; ++i)
    if (int status = bind_operand(frame, finishing.operands[i], p.operands[finishing.partial_count + i])) return status;
  for (int i = 0; i < finishing.result_count; ++i) p.outputs[i] = bind_output(frame, finishing.results[i]);
  for (int i = 0; i < finishing.kept_count; ++i)
    p.outputs[finishing.result_count + i] = {slot(call, workspace, program.store_count + i), 1, 0, 0, 0};
  Kernel const& kernel = program.image->kernels[finishing.kernel];
  dim3 grid(unsigned(ceil_div(p.length, 32)));
  return launch(kernel, finishing.kernel, grid, dim3(32, 16), stream, &p);
}

inline int run_on_device(Call const& call, int device, void* workspace, cudaStream_t stream) {
  Program const& program = *call.program;
  DeviceState const* ready = nullptr;
  if (int status = prepare(*program.image, program.name, device, stream, &ready)) return status;
  if (call.rows > 0 && call.columns > 0)
    if (int status = program.gemm(call, *ready, workspace, stream)) return status;
  for (int i = 0; i < program.finishing_count; ++i) {
    Finishing const& finishing = program.finishings[i];
    if (int status = finishing.launch(call, finishing, workspace, stream)) return status;
  }
  return CODA_OK;
}

// -- the functions behind the ABI ------------------------------------------------------------------------------------

inline int check(Program const& program, DLTensor* const* args, int n) {
  Call call;
  clear_error();
  return accept(call, program, args, n) ? CODA_OK : CODA_REFUSED;
}

inline size_t workspace_bytes(Program const& program, DLTensor* const* args, int n) {
  Call call;
  clear_error();
  return accept(call, program, args, n) ? size_t(workspace_bytes(call)) : 0;
}

inline int run(Program const& program, DLTensor* const* args, int n, void* workspace, size_t bytes,
               cudaStream_t stream) {
  Call call;
  clear_error();
  int device = -1;
  if (!accept(call, program, args, n) || !find_device(program, call.views, &device) ||
      !check_workspace(call, workspace, bytes))
    return CODA_REFUSED;
  if (device < 0) return CODA_OK;  // nothing but absent and empty tensors
  DeviceGuard guard(device);
  if (guard.status) return guard.status;
  return run_on_device(call, device, workspace, stream);
}

inline int warmup(Program const& program, int device) {
  clear_error();
  DeviceGuard guard(device);
  return guard.status ? guard.status : warm(*program.image, device);
}

}  // namespace coda::host
