// What the host half tells the device half: plain data, no CUTLASS, so that the launcher compiles with any C++17
// compiler in a second. The structs are passed as __grid_constant__ kernel parameters.
#pragma once
#include <cstdint>
#include <cuda.h>  // CUtensorMap

namespace coda {

// Where an epilogue operand lives. The element of row m, column n, lane l is data[m * row + n * column + l * lane];
// strides count elements and are 0 along axes the operand lacks. Lanes are the two halves of a paired product (gate
// and up), or heads. An absent optional operand has no data and stands for `value`, the identity of the + or * it is in; so
// does a scalar passed from the host.
struct Operand {
  void const* data;
  int64_t row, column, lane;
  float value;
  int64_t extent;  // rows of a table that is gathered from
  int64_t integer;  // the value of an integer or bool operand, exact
};

// Where a result goes. `vector` allows 16-byte stores: base, row stride and width are multiples of 16 bytes.
struct Output {
  void* data;
  int64_t row, column, lane;
  int32_t vector;
  int32_t rows_per_batch;  // not 0: rows come in batches of so many, `batch` apart (an output [B, H, T, d])
  int64_t batch;
};

// The order in which persistent clusters walk the output tiles: groups of `swizzle` cluster tiles along the minor
// direction, each group walked along the major one; the last group is simply narrower. See scheduler.h.
struct Schedule {
  int32_t clusters_m, clusters_n;  // cluster tiles in each direction
  int32_t swizzle;                 // width of a group
  int32_t along_n;                 // 1: groups run along N (minor direction M)
  int32_t grid_clusters;           // clusters launched
};

// One GEMM with its epilogue. The accumulators hold a sum of kTerms products, each over its own contracted axis of k
// elements. `n` counts accumulator columns: lanes x columns of a lane.
template <int kMaps, int kOperands, int kOutputs, int kTerms_ = 1>
struct Launch {
  static constexpr int kTerms = kTerms_;
  static constexpr bool kBatched = false;
  CUtensorMap a[kTerms], b[kTerms];
  CUtensorMap tiles[kMaps > 0 ? kMaps : 1];  // tile operands, in order of first use
  int32_t m, n, k[kTerms];
  int32_t swap_lanes;  // 1: lane 0 is the weight at the higher address (see weights in host.h)
  Schedule schedule;
  Operand operands[kOperands > 0 ? kOperands : 1];
  Output outputs[kOutputs > 0 ? kOutputs : 1];
};

// The same for each of `batches` batches, whose operands of the product have a coordinate more and whose other operands
// and outputs lie so many bytes further on. A kernel without a batch has none of this.
template <int kMaps, int kOperands, int kOutputs, int kTerms = 1>
struct BatchedLaunch : Launch<kMaps, kOperands, kOutputs, kTerms> {
  static constexpr bool kBatched = true;
  int32_t batches;
  int64_t operand_step[kOperands > 0 ? kOperands : 1], output_step[kOutputs > 0 ? kOutputs : 1];
};

// Launches of one kernel that run as one grid; `first` is the tile row at which each begins. See group.h.
template <class Launch_, int kMembers_>
struct Launches {
  using Launch = Launch_;
  static constexpr int kMembers = kMembers_;
  Launch each[kMembers];  // the schedule of the first is that of all
  int32_t first[kMembers];
};

// A finish kernel: combines the partials of each of `length` rows (or columns), in order. Those of slot i are an f32 array
// [operands[i].extent][length] at operands[i].data; the other operands and outputs follow as in the GEMM, or, where a
// result is counted by two loops, with `extent` (`rows_per_batch`) the size of the inner one and `lane` (`batch`) the
// stride of the outer one.
template <int kOperands, int kOutputs>
struct Finish {
  int32_t length;
  int64_t extent;  // number of elements reduced over: the divisor of a mean
  Operand operands[kOperands > 0 ? kOperands : 1];
  Output outputs[kOutputs > 0 ? kOutputs : 1];
};

// ---- row and map kernels ----

constexpr int kMaxLevels = 4;

// Where a tensor of a row kernel lies. Rows are counted by up to kMaxLevels nested loops, each a step in memory; an
// operand without data stands for `value` or `integer`, as above.
struct RowTensor {
  void* data;
  int64_t level[kMaxLevels];  // elements from one step of a loop to the next; 0 where the tensor does not vary
  int64_t column;
  int64_t gather, extent;     // rows of a table that is gathered from, or partial results: their pitch and number
  int64_t integer;
  float value;
  int32_t vector;             // 1: 16-byte accesses, columns are adjacent, rows begin at multiples of 16 bytes; 2 and 3:
                              // so do pairs of columns, of which this is the first or the second
};

// A part of a row kernel. `rows` is the product of the loops' sizes. Columns of each space are shared by the `threads` of
// a team. Rows fall into `groups` of equal size, one after the other, each worked on by `blocks` x `chunks` blocks.
template <int kLevels_, int kSpaces_, int kTensors_>
struct Rows {
  static constexpr int kLevels = kLevels_, kSpaces = kSpaces_, kTensors = kTensors_;
  int32_t rows, threads, groups, blocks, chunks;
  int32_t sizes[kLevels > 0 ? kLevels : 1];
  int32_t columns[kSpaces];
  RowTensor tensors[kTensors];
};

// The parts of a kernel, which is launched with the blocks of all.
template <class Part, class... Others> struct RowParts {
  Part part;
  RowParts<Others...> others;
};
template <class Part> struct RowParts<Part> { Part part; };

}  // namespace coda
