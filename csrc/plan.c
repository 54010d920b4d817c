/* plan.c - a frozen plan: the buffers and launches of one kind of call.
 *
 * Reads the tuples of a planner's answer once (python/tkjit/_plan.py makes
 * them), then allocates, patches pointers and launches as often as asked.
 *
 * Slots: the pointers that launches are patched with, in one row: the call's
 * arguments, then the outputs, then the scratch buffers.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define TK_PYTHON
#include "tkjit.h"

#include <string.h>

enum {
    MAX_MADE = 32, /* outputs and scratch buffers of a plan */
    MAX_SLOTS = TK_MAX_ARGS + MAX_MADE,
    MAX_PARAMS = 64, /* of a kernel */
    MAX_MAPS = 16,   /* tensor maps of a plan */
    MAX_BLOB = 4096, /* bytes of a kernel's parameters */
};

/* --- Plans --------------------------------------------------------------- */

typedef struct {
    int argument;   /* the output is this argument, or -1 */
    int like;       /* it is made like this argument, or -1 */
    PyObject *args; /* of torch.empty_strided */
    PyObject *kwargs;
} made_spec;

typedef struct {
    unsigned offset; /* in the blob */
    unsigned slot;
    int64_t bytes; /* added to the slot's pointer */
} patch;

typedef struct {
    unsigned offset;
    unsigned slot;
    tk_tensor_map map;
    void *address; /* what `encoded` was made for */
    unsigned char encoded[sizeof(CUtensorMap)]; /* on the heap: not aligned */
} map_patch;

/* A kernel launch, or a memset where kernel is NULL. */
typedef struct {
    PyObject *kernel;      /* owned */
    const char *name;      /* borrowed from it */
    tk_emulated *emulated; /* borrowed from it, in a plan for the CPU */
    int check;
    tk_geometry geometry;
    unsigned char *blob;
    unsigned blob_size;
    int n_params, n_patches, n_maps;
    unsigned *offsets;
    patch *patches;
    map_patch *maps;
    unsigned memset_slot;
    unsigned char memset_value;
    size_t memset_bytes;
} step;

struct tk_plan {
    int refs;   /* the cache's and running calls' */
    int device; /* a GPU's index, or -1: the CPU, by the emulator */
    int n_args, n_outputs, n_scratch, n_steps, n_kernels, n_maps;
    made_spec *made; /* outputs, then scratch */
    step *steps;
};

static void
free_step(step *s)
{
    Py_XDECREF(s->kernel);
    tk_free(s->blob);
    tk_free(s->offsets);
    tk_free(s->patches);
    tk_free(s->maps);
}

void
tkplan_release(tk_plan *p)
{
    if (p == NULL || --p->refs > 0) {
        return;
    }
    for (int i = 0; p->made != NULL && i < p->n_outputs + p->n_scratch; i++) {
        Py_XDECREF(p->made[i].args);
        Py_XDECREF(p->made[i].kwargs);
    }
    for (int i = 0; p->steps != NULL && i < p->n_steps; i++) {
        free_step(&p->steps[i]);
    }
    tk_free(p->made);
    tk_free(p->steps);
    tk_free(p);
}

/* --- Freezing: the planner's tuples -> a plan -------------------------------
 *
 *   (device, outputs, scratch, steps)
 *   output:  i: argument i itself | ~i: made like it |
 *            (args, kwargs) of torch.empty_strided
 *   scratch: (args, kwargs)
 *   step:    (kernel, grid, block, cluster, smem, blob, offsets, patches, maps)
 *            | (None, slot, value, bytes)
 *   patch:   (offset, slot, bytes)
 *   map:     (offset, slot, type, dims, strides, box, element_strides, swizzle,
 *             l2_promotion, fill)
 */

static int
freeze_made(PyObject *item, int n_args, made_spec *out)
{
    PyObject *args, *kwargs;

    out->argument = -1;
    out->like = -1;
    if (PyLong_Check(item)) {
        long number = PyLong_AsLong(item);
        long index = number < 0 ? ~number : number;
        if (index >= n_args || PyErr_Occurred()) {
            PyErr_SetString(PyExc_ValueError,
                            "a plan returns no such argument");
            return -1;
        }
        *(number < 0 ? &out->like : &out->argument) = (int)index;
        return 0;
    }
    if (!PyArg_ParseTuple(item, "O!O!", &PyTuple_Type, &args, &PyDict_Type,
                          &kwargs)) {
        return -1;
    }
    Py_INCREF(args);
    Py_INCREF(kwargs);
    out->args = args;
    out->kwargs = kwargs;
    return 0;
}

static int
check_slot(const tk_plan *p, unsigned slot)
{
    if (slot < (unsigned)(p->n_args + p->n_outputs + p->n_scratch)) {
        return 0;
    }
    PyErr_SetString(PyExc_ValueError, "a plan patches no such slot");
    return -1;
}

/* Up to `room` numbers of a tuple into 64-bit words. */
static int
read_numbers(PyObject *tuple, size_t room, uint64_t *out)
{
    Py_ssize_t n = PyTuple_Size(tuple);
    if (n < 0 || (size_t)n > room) {
        if (n >= 0) {
            PyErr_SetString(PyExc_ValueError, "too many numbers in a plan");
        }
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        out[i] = PyLong_AsUnsignedLongLong(PyTuple_GetItem(tuple, i));
        if (out[i] == UINT64_MAX && PyErr_Occurred()) {
            return -1;
        }
    }
    return 0;
}

static int
freeze_map(const tk_plan *p, const step *s, PyObject *item, map_patch *out)
{
    PyObject *dims, *strides, *box, *element_strides;
    int type, swizzle, l2, fill;
    uint64_t box64[5] = {0}, element64[5] = {0};
    tk_tensor_map *m = &out->map;

    if (!PyArg_ParseTuple(item, "IIiO!O!O!O!iii", &out->offset, &out->slot,
                          &type, &PyTuple_Type, &dims, &PyTuple_Type, &strides,
                          &PyTuple_Type, &box, &PyTuple_Type, &element_strides,
                          &swizzle, &l2, &fill) ||
        check_slot(p, out->slot) < 0 || read_numbers(dims, 5, m->dims) < 0 ||
        read_numbers(strides, 4, m->strides) < 0 ||
        read_numbers(box, 5, box64) < 0 ||
        read_numbers(element_strides, 5, element64) < 0) {
        return -1;
    }
    if (out->offset + sizeof(CUtensorMap) > s->blob_size) {
        PyErr_SetString(PyExc_ValueError, "a tensor map lies past its blob");
        return -1;
    }
    m->rank = (unsigned)PyTuple_Size(dims);
    for (int i = 0; i < 5; i++) {
        m->box[i] = (uint32_t)box64[i];
        m->element_strides[i] = (uint32_t)element64[i];
    }
    m->type = (CUtensorMapDataType)type;
    m->swizzle = (CUtensorMapSwizzle)swizzle;
    m->l2_promotion = (CUtensorMapL2promotion)l2;
    m->fill = (CUtensorMapFloatOOBfill)fill;
    return 0;
}

static int
freeze_parameters(const tk_plan *p, PyObject *blob, PyObject *offsets,
                  PyObject *patches, PyObject *maps, step *s)
{
    char *bytes;
    Py_ssize_t size;

    if (PyBytes_AsStringAndSize(blob, &bytes, &size) < 0) {
        return -1;
    }
    s->n_params = (int)PyTuple_Size(offsets);
    s->n_patches = (int)PyTuple_Size(patches);
    s->n_maps = (int)PyTuple_Size(maps);
    if (size > MAX_BLOB || s->n_params > MAX_PARAMS) {
        PyErr_Format(
            PyExc_ValueError,
            "a kernel takes at most %d parameters and %d bytes of them",
            MAX_PARAMS, MAX_BLOB);
        return -1;
    }
    s->blob_size = (unsigned)size;
    s->blob = tk_alloc((size_t)size);
    s->offsets = tk_alloc((size_t)s->n_params * sizeof *s->offsets);
    s->patches = tk_calloc((size_t)s->n_patches * sizeof *s->patches);
    s->maps = tk_calloc((size_t)s->n_maps * sizeof *s->maps);
    if (s->blob == NULL || s->offsets == NULL || s->patches == NULL ||
        s->maps == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    memcpy(s->blob, bytes, (size_t)size);
    for (int i = 0; i < s->n_params; i++) {
        unsigned long at = PyLong_AsUnsignedLong(PyTuple_GetItem(offsets, i));
        if (PyErr_Occurred() || at >= s->blob_size) {
            PyErr_SetString(PyExc_ValueError, "a parameter lies past its blob");
            return -1;
        }
        s->offsets[i] = (unsigned)at;
    }
    for (int i = 0; i < s->n_patches; i++) {
        patch *q = &s->patches[i];
        long long extra = 0;
        if (!PyArg_ParseTuple(PyTuple_GetItem(patches, i), "IIL", &q->offset,
                              &q->slot, &extra) ||
            check_slot(p, q->slot) < 0) {
            return -1;
        }
        q->bytes = extra;
        if (q->offset + sizeof(void *) > s->blob_size) {
            PyErr_SetString(PyExc_ValueError, "a pointer lies past its blob");
            return -1;
        }
    }
    for (int i = 0; i < s->n_maps; i++) {
        if (freeze_map(p, s, PyTuple_GetItem(maps, i), &s->maps[i]) < 0) {
            return -1;
        }
    }
    return 0;
}

static int
freeze_step(tk_state *state, const tk_plan *p, PyObject *item, step *s)
{
    PyObject *kernel, *blob, *offsets, *patches, *maps;
    tk_geometry *g = &s->geometry;

    if (PyTuple_Size(item) == 4) {
        unsigned long long bytes = 0;
        if (!PyArg_ParseTuple(item, "OIbK", &kernel, &s->memset_slot,
                              &s->memset_value, &bytes)) {
            return -1;
        }
        s->memset_bytes = (size_t)bytes;
        return check_slot(p, s->memset_slot);
    }
    if (!PyArg_ParseTuple(item, "O(III)(III)(III)IO!O!O!O!", &kernel,
                          &g->grid[0], &g->grid[1], &g->grid[2], &g->block[0],
                          &g->block[1], &g->block[2], &g->cluster[0],
                          &g->cluster[1], &g->cluster[2], &g->smem,
                          &PyBytes_Type, &blob, &PyTuple_Type, &offsets,
                          &PyTuple_Type, &patches, &PyTuple_Type, &maps)) {
        return -1;
    }
    Py_INCREF(kernel);
    s->kernel = kernel;
    int blocks = (int)(g->cluster[0] * g->cluster[1] * g->cluster[2]);
    int status = p->device < 0
                     ? tkkernel_emulated(state, kernel, &s->emulated, &s->check)
                     : tkkernel_function(state, kernel, p->device, (int)g->smem,
                                         blocks, &g->function);
    if (status < 0) {
        return -1;
    }
    s->name = tkkernel_name(kernel);
    return freeze_parameters(p, blob, offsets, patches, maps, s);
}

static int
freeze_into(tk_state *state, PyObject *answer, tk_plan *p)
{
    PyObject *outputs, *scratch, *steps;

    if (!PyArg_ParseTuple(answer, "iO!O!O!", &p->device, &PyTuple_Type,
                          &outputs, &PyTuple_Type, &scratch, &PyTuple_Type,
                          &steps)) {
        return -1;
    }
    p->n_outputs = (int)PyTuple_Size(outputs);
    p->n_scratch = (int)PyTuple_Size(scratch);
    p->n_steps = (int)PyTuple_Size(steps);
    int n_made = p->n_outputs + p->n_scratch;
    if (n_made > MAX_MADE || p->n_outputs == 0) {
        PyErr_Format(PyExc_ValueError,
                     "a plan makes 1 to %d outputs and buffers, not %d",
                     MAX_MADE, n_made);
        return -1;
    }
    p->made = tk_calloc((size_t)n_made * sizeof *p->made);
    p->steps = tk_calloc((size_t)p->n_steps * sizeof *p->steps);
    if (p->made == NULL || p->steps == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (int i = 0; i < n_made; i++) {
        PyObject *item = i < p->n_outputs
                             ? PyTuple_GetItem(outputs, i)
                             : PyTuple_GetItem(scratch, i - p->n_outputs);
        if (freeze_made(item, p->n_args, &p->made[i]) < 0) {
            return -1;
        }
    }
    for (int i = 0; i < p->n_steps; i++) {
        if (freeze_step(state, p, PyTuple_GetItem(steps, i), &p->steps[i]) <
            0) {
            return -1;
        }
        p->n_kernels += p->steps[i].kernel != NULL;
        p->n_maps += p->steps[i].n_maps;
        if (p->n_maps > MAX_MAPS) {
            PyErr_Format(PyExc_ValueError, "a plan has at most %d tensor maps",
                         MAX_MAPS);
            return -1;
        }
    }
    return 0;
}

tk_plan *
tkplan_freeze(tk_state *state, PyObject *answer, int n_args)
{
    tk_plan *p = tk_calloc(sizeof *p);
    if (p == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    p->refs = 1;
    p->n_args = n_args;
    if (freeze_into(state, answer, p) < 0) {
        tkplan_release(p);
        return NULL;
    }
    return p;
}

void
tkplan_retain(tk_plan *p)
{
    p->refs++;
}

/* --- Running a plan ------------------------------------------------------ */

/* What a run of a plan works on, beside the plan. */
typedef struct {
    void *slots[MAX_SLOTS];
    tk_range ranges[MAX_SLOTS]; /* of the slots' memory; for the CPU alone */
    CUtensorMap maps[MAX_MAPS];
    CUstream stream;
    uint64_t seed;   /* of the emulator */
    int failed_step; /* which one it was */
} run;

/* `maps` are this step's. */
static int
run_step(const step *s, const run *r, const CUtensorMap *maps, int device,
         int n_slots, tk_error *err)
{
    _Alignas(CUtensorMap) unsigned char blob[MAX_BLOB];
    void *params[MAX_PARAMS];
    void *const *slots = r->slots;

    if (s->kernel == NULL && device < 0) {
        memset(slots[s->memset_slot], s->memset_value, s->memset_bytes);
        return 0;
    }
    if (s->kernel == NULL) {
        return tkcu_memset((CUdeviceptr)(uintptr_t)slots[s->memset_slot],
                           s->memset_value, s->memset_bytes, r->stream, err);
    }
    memcpy(blob, s->blob, s->blob_size);
    for (int i = 0; i < s->n_patches; i++) {
        const patch *q = &s->patches[i];
        uintptr_t pointer = (uintptr_t)slots[q->slot] + (uintptr_t)q->bytes;
        memcpy(blob + q->offset, &pointer, sizeof pointer);
    }
    for (int i = 0; i < s->n_maps; i++) {
        memcpy(blob + s->maps[i].offset, &maps[i], sizeof maps[i]);
    }
    for (int i = 0; i < s->n_params; i++) {
        params[i] = blob + s->offsets[i];
    }
    if (device < 0) {
        const tk_emulation how = {s->check, r->seed, r->ranges,
                                  n_slots,  blob,    s->blob_size};
        return tkemu_launch(s->emulated, &s->geometry, params, &how, s->name,
                            err);
    }
    return tkcu_launch(&s->geometry, r->stream, params, s->name, device, err);
}

/* Under the GIL: the plan's maps are shared by the threads that run it.  What
 * the launches take are copies, since they run without it. */
static int
encode_maps(tk_plan *p, void *const *slots, CUtensorMap *copies, tk_error *err)
{
    for (int i = 0; i < p->n_steps; i++) {
        step *s = &p->steps[i];
        for (int j = 0; j < s->n_maps; j++) {
            map_patch *q = &s->maps[j];
            if (q->address == slots[q->slot]) {
                memcpy(copies, q->encoded, sizeof q->encoded);
            }
            else if ((p->device < 0 ? tkemu_encode : tkcu_encode)(
                         &q->map, slots[q->slot], copies, err) < 0) {
                return -1;
            }
            else {
                memcpy(q->encoded, copies, sizeof q->encoded);
                q->address = slots[q->slot];
            }
            copies++;
        }
    }
    return 0;
}

static int
run_steps(const tk_plan *p, run *r, tk_error *err)
{
    int n_slots = p->n_args + p->n_outputs + p->n_scratch;
    const CUtensorMap *maps = r->maps;
    bool pushed = false;
    int status = 0;

    if (p->device >= 0 && tkcu_enter(p->device, &pushed, err) < 0) {
        return -1;
    }
    for (int i = 0; status == 0 && i < p->n_steps; i++) {
        const step *s = &p->steps[i];
        r->failed_step = i;
        status = run_step(s, r, maps, p->device, n_slots, err);
        maps += s->n_maps;
    }
    tkcu_leave(pushed);
    return status;
}

/* The outputs and scratch buffers; the caller owns what stands in `made`, also
 * on failure. */
static int
make_buffers(const tk_state *state, const tk_plan *p, PyObject *const *args,
             PyObject **made, run *r)
{
    void **slots = r->slots;

    for (int i = 0; i < p->n_outputs + p->n_scratch; i++) {
        const made_spec *m = &p->made[i];
        if (m->argument >= 0) {
            made[i] = args[m->argument];
            Py_INCREF(made[i]);
            slots[p->n_args + i] = slots[m->argument];
            if (p->device < 0) {
                r->ranges[p->n_args + i] = r->ranges[m->argument];
            }
            continue;
        }
        DLTensor view;
        made[i] = m->like >= 0 ? tktensor_empty_like(state, args[m->like])
                               : tktensor_empty(state, m->args, m->kwargs);
        if (made[i] == NULL || tktensor_view(state, made[i], &view) < 0) {
            return -1;
        }
        slots[p->n_args + i] = tktensor_data(&view);
        if (p->device < 0) {
            r->ranges[p->n_args + i] = tktensor_range(&view);
        }
    }
    return 0;
}

/* One output as it is, several as a tuple.  Takes the references. */
static PyObject *
hand_over(const tk_plan *p, PyObject **made)
{
    if (p->n_outputs == 1) {
        PyObject *only = made[0];
        made[0] = NULL;
        return only;
    }
    PyObject *tuple = PyTuple_New(p->n_outputs);
    for (int i = 0; tuple != NULL && i < p->n_outputs; i++) {
        PyTuple_SetItem(tuple, i, made[i]);
        made[i] = NULL;
    }
    return tuple;
}

/* Sets the exception for a failed run; a fault that the emulator found is told
 * with the lines of the kernel's text (python/tkjit/_emulator.py). */
void
tkplan_raise(tk_state *state, PyObject *kernel, tk_error *err)
{
    PyObject *exception = NULL, *module = NULL;

    if (err->kind != TK_EMULATOR || err->message == NULL) {
        tk_raise(state, err);
        return;
    }
    module = PyImport_ImportModule("tkjit._emulator");
    if (module != NULL) {
        exception =
            PyObject_CallMethod(module, "fault", "sO", err->message, kernel);
        Py_DECREF(module);
    }
    if (exception != NULL) {
        PyErr_SetObject((PyObject *)Py_TYPE(exception), exception);
        Py_DECREF(exception);
    }
    tk_error_clear(err);
}

PyObject *
tkplan_run(tk_state *state, tk_plan *p, PyObject *const *args,
           const DLTensor *views)
{
    run r; /* its arrays are large: filled where they are used */
    PyObject *made[MAX_MADE] = {NULL};
    PyObject *result = NULL;
    tk_error err = {0};
    int status = 0;

    r.stream = NULL;
    r.seed = state->emulator_seed;
    r.failed_step = 0;
    for (int i = 0; i < p->n_args; i++) {
        bool tensor = views[i].ndim >= 0;
        r.slots[i] = tensor ? tktensor_data(&views[i]) : NULL;
        if (p->device < 0) {
            r.ranges[i] = tensor ? tktensor_range(&views[i]) : (tk_range){0, 0};
        }
    }
    /* Before torch is asked for memory, which it would refuse less clearly. */
    if (p->n_steps > 0 && p->device >= 0 && tkcu_check_fork(&err) < 0) {
        return tk_raise(state, &err);
    }
    if (make_buffers(state, p, args, made, &r) < 0) {
        goto done;
    }
    if (p->n_steps > 0) {
        if (p->device >= 0 &&
            tktensor_stream(state, p->device, &r.stream) < 0) {
            goto done;
        }
        status = encode_maps(p, r.slots, r.maps, &err);
        if (status == 0) {
            /* A full queue blocks the launch; others may go on meanwhile. */
            Py_BEGIN_ALLOW_THREADS
            status = run_steps(p, &r, &err);
            Py_END_ALLOW_THREADS
        }
        if (status < 0) {
            tkplan_raise(state, p->steps[r.failed_step].kernel, &err);
            goto done;
        }
        state->stats.launches += (uint64_t)p->n_kernels;
    }
    result = hand_over(p, made);
done:
    for (int i = 0; i < p->n_outputs + p->n_scratch; i++) {
        Py_XDECREF(made[i]);
    }
    return result;
}
