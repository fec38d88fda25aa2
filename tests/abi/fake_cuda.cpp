// A CUDA runtime for tests without a GPU: linked into an artifact instead of libcudart, it records what the launcher
// asks for. fake_log() returns the calls since the last fake_reset(), one JSON object a line.
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <string>

#define API extern "C" __attribute__((visibility("default")))

namespace {
std::string log;
std::string parameters;  // of all launches, one after another
int current = 0, devices = 2, capability = 90, capturing = 0, parameter_bytes = 0, maps = 0;

void record(char const* format, ...) {
  char line[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  log += line;
  log += "\n";
}

std::string list(cuuint64_t const* values, int count) {
  std::string text;
  for (int i = 0; i < count; ++i) text += (i ? ", " : "") + std::to_string(values[i]);
  return "[" + text + "]";
}

std::string list(cuuint32_t const* values, int count) {
  cuuint64_t wide[5];
  for (int i = 0; i < count; ++i) wide[i] = values[i];
  return list(wide, count);
}

CUresult encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* base, cuuint64_t const* dims,
                cuuint64_t const* strides, cuuint32_t const* box, cuuint32_t const*, CUtensorMapInterleave,
                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  memset(map, 0, sizeof *map);
  map->opaque[0] = cuuint64_t(++maps);  // tells which call filled it
  record(R"({"call": "encode", "map": %d, "type": %d, "base": %llu, "dims": %s, "strides": %s, "box": %s, )"
         R"("swizzle": %d})",
         maps, int(type), (unsigned long long)(uintptr_t)base, list(dims, int(rank)).c_str(),
         list(strides, int(rank) - 1).c_str(), list(box, int(rank)).c_str(), int(swizzle));
  return CUDA_SUCCESS;
}
}  // namespace

API void fake_reset(int capability_, int capturing_, int parameter_bytes_) {
  log.clear(), parameters.clear();
  capability = capability_, capturing = capturing_, parameter_bytes = parameter_bytes_, maps = 0;
}
API char const* fake_log() { return log.c_str(); }
API char const* fake_parameters() { return parameters.data(); }
API int fake_current_device() { return current; }

cudaError_t cudaGetDevice(int* device) { return *device = current, cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
  if (device >= devices) return cudaErrorInvalidDevice;
  record(R"({"call": "cudaSetDevice", "device": %d})", device);
  return current = device, cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  record(R"({"call": "cudaDeviceGetAttribute", "device": %d})", device);
  *value = attribute == cudaDevAttrComputeCapabilityMajor   ? capability / 10
           : attribute == cudaDevAttrComputeCapabilityMinor ? capability % 10
                                                            : 132 - 54 * device;  // cuda:1 is a smaller board
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(char const*, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = reinterpret_cast<void*>(&encode), *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
cudaError_t cudaLibraryLoadData(cudaLibrary_t* library, void const*, cudaJitOption*, void**, unsigned,
                                cudaLibraryOption*, void**, unsigned) {
  record(R"({"call": "cudaLibraryLoadData"})");
  *library = reinterpret_cast<cudaLibrary_t>(&log);
  return cudaSuccess;
}
cudaError_t cudaLibraryGetKernel(cudaKernel_t* kernel, cudaLibrary_t, char const* name) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<char*>(name));
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(void const* kernel, cudaFuncAttribute, int value) {
  record(R"({"call": "cudaFuncSetAttribute", "kernel": "%s", "value": %d})", (char const*)kernel, value);
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, void const*, cudaLaunchConfig_t const*) {
  return *clusters = 64, cudaSuccess;  // fewer than 132 / 2, as GPCs with an odd number of multiprocessors have
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(cudaLaunchConfig_t const* c, void const* kernel, void** arguments) {
  unsigned cluster[3] = {0, 0, 0};
  int follows = 0;
  for (unsigned i = 0; i < c->numAttrs; ++i) {
    cudaLaunchAttribute const& a = c->attrs[i];
    if (a.id == cudaLaunchAttributeClusterDimension) memcpy(cluster, &a.val.clusterDim, sizeof cluster);
    if (a.id == cudaLaunchAttributeProgrammaticStreamSerialization) follows = a.val.programmaticStreamSerializationAllowed;
  }
  record(R"({"call": "launch", "kernel": "%s", "device": %d, "grid": [%u, %u, %u], "block": [%u, %u, %u], )"
         R"("cluster": [%u, %u, %u], "follows": %d, "shared": %zu, "stream": %llu})",
         (char const*)kernel, current, c->gridDim.x, c->gridDim.y, c->gridDim.z, c->blockDim.x, c->blockDim.y,
         c->blockDim.z, cluster[0], cluster[1], cluster[2], follows, c->dynamicSmemBytes,
         (unsigned long long)(uintptr_t)c->stream);
  parameters.append(static_cast<char const*>(arguments[0]), size_t(parameter_bytes));
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
char const* cudaGetErrorName(cudaError_t) { return "cudaErrorFake"; }
char const* cudaGetErrorString(cudaError_t) { return "fake"; }
