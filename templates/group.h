// A kernel may run several launches as one grid: products that differ in their operands and rows only, as the gradients
// of two weights that one activation makes. Their tiles lie below each other, those of one batch before the next, so that
// there is one last wave.
#pragma once
#include <cutlass/cutlass.h>

#include "launch.h"

namespace coda {

// The launch that a tile row of the grid belongs to; `row` becomes the tile row within it.
template <class Launches> CUTLASS_DEVICE typename Launches::Launch const& launch_of(Launches const& group, int& row) {
  if constexpr (Launches::kMembers == 1) return group.each[0];
  int member = 0;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 1; i < Launches::kMembers; ++i)
    if (row >= group.first[i]) member = i;
  row -= group.first[member];
  return group.each[member];
}

}  // namespace coda
