/* The C ABI of an artifact. Tensors are DLPack's; include the real dlpack.h before this file to use its types. */
#ifndef CODA_ABI_H_
#define CODA_ABI_H_

#include <stddef.h>
#include <stdint.h>

#ifndef DLPACK_DLPACK_H_ /* same layout as dlpack.h 1.x; only the names used here */
typedef enum { kDLCPU = 1, kDLCUDA = 2, kDLCUDAHost = 3, kDLCUDAManaged = 13 } DLDeviceType;
typedef enum {
  kDLInt = 0, kDLUInt = 1, kDLFloat = 2, kDLBfloat = 4, kDLBool = 6, kDLFloat8_e4m3fn = 10, kDLFloat8_e5m2 = 12
} DLDataTypeCode;
typedef struct {
  DLDeviceType device_type;
  int32_t device_id;
} DLDevice;
typedef struct {
  uint8_t code; /* a DLDataTypeCode */
  uint8_t bits;
  uint16_t lanes; /* 1 */
} DLDataType;
typedef struct {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides; /* in elements; NULL: contiguous */
  uint64_t byte_offset;
} DLTensor;
#endif

typedef struct CUstream_st* cudaStream_t; /* as in cuda_runtime.h; NULL is the default stream */

#ifdef __cplusplus
#define CODA_API extern "C" __attribute__((visibility("default")))
#else
#define CODA_API extern
#endif

/* Status of every call that returns int; coda_last_error() has the sentence. */
enum { CODA_OK = 0, CODA_REFUSED = 1, CODA_CUDA_ERROR = 2, CODA_WRONG_ARCH = 3 };

/* JSON: programs with arguments, axes and requirements, variants, arch, versions, rounding contract, source text. */
CODA_API const char* coda_describe(void);

/* Why the last call of this thread did not return CODA_OK; "" when it did. */
CODA_API const char* coda_last_error(void);

#endif /* CODA_ABI_H_ */
