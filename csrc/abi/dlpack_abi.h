/* dlpack_abi.h: DLPack 1.3 and its C exchange table, as tensor.c reads them.

   torch.Tensor carries a capsule named "dlpack_exchange_api" that holds a
   DLPackExchangeAPI.  A build that finds ATen/dlpack.h takes it from there;
   any other build takes the declarations below, which hold what tkjit uses
   and no more.  How the two are proved equal: see cuda_abi.h. */

#ifndef TKJIT_DLPACK_ABI_H
#define TKJIT_DLPACK_ABI_H

#include <stddef.h>
#include <stdint.h>

#ifdef TKJIT_HAVE_ATEN_DLPACK
#include <ATen/dlpack.h>
#endif

/* The guard of the real header: if it is set, the types are known. */
#ifndef DLPACK_DLPACK_H_

#define DLPACK_MAJOR_VERSION 1
#define DLPACK_MINOR_VERSION 3

/* Bits of DLManagedTensorVersioned.flags. */
#define DLPACK_FLAG_BITMASK_READ_ONLY 1UL
#define DLPACK_FLAG_BITMASK_IS_COPIED 2UL

typedef enum {
    kDLCPU = 1,
    kDLCUDA = 2,
    kDLCUDAHost = 3,     /* pinned host memory */
    kDLCUDAManaged = 13, /* unified memory */
} DLDeviceType;

/* Values of DLDataType.code; the width stands in .bits. */
typedef enum {
    kDLInt = 0,
    kDLUInt = 1,
    kDLFloat = 2,
    kDLBfloat = 4,
    kDLComplex = 5,
    kDLBool = 6,
    kDLFloat8_e3m4 = 7,
    kDLFloat8_e4m3 = 8,
    kDLFloat8_e4m3b11fnuz = 9,
    kDLFloat8_e4m3fn = 10,
    kDLFloat8_e4m3fnuz = 11,
    kDLFloat8_e5m2 = 12,
    kDLFloat8_e5m2fnuz = 13,
    kDLFloat8_e8m0fnu = 14,
} DLDataTypeCode;

/* A major number above ours means another memory layout: read no further. */
typedef struct {
    uint32_t major;
    uint32_t minor;
} DLPackVersion;

typedef struct {
    DLDeviceType device_type;
    int32_t device_id;
} DLDevice;

typedef struct {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
} DLDataType;

/* A view: owns nothing.  Strides count elements; element 0 lies at
   data + byte_offset.  shape and strides may be NULL when ndim is 0. */
typedef struct {
    void *data;
    DLDevice device;
    int32_t ndim;
    DLDataType dtype;
    int64_t *shape;
    int64_t *strides;
    uint64_t byte_offset;
} DLTensor;

/* A view that keeps its storage alive until deleter(self) is called, once. */
typedef struct DLManagedTensorVersioned {
    DLPackVersion version;
    void *manager_ctx;
    void (*deleter)(struct DLManagedTensorVersioned *self);
    uint64_t flags;
    DLTensor dl_tensor;
} DLManagedTensorVersioned;

#endif /* DLPACK_DLPACK_H_ */

#if !defined(DLPACK_DLPACK_H_) || defined(TKJIT_ABI_PROOF)

/* Each returns 0, or -1 with an error set.  They need the GIL, and they do
   not synchronise with any stream. */

/* Allocates like prototype (dtype, ndim, shape and device are read).  A
   failure is told through set_error alone. */
typedef int (*DLPackManagedTensorAllocator)(
    DLTensor *prototype, DLManagedTensorVersioned **out, void *error_ctx,
    void (*set_error)(void *error_ctx, const char *kind, const char *message));

/* *out is new and owned by the caller. */
typedef int (*DLPackManagedTensorFromPyObjectNoSync)(
    void *py_object, DLManagedTensorVersioned **out);

/* Takes tensor over; *out_py_object is a new reference. */
typedef int (*DLPackManagedTensorToPyObjectNoSync)(
    DLManagedTensorVersioned *tensor, void **out_py_object);

/* *out borrows from py_object. */
typedef int (*DLPackDLTensorFromPyObjectNoSync)(void *py_object, DLTensor *out);

/* The stream on which the framework would put its next kernel. */
typedef int (*DLPackCurrentWorkStream)(DLDeviceType device_type,
                                       int32_t device_id,
                                       void **out_current_stream);

#endif

#ifndef DLPACK_DLPACK_H_

/* The part that stays the same in every version.  prev_api leads to the table
   of an older major version, or is NULL. */
typedef struct DLPackExchangeAPIHeader {
    DLPackVersion version;
    struct DLPackExchangeAPIHeader *prev_api;
} DLPackExchangeAPIHeader;

/* Only dltensor_from_py_object_no_sync may be NULL. */
typedef struct DLPackExchangeAPI {
    DLPackExchangeAPIHeader header;
    DLPackManagedTensorAllocator managed_tensor_allocator;
    DLPackManagedTensorFromPyObjectNoSync managed_tensor_from_py_object_no_sync;
    DLPackManagedTensorToPyObjectNoSync managed_tensor_to_py_object_no_sync;
    DLPackDLTensorFromPyObjectNoSync dltensor_from_py_object_no_sync;
    DLPackCurrentWorkStream current_work_stream;
} DLPackExchangeAPI;

#endif /* DLPACK_DLPACK_H_ */

#endif /* TKJIT_DLPACK_ABI_H */
