// Kernels of a call begin while the one in front of them ends (programmatic dependent launch): blocks get their
// multiprocessor, and set up their barriers, as soon as it is free.
//
// Every thread of every kernel calls follow_predecessor() before it touches memory that kernels share. Behind it the
// predecessor is complete and what it wrote is visible, and since it had waited for its own predecessor, so are all
// before: a kernel may read what any of them wrote, and write what any of them read (the temporaries share buffers).
// Its own successor may then be launched, which waits in the same place. Whether kernels overlap is for the launcher to
// say (host/call.h); where they do not, this does nothing.
//
// Nothing that a kernel of the call writes may be read with ld.global.nc, whose cache is not part of this: pointers of
// the parameters are never __restrict__.
#pragma once

#if defined(__CUDACC__)
namespace coda {

__device__ __forceinline__ void follow_predecessor() {
  asm volatile("griddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace coda
#endif
