// A call whose arguments were accepted, the variants of its kernels, and the layout of its workspace.
#pragma once
#include "bind.h"
#include "checks.h"
#include "device.h"

namespace coda::host {

constexpr int64_t kWorkspaceAlign = 256;
constexpr int64_t kPitchAlign = 16;    // bytes; rows of temporaries are read by TMA
constexpr int64_t kTotalBlocks = 264;  // TOTAL_BLOCKS of coda/target/rowplan.py

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

struct Call {
  Program const* program;
  View views[kMaxTensors];
  Sizes sizes;
  char* workspace;
  bool follows;  // whether a kernel of this call is in front of the next one
  int64_t start;  // of the chunk of the loop: see `enter`

  // The step that is being launched: see `begin`.
  Step const* step;
  int64_t rows, columns;   // columns of one lane
  int64_t batches;         // each of `rows` rows; 1 where there is no batch
  Variant const* variant;  // of a GEMM
};

// The variant with the least waves x cost of a tile, the first of equals. The number of multiprocessors is that of the
// description, not of the device: partial sums and bits must not depend on the board.
inline Variant const& select(Program const& program, Gemm const& gemm, int64_t rows, int64_t columns,
                             int64_t batches = 1) {
  Variant const* best = nullptr;
  int64_t least = 0;
  for (int i = 0; i < gemm.variant_count; ++i) {
    Variant const& v = gemm.variants[i];
    int64_t tiles = ceil_div(rows, v.tile_m) * ceil_div(columns, v.columns) * batches;
    int64_t cost = ceil_div(tiles, program.design_sms) * v.cost;
    if (!best || cost < least) best = &v, least = cost;
  }
  return *best;
}

inline int64_t partials(Variant const& v, bool of_rows, int64_t rows, int64_t columns) {
  return of_rows ? ceil_div(columns, v.columns) : ceil_div(rows, kBand);
}

// Sets what depends on the step.
inline void begin(Call& call, Step const& step) {
  call.step = &step;
  call.rows = call.sizes.value(step.rows);
  call.columns = call.sizes.value(step.columns);
  call.batches = step.gemm ? call.sizes.value(step.gemm->batch) : 1;
  call.variant = step.gemm ? &select(*call.program, *step.gemm, call.rows, call.columns, call.batches) : nullptr;
}

// The blocks of a part of a row kernel that leave partial results, in each group of rows. Sizes alone decide: bits must
// not depend on where tensors lie.
inline int64_t total_blocks(Call const& call, RowPart const& part) {
  int64_t groups = call.sizes.value(part.groups), rows = call.sizes.value(part.rows);
  if (rows == 0) return 0;
  int64_t most = ceil_div(kTotalBlocks, groups);
  return rows / groups < most ? rows / groups : most;
}

// Sets the size of the chunk of a loop that begins at `start`.
inline void set_chunk(Call& call, Loop const& loop, int64_t start) {
  int64_t left = call.sizes.value(loop.axis) - start;
  call.sizes.values[loop.variable] = left < loop.width ? left : loop.width;
}

// Views of the arguments, all requirements and the sizes. False leaves the sentence in last_error.
inline bool accept(Call& call, Program const& program, DLTensor* const* args, int n) {
  call.program = &program;
  call.follows = false;
  if (n != program.arg_count) return refuse("%s, got %d", program.usage, n);
  for (int i = 0; i < n; ++i) call.views[i] = view(args[i]);
  auto counts = [&](bool of_rows) {
    Step const& step = program.steps[program.partial_step];
    int64_t rows = call.sizes.value(step.rows), columns = call.sizes.value(step.columns);
    return partials(select(program, *step.gemm, rows, columns), of_rows, rows, columns);
  };
  if (!check(program, call.views, call.sizes, counts)) return false;
  if (program.loop) set_chunk(call, *program.loop, 0);  // the largest: for it the workspace is planned
  return true;
}

// -- workspace: scratch memory, which every step uses anew, then the buffers of the temporaries -------------------------
//
// A step's scratch memory has a slot for each store that a finish kernel reads, f32 partials [count][length], then one
// for each value of a row that a total is made of.

struct Counts {
  int64_t count, length;
};

inline Counts counts(Call const& call, RowPartials const& partials) {
  int64_t length = call.sizes.value(partials.length);
  if (!partials.blocks) return {call.sizes.value(partials.count), length};
  RowPart const& part = call.step->row->parts[partials.part];
  return {total_blocks(call, part) * (partials.kept ? 1 : call.sizes.value(part.groups)), length};
}

// Of the partials in a slot; behind the stores there are values of rows, which a finish kernel reduces to one.
inline Counts counts(Call const& call, int slot) {
  if (call.step->row) return counts(call, call.step->row->partials[slot]);
  int64_t rows = call.rows * call.batches;
  if (slot >= call.step->store_count) return {rows, 1};
  Store const& store = call.step->stores[slot];
  if (store.kind == StoreKind::kPick) return {call.columns > 0, rows};
  bool of_rows = store.kind == StoreKind::kRow;
  int64_t count = partials(*call.variant, of_rows, call.rows, call.columns);
  if (of_rows) return {count, rows};
  return store.batch_dim < 0 ? Counts{count * call.batches, call.columns} : Counts{count, call.columns * call.batches};
}

// Bytes from the partials of one batch to those of the next.
inline int64_t partial_step(Call const& call, int slot) {
  Store const& store = call.step->stores[slot];
  Counts c = counts(call, slot);
  bool of_all = store.kind == StoreKind::kColumn && store.batch_dim < 0;
  int64_t values = of_all ? c.count / call.batches * c.length : c.length / call.batches;
  return values * store.floats * int64_t(sizeof(float));
}

inline coda::Operand partial_operand(void* at, StoreKind kind, Counts c) {
  bool of_rows = kind == StoreKind::kRow;
  return {at, of_rows ? 1 : c.length, of_rows ? c.length : 1, 0, 0.0f, c.count};
}

inline bool in_workspace(Store const& store) { return store.arg < 0; }

inline int64_t slot_bytes(Call const& call, int slot) {
  Step const& step = *call.step;
  if (slot < step.store_count && !in_workspace(step.stores[slot])) return 0;
  Counts c = counts(call, slot);
  int64_t floats = c.count * c.length * (slot < step.store_count ? step.stores[slot].floats : 1);
  return round_up(floats * int64_t(sizeof(float)), kWorkspaceAlign);
}

// Where a slot begins.
inline int64_t slot_offset(Call const& call, int slot) {
  int64_t offset = 0;
  for (int before = 0; before < slot; ++before) offset += slot_bytes(call, before);
  return offset;
}

inline void* slot(Call const& call, int index) { return call.workspace + slot_offset(call, index); }

// The most that any step needs.
inline int64_t scratch_bytes(Call& call) {
  int64_t most = 0;
  for (int i = 0; i < call.program->step_count; ++i) {
    Step const& step = call.program->steps[i];
    begin(call, step);
    int64_t bytes = slot_offset(call, step.store_count + step.kept_count);
    if (bytes > most) most = bytes;
  }
  return most;
}

// A temporary is contiguous but for its rows, which begin at multiples of 16 bytes.
inline View temporary_view(Call const& call, Temporary const& t) {
  View v;
  v.present = true;
  v.rank = t.rank;
  v.dtype = t.dtype;
  v.device = {kDLCUDA, 0};
  if (t.step >= 0) {
    Step const& step = call.program->steps[t.step];
    int64_t rows = call.sizes.value(step.rows), columns = call.sizes.value(step.columns);
    v.rank = 2;
    v.shape[0] = partials(select(*call.program, *step.gemm, rows, columns), true, rows, columns);
    v.shape[1] = v.strides[0] = rows;
    v.strides[1] = 1;
    return v;
  }
  int64_t stride = 1;
  for (int i = t.rank - 1; i >= 0; --i) {
    v.shape[i] = call.sizes.value(t.dims[i]);
    v.strides[i] = stride;
    stride *= v.shape[i];
    if (i == t.rank - 1) stride = round_up(stride, kPitchAlign / v.itemsize());
  }
  return v;
}

inline int64_t temporary_bytes(View const& v) {
  return round_up((v.rank ? v.shape[0] * v.strides[0] : 1) * v.itemsize(), kWorkspaceAlign);
}

// The workspace that a call needs. With memory, the temporaries are put into it: each buffer is as large as the largest
// of the tensors that it holds one after the other.
inline int64_t plan_workspace(Call& call, void* memory) {
  Program const& program = *call.program;
  int64_t offset = scratch_bytes(call);
  call.workspace = static_cast<char*>(memory);
  for (int buffer = 0; buffer < program.buffer_count; ++buffer) {
    int64_t most = 0;
    for (int i = 0; i < program.temporary_count; ++i) {
      if (program.temporaries[i].buffer != buffer) continue;
      View& v = call.views[program.arg_count + i] = temporary_view(call, program.temporaries[i]);
      if (memory) v.data = call.workspace + offset;
      int64_t bytes = temporary_bytes(v);
      if (bytes > most) most = bytes;
    }
    offset += most;
  }
  return offset;
}

// Sets what depends on the chunk of a loop: sizes, its parts of arguments, and its first position. Temporaries stay
// where they are; those over the chunk become narrower with the last one.
inline void enter(Call& call, Loop const& loop, int64_t start) {
  Program const& program = *call.program;
  set_chunk(call, loop, start);
  call.start = start;
  for (int i = 0; i < program.temporary_count; ++i)
    for (int d = 0; program.temporaries[i].step < 0 && d < program.temporaries[i].rank; ++d)
      call.views[program.arg_count + i].shape[d] = call.sizes.value(program.temporaries[i].dims[d]);
  View* views = call.views + program.arg_count + program.temporary_count;
  for (int i = 0; i < loop.part_count; ++i) {
    Part const& part = loop.parts[i];
    View& v = views[i] = call.views[part.of];
    if (!v.present) continue;
    v.data += start * v.pitch(part.dim) * v.itemsize();
    v.shape[part.dim] = call.sizes.values[loop.variable];
  }
  View& scalar = views[loop.part_count] = View{};
  scalar.present = true;
  scalar.dtype = {kDLInt, 64, 1};
  scalar.device = {kDLCPU, 0};
  scalar.data = reinterpret_cast<char*>(&call.start);
}

inline bool check_workspace(Call& call, void* workspace, size_t bytes) {
  int64_t need = plan_workspace(call, workspace);
  if (need == 0) return true;
  if (bytes < size_t(need)) return refuse("the workspace has %zu bytes, this call needs %lld", bytes, (long long)need);
  if (!workspace || uintptr_t(workspace) % kWorkspaceAlign)
    return refuse("the workspace must be device memory aligned to %lld bytes", (long long)kWorkspaceAlign);
  return true;
}

// -- launches --------------------------------------------------------------------------------------------------------

// A kernel may begin before the one in front of it has ended: it waits itself (templates/chain.h). Not the first of a
// call: what the caller has in the stream need not have waited for all that is before it.
inline int launch(Call& call, int index, dim3 grid, dim3 block, cudaStream_t stream, void* parameters) {
  Kernel const& kernel = call.program->image->kernels[index];
  cudaLaunchAttribute attributes[2]{};
  unsigned count = 0;
  if (kernel.cluster_m > 0) {  // row and finish kernels have no cluster
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {unsigned(kernel.cluster_m), unsigned(kernel.cluster_n), 1};
  }
  if (call.follows) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  call.follows = true;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = size_t(kernel.shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  void* pointers[] = {parameters};
  return cuda_status(cudaLaunchKernelExC(&config, state().kernels[index], pointers), kernel.symbol);
}

}  // namespace coda::host
