// Tensors as the launcher sees them, and the error sentence of the thread.
#pragma once
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "tables.h"

namespace coda::host {

// -- errors ----------------------------------------------------------------------------------------------------------

inline char* last_error() {
  static thread_local char text[1024];
  return text;
}

inline void clear_error() { last_error()[0] = 0; }

__attribute__((format(printf, 1, 2))) inline bool refuse(char const* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(last_error(), 1024, format, arguments);
  va_end(arguments);
  return false;
}

inline int cuda_status(cudaError_t error, char const* what) {
  if (error == cudaSuccess) return CODA_OK;
  refuse("CUDA error %s in %s: %s", cudaGetErrorName(error), what, cudaGetErrorString(error));
  cudaGetLastError();  // a refused launch must not surface in the caller's next check
  return CODA_CUDA_ERROR;
}

// -- views -----------------------------------------------------------------------------------------------------------

// Strides count elements and are those of the tensor, made explicit where DLPack leaves them out.
struct View {
  bool present = false;
  int rank = 0;
  int64_t shape[kMaxRank], strides[kMaxRank];
  DLDataType dtype{};
  DLDevice device{};
  char* data = nullptr;

  int64_t itemsize() const { return dtype.bits / 8; }
  bool on_device() const { return device.device_type == kDLCUDA || device.device_type == kDLCUDAManaged; }
  bool on_host() const { return device.device_type == kDLCPU || device.device_type == kDLCUDAHost; }
  uintptr_t address() const { return uintptr_t(data); }
  bool empty() const {
    for (int i = 0; i < rank; ++i)
      if (shape[i] == 0) return true;
    return false;
  }
  // Stride of a dim; 0 where there is no such dim, or it has one element: its stride says nothing.
  int64_t pitch(int dim) const { return dim >= 0 && dim < rank && shape[dim] != 1 ? strides[dim] : 0; }
};

inline View view(DLTensor const* tensor) {
  View v;
  if (!tensor) return v;
  v.present = true;
  v.rank = tensor->ndim;
  v.dtype = tensor->dtype;
  v.device = tensor->device;
  v.data = static_cast<char*>(tensor->data) + tensor->byte_offset;
  int64_t contiguous = 1;
  for (int i = (v.rank < kMaxRank ? v.rank : kMaxRank) - 1; i >= 0; --i) {  // no argument has a higher rank
    v.shape[i] = tensor->shape[i];
    v.strides[i] = tensor->strides ? tensor->strides[i] : contiguous;
    contiguous *= v.shape[i] > 0 ? v.shape[i] : 1;
  }
  return v;
}

// -- words for sentences ---------------------------------------------------------------------------------------------

// As DTYPE_NAMES in coda/target/requirements.py.
inline void dtype_name(DLDataType dtype, char* out, size_t size) {
  struct Name { int code, bits; char const* name; };
  static constexpr Name names[] = {
      {2, 32, "f32"}, {2, 16, "f16"}, {4, 16, "bf16"}, {10, 8, "f8e4m3"}, {12, 8, "f8e5m2"}, {0, 64, "i64"},
      {0, 32, "i32"}, {0, 8, "s8"},   {6, 8, "bool"},  {2, 64, "f64"},    {1, 8, "u8"},      {0, 16, "i16"},
  };
  for (Name const& n : names)
    if (n.code == dtype.code && n.bits == dtype.bits && dtype.lanes == 1) {
      snprintf(out, size, "%s", n.name);
      return;
    }
  snprintf(out, size, "dlpack(%d, %d)", dtype.code, dtype.bits);
}

inline void shape_text(View const& v, char* out, size_t size) {
  size_t used = size_t(snprintf(out, size, "["));
  for (int i = 0; i < v.rank && i < kMaxRank && used < size; ++i)
    used += size_t(snprintf(out + used, size - used, i ? ", %lld" : "%lld", (long long)v.shape[i]));
  if (used < size) snprintf(out + used, size - used, "]");
}

}  // namespace coda::host
