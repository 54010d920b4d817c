/* tkjit.h - the only internal header: the types that the files of the core
 * share, and their functions, grouped by file.
 *
 * Two halves.  The first is plain C: support.c, nvrtc_jit.c, cubin_cache.c and
 * cuda_driver.c know nothing of Python and run without the GIL.  The second,
 * behind TK_PYTHON, is for the files that are left.
 *
 * Every function that can fail returns 0, or -1 with its tk_error filled in,
 * and leaves its outputs untouched on failure.  Only module.c makes a Python
 * exception of a tk_error.
 */
#ifndef TKJIT_H
#define TKJIT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "abi/cuda_abi.h"
#include "abi/dlpack_abi.h"
#include "abi/nvrtc_abi.h"

/* --- support.c: errors, memory, and the switch of a hostile build -------- */

typedef enum {
    TK_OK = 0,
    TK_MEMORY,   /* MemoryError */
    TK_COMPILE,  /* tkjit.CompileError: the compiler said no */
    TK_LAUNCH,   /* tkjit.LaunchError: the driver refused a kernel */
    TK_DEVICE,   /* tkjit.DeviceError: no driver, no compiler, no such GPU */
    TK_EMULATOR, /* tkjit.EmulatorError: the emulator found a fault */
} tk_error_kind;

typedef struct {
    tk_error_kind kind;
    char *message; /* owned; NULL if there was no memory for it */
} tk_error;

/* Fills *err and returns -1, so that a caller can `return tk_fail(...)`. */
int tk_fail(tk_error *err, tk_error_kind kind, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
void tk_error_clear(tk_error *err);

/* malloc and friends, which a hostile build makes fail.  tk_free(NULL) is
 * allowed; sizes of 0 give a valid pointer. */
void *tk_alloc(size_t size);
void *tk_calloc(size_t size);
char *tk_strdup(const char *text);
void tk_free(void *pointer);

/* Places at which a hostile build (TKJIT_HOSTILE) can be told to fail. */
typedef enum { TK_AT_ALLOC, TK_AT_READ, TK_AT_WRITE, TK_AT_NVRTC } tk_place;

#ifdef TKJIT_HOSTILE
/* True if this visit of the place is the one that is to fail. */
bool tk_hostile(tk_place place);
/* Lets the n-th visit from now fail (1 is the next; 0: none). */
void tk_hostile_arm(tk_place place, int nth);
/* Visits of the place since it was armed. */
int tk_hostile_visits(tk_place place);
#else
#define tk_hostile(place) false
#endif

/* --- nvrtc_jit.c: template text and options -> binary -------------------- */

/* What ptxas said of the kernel; -1 where its log held no figure. */
typedef struct {
    int registers;
    int shared_bytes; /* static */
    int stack_bytes;
    int spill_stores; /* bytes */
    int spill_loads;
} tk_facts;

/* A compiled kernel.  All pointers are owned; tk_binary_clear frees them. */
typedef struct {
    unsigned char *image; /* cubin, or NUL-terminated PTX */
    size_t image_size;
    char *lowered; /* the kernel's mangled name in the image */
    char *log;     /* what the compiler printed, maybe "" */
    tk_facts facts;
} tk_binary;

void tk_binary_clear(tk_binary *binary);

/* What to compile.  All pointers are borrowed for the call. */
typedef struct {
    const char *name; /* shown in the compiler's messages */
    const char *source;
    const char *expression; /* the instance: "softmax::fwd<float, 256>" */
    int n_headers;
    const char *const *header_names;
    const char *const *header_texts;
    int n_options;
    const char *const *options;
    bool ptx; /* the architecture is a virtual one */
} tk_program;

/* Opens the first library of the list that works; the process keeps it.
 * Returns 0 at once if one is open.  On failure the message lists every path
 * and why it was refused. */
int tkrtc_open(int n_paths, const char *const *paths, tk_error *err);
bool tkrtc_is_open(void);
/* The path that tkrtc_open took; borrowed, NULL before. */
const char *tkrtc_path(void);
int tkrtc_version(int *major, int *minor, tk_error *err);
/* Writes up to `room` supported architectures (90 for sm_90); returns how many
 * there are, or -1. */
int tkrtc_archs(int *archs, int room, tk_error *err);
/* Compiles.  A TK_COMPILE error's message is the compiler's whole log. */
int tkrtc_compile(const tk_program *program, tk_binary *out, tk_error *err);
/* Kernels compiled by this process. */
uint64_t tkrtc_compiles(void);

/* --- cubin_cache.c: binaries on disk ------------------------------------- */

#define TK_KEY_SIZE 64 /* hexadecimal SHA-256 */

/* What a look-up in a folder came to. */
typedef enum { TK_MISS = 0, TK_HIT = 1, TK_DAMAGED = 2 } tk_lookup;

/* Reads the entry of the key below the folder.  Anything but a whole entry of
 * that key, owned by this user or root (or anyone if trusted), is a miss. */
tk_lookup tkcache_read(const char *folder, const char *key, bool trust,
                       tk_binary *out);
/* Reads a file as an entry, whatever its key; *meta is owned by the caller. */
tk_lookup tkcache_read_file(const char *path, tk_binary *out, char **meta);
/* Publishes an entry by writing a file aside and renaming it.  meta is lines of
 * "name: value" for people.  Returns 0, or -1 with errno in *why. */
int tkcache_write(const char *folder, const char *key, const char *meta,
                  const tk_binary *binary, int *why);
/* Takes the key's lock among processes; waits at most the given time.  Returns
 * a token for tkcache_unlock, or -1 if it could not be had.  *waited says
 * whether another process held it.  A killed process holds nothing. */
int tkcache_lock(const char *folder, const char *key, int timeout_ms,
                 bool *waited);
void tkcache_unlock(int token);
/* SHA-256 of a buffer (also for the test against hashlib). */
void tkcache_sha256(const void *data, size_t size, unsigned char digest[32]);

/* --- cuda_driver.c: libcuda, devices, modules, launches ------------------ */

typedef struct {
    int major, minor; /* compute capability */
    int sms;
    int smem_block; /* most dynamic shared memory of a block, opted in */
    int smem_sm;
    int l2_bytes;
    int max_threads_sm;
    int registers_sm;
    int bus_bits;
    int memory_khz;
    uint64_t memory_bytes;
    char name[128];
} tk_device;

#define TK_MAX_DEVICES 64

/* Opens libcuda and initialises it, once.  Fails (TK_DEVICE) where there is no
 * driver, and in the child of a process that had initialised it. */
int tkcu_init(tk_error *err);
/* Fails in the child of a process that had used the driver. */
int tkcu_check_fork(tk_error *err);
int tkcu_driver_version(int *version, tk_error *err);
int tkcu_device_count(int *count, tk_error *err);
/* Facts of a device; asks the driver once. */
int tkcu_device(int device, tk_device *out, tk_error *err);

/* One loaded kernel on one device.  Modules live as long as the process: a
 * captured graph may hold the function after every plan has let go of it. */
int tkcu_load(int device, const tk_binary *binary, CUmodule *module,
              CUfunction *function, tk_error *err);
/* Allows the launches of a function this much dynamic shared memory, and
 * clusters above 8 blocks. */
int tkcu_allow(int device, CUfunction function, int smem, bool large_cluster,
               tk_error *err);

typedef struct {
    CUfunction function;
    unsigned grid[3];
    unsigned block[3];
    unsigned cluster[3]; /* 1, 1, 1: none */
    unsigned smem;
} tk_geometry;

/* Makes the device's context current; *pushed says whether tkcu_leave has to
 * undo it.  The caller's current device is what it was after tkcu_leave. */
int tkcu_enter(int device, bool *pushed, tk_error *err);
void tkcu_leave(bool pushed);
/* Between tkcu_enter and tkcu_leave.  `name` is for the message. */
int tkcu_launch(const tk_geometry *geometry, CUstream stream, void **args,
                const char *name, int device, tk_error *err);
int tkcu_memset(CUdeviceptr pointer, unsigned char value, size_t size,
                CUstream stream, tk_error *err);

/* What cuTensorMapEncodeTiled is given, but for the address. */
typedef struct {
    CUtensorMapDataType type;
    unsigned rank;
    uint64_t dims[5];
    uint64_t strides[4]; /* bytes; of dims 1.. */
    uint32_t box[5];
    uint32_t element_strides[5];
    CUtensorMapSwizzle swizzle;
    CUtensorMapL2promotion l2_promotion;
    CUtensorMapFloatOOBfill fill;
} tk_tensor_map;

int tkcu_encode(const tk_tensor_map *map, void *address, CUtensorMap *out,
                tk_error *err);

/* --- host_compiler.c: template text -> an object for the emulator --------- */

/* The program's options are a folder to work in, the compiler, and what it is
 * given; the object comes out as `image`.  A TK_COMPILE error's message is what
 * the compiler printed. */
int tkcc_compile(const tk_program *program, tk_binary *out, tk_error *err);
/* Objects compiled by this process. */
uint64_t tkcc_compiles(void);

/* --- emulator_counts.c: what accesses cost -------------------------------- */

/* One access of a thread. */
typedef struct {
    uint32_t where; /* in the kernel's object */
    uint32_t turn;
    uint64_t address; /* of shared memory: any whose bank is right */
    uint32_t warp;    /* in the cluster */
    uint16_t bytes;
    uint8_t lane;
    bool shared, writes;
} tk_touch;

/* All accesses of a place. */
typedef struct {
    uint32_t where;
    bool shared, writes;
    uint64_t requests; /* of warps */
    uint64_t actual;   /* wavefronts, or sectors */
    uint64_t ideal;
} tk_count;

typedef struct tk_counts tk_counts;
tk_counts *tkcount_new(void); /* NULL: no memory */
void tkcount_free(tk_counts *counts);
void tkcount_note(tk_counts *counts, const tk_touch *touch);
/* At the end of a cluster: warps' numbers may come again. */
void tkcount_settle(tk_counts *counts);
/* Returns how many rows there are; borrowed until the next launch. */
size_t tkcount_rows(const tk_counts *counts, const tk_count **rows);

/* --- emulator.c: kernels on the CPU -------------------------------------- */

typedef struct tk_emulated tk_emulated; /* a loaded object */

int tkemu_load(const tk_binary *binary, tk_emulated **out, tk_error *err);
void tkemu_unload(tk_emulated *object); /* NULL is allowed */
/* What was counted in launches with check 2; NULL before. */
const tk_counts *tkemu_counts(const tk_emulated *object);

typedef struct {
    uintptr_t begin, end;
} tk_range;

/* How a kernel is to be run, and what it may touch.  Borrowed for a launch. */
typedef struct {
    int check; /* 0: run; 1: and find faults; 2: and count accesses */
    uint64_t seed;
    const tk_range *ranges; /* of the tensors and buffers */
    int n_ranges;
    const void *params; /* the parameters' bytes */
    size_t params_size;
} tk_emulation;

/* Runs a kernel to its end; TK_EMULATOR where it has a fault.  Places in the
 * object stand in the message as "<at 0x12ab>". */
int tkemu_launch(tk_emulated *object, const tk_geometry *geometry,
                 void *const *params, const tk_emulation *options,
                 const char *name, tk_error *err);

/* --- tensor_map.c: tensor maps for the emulator -------------------------- */

/* As tkcu_encode; TK_LAUNCH where the driver would refuse the map. */
int tkemu_encode(const tk_tensor_map *map, void *address, CUtensorMap *out,
                 tk_error *err);

/* --- The half that knows Python ------------------------------------------ */

#ifdef TK_PYTHON

/* Counters, under the GIL; what each counts stands in cache.stats(). */
typedef struct {
    uint64_t disk_hits, damaged, published, publish_failures, lock_waits;
    uint64_t plan_hits, plan_misses, plan_evictions, launches;
} tk_stats;

/* What the module owns for the life of the interpreter. */
typedef struct {
    tk_stats stats;
    PyTypeObject *kernel_type;
    PyTypeObject *planned_type;
    PyObject *errors;       /* tkjit._errors, imported on first need */
    uint64_t emulator_seed; /* of the schedule */
    struct tk_torch *torch; /* what tensor.c took from torch; NULL before */
} tk_state;

/* module.c */
tk_state *tk_state_of(PyObject *module);
tk_state *tk_state_of_type(PyTypeObject *type);
/* Sets the Python exception for *err and clears it; returns NULL. */
PyObject *tk_raise(tk_state *state, tk_error *err);

/* tensor.c: torch tensors through the DLPack exchange table */

/* Takes what the core needs from torch, once.  Returns 0, or -1 with an
 * exception. */
int tktensor_setup(tk_state *state);
void tktensor_teardown(tk_state *state);
/* True for a Tensor or Parameter itself, not for a subclass. */
bool tktensor_is_exact(const tk_state *state, PyObject *object);
/* True for an instance of Tensor, subclasses too. */
bool tktensor_check(const tk_state *state, PyObject *object);
/* Borrowed view of a tensor; -1 with an exception where it has none. */
int tktensor_view(const tk_state *state, PyObject *tensor, DLTensor *out);
/* The address of the first element. */
void *tktensor_data(const DLTensor *view);
/* The bytes from the first element to the last. */
tk_range tktensor_range(const DLTensor *view);
/* The largest power of two up to 16 that divides it. */
uint64_t tktensor_alignment(const DLTensor *view);
/* What a planner is told of a tensor: (code, bits, lanes, device type, device,
 * shape, strides, alignment); NULL with an exception. */
PyObject *tktensor_describe(const tk_state *state, PyObject *tensor);
/* The stream torch works on now; -1 with an exception. */
int tktensor_stream(const tk_state *state, int device, CUstream *out);
/* A new tensor of torch's allocator: torch.empty_strided(*args, **kwargs). */
PyObject *tktensor_empty(const tk_state *state, PyObject *args,
                         PyObject *kwargs);
/* The same by torch.empty_like(tensor), which is a little quicker. */
PyObject *tktensor_empty_like(const tk_state *state, PyObject *tensor);

/* How a call has to go (see Planned.call in planned.c). */
typedef enum {
    TK_RAW = 0,
    TK_AUTOGRAD = 1,
    TK_SLOW = 2,
    TK_FAILED = -1
} tk_route;
/* Views of the tensors among the arguments; ndim is -1 where there is none.  -1
 * with an exception. */
int tktensor_views(const tk_state *state, PyObject *const *args,
                   Py_ssize_t n_args, DLTensor *views);
/* Judges the tensors among the arguments, and the modes torch is in.  The views
 * are filled unless the answer is TK_SLOW or TK_FAILED. */
tk_route tktensor_route(const tk_state *state, PyObject *const *args,
                        Py_ssize_t n_args, DLTensor *views);
/* The same for a call that torch has seen already: never TK_SLOW. */
tk_route tktensor_direct_route(const tk_state *state, PyObject *const *args,
                               Py_ssize_t n_args, DLTensor *views);

/* kernel.c: one instance of a template for one architecture */

typedef struct tk_kernel tk_kernel;
extern PyType_Spec tk_kernel_spec;
/* The function on a device, allowed the shared memory and cluster; loads it on
 * first need.  -1 with an exception. */
int tkkernel_function(tk_state *state, PyObject *kernel, int device, int smem,
                      int cluster_blocks, CUfunction *out);
/* The object of a kernel that was compiled for the emulator, loaded on first
 * need, and whether it was compiled for checks; borrowed from the kernel. */
int tkkernel_emulated(tk_state *state, PyObject *kernel, tk_emulated **out,
                      int *check);
/* The kernel's name for messages; borrowed. */
const char *tkkernel_name(PyObject *kernel);

/* key.c: the key of a call */

enum {
    TK_MAX_ARGS = 32,   /* of a call */
    TK_KEY_WORDS = 192, /* of a key, before it needs the heap */
};

typedef struct {
    uint64_t *words; /* `inline_words`, or owned */
    size_t n, room;
    uint64_t inline_words[TK_KEY_WORDS];
} tk_key;

void tkkey_begin(tk_key *key);
void tkkey_end(tk_key *key);
/* Adds one argument that is not a tensor; -1 with an exception. */
int tkkey_add_scalar(tk_key *key, PyObject *object);
/* Fills the key; -1 with an exception. */
int tkkey_build(PyObject *const *args, Py_ssize_t n_args, const DLTensor *views,
                tk_key *key);
uint64_t tkkey_hash(const tk_key *key);

/* plan.c: the frozen launches of one kind of call */

typedef struct tk_plan tk_plan;

/* A plan with one reference, of a planner's answer; NULL with an exception. */
tk_plan *tkplan_freeze(tk_state *state, PyObject *answer, int n_args);
void tkplan_retain(tk_plan *plan);
void tkplan_release(tk_plan *plan); /* NULL is allowed */
/* Allocates and launches; returns the outputs, or NULL with an exception. */
PyObject *tkplan_run(tk_state *state, tk_plan *plan, PyObject *const *args,
                     const DLTensor *views);

/* Sets the exception for a failed launch of the kernel; a fault that the
 * emulator found is told with the lines of its text (_emulator.py). */
void tkplan_raise(tk_state *state, PyObject *kernel, tk_error *err);

/* launch.c: _core.launch(); NULL with an exception */

PyObject *tklaunch(tk_state *state, PyObject *args);

/* planned.c: the plans of one op */

extern PyType_Spec tk_planned_spec;

#endif /* TK_PYTHON */
#endif /* TKJIT_H */
