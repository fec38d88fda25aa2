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

// Partials have no view.
inline int64_t partial_stride(Call const& call, RowStride const& s) { return s.dim == -2 ? call.sizes.value(s.scale) : 0; }

inline int bind_row_tensor(Call const& call, RowAccess const& spec, RowTensor& t) {
  t.value = spec.absent;
  t.integer = spec.absent_integer;
  if (spec.slot >= 0) {
    t.data = slot(call, spec.slot);
    for (int i = 0; i < kMaxLevels; ++i) t.level[i] = partial_stride(call, spec.levels[i]);
    return CODA_OK;
  }
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
  if (spec.partials) t.gather = v.pitch(0), t.extent = v.shape[0];
  bool aligned = t.gather * v.itemsize() % 16 == 0;
  for (int i = 0; i < kMaxLevels; ++i) {
    t.level[i] = row_stride(call, v, spec.levels[i]);
    aligned = aligned && t.level[i] * v.itemsize() % 16 == 0;
  }
  int64_t const beyond = int64_t(uintptr_t(t.data) % 16);
  bool const paired = t.column == 2 && (beyond == 0 || beyond == v.itemsize());
  t.vector = !aligned ? 0 : t.column == 1 && beyond == 0 ? 1 : paired ? 2 + (beyond != 0) : 0;
  return CODA_OK;
}

inline int power_of_two(int64_t at_least, int most) {
  int result = 1;
  while (result < at_least && result < most) result *= 2;
  return result;
}

// What the kernel has to do for a part.
struct RowWork {
  bool vector;     // all accesses are of 16 bytes
  int64_t octets;  // in a row
};

template <class Rows> int bind_part(Call const& call, RowPart const& spec, Rows& p, RowWork& work) {
  p.rows = int32_t(call.sizes.value(spec.rows));
  p.groups = p.rows ? int32_t(call.sizes.value(spec.groups)) : 1;
  for (int i = 0; i < Rows::kLevels; ++i) p.sizes[i] = int32_t(call.sizes.value(spec.levels[i]));
  int64_t widest = 0;
  work.vector = true;
  for (int i = 0; i < Rows::kSpaces; ++i) {
    int64_t columns = call.sizes.value(spec.spaces[i]);
    p.columns[i] = int32_t(columns);
    widest = columns > widest ? columns : widest;
    work.vector = work.vector && columns % kOctet == 0;
  }
  for (int i = 0; i < Rows::kTensors; ++i) {
    if (int status = bind_row_tensor(call, spec.accesses[i], p.tensors[i])) return status;
    work.vector = work.vector && (!spec.accesses[i].octets || !p.tensors[i].data || p.tensors[i].vector == 1);
  }
  work.octets = ceil_div(widest, kOctet);
  return CODA_OK;
}

template <class Part, class... Others>
int bind_parts(Call const& call, RowPart const* spec, RowParts<Part, Others...>& p, RowWork* work) {
  if (int status = bind_part(call, *spec, p.part, *work)) return status;
  if constexpr (sizeof...(Others) > 0) return bind_parts(call, spec + 1, p.others, work + 1);
  return CODA_OK;
}

// Up to 256 octets a thread holds one, up to 1024 two, up to 2048 four. A map cuts longer rows into pieces.
inline bool holds(RowKernel const& kernel, RowVariant const& v, RowWork const& work) {
  if (v.vector && !work.vector) return false;
  if (!v.vector || kernel.chunked) return true;
  return work.octets <= (v.octets == 1 ? kTeamThreads : kMostThreads * v.octets);
}

// The first variant that holds the rows of all parts; of a map the second one, which holds more, where a row is long:
// more of a row is asked for at once.
inline RowVariant const& row_variant(RowKernel const& kernel, RowWork const* work) {
  RowVariant const* v = kernel.variants;
  for (int part = 0; part < kernel.part_count; ++part)
    while (!holds(kernel, *v, work[part])) ++v;
  bool two = kernel.chunked && v->vector && v[1].vector;
  for (int part = 0; part < kernel.part_count; ++part)
    if (two && v == kernel.variants && work[part].octets > kTeamThreads) ++v;
  return *v;
}

// The threads of a team.
inline int row_threads(RowKernel const& kernel, RowVariant const& v, RowWork const& work) {
  return power_of_two(ceil_div(work.octets, v.octets > 0 ? v.octets : 1), kernel.chunked ? kTeamThreads : kMostThreads);
}

// Spreads the rows of each part over blocks; the number of these.
template <class Part, class... Others>
int64_t share_rows(Call const& call, RowPart const* spec, RowParts<Part, Others...>& all, RowVariant const& v,
                   RowWork const* work, int block) {
  RowKernel const& kernel = *call.step->row;
  Part& p = all.part;
  p.threads = row_threads(kernel, v, *work);
  bool const cut = kernel.chunked && work->octets > 0;
  p.chunks = cut ? int32_t(ceil_div(work->octets, int64_t(p.threads) * (v.octets > 0 ? v.octets : 1))) : 1;
  p.blocks = int32_t(spec->totals ? total_blocks(call, *spec) : ceil_div(p.rows / p.groups, block / p.threads));
  int64_t const blocks = int64_t(p.groups) * p.blocks * p.chunks;
  if constexpr (sizeof...(Others) > 0) return blocks + share_rows(call, spec + 1, all.others, v, work + 1, block);
  return blocks;
}

// The row kernel of a step with these parts; Step::launch points to the instance.
template <class... Parts> int launch_rows(Call& call, DeviceState const&, cudaStream_t stream) {
  RowKernel const& kernel = *call.step->row;
  RowParts<Parts...> p{};
  RowWork work[kMaxParts];
  if (int status = bind_parts(call, kernel.parts, p, work)) return status;
  RowVariant const& v = row_variant(kernel, work);
  int threads = kTeamThreads;
  for (int part = 0; part < kernel.part_count; ++part) {
    int const team = row_threads(kernel, v, work[part]);
    threads = team > threads ? team : threads;
  }
  int64_t blocks = share_rows(call, kernel.parts, p, v, work, threads);
  if (blocks == 0) return CODA_OK;
  return launch(call, v.kernel, dim3(unsigned(blocks)), dim3(unsigned(threads)), stream, &p);
}

}  // namespace coda::host
