// The launcher of an artifact: everything that does not depend on the program, driven by the constexpr tables that
// coda/build/host.py writes into host.cpp. C++17 for the plain host compiler; no exceptions, no allocation.
//
//   tables      what a program is: arguments, requirements, temporaries, and steps: kernels in the order they run
//   views.h     DLTensor -> View, and the error sentence of this thread
//   checks.h    the requirements, evaluated; the twin of coda/target/requirements.py
//   device.h    cubins, kernels and limits of each device; filled once by warmup
//   bind.h      views -> coda::Operand, coda::Output, tensor maps
//   call.h      a call: its views, sizes, variants, and the layout of its workspace
//   gemm.h      launching GEMM kernels
//   rows.h      launching row and map kernels
//   finish.h    launching finish kernels
//
// A call allocates nothing, synchronises nothing and asks the driver for nothing but the launches, so it can be captured
// into a CUDA graph. Tensor maps are encoded on every call: optimisers and sharding move weights.
#pragma once
#include "host/finish.h"
#include "host/gemm.h"

namespace coda::host {

inline int run_steps(Call& call, DeviceState const& device, cudaStream_t stream, int first, int end) {
  for (int i = first; i < end; ++i) {
    Step const& step = call.program->steps[i];
    if (!step.launch) continue;  // it ran with a step before
    begin(call, step);
    if (int status = step.launch(call, device, stream)) return status;
    for (int f = 0; f < step.finishing_count; ++f)
      if (int status = step.finishings[f].launch(call, step.finishings[f], stream)) return status;
  }
  return CODA_OK;
}

// All steps, one after the other on the stream; those of the loop for each chunk.
inline int run_on_device(Call& call, int device, cudaStream_t stream) {
  Program const& program = *call.program;
  DeviceState const* ready = nullptr;
  if (int status = prepare(*program.image, program.name, device, stream, &ready)) return status;
  Loop const* loop = program.loop;
  if (!loop) return run_steps(call, *ready, stream, 0, program.step_count);
  if (int status = run_steps(call, *ready, stream, 0, loop->first)) return status;
  int64_t length = call.sizes.value(loop->axis);
  for (int64_t start = 0; start < length; start += loop->width) {
    enter(call, *loop, start);
    if (int status = run_steps(call, *ready, stream, loop->first, loop->end)) return status;
  }
  return run_steps(call, *ready, stream, loop->end, program.step_count);
}

// -- the functions behind the ABI ------------------------------------------------------------------------------------

inline int check(Program const& program, DLTensor* const* args, int n) {
  Call call;
  clear_error();
  return accept(call, program, args, n) ? CODA_OK : CODA_REFUSED;
}

inline size_t workspace_bytes(Program const& program, DLTensor* const* args, int n) {
  Call call;
  clear_error();
  return accept(call, program, args, n) ? size_t(plan_workspace(call, nullptr)) : 0;
}

inline int run(Program const& program, DLTensor* const* args, int n, void* workspace, size_t bytes,
               cudaStream_t stream) {
  Call call;
  clear_error();
  int device = -1;
  if (!accept(call, program, args, n) || !find_device(program, call.views, &device) ||
      !check_workspace(call, workspace, bytes))
    return CODA_REFUSED;
  if (device < 0) return CODA_OK;  // nothing but absent and empty tensors
  DeviceGuard guard(device);
  if (guard.status) return guard.status;
  return run_on_device(call, device, stream);
}

inline int warmup(Program const& program, int device) {
  clear_error();
  DeviceGuard guard(device);
  return guard.status ? guard.status : warm(*program.image, device);
}

}  // namespace coda::host
