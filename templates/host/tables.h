// The shape of the tables in a generated host.cpp. Everything is constexpr data; indices refer to neighbouring tables,
// -1 means none.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "abi.h"
#include "launch.h"

namespace coda::host {

constexpr int kMaxArgs = 64;
constexpr int kMaxTensors = 128;  // arguments, temporaries, and what a loop sees of them
constexpr int kMaxOffsets = 3;
constexpr int kMaxSpaces = 4;
constexpr int kMaxParts = 4;  // of a row kernel
constexpr int kMaxRank = 8;
constexpr int kMaxVariables = 32;
constexpr int kMaxKernels = 256;
constexpr int kMaxDevices = 64;
constexpr int kBand = 16;  // rows of a partial of a column reduction: those of one warp

struct Call;
struct DeviceState;

// Order and meaning as in coda/target/requirements.py, class Kind.
enum class Kind : uint8_t {
  kPresent, kDtype, kRank, kDivisible, kSize, kProduct, kAtLeast, kAtMost, kMultiple, kPartials, kCount,
  kAligned, kUnit, kPitchBytes, kPitchMin, kPitchMax, kSamePitch, kLanes, kDistinct, kApart,
};

// coefficient * variable + offset
struct Extent {
  int64_t coefficient;
  int variable;
  int64_t offset;
};

struct Requirement {
  Kind kind;
  int arg, dim, other;
  int64_t value;
  Extent extent;
  char const* sentence;
};

struct Arg {
  char const* name;
  bool output;
  bool scalar;  // may live on the CPU
  bool vector;  // one element may stand for all
};

enum class Lanes : uint8_t { kNone, kOuter, kInner };

// How a head-wise kernel steps through a tensor (coda.target.plan.Walk): tensor dims, -1 where it does not vary.
// head_scale 0: the tensor is not walked by heads.
struct Walk {
  int row, batch, head, column;
  int64_t head_scale;
};

// Which dim of an operand of the product is adjacent in memory: K, or M (of A) and N (of B).
enum class Major : uint8_t { kK, kMn };

// The dims of an operand of the product that are not the last, adjacent one: that of the batch, which is outside where it
// shares a dim with another, and that of the rest; -1: the last but one.
struct Dims {
  int batch = 0, row = -1;
};

// One product of the sum that is accumulated: arguments A and B over their own contracted axis.
struct Term {
  int a, b0, b1;  // b1: the weight of the second lane, -1 where there is one weight
  Extent contraction;
  Dims a_at = {}, b_at = {};
};

struct Operand {
  int arg;
  int row_dim, column_dim;
  Lanes lanes;
  int map;       // index into Launch::tiles
  float absent;  // value of an absent optional operand, or the default
  Walk walk;
  int64_t absent_integer;  // as `absent`, of an integer operand
  Extent size;             // the number that an operand stands for which is no argument (arg -1)
  bool partials;           // [count, rows], reduced where it is read
  int batch_dim = -1;
};

enum class StoreKind : uint8_t { kTile, kRow, kColumn, kHead, kPick, kTotal, kEach };

struct Store {
  StoreKind kind;
  int arg;  // -1: partials in the workspace
  int row_dim, column_dim;
  Lanes lanes;
  Walk walk;
  int floats;  // f32 values of one partial
  int batch_dim = -1;  // of partials of columns: -1 if they are of all batches
};

// How one loop steps through a tensor: scale x the stride of a dim; -1: it does not vary; -2: `scale` elements.
struct RowStride {
  int dim;
  Extent scale;
};

// A tensor as row kernels, and the finish kernels behind them, step through it.
struct RowAccess {
  int arg;             // -1: the number `extent`, or partial results
  bool octets;         // read or written along the columns
  RowStride levels[kMaxLevels];
  RowStride column;
  RowStride offsets[kMaxOffsets];  // to where it begins: elements along a dim
  RowStride gather;
  Extent extent;       // positions of a table that is gathered from
  float absent;
  int64_t absent_integer;
  int slot;            // of partial results in the scratch memory; -1: it is an argument or a number
  bool partials;       // of another program: the first dim counts them
};

struct Finishing {
  StoreKind kind;
  int kernel;
  int const* partials;  // slots of the scratch memory: stores, then the kept values of each row
  int partial_count;
  Operand const* operands;
  int operand_count;
  Store const* results;
  int result_count;
  int kept_count;  // values of each row left in the scratch memory, after the results
  RowAccess const* accesses;  // behind a row kernel: operands, then results, by two loops; else nullptr
  Extent inner;               // size of the inner loop
  int (*launch)(Call&, Finishing const&, cudaStream_t);
};

struct Variant {
  int kernel;
  int tile_m, tile_n;
  int cost;       // of a tile, beside those of other variants
  int columns;    // of one lane
  int slab_rows;  // rows of a box of a tile operand
  int chunk;      // its columns
  int swizzle, along_n;  // the order of the tiles: see Schedule in launch.h
};

struct Kernel {
  char const* symbol;
  int cubin;
  int cluster_m, cluster_n;  // 0: launched without clusters
  int threads;
  int shared_bytes;
};

// The cubins and their kernels.
struct Image {
  void const* const* cubins;
  int cubin_count;
  char const* arch;
  int compute_capability;  // 10 * major + minor
  Kernel const* kernels;
  int kernel_count;
};

// What a GEMM kernel multiplies and reads.
struct Gemm {
  Term const* terms;
  int term_count;
  Major a_major, b_major;
  int lanes;
  Lanes weight_lanes;
  Operand const* operands;
  int operand_count;
  Variant const* variants;
  int variant_count;
  int run;                   // columns of B in a box, where tiles hold strips of heads (mainloop.h); else 0
  bool batched = false;      // rows are those of one batch
  Extent batch = {0, -1, 1};
};

// -- row and map kernels: coda/target/rowplan.py ---------------------------------------------------------------------

struct RowVariant {
  int kernel;
  int octets;   // held by a thread; 0: it reads the row again for each reduction
  bool vector;  // all accesses are of 16 bytes
};

struct RowPart {
  Extent levels[kMaxLevels];
  int level_count;
  Extent spaces[kMaxSpaces];
  int space_count;
  RowAccess const* accesses;
  int access_count;
  Extent rows;
  Extent groups;  // rows fall into so many, each with blocks of its own
  bool totals;    // reduces over the rows: a fixed number of blocks
};

// Partials in a slot of the scratch memory, [count][length].
struct RowPartials {
  int part;
  Extent length, count;
  bool blocks;  // there are as many as the part has blocks in a group, if they are `kept` apart by groups, or else in all
  bool kept;
};

struct RowKernel {
  RowPart const* parts;
  int part_count;
  RowPartials const* partials;
  int partial_count;
  RowVariant const* variants;
  int variant_count;
  bool chunked;  // a map: rows are cut into pieces for several blocks
};

// -- programs --------------------------------------------------------------------------------------------------------

// A kernel and the finish kernels behind it.
struct Step {
  Extent rows, columns;  // columns of one lane
  Store const* stores;
  int store_count;
  Finishing const* finishings;
  int finishing_count;
  int kept_count;         // of the row finish kernel: f32 for each row, in the scratch memory behind the partials
  Gemm const* gemm;       // one of these two
  RowKernel const* row;
  int (*launch)(Call&, DeviceState const&, cudaStream_t);
};

// A tensor between kernels, in the workspace. Those in one buffer are never alive at once.
struct Temporary {
  char const* name;
  DLDataType dtype;
  int rank;
  Extent dims[kMaxRank];
  int buffer;
  int step;  // whose tiles leave it, as partials [count, rows]; -1: it is a tensor of these dims
};

// What the steps of a loop see of an argument: its chunk along a dim.
struct Part {
  char const* name;
  int of, dim;
};

// Steps [first, end) run for one chunk after the other of an axis, `width` positions of it; `variable` is the size of
// the chunk. In the count of tensors the parts stand behind the temporaries, then `start`, the chunk's first position.
struct Loop {
  int first, end;
  Extent axis;
  int64_t width;
  int variable;
  Part const* parts;
  int part_count;
  char const* start;
};

// Tensors are counted through: arguments, then temporaries, then those of the loop.
struct Program {
  char const* name;
  char const* usage;  // "'name' takes 3 arguments (a, b, c)"
  Image const* image;
  Arg const* args;
  int arg_count;
  Temporary const* temporaries;
  int temporary_count;
  int buffer_count;
  Requirement const* requirements;
  int requirement_count;
  int variable_count;
  Step const* steps;  // in the order in which they run
  int step_count;
  int partial_step;  // whose partial results are outputs; -1: none
  int design_sms;
  Loop const* loop;  // null where every step runs once
};

inline char const* tensor_name(Program const& program, int tensor) {
  if (tensor < program.arg_count) return program.args[tensor].name;
  if ((tensor -= program.arg_count) < program.temporary_count) return program.temporaries[tensor].name;
  tensor -= program.temporary_count;
  return tensor < program.loop->part_count ? program.loop->parts[tensor].name : program.loop->start;
}

// A table that may be empty: {pointer, count} for two members of a struct above.
#define CODA_TABLE(array) array, int(sizeof(array) / sizeof(*array))

}  // namespace coda::host
