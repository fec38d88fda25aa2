// What is known of each device: filled by the first call (or NAME_warmup), read without locks afterwards.
#pragma once
#include <pthread.h>

#include <atomic>

#include "views.h"

namespace coda::host {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

struct DeviceState {
  std::atomic<bool> ready;
  int multiprocessors;
  int max_clusters[kMaxKernels];  // resident at once; 0 for kernels without clusters
};

// One per artifact. The cubins are loaded once for all devices; CUDA instantiates them on each by itself.
struct State {
  pthread_mutex_t mutex;
  bool loaded;
  cudaLibrary_t cubins[kMaxKernels];
  cudaKernel_t kernels[kMaxKernels];
  EncodeTiled encode;
  DeviceState devices[kMaxDevices];
};

inline State& state() {
  static State s{};  // zero: PTHREAD_MUTEX_INITIALIZER is all zeros on Linux
  return s;
}

// Makes a device current and restores the caller's.
struct DeviceGuard {
  int previous = -1, status = CODA_OK;
  explicit DeviceGuard(int device) {
    int current = 0;
    if ((status = cuda_status(cudaGetDevice(&current), "cudaGetDevice")) || current == device) return;
    status = cuda_status(cudaSetDevice(device), "cudaSetDevice");
    if (!status) previous = current;
  }
  ~DeviceGuard() {
    if (previous >= 0) cudaSetDevice(previous);
  }
  DeviceGuard(DeviceGuard const&) = delete;
};

struct Lock {
  pthread_mutex_t* mutex;
  explicit Lock(pthread_mutex_t* m) : mutex(m) { pthread_mutex_lock(m); }
  ~Lock() { pthread_mutex_unlock(mutex); }
  Lock(Lock const&) = delete;
};

inline int attribute(int device, cudaDeviceAttr which, int* value) {
  return cuda_status(cudaDeviceGetAttribute(value, which, device), "cudaDeviceGetAttribute");
}

inline int check_arch(Image const& image, int device) {
  int major = 0, minor = 0;
  if (int status = attribute(device, cudaDevAttrComputeCapabilityMajor, &major)) return status;
  if (int status = attribute(device, cudaDevAttrComputeCapabilityMinor, &minor)) return status;
  if (10 * major + minor == image.compute_capability) return CODA_OK;
  refuse("the artifact is built for %s, device %d is sm_%d%d", image.arch, device, major, minor);
  return CODA_WRONG_ARCH;
}

inline int load_cubins(Image const& image) {
  State& s = state();
  if (s.loaded) return CODA_OK;
  cudaDriverEntryPointQueryResult found;
  void* encode = nullptr;
  char const* name = "cuTensorMapEncodeTiled";
  cudaError_t error = cudaGetDriverEntryPointByVersion(name, &encode, 12000, cudaEnableDefault, &found);
  if (int status = cuda_status(error, "cudaGetDriverEntryPointByVersion")) return status;
  if (!encode) {
    refuse("the driver has no cuTensorMapEncodeTiled: CUDA 12.0 or newer is needed");
    return CODA_CUDA_ERROR;
  }
  s.encode = reinterpret_cast<EncodeTiled>(encode);
  for (int i = 0; i < image.cubin_count; ++i) {
    if (s.cubins[i]) continue;  // an earlier call failed behind it
    error = cudaLibraryLoadData(&s.cubins[i], image.cubins[i], nullptr, nullptr, 0, nullptr, nullptr, 0);
    if (int status = cuda_status(error, "cudaLibraryLoadData")) return status;
  }
  for (int i = 0; i < image.kernel_count; ++i) {
    Kernel const& kernel = image.kernels[i];
    error = cudaLibraryGetKernel(&s.kernels[i], s.cubins[kernel.cubin], kernel.symbol);
    if (int status = cuda_status(error, kernel.symbol)) return status;
  }
  s.loaded = true;
  return CODA_OK;
}

// Opts in to shared memory and asks how many clusters are resident at once: GPCs differ in their number of SMs.
inline int prepare_kernel(Kernel const& kernel, void const* function, int multiprocessors, int* max_clusters) {
  if (kernel.shared_bytes == 0) return CODA_OK;
  cudaError_t error =
      cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.shared_bytes);
  if (int status = cuda_status(error, "cudaFuncSetAttribute")) return status;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {unsigned(kernel.cluster_m), unsigned(kernel.cluster_n), 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(kernel.cluster_m, kernel.cluster_n * (multiprocessors / (kernel.cluster_m * kernel.cluster_n)));
  config.blockDim = dim3(kernel.threads);
  config.dynamicSmemBytes = size_t(kernel.shared_bytes);
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cuda_status(cudaOccupancyMaxActiveClusters(max_clusters, function, &config), "cudaOccupancyMaxActiveClusters");
}

// Loads the kernels for the current device.
inline int warm(Image const& image, int device) {
  State& s = state();
  if (device < 0 || device >= kMaxDevices) {
    refuse("device %d is not below %d", device, kMaxDevices);
    return CODA_REFUSED;
  }
  Lock lock(&s.mutex);
  DeviceState& d = s.devices[device];
  if (d.ready.load(std::memory_order_acquire)) return CODA_OK;
  if (int status = check_arch(image, device)) return status;
  if (int status = attribute(device, cudaDevAttrMultiProcessorCount, &d.multiprocessors)) return status;
  if (int status = load_cubins(image)) return status;
  for (int i = 0; i < image.kernel_count; ++i) {
    int status = prepare_kernel(image.kernels[i], s.kernels[i], d.multiprocessors, &d.max_clusters[i]);
    if (status) return status;
  }
  d.ready.store(true, std::memory_order_release);
  return CODA_OK;
}

// The state of the (current) device, warming it up on its first use unless a graph is being captured.
inline int prepare(Image const& image, char const* program, int device, cudaStream_t stream, DeviceState const** out) {
  if (device >= kMaxDevices) return warm(image, device);
  DeviceState& d = state().devices[device];
  *out = &d;
  if (d.ready.load(std::memory_order_acquire)) return CODA_OK;
  cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  if (int status = cuda_status(cudaStreamIsCapturing(stream, &capturing), "cudaStreamIsCapturing")) return status;
  if (capturing == cudaStreamCaptureStatusNone) return warm(image, device);
  refuse("the first use on device %d is inside a graph capture: call %s_warmup(%d) before it", device, program, device);
  return CODA_REFUSED;
}

// The device all tensors live on; -1 where none does. Scalars may be on the CPU. False: mixed devices, or no memory.
inline bool find_device(Program const& program, View const* views, int* device) {
  int first = -1;
  for (int i = 0; i < program.arg_count; ++i) {
    View const& v = views[i];
    char const* name = program.args[i].name;
    if (!v.present) continue;
    if (!v.on_device() && !(program.args[i].scalar && v.on_host()))
      return refuse("'%s' is in host memory (DLPack device type %d); the kernel needs CUDA memory", name,
                    v.device.device_type);
    if (!v.data && !v.empty()) return refuse("'%s' has no data", name);
    if (!v.on_device()) continue;
    if (first >= 0 && v.device.device_id != *device)
      return refuse("'%s' is on cuda:%d, but '%s' on cuda:%d; all tensors of a call live on one device", name,
                    v.device.device_id, program.args[first].name, *device);
    if (first < 0) first = i, *device = v.device.device_id;
  }
  return true;
}

}  // namespace coda::host
