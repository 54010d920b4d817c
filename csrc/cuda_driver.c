/* cuda_driver.c - libcuda through tables: devices, modules, launches.
 *
 * Owns the handle of libcuda, and per device the primary context (torch's own)
 * and its facts.  Runs without the GIL; must not call Python.
 */
#include "tkjit.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

typedef struct {
#define FIELD(name, symbol, required, result, args) tk_##name name;
    TK_CUDA_FUNCTIONS(FIELD)
#undef FIELD
} cuda_table;

/* All but `ready`, `forked` and `contexts` is written under the lock and read
 * after `ready`. */
static struct {
    pthread_mutex_t lock;
    atomic_bool ready;
    atomic_bool forked; /* we are the child of a process that was ready */
    bool hooked;
    cuda_table fn;
    _Atomic(CUcontext) contexts[TK_MAX_DEVICES];
    bool known[TK_MAX_DEVICES];
    tk_device devices[TK_MAX_DEVICES];
} cuda = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* --- Errors -------------------------------------------------------------- */

/* What a user can do about it; "" where the driver's words say all. */
static const char *
advice(CUresult result)
{
    switch ((int)result) {
    case CUDA_ERROR_NO_DEVICE:
        return "; is the GPU hidden by CUDA_VISIBLE_DEVICES?";
    case CUDA_ERROR_NO_BINARY_FOR_GPU:
        return "; the kernel was compiled for another architecture";
    case CUDA_ERROR_UNSUPPORTED_PTX_VERSION:
        return "; NVRTC is newer than the driver: update the driver";
    case CUDA_ERROR_SYSTEM_DRIVER_MISMATCH:
        return "; the driver was updated: restart the machine";
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_FAILED:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
        return "; an earlier kernel of this process failed, and its CUDA "
               "context is lost";
    case CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED:
    case CUDA_ERROR_STREAM_CAPTURE_INVALIDATED:
    case CUDA_ERROR_STREAM_CAPTURE_IMPLICIT:
        return "; call the op once before the capture, or tkjit.warmup()";
    default:
        return "";
    }
}

static int
fail(CUresult result, const char *what, tk_error_kind kind, tk_error *err)
{
    const char *name = NULL, *text = NULL;

    cuda.fn.cuGetErrorName(result, &name);
    cuda.fn.cuGetErrorString(result, &text);
    return tk_fail(err, result == CUDA_ERROR_OUT_OF_MEMORY ? TK_MEMORY : kind,
                   "%s: %s (%s)%s", what, name != NULL ? name : "CUDA error",
                   text != NULL ? text : "unknown", advice(result));
}

/* cuXxx(...) -> 0, or -1 with a TK_DEVICE error */
#define CUDA(name, ...) device_call(cuda.fn.name(__VA_ARGS__), #name, err)

static int
device_call(CUresult result, const char *name, tk_error *err)
{
    return result == CUDA_SUCCESS ? 0 : fail(result, name, TK_DEVICE, err);
}

/* --- The library --------------------------------------------------------- */

static int
open_library(tk_error *err)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        return tk_fail(err, TK_DEVICE,
                       "no CUDA driver: %s. A CUDA tensor needs a machine with "
                       "an NVIDIA GPU and its driver",
                       dlerror());
    }
#define LOAD(name, symbol, required, result, args)                             \
    *(void **)&cuda.fn.name = dlsym(library, symbol);                          \
    if (cuda.fn.name == NULL && required) {                                    \
        return tk_fail(err, TK_DEVICE,                                         \
                       "the CUDA driver has no %s: it is older than CUDA 12; " \
                       "update the driver",                                    \
                       symbol);                                                \
    }
    TK_CUDA_FUNCTIONS(LOAD)
#undef LOAD
    return 0;
}

static void
after_fork(void)
{
    if (atomic_load(&cuda.ready)) {
        atomic_store(&cuda.forked, true);
    }
}

static int
init_locked(tk_error *err)
{
    if (atomic_load(&cuda.ready)) {
        return 0;
    }
    if (open_library(err) < 0 || CUDA(cuInit, 0) < 0) {
        return -1;
    }
    if (!cuda.hooked) {
        pthread_atfork(NULL, NULL, after_fork);
        cuda.hooked = true;
    }
    atomic_store(&cuda.ready, true);
    return 0;
}

int
tkcu_check_fork(tk_error *err)
{
    if (!atomic_load(&cuda.forked)) {
        return 0;
    }
    return tk_fail(err, TK_DEVICE,
                   "CUDA was used before this process was forked, and "
                   "does not survive a fork; use the 'spawn' start method "
                   "of multiprocessing, or fork before the first use");
}

int
tkcu_init(tk_error *err)
{
    if (tkcu_check_fork(err) < 0) {
        return -1;
    }
    if (atomic_load(&cuda.ready)) {
        return 0;
    }
    pthread_mutex_lock(&cuda.lock);
    int status = init_locked(err);
    pthread_mutex_unlock(&cuda.lock);
    return status;
}

int
tkcu_driver_version(int *version, tk_error *err)
{
    return tkcu_init(err) < 0 ? -1 : CUDA(cuDriverGetVersion, version);
}

int
tkcu_device_count(int *count, tk_error *err)
{
    return tkcu_init(err) < 0 ? -1 : CUDA(cuDeviceGetCount, count);
}

/* --- Devices ------------------------------------------------------------- */

static int
ask_device(int device, tk_device *out, tk_error *err)
{
    CUdevice handle = 0;
    tk_device d = {0};
    size_t bytes = 0;

    const struct {
        CUdevice_attribute attribute;
        int *value;
    } questions[] = {
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, &d.major},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, &d.minor},
        {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, &d.sms},
        {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, &d.smem_block},
        {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, &d.smem_sm},
        {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, &d.l2_bytes},
        {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, &d.max_threads_sm},
        {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR, &d.registers_sm},
        {CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, &d.bus_bits},
        {CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, &d.memory_khz},
    };
    if (CUDA(cuDeviceGet, &handle, device) < 0 ||
        CUDA(cuDeviceGetName, d.name, (int)sizeof d.name, handle) < 0 ||
        CUDA(cuDeviceTotalMem, &bytes, handle) < 0) {
        return -1;
    }
    for (size_t i = 0; i < sizeof questions / sizeof *questions; i++) {
        if (CUDA(cuDeviceGetAttribute, questions[i].value,
                 questions[i].attribute, handle) < 0) {
            return -1;
        }
    }
    d.memory_bytes = bytes;
    *out = d;
    return 0;
}

static int
check_ordinal(int device, tk_error *err)
{
    if (device >= 0 && device < TK_MAX_DEVICES) {
        return 0;
    }
    return tk_fail(err, TK_DEVICE, "device %d is out of range", device);
}

int
tkcu_device(int device, tk_device *out, tk_error *err)
{
    int status = 0;

    if (check_ordinal(device, err) < 0 || tkcu_init(err) < 0) {
        return -1;
    }
    pthread_mutex_lock(&cuda.lock);
    if (!cuda.known[device]) {
        status = ask_device(device, &cuda.devices[device], err);
        cuda.known[device] = status == 0;
    }
    if (status == 0) {
        *out = cuda.devices[device];
    }
    pthread_mutex_unlock(&cuda.lock);
    return status;
}

/* The primary context, retained once for the life of the process. */
static int
context_of(int device, CUcontext *out, tk_error *err)
{
    CUdevice handle = 0;
    CUcontext context = NULL;

    if (check_ordinal(device, err) < 0) {
        return -1;
    }
    context = atomic_load(&cuda.contexts[device]);
    if (context == NULL) {
        if (CUDA(cuDeviceGet, &handle, device) < 0 ||
            CUDA(cuDevicePrimaryCtxRetain, &context, handle) < 0) {
            return -1;
        }
        atomic_store(&cuda.contexts[device], context);
    }
    *out = context;
    return 0;
}

int
tkcu_enter(int device, bool *pushed, tk_error *err)
{
    CUcontext wanted = NULL, current = NULL;

    if (tkcu_init(err) < 0 || context_of(device, &wanted, err) < 0) {
        return -1;
    }
    /* A thread whose first CUDA call is ours has no context: that too. */
    if (cuda.fn.cuCtxGetCurrent(&current) == CUDA_SUCCESS &&
        current == wanted) {
        *pushed = false;
        return 0;
    }
    if (CUDA(cuCtxPushCurrent, wanted) < 0) {
        return -1;
    }
    *pushed = true;
    return 0;
}

void
tkcu_leave(bool pushed)
{
    CUcontext context;
    if (pushed) {
        cuda.fn.cuCtxPopCurrent(&context);
    }
}

/* --- Modules ------------------------------------------------------------- */

static int
load_here(const tk_binary *binary, CUmodule *module, CUfunction *function,
          tk_error *err)
{
    CUmodule loaded = NULL;
    CUfunction found = NULL;

    if (CUDA(cuModuleLoadData, &loaded, binary->image) < 0) {
        return -1;
    }
    if (CUDA(cuModuleGetFunction, &found, loaded, binary->lowered) < 0) {
        cuda.fn.cuModuleUnload(loaded);
        return -1;
    }
    /* Lazily it would be loaded at its first launch, maybe in a capture. */
    if (cuda.fn.cuFuncLoad != NULL && CUDA(cuFuncLoad, found) < 0) {
        cuda.fn.cuModuleUnload(loaded);
        return -1;
    }
    *module = loaded;
    *function = found;
    return 0;
}

int
tkcu_load(int device, const tk_binary *binary, CUmodule *module,
          CUfunction *function, tk_error *err)
{
    bool pushed = false;
    /* Relaxed: loading allocates, which a capture in global mode, by any thread
     * of the process, forbids to threads that did not say otherwise. */
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;

    if (tkcu_enter(device, &pushed, err) < 0) {
        return -1;
    }
    int status = CUDA(cuThreadExchangeStreamCaptureMode, &mode);
    if (status == 0) {
        status = load_here(binary, module, function, err);
        cuda.fn.cuThreadExchangeStreamCaptureMode(&mode);
    }
    tkcu_leave(pushed);
    return status;
}

int
tkcu_allow(int device, CUfunction function, int smem, bool large_cluster,
           tk_error *err)
{
    bool pushed = false;
    int status = 0;

    if (tkcu_enter(device, &pushed, err) < 0) {
        return -1;
    }
    if (smem > 0) {
        status = CUDA(cuFuncSetAttribute, function,
                      CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, smem);
    }
    if (status == 0 && large_cluster) {
        status = CUDA(cuFuncSetAttribute, function,
                      CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1);
    }
    tkcu_leave(pushed);
    return status;
}

/* --- Launch -------------------------------------------------------------- */

static int
launch_failed(CUresult result, const tk_geometry *g, const char *name,
              int device, tk_error *err)
{
    char what[1024];
    tk_device d = {0};
    tk_error ignored = {0};

    if (tkcu_device(device, &d, &ignored) < 0) {
        tk_error_clear(&ignored);
    }
    snprintf(what, sizeof what,
             "launch of %s on device %d with grid (%u, %u, %u), block (%u, %u, "
             "%u), cluster (%u, %u, %u), %u bytes of dynamic shared memory "
             "(the device allows %d a block)",
             name, device, g->grid[0], g->grid[1], g->grid[2], g->block[0],
             g->block[1], g->block[2], g->cluster[0], g->cluster[1],
             g->cluster[2], g->smem, d.smem_block);
    return fail(result, what, TK_LAUNCH, err);
}

int
tkcu_launch(const tk_geometry *g, CUstream stream, void **args,
            const char *name, int device, tk_error *err)
{
    CUlaunchAttribute attribute;
    CUlaunchConfig config = {
        .gridDimX = g->grid[0],
        .gridDimY = g->grid[1],
        .gridDimZ = g->grid[2],
        .blockDimX = g->block[0],
        .blockDimY = g->block[1],
        .blockDimZ = g->block[2],
        .sharedMemBytes = g->smem,
        .hStream = stream,
        .attrs = &attribute,
    };
    if (g->cluster[0] * g->cluster[1] * g->cluster[2] > 1) {
        memset(&attribute, 0, sizeof attribute);
        attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
        attribute.value.clusterDim.x = g->cluster[0];
        attribute.value.clusterDim.y = g->cluster[1];
        attribute.value.clusterDim.z = g->cluster[2];
        config.numAttrs = 1;
    }
    CUresult result =
        cuda.fn.cuLaunchKernelEx(&config, g->function, args, NULL);
    return result == CUDA_SUCCESS ? 0
                                  : launch_failed(result, g, name, device, err);
}

int
tkcu_memset(CUdeviceptr pointer, unsigned char value, size_t size,
            CUstream stream, tk_error *err)
{
    return CUDA(cuMemsetD8Async, pointer, value, size, stream);
}

int
tkcu_encode(const tk_tensor_map *map, void *address, CUtensorMap *out,
            tk_error *err)
{
    if (tkcu_init(err) < 0) {
        return -1;
    }
    if (cuda.fn.cuTensorMapEncodeTiled == NULL) {
        return tk_fail(err, TK_DEVICE, "the CUDA driver has no tensor maps");
    }
    int status = CUDA(cuTensorMapEncodeTiled, out, map->type, map->rank,
                      address, map->dims, map->strides, map->box,
                      map->element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
                      map->swizzle, map->l2_promotion, map->fill);
    if (status < 0) {
        err->kind = TK_LAUNCH; /* what the launch asks for is wrong */
    }
    return status;
}
