// All that templates/launch.h needs of CUDA, so that a host compiler takes generated math on a machine without CUDA.
#pragma once
struct alignas(64) CUtensorMap {
  unsigned long long opaque[16];
};
