// From views to what a kernel reads: operand and output records, tensor maps.
#pragma once
#include "checks.h"
#include "device.h"

namespace coda::host {

// Everything binding looks at.
struct Frame {
  Program const& program;
  Gemm const& gemm;
  Variant const& variant;
  View const* views;
  int64_t rows, columns;  // columns of one lane
  int64_t batches;
};

// -- tensor maps -----------------------------------------------------------------------------------------------------

inline CUtensorMapDataType map_type(DLDataType dtype) {
  if (dtype.bits == 8) return CU_TENSOR_MAP_DATA_TYPE_UINT8;
  if (dtype.bits == 32) return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  return dtype.code == kDLBfloat ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

inline CUtensorMapSwizzle map_swizzle(int64_t bytes) {
  return bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
         : bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                       : CU_TENSOR_MAP_SWIZZLE_32B;
}

// Dims fastest first; `strides` in bytes, of all dims but the first. What lies outside reads as zero.
template <int kRank>
int encode(CUtensorMap& map, char const* name, View const& v, void* base, cuuint64_t const (&dims)[kRank],
           cuuint64_t const (&strides)[kRank - 1], cuuint32_t const (&box)[kRank]) {
  cuuint32_t ones[kRank];
  for (cuuint32_t& one : ones) one = 1;
  CUresult result = state().encode(&map, map_type(v.dtype), kRank, base, dims, strides, box, ones,
                                   CU_TENSOR_MAP_INTERLEAVE_NONE, map_swizzle(box[0] * v.itemsize()),
                                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return CODA_OK;
  refuse("the driver refused a tensor map over '%s' (CUresult %d)", name, int(result));
  return CODA_CUDA_ERROR;
}

// Bytes from row to row. One row has no pitch of its own, but the map wants a legal one.
inline cuuint64_t row_bytes(View const& v, int row_dim, int64_t width) {
  int64_t pitch = v.pitch(row_dim);
  return cuuint64_t(pitch ? pitch * v.itemsize() : (width * v.itemsize() + 15) / 16 * 16);
}

// Elements from batch to batch. Where a batch shares a dim with rows or columns, as in (B M), it is outside of them.
template <class Spec> int64_t batch_pitch(View const& v, Spec const& spec, int64_t rows, int64_t columns) {
  int64_t steps = spec.batch_dim == spec.row_dim ? rows : spec.batch_dim == spec.column_dim ? columns : 1;
  return v.present ? v.pitch(spec.batch_dim) * steps : 0;
}

// A map with the batch as one dim more, `batch_pitch` elements apart, where the tensor is `batched`.
template <int kRank>
int encode_batched(Frame const& f, CUtensorMap& map, int tensor, void* base, bool batched, int64_t batch_pitch,
                   cuuint64_t const (&dims)[kRank], cuuint64_t const (&strides)[kRank - 1], cuuint32_t const (&box)[kRank]) {
  View const& v = f.views[tensor];
  if (!batched) return encode<kRank>(map, tensor_name(f.program, tensor), v, base, dims, strides, box);
  cuuint64_t all_dims[kRank + 1], all_strides[kRank];
  cuuint32_t boxes[kRank + 1];
  for (int i = 0; i < kRank; ++i) all_dims[i] = dims[i], boxes[i] = box[i];
  for (int i = 0; i < kRank - 1; ++i) all_strides[i] = strides[i];
  all_dims[kRank] = cuuint64_t(f.batches), boxes[kRank] = 1;
  all_strides[kRank - 1] = cuuint64_t(batch_pitch ? batch_pitch * v.itemsize() : 16);  // one batch needs a legal one, too
  return encode<kRank + 1>(map, tensor_name(f.program, tensor), v, base, all_dims, all_strides, boxes);
}

// The two lanes of B, fetched interleaved in groups of eight rows by one 4-D map: K, 8 rows, 2 lanes, F/8 groups. Two
// weights are lanes one address difference apart; strides are unsigned, so the lower one comes first and the kernel is
// told when that swaps the lanes.
inline int bind_paired_weight(Frame const& f, Term const& term, int64_t k, cuuint32_t box_rows, CUtensorMap& map,
                              int32_t& swap_lanes) {
  View const& w = f.views[term.b0];
  cuuint64_t pitch = row_bytes(w, w.rank - 2, k), row = pitch, lane = 0;
  char* base = w.data;
  if (term.b1 >= 0) {
    char* other = f.views[term.b1].data;
    swap_lanes = other < base;
    lane = cuuint64_t(swap_lanes ? base - other : other - base);
    base = swap_lanes ? other : base;
  } else if (f.gemm.weight_lanes == Lanes::kInner) {
    row = 2 * pitch, lane = pitch;
  } else {
    lane = cuuint64_t(f.columns) * pitch;
  }
  return encode_batched<4>(f, map, term.b0, base, f.gemm.batched, w.pitch(0),
                           {cuuint64_t(k), 8, 2, cuuint64_t(f.columns / 8)}, {row, lane, 8 * row}, {64, 8, 2, box_rows / 16});
}

// An operand of the product, [rows, k] or stored transposed. A box is 64 wide along K, which is 128 bytes, the swizzle,
// with `box_rows` rows; or 64 high, and as wide along the rows as a block of the `tile_rows` (block_rows in wgmma.h).
inline int bind_matrix(Frame const& f, int arg, Dims at, Major major, int64_t rows, int64_t k, cuuint32_t box_rows,
                       int tile_rows, CUtensorMap& map) {
  View const& v = f.views[arg];
  int const row = at.row < 0 ? v.rank - 2 : at.row;
  bool along_k = major == Major::kK;
  int64_t width = along_k ? k : rows, height = along_k ? rows : k;
  int64_t const batch = v.pitch(at.batch) * (at.batch == row ? height : at.batch == v.rank - 1 ? width : 1);
  return encode_batched<2>(f, map, arg, v.data, f.gemm.batched, batch, {cuuint64_t(width), cuuint64_t(height)},
                           {row_bytes(v, row, width)}, {along_k || tile_rows % 64 == 0 ? 64u : 32u, along_k ? box_rows : 64});
}

// A weight of strips of heads, in runs: box by box the rows of one, in the order in which threads have them (mainloop.h).
inline int bind_runs(Frame const& f, int arg, int64_t rows, int64_t k, CUtensorMap& map) {
  View const& v = f.views[arg];
  cuuint64_t const run = cuuint64_t(f.gemm.run), row = row_bytes(v, v.rank - 2, k);
  cuuint32_t const pairs = cuuint32_t(run / 8);
  return encode<5>(map, tensor_name(f.program, arg), v, v.data, {cuuint64_t(k), 2, 4, pairs, cuuint64_t(rows) / run},
                   {row, 2 * pairs * row, 2 * row, run * row}, {64, 2, 4, pairs, 1});
}

// Clusters share tiles: each block loads its part of A (along N) and of B (along M) and multicasts it.
inline int bind_term(Frame const& f, Term const& term, int64_t k, CUtensorMap& a, CUtensorMap& b, int32_t& swap_lanes) {
  Gemm const& p = f.gemm;
  Kernel const& kernel = f.program.image->kernels[f.variant.kernel];
  cuuint32_t a_rows = cuuint32_t(f.variant.tile_m / kernel.cluster_n);
  cuuint32_t b_rows = cuuint32_t(f.variant.tile_n / kernel.cluster_m);
  if (int status = bind_matrix(f, term.a, term.a_at, p.a_major, f.rows, k, a_rows, f.variant.tile_m, a)) return status;
  if (p.lanes == 2) return bind_paired_weight(f, term, k, b_rows, b, swap_lanes);
  View const& w = f.views[term.b0];  // its own columns: weights side by side have a part of the product's each
  int64_t columns = p.batched ? f.columns : w.shape[p.b_major == Major::kK ? 0 : 1];
  if (p.run > 0) return bind_runs(f, term.b0, columns, k, b);
  return bind_matrix(f, term.b0, term.b_at, p.b_major, columns, k, b_rows, f.variant.tile_n, b);
}

inline int bind_tile_map(Frame const& f, Operand const& spec, CUtensorMap& map) {
  View const& v = f.views[spec.arg];
  cuuint64_t columns = cuuint64_t(f.columns), rows = cuuint64_t(f.rows);
  cuuint32_t chunk = cuuint32_t(f.variant.chunk), slab = cuuint32_t(f.variant.slab_rows);
  bool const batched = spec.batch_dim >= 0;
  int64_t const batch = batch_pitch(v, spec, f.rows, f.columns);
  if (spec.lanes == Lanes::kNone)
    return encode_batched<2>(f, map, spec.arg, v.data, batched, batch, {columns, rows},
                             {row_bytes(v, spec.row_dim, f.columns)}, {chunk, slab});
  return encode_batched<3>(f, map, spec.arg, v.data, batched, batch, {columns, 2, rows},
                           {columns * cuuint64_t(v.itemsize()), row_bytes(v, spec.row_dim, 2 * f.columns)}, {chunk, 1, slab});
}

// -- operands and outputs --------------------------------------------------------------------------------------------

// Column and lane strides of a dim that holds both lanes.
inline void lane_strides(Lanes lanes, int64_t stride, int64_t columns, int64_t* column, int64_t* lane) {
  *column = lanes == Lanes::kInner ? 2 * stride : stride;
  *lane = lanes == Lanes::kNone ? 0 : lanes == Lanes::kInner ? stride : columns * stride;
}

// Row, column and head strides of a tensor walked by heads; heads take the place of lanes.
inline void walk_strides(View const& v, Walk const& walk, int64_t* row, int64_t* column, int64_t* head) {
  *row = v.pitch(walk.row);
  *column = v.pitch(walk.column);
  *head = v.pitch(walk.head) * walk.head_scale;
}

inline float half_to_float(uint16_t bits) {
  uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = bits >> 10 & 31, mantissa = bits & 1023;
  float magnitude;
  uint32_t word = exponent == 31 ? 0x7f800000u | mantissa << 13 : (exponent + 112) << 23 | mantissa << 13;
  memcpy(&magnitude, &word, 4);
  if (exponent == 0) magnitude = float(mantissa) * 0x1p-24f;
  return sign ? -magnitude : magnitude;
}

// A scalar in host memory, as the f32 or the 64-bit integer that the kernel takes.
inline bool read_scalar(View const& v, coda::Operand& o) {
  uint16_t half;
  uint32_t word;
  int32_t integer;
  switch (v.dtype.code) {
    case kDLFloat:
      if (v.dtype.bits == 32) return memcpy(&o.value, v.data, 4), true;
      memcpy(&half, v.data, 2);
      return o.value = half_to_float(half), true;
    case kDLBfloat:
      memcpy(&half, v.data, 2);
      word = uint32_t(half) << 16;
      return memcpy(&o.value, &word, 4), true;
    case kDLBool: return o.integer = *v.data != 0, true;
    case kDLInt:
      if (v.dtype.bits == 64) return memcpy(&o.integer, v.data, 8), true;
      if (v.dtype.bits == 8) return o.integer = static_cast<signed char>(*v.data), true;
      memcpy(&integer, v.data, 4);
      return o.integer = integer, true;
    default: return false;
  }
}

// `columns`: of one lane.
inline int bind_operand(Program const& program, View const* views, Sizes const& sizes, int64_t columns,
                        Operand const& spec, coda::Operand& o) {
  if (spec.arg < 0) return o.integer = sizes.value(spec.size), CODA_OK;
  View const& v = views[spec.arg];
  o.value = spec.absent;
  o.integer = spec.absent_integer;
  if (!v.present) return CODA_OK;
  if (v.on_host()) {
    if (read_scalar(v, o)) return CODA_OK;
    refuse("the scalar '%s' has a dtype that only device memory may hold", tensor_name(program, spec.arg));
    return CODA_REFUSED;
  }
  o.data = v.data;
  if (spec.walk.head_scale) {
    walk_strides(v, spec.walk, &o.row, &o.column, &o.lane);
    o.extent = spec.walk.row >= 0 && spec.walk.row < v.rank ? v.shape[spec.partials ? 0 : spec.walk.row] : 0;
    return CODA_OK;
  }
  o.row = v.pitch(spec.row_dim);
  lane_strides(spec.lanes, v.pitch(spec.column_dim), columns, &o.column, &o.lane);
  if (spec.partials) o.extent = v.shape[0];
  return CODA_OK;
}

// Partial results of a user: a matrix [count, length].
inline coda::Output bind_partials(View const& v, StoreKind kind) {
  bool of_rows = kind == StoreKind::kRow;
  return {v.data, v.strides[of_rows ? 1 : 0], v.strides[of_rows ? 0 : 1], 0, 0};
}

inline coda::Output bind_walked_output(View const& v, Walk const& walk) {
  coda::Output o{};
  o.data = v.data;
  walk_strides(v, walk, &o.row, &o.column, &o.lane);
  o.batch = v.pitch(walk.batch);
  o.rows_per_batch = walk.batch >= 0 ? int32_t(v.shape[walk.row]) : 0;
  int64_t steps[] = {o.row, o.lane, o.batch};
  o.vector = o.column == 1 && v.address() % 16 == 0;
  for (int64_t step : steps) o.vector = o.vector && step * v.itemsize() % 16 == 0;
  return o;
}

inline coda::Output bind_output(View const* views, int64_t rows, int64_t columns, Store const& spec) {
  View const& v = views[spec.arg];
  if (spec.walk.head_scale) return bind_walked_output(v, spec.walk);
  if (spec.kind == StoreKind::kEach) return {v.data, v.pitch(spec.row_dim), 0, 0, 0};
  if (spec.kind != StoreKind::kTile) return bind_partials(v, spec.kind);
  coda::Output o{};
  o.data = v.data;
  o.row = v.pitch(spec.row_dim);
  lane_strides(spec.lanes, v.pitch(spec.column_dim), columns, &o.column, &o.lane);
  bool unit = spec.lanes == Lanes::kInner ? o.lane == 1 && columns % 8 == 0
                                          : o.column == 1 && columns * v.itemsize() % 16 == 0;
  o.vector = unit && v.address() % 16 == 0 && o.row * v.itemsize() % 16 == 0 &&
             batch_pitch(v, spec, rows, columns) * v.itemsize() % 16 == 0;
  return o;
}

// Partials in the workspace, [count][length]: for rows, length runs along the rows and count along the tile columns.
inline coda::Output partial_output(void* at, Store const& spec, int64_t length) {
  bool of_columns = spec.kind == StoreKind::kColumn;  // else rows: their partials, or a pick of each
  return {at, of_columns ? length : 1, of_columns ? 1 : length, 0, 0};
}

}  // namespace coda::host
