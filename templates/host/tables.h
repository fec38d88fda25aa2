// The shape of the tables in a generated host.cpp. Everything is constexpr data; indices refer to neighbouring tables,
// -1 means none.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "abi.h"
#include "launch.h"

namespace coda::host {

constexpr int kMaxArgs = 64;
constexpr int kMaxRank = 8;
constexpr int kMaxVariables = 32;
constexpr int kMaxKernels = 64;
constexpr int kMaxDevices = 64;
constexpr int kBand = 16;  // rows of a partial of a column reduction: those of one warp

struct Call;
struct DeviceState;

// Order and meaning as in coda/target/requirements.py, class Kind.
enum class Kind : uint8_t {
  kPresent, kDtype, kRank, kDivisible, kSize, kProduct, kAtLeast, kAtMost, kMultiple, kPartials,
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

// One product of the sum that is accumulated: arguments A and B over their own contracted axis.
struct Term {
  int a, b0, b1;  // b1: the weight of the second lane, -1 where there is one weight
  Extent contraction;
};

struct Operand {
  int arg;
  int row_dim, column_dim;
  Lanes lanes;
  int map;       // index into Launch::tiles
  float absent;  // value of an absent optional operand, or the default
  Walk walk;
  int64_t absent_integer;  // as `absent`, of an integer operand
};

enum class StoreKind : uint8_t { kTile, kRow, kColumn, kHead, kPick, kTotal };

struct Store {
  StoreKind kind;
  int arg;  // -1: partials in the workspace
  int row_dim, column_dim;
  Lanes lanes;
  Walk walk;
  int floats;  // f32 values of one partial
};

struct Finishing {
  StoreKind kind;
  int kernel;
  int const* partials;  // slots of the workspace: stores, then the kept values of each row
  int partial_count;
  Operand const* operands;
  int operand_count;
  Store const* results;
  int result_count;
  int kept_count;  // values of each row left in the workspace, after the results
  int (*launch)(Call const&, Finishing const&, void* workspace, cudaStream_t);
};

struct Variant {
  int kernel;
  int tile_m, tile_n;
  int columns;    // of one lane
  int slab_rows;  // rows of a box of a tile operand
  int chunk;      // its columns
};

struct Kernel {
  char const* symbol;
  int cluster_m, cluster_n;  // 0: launched without clusters
  int threads;
  int shared_bytes;
};

// The cubin and its kernels.
struct Image {
  void const* cubin;
  char const* arch;
  int compute_capability;  // 10 * major + minor
  Kernel const* kernels;
  int kernel_count;
};

struct Program {
  char const* name;
  char const* usage;  // "'name' takes 3 arguments (a, b, c)"
  Image const* image;
  Arg const* args;
  int arg_count;
  Requirement const* requirements;
  int requirement_count;
  int variable_count;
  Extent rows, columns;
  Term const* terms;
  int term_count;
  Major a_major, b_major;
  int lanes;
  Lanes weight_lanes;
  Operand const* operands;
  int operand_count;
  Store const* stores;
  int store_count;
  Finishing const* finishings;
  int finishing_count;
  int kept_count;  // of the row kernel: f32 for each row, in the workspace behind the partials
  Variant const* variants;
  int variant_count;
  int design_sms;
  int (*gemm)(Call const&, DeviceState const&, void* workspace, cudaStream_t);
};

// A table that may be empty: {pointer, count} for two members of a struct above.
#define CODA_TABLE(array) array, int(sizeof(array) / sizeof(*array))

}  // namespace coda::host
