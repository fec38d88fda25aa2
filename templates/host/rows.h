// Launching row and map kernels: strides of the loops, the variant, and the shape of the grid.
#pragma once
#include "call.h"

namespace coda::host {

constexpr int kOctet = 8;
constexpr int kTeamThreads = 256;  // of a block, but for teams of more
constexpr int kMostThreads = 512;  // kRowThreads of row.h

inline int64_t row_stride(Call const& call, View const& v, RowStride const& s) {
  return s.dim < 0 ? 0 : v.pitch(s.dim) * call.sizes.value(s.scale);
}

inline int bind_row_tensor(Call const& call, RowAccess const& spec, RowTensor& t) {
  t.value = spec.absent;
  t.integer = spec.absent_integer;
  if (spec.slot >= 0) return t.data = slot(call, spec.slot), CODA_OK;
  t.extent = call.sizes.value(spec.extent);
  if (spec.arg < 0) return t.integer = t.extent, CODA_OK;
  View const& v = call.views[spec.arg];
  if (!v.present) return CODA_OK;
  if (v.on_host()) {
    coda::Operand scalar{};
    if (!read_scalar(v, scalar)) {
      refuse("the scalar '%s' has a dtype that only device memory may hold", tensor_name(*call.program, spec.arg));
      return CODA_REFUSED;
    }
    t.value = scalar.value, t.integer = scalar.integer;
    return CODA_OK;
  }
  int64_t begin = 0;
  for (RowStride const& offset : spec.offsets) begin += row_stride(call, v, offset);
  t.data = v.data + begin * v.itemsize();
  t.column = row_stride(call, v, spec.column);
  t.gather = row_stride(call, v, spec.gather);
  t.vector = t.column == 1 && uintptr_t(t.data) % 16 == 0 && t.gather * v.itemsize() % 16 == 0;
  for (int i = 0; i < kMaxLevels; ++i) {
    t.level[i] = row_stride(call, v, spec.levels[i]);
    t.vector = t.vector && t.level[i] * v.itemsize() % 16 == 0;
  }
  return CODA_OK;
}

inline int power_of_two(int64_t at_least, int most) {
  int result = 1;
  while (result < at_least && result < most) result *= 2;
  return result;
}

// How rows of so many octets are shared by threads.
struct RowShape {
  RowVariant const* variant;
  int threads, teams;  // of a team; of a block
  int64_t chunks;      // blocks that share a row
};

// Up to 256 octets a thread holds one, up to 1024 two, up to 2048 four. A map cuts longer rows into parts.
inline bool holds(RowKernel const& kernel, RowVariant const& v, bool vector, int64_t octets) {
  if (v.vector && !vector) return false;
  if (!v.vector || kernel.chunked) return true;
  return octets <= (v.octets == 1 ? kTeamThreads : kMostThreads * v.octets);
}

inline RowShape row_shape(RowKernel const& kernel, bool vector, int64_t octets) {
  RowShape shape{};
  for (int i = 0; i < kernel.variant_count && !shape.variant; ++i)
    if (holds(kernel, kernel.variants[i], vector, octets)) shape.variant = &kernel.variants[i];
  bool two = kernel.chunked && shape.variant->vector && shape.variant[1].vector;  // a second one that holds more
  if (two && octets > kTeamThreads) ++shape.variant;
  int held = shape.variant->octets > 0 ? shape.variant->octets : 1;
  shape.threads = power_of_two(ceil_div(octets, held), kernel.chunked ? kTeamThreads : kMostThreads);
  shape.teams = shape.threads < kTeamThreads ? kTeamThreads / shape.threads : 1;
  shape.chunks = kernel.chunked && octets > 0 ? ceil_div(octets, int64_t(shape.threads) * held) : 1;
  return shape;
}

// The row kernel of a step with these counts; Step::launch points to the instance.
template <int kLevels, int kSpaces, int kTensors>
int launch_rows(Call& call, DeviceState const&, cudaStream_t stream) {
  RowKernel const& row = *call.step->row;
  Rows<kLevels, kSpaces, kTensors> p{};
  p.rows = int32_t(call.rows);
  for (int i = 0; i < kLevels; ++i) p.sizes[i] = int32_t(call.sizes.value(row.levels[i]));
  int64_t widest = 0;
  bool vector = true;
  for (int i = 0; i < kSpaces; ++i) {
    int64_t columns = call.sizes.value(row.spaces[i]);
    p.columns[i] = int32_t(columns);
    widest = columns > widest ? columns : widest;
    vector = vector && columns % kOctet == 0;
  }
  for (int i = 0; i < kTensors; ++i) {
    RowAccess const& spec = row.accesses[i];
    if (int status = bind_row_tensor(call, spec, p.tensors[i])) return status;
    vector = vector && (!spec.octets || !p.tensors[i].data || p.tensors[i].vector);
  }
  RowShape shape = row_shape(row, vector, ceil_div(widest, kOctet));
  int64_t blocks = ceil_div(call.rows, shape.teams);
  call.launched = row.totals && blocks > kTotalBlocks ? kTotalBlocks : blocks;  // teams share a block: never more
  if (call.rows == 0) return CODA_OK;
  dim3 grid(unsigned(call.launched), unsigned(shape.chunks)), block(unsigned(shape.threads), unsigned(shape.teams));
  return launch(call, shape.variant->kernel, grid, block, stream, &p);
}

}  // namespace coda::host
