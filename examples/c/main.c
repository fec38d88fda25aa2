/* A linear layer from C: no Python, no C++, no CUTLASS. Build and run:
 *
 *   coda lower examples/linear.coda --dims M=4096,N=4096,K=4096 -o linear.so
 *   gcc -I. -I/usr/local/cuda/include examples/c/main.c ./linear.so -L/usr/local/cuda/lib64 -lcudart -o linear
 *   ./linear
 *
 * linear.h is written beside linear.so. An artifact serves every M, N and K; --dims only choose its tile.
 */
#include <cuda_runtime_api.h>
#include <stdio.h>

#include "linear.h"

static const DLDataType bf16 = {kDLBfloat, 16, 1};

/* A contiguous matrix in memory of device 0, all bytes zero. */
static DLTensor matrix(int64_t* shape) {
  DLTensor t = {NULL, {kDLCUDA, 0}, 2, bf16, shape, NULL, 0};
  size_t bytes = (size_t)(shape[0] * shape[1] * 2);
  if (cudaMalloc(&t.data, bytes) == cudaSuccess) cudaMemset(t.data, 0, bytes);
  return t;
}

static int failed(int status) {
  if (status != CODA_OK) fprintf(stderr, "linear: %s\n", coda_last_error());
  return status;
}

int main(void) {
  /* Load the kernels now; else the first run does. Needed before capturing a run into a CUDA graph. */
  if (failed(linear_warmup(0))) return 1;

  int64_t m = 4096, n = 4096, k = 4096;
  int64_t x_shape[] = {m, k}, w_shape[] = {n, k}, y_shape[] = {m, n};
  DLTensor x = matrix(x_shape), w = matrix(w_shape), y = matrix(y_shape);
  DLTensor* args[] = {&x, &w, &y}; /* the order is that of linear.h: inputs, then outputs */

  /* Scratch memory for statistics that are combined after the product. This program has none: 0 bytes. */
  size_t bytes = linear_workspace_bytes(args, 3);
  void* workspace = NULL;
  if (bytes) cudaMalloc(&workspace, bytes);

  cudaStream_t stream = NULL; /* the default stream */
  if (failed(linear_run(args, 3, workspace, bytes, stream))) return 1;
  printf("%s\n", cudaGetErrorString(cudaStreamSynchronize(stream)));

  cudaFree(x.data), cudaFree(w.data), cudaFree(y.data), cudaFree(workspace);
  return 0;
}
