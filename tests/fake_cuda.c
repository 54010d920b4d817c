/* fake_cuda.c - a libcuda.so.1 without a GPU: its memory is the host's, and its
 * one kernel says what it was launched with.
 *
 * Includes csrc/abi/cuda_abi.h.  The kernel, whatever its name, takes
 *   (int64_t *out, CUtensorMap map, int64_t tag)
 * and writes the address that the map was encoded for, the tag, and the
 * launch's grid, block, cluster and shared memory into out[0..10].
 * FAKE_CUDA_FAIL=<function> makes that function return an error.
 */
#include "cuda_abi.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FAKE __attribute__((visibility("default"))) CUresult

static int
fails(const char *function)
{
    const char *name = getenv("FAKE_CUDA_FAIL");
    return name != NULL && strcmp(name, function) == 0;
}

#define CHECK()                                                                \
    if (fails(__func__)) {                                                     \
        return CUDA_ERROR_INVALID_VALUE;                                       \
    }

static _Thread_local CUcontext current;

FAKE cuInit(unsigned int flags) { (void)flags; CHECK() return CUDA_SUCCESS; }
FAKE cuDriverGetVersion(int *version) { CHECK() *version = 13000; return CUDA_SUCCESS; }
FAKE cuGetErrorName(CUresult e, const char **name) { (void)e; *name = "CUDA_ERROR_FAKE"; return CUDA_SUCCESS; }
FAKE cuGetErrorString(CUresult e, const char **text) { (void)e; *text = "as was asked for"; return CUDA_SUCCESS; }
FAKE cuDeviceGetCount(int *count) { CHECK() *count = 2; return CUDA_SUCCESS; }
FAKE cuDeviceGet(CUdevice *device, int ordinal) { CHECK() *device = ordinal; return ordinal < 2 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE; }
FAKE cuDeviceGetName(char *name, int size, CUdevice d) { (void)d; CHECK() strncpy(name, "Fake GPU", (size_t)size); return CUDA_SUCCESS; }
FAKE cuDeviceTotalMem_v2(size_t *bytes, CUdevice d) { (void)d; CHECK() *bytes = 1u << 30; return CUDA_SUCCESS; }
FAKE cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice d) { CHECK() *context = (CUcontext)(uintptr_t)(d + 1); return CUDA_SUCCESS; }
FAKE cuDevicePrimaryCtxGetState(CUdevice d, unsigned *flags, int *active) { (void)d; *flags = 0; *active = 1; return CUDA_SUCCESS; }
FAKE cuCtxGetCurrent(CUcontext *context) { CHECK() *context = current; return CUDA_SUCCESS; }
FAKE cuCtxSetCurrent(CUcontext context) { current = context; return CUDA_SUCCESS; }
FAKE cuCtxPushCurrent_v2(CUcontext context) { CHECK() current = context; return CUDA_SUCCESS; }
FAKE cuCtxPopCurrent_v2(CUcontext *context) { *context = current; current = NULL; return CUDA_SUCCESS; }
FAKE cuCtxGetDevice(CUdevice *device) { *device = 0; return CUDA_SUCCESS; }
FAKE cuModuleLoadData(CUmodule *module, const void *image) { CHECK() *module = (CUmodule)(uintptr_t)image; return CUDA_SUCCESS; }
FAKE cuModuleUnload(CUmodule module) { (void)module; return CUDA_SUCCESS; }
FAKE cuModuleGetFunction(CUfunction *f, CUmodule m, const char *name) { (void)m; CHECK() *f = (CUfunction)(uintptr_t)name; return CUDA_SUCCESS; }
FAKE cuFuncGetAttribute(int *value, CUfunction_attribute a, CUfunction f) { (void)a; (void)f; *value = 0; return CUDA_SUCCESS; }
FAKE cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int value) { (void)f; (void)a; (void)value; CHECK() return CUDA_SUCCESS; }
FAKE cuFuncLoad(CUfunction f) { (void)f; CHECK() return CUDA_SUCCESS; }
FAKE cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t n, CUstream s) { (void)s; memcpy((void *)(uintptr_t)to, from, n); return CUDA_SUCCESS; }
FAKE cuStreamSynchronize(CUstream s) { (void)s; return CUDA_SUCCESS; }
FAKE cuStreamIsCapturing(CUstream s, CUstreamCaptureStatus *status) { (void)s; memset(status, 0, sizeof *status); return CUDA_SUCCESS; }
FAKE cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) { (void)mode; CHECK() return CUDA_SUCCESS; }
FAKE cuPointerGetAttribute(void *value, CUpointer_attribute a, CUdeviceptr p) { (void)value; (void)a; (void)p; return CUDA_SUCCESS; }
FAKE cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, CUfunction f, int size, size_t smem) { (void)f; (void)size; (void)smem; *n = 1; return CUDA_SUCCESS; }

FAKE
cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
    (void)device;
    CHECK()
    switch ((int)attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
        *value = 9;
        break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
        *value = 0;
        break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
        *value = 232448;
        break;
    default:
        *value = 1;
    }
    return CUDA_SUCCESS;
}

/* A full queue blocks the caller; the sleep gives other threads their chance. */
FAKE
cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t n, CUstream s)
{
    (void)s;
    CHECK()
    usleep(500);
    memset((void *)(uintptr_t)to, value, n);
    return CUDA_SUCCESS;
}

FAKE
cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, uint32_t rank,
                       void *base, const uint64_t *shape, const uint64_t *strides,
                       const uint32_t *box, const uint32_t *element_strides,
                       CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                       CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill)
{
    (void)type, (void)rank, (void)shape, (void)strides, (void)box;
    (void)element_strides, (void)interleave, (void)swizzle, (void)promotion, (void)fill;
    CHECK()
    memset(map, 0, sizeof *map);
    memcpy(map, &base, sizeof base);
    return CUDA_SUCCESS;
}

FAKE
cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **params, void **extra)
{
    int64_t *out;
    (void)f, (void)extra;
    CHECK()
    memcpy(&out, params[0], sizeof out);
    memcpy(&out[0], params[1], sizeof out[0]);
    memcpy(&out[1], params[2], sizeof out[1]);
    const unsigned launch[] = {
        c->gridDimX,  c->gridDimY,  c->gridDimZ,       c->blockDimX,
        c->blockDimY, c->blockDimZ, c->sharedMemBytes,
        c->numAttrs ? c->attrs[0].value.clusterDim.x : 0,
        c->numAttrs ? c->attrs[0].value.clusterDim.y : 0,
    };
    for (size_t i = 0; i < sizeof launch / sizeof *launch; i++) {
        out[2 + i] = launch[i];
    }
    return CUDA_SUCCESS;
}
