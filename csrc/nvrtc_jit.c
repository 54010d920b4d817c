/* nvrtc_jit.c - template text and options -> cubin, lowered name, facts.
 *
 * Owns the handle of libnvrtc, which stays open for the life of the process.
 * Runs without the GIL; must not call Python, nor the driver: a cubin is made
 * the same way where there is no GPU.
 */
#include "tkjit.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
#define FIELD(name, symbol, required, result, args) tk_##name name;
    TK_NVRTC_FUNCTIONS(FIELD)
#undef FIELD
} nvrtc_table;

/* Written once under the lock, before `opened` is set; read-only after. */
static struct {
    pthread_mutex_t lock;
    atomic_bool opened;
    nvrtc_table fn;
    char *path;
} nvrtc = {.lock = PTHREAD_MUTEX_INITIALIZER};

static atomic_uint_fast64_t compiles;

/* --- The library --------------------------------------------------------- */

/* NVRTC looks for its builtins by bare name when it first compiles; beside a
 * library that was opened by path, the loader finds them only if they are in
 * the process already.  Where they are missing, NVRTC's own message says so. */
static void
preload_builtins(const char *path, int major, int minor)
{
    char builtins[4096];
    const char *slash = strrchr(path, '/');

    if (slash != NULL) {
        snprintf(builtins, sizeof builtins, "%.*s/libnvrtc-builtins.so.%d.%d",
                 (int)(slash - path), path, major, minor);
        dlopen(builtins, RTLD_NOW | RTLD_LOCAL);
    }
}

/* Fills the table from one library; returns NULL, or what is wrong with it. */
static const char *
load_table(const char *path, nvrtc_table *table)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        return dlerror();
    }
#define LOAD(name, symbol, required, result, args)                             \
    *(void **)&table->name = dlsym(library, symbol);                           \
    if (table->name == NULL && required) {                                     \
        dlclose(library);                                                      \
        return "it has no " symbol;                                            \
    }
    TK_NVRTC_FUNCTIONS(LOAD)
#undef LOAD
    int major = 0, minor = 0;
    if (table->nvrtcVersion(&major, &minor) != NVRTC_SUCCESS || major < 12) {
        dlclose(library);
        return "it is older than CUDA 12";
    }
    preload_builtins(path, major, minor);
    return NULL;
}

static int
open_locked(int n_paths, const char *const *paths, tk_error *err)
{
    char tried[4096] = "";
    size_t used = 0;

    for (int i = 0; i < n_paths; i++) {
        nvrtc_table table;
        const char *wrong = load_table(paths[i], &table);
        if (wrong == NULL) {
            nvrtc.path = tk_strdup(paths[i]);
            if (nvrtc.path == NULL) {
                return tk_fail(err, TK_MEMORY, "out of memory");
            }
            nvrtc.fn = table;
            atomic_store(&nvrtc.opened, true);
            return 0;
        }
        if (used < sizeof tried) {
            used += (size_t)snprintf(tried + used, sizeof tried - used,
                                     "\n  %s: %s", paths[i], wrong);
        }
    }
    return tk_fail(
        err, TK_DEVICE,
        "no CUDA run-time compiler (NVRTC) could be opened; tried:"
        "%s\nInstall it with `pip install nvidia-cuda-nvrtc`, or set "
        "TKJIT_NVRTC to the path of a libnvrtc.so",
        n_paths > 0 ? tried : " nothing");
}

int
tkrtc_open(int n_paths, const char *const *paths, tk_error *err)
{
    int status = 0;

    pthread_mutex_lock(&nvrtc.lock);
    if (!atomic_load(&nvrtc.opened)) {
        status = open_locked(n_paths, paths, err);
    }
    pthread_mutex_unlock(&nvrtc.lock);
    return status;
}

bool
tkrtc_is_open(void)
{
    return atomic_load(&nvrtc.opened);
}

const char *
tkrtc_path(void)
{
    return tkrtc_is_open() ? nvrtc.path : NULL;
}

static int
check(nvrtcResult result, const char *call, tk_error *err)
{
    if (result == NVRTC_SUCCESS && !tk_hostile(TK_AT_NVRTC)) {
        return 0;
    }
    if (result == NVRTC_ERROR_OUT_OF_MEMORY) {
        return tk_fail(err, TK_MEMORY, "NVRTC is out of memory");
    }
    return tk_fail(err, TK_COMPILE, "%s failed: %s", call,
                   nvrtc.fn.nvrtcGetErrorString(result));
}

/* nvrtcXxx(...) -> 0 or -1 */
#define NVRTC(name, ...) check(nvrtc.fn.name(__VA_ARGS__), #name, err)

static int
require_open(tk_error *err)
{
    if (!tkrtc_is_open()) {
        return tk_fail(err, TK_DEVICE, "NVRTC has not been opened");
    }
    return 0;
}

int
tkrtc_version(int *major, int *minor, tk_error *err)
{
    return require_open(err) < 0 ? -1 : NVRTC(nvrtcVersion, major, minor);
}

int
tkrtc_archs(int *archs, int room, tk_error *err)
{
    int count = 0;
    int *all = NULL;
    int status = -1;

    if (require_open(err) < 0 || NVRTC(nvrtcGetNumSupportedArchs, &count) < 0) {
        return -1;
    }
    all = tk_alloc((size_t)count * sizeof *all);
    if (all == NULL) {
        return tk_fail(err, TK_MEMORY, "out of memory");
    }
    if (NVRTC(nvrtcGetSupportedArchs, all) == 0) {
        for (int i = 0; i < count && i < room; i++) {
            archs[i] = all[i];
        }
        status = count;
    }
    tk_free(all);
    return status;
}

/* --- What ptxas said ----------------------------------------------------- */

/* The number right before `unit` in the text, or -1. */
static int
number_before(const char *text, const char *unit)
{
    const char *at = strstr(text, unit);
    if (at == NULL) {
        return -1;
    }
    const char *begin = at;
    while (begin > text && begin[-1] >= '0' && begin[-1] <= '9') {
        begin--;
    }
    return begin < at ? atoi(begin) : -1;
}

/* The log holds the figures of every function; ours is the entry. */
static tk_facts
read_facts(const char *log, const char *lowered)
{
    tk_facts facts = {-1, -1, -1, -1, -1};
    char wanted[64 + 1024];

    snprintf(wanted, sizeof wanted, "Compiling entry function '%s'", lowered);
    const char *entry = strstr(log, wanted);
    if (entry == NULL) {
        return facts;
    }
    facts.stack_bytes = number_before(entry, " bytes stack frame");
    facts.spill_stores = number_before(entry, " bytes spill stores");
    facts.spill_loads = number_before(entry, " bytes spill loads");
    facts.registers = number_before(entry, " registers");
    const char *used = strstr(entry, "Used ");
    const char *end = used != NULL ? strchr(used, '\n') : NULL;
    if (used != NULL) {
        const char *smem = strstr(used, " bytes smem");
        bool same_line = smem != NULL && (end == NULL || smem < end);
        facts.shared_bytes = same_line ? number_before(used, " bytes smem") : 0;
    }
    return facts;
}

/* --- Compiling ----------------------------------------------------------- */

void
tk_binary_clear(tk_binary *binary)
{
    tk_free(binary->image);
    tk_free(binary->lowered);
    tk_free(binary->log);
    memset(binary, 0, sizeof *binary);
}

static int
read_log(nvrtcProgram program, char **out, tk_error *err)
{
    size_t size = 0;

    if (NVRTC(nvrtcGetProgramLogSize, program, &size) < 0) {
        return -1;
    }
    char *log = tk_alloc(size + 1);
    if (log == NULL) {
        return tk_fail(err, TK_MEMORY, "out of memory");
    }
    if (NVRTC(nvrtcGetProgramLog, program, log) < 0) {
        tk_free(log);
        return -1;
    }
    log[size] = '\0';
    *out = log;
    return 0;
}

static int
read_image(nvrtcProgram program, bool ptx, tk_binary *out, tk_error *err)
{
    size_t size = 0;
    int status = ptx ? NVRTC(nvrtcGetPTXSize, program, &size)
                     : NVRTC(nvrtcGetCUBINSize, program, &size);
    if (status < 0) {
        return -1;
    }
    if (size == 0) {
        return tk_fail(err, TK_COMPILE, "NVRTC returned no binary");
    }
    out->image = tk_alloc(size);
    if (out->image == NULL) {
        return tk_fail(err, TK_MEMORY, "out of memory");
    }
    out->image_size = size;
    return ptx ? NVRTC(nvrtcGetPTX, program, (char *)out->image)
               : NVRTC(nvrtcGetCUBIN, program, (char *)out->image);
}

/* Everything between creating and destroying the program. */
static int
compile_program(nvrtcProgram program, const tk_program *what, tk_binary *out,
                tk_error *err)
{
    const char *lowered = NULL;

    if (NVRTC(nvrtcAddNameExpression, program, what->expression) < 0) {
        return -1;
    }
    nvrtcResult result =
        nvrtc.fn.nvrtcCompileProgram(program, what->n_options, what->options);
    if (tk_hostile(TK_AT_NVRTC)) {
        result = NVRTC_ERROR_INTERNAL_ERROR;
    }
    if (read_log(program, &out->log, err) < 0) {
        return -1;
    }
    if (result == NVRTC_ERROR_OUT_OF_MEMORY) {
        return tk_fail(err, TK_MEMORY, "NVRTC is out of memory");
    }
    if (result != NVRTC_SUCCESS) {
        return tk_fail(err, TK_COMPILE, "%s\n%s",
                       nvrtc.fn.nvrtcGetErrorString(result), out->log);
    }
    if (NVRTC(nvrtcGetLoweredName, program, what->expression, &lowered) < 0) {
        return -1;
    }
    out->lowered = tk_strdup(lowered);
    if (out->lowered == NULL) {
        return tk_fail(err, TK_MEMORY, "out of memory");
    }
    if (read_image(program, what->ptx, out, err) < 0) {
        return -1;
    }
    out->facts = read_facts(out->log, out->lowered);
    return 0;
}

int
tkrtc_compile(const tk_program *what, tk_binary *out, tk_error *err)
{
    nvrtcProgram program = NULL;
    tk_binary binary = {0};

    if (require_open(err) < 0 ||
        NVRTC(nvrtcCreateProgram, &program, what->source, what->name,
              what->n_headers, what->header_texts, what->header_names) < 0) {
        return -1;
    }
    int status = compile_program(program, what, &binary, err);
    nvrtc.fn.nvrtcDestroyProgram(&program);
    if (status < 0) {
        tk_binary_clear(&binary);
        return -1;
    }
    atomic_fetch_add(&compiles, 1);
    *out = binary;
    return 0;
}

uint64_t
tkrtc_compiles(void)
{
    return atomic_load(&compiles);
}
