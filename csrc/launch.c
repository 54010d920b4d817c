/* launch.c - one launch of a kernel whose parameters are packed for it.
 *
 * For what changes from call to call and is no reason to plan anew: numbers,
 * and lists of tensors that are longer than a plan takes.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define TK_PYTHON
#include "tkjit.h"

#include <string.h>

enum {
    MAX_PARAMS = 64,
    MAX_BLOB = 4096, /* bytes of a kernel's parameters */
};

typedef struct {
    PyObject *kernel; /* borrowed */
    int device;       /* -1: the CPU, by the emulator */
    tk_geometry geometry;
    tk_emulated *emulated; /* borrowed from the kernel */
    int check;
    CUstream stream;
    tk_range *ranges; /* owned; of the tensors, for the emulator */
    Py_ssize_t n_ranges;
    _Alignas(64) unsigned char blob[MAX_BLOB];
    size_t blob_size;
    void *params[MAX_PARAMS];
} launch;

/* Points params[] into the blob at the offsets; -1 with an exception. */
static int
place_parameters(launch *l, PyObject *blob, PyObject *offsets)
{
    char *bytes;
    Py_ssize_t size, n = PyTuple_Size(offsets);

    if (PyBytes_AsStringAndSize(blob, &bytes, &size) < 0) {
        return -1;
    }
    if (size > MAX_BLOB || n > MAX_PARAMS) {
        PyErr_Format(PyExc_ValueError,
                     "a kernel takes at most %d parameters and %d bytes of "
                     "them, not %zd and %zd",
                     MAX_PARAMS, MAX_BLOB, n, size);
        return -1;
    }
    memcpy(l->blob, bytes, (size_t)size);
    l->blob_size = (size_t)size;
    for (Py_ssize_t i = 0; i < n; i++) {
        size_t at = PyLong_AsSize_t(PyTuple_GetItem(offsets, i));
        if (PyErr_Occurred() || at >= l->blob_size) {
            PyErr_SetString(PyExc_ValueError, "a parameter lies past its blob");
            return -1;
        }
        l->params[i] = l->blob + at;
    }
    return 0;
}

/* Writes the tensors' addresses to their places in the blob. */
static int
place_tensors(tk_state *state, launch *l, PyObject *places, PyObject *tensors)
{
    Py_ssize_t n = PyTuple_Size(tensors);

    if (PyTuple_Size(places) != n) {
        PyErr_SetString(PyExc_ValueError, "each tensor has one place");
        return -1;
    }
    if (l->device < 0) {
        l->ranges = tk_alloc((size_t)(n + 1) * sizeof *l->ranges);
        if (l->ranges == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        l->n_ranges = n;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        DLTensor view;
        size_t at = PyLong_AsSize_t(PyTuple_GetItem(places, i));
        PyObject *tensor = PyTuple_GetItem(tensors, i);
        if (PyErr_Occurred() || tktensor_views(state, &tensor, 1, &view) < 0) {
            return -1;
        }
        if (view.ndim < 0) {
            PyErr_SetString(PyExc_TypeError, "what has a place is a tensor");
            return -1;
        }
        void *data = tktensor_data(&view);
        int device = view.device.device_type == kDLCUDA  ? view.device.device_id
                     : view.device.device_type == kDLCPU ? -1
                                                         : -2;
        if (device != l->device) {
            PyErr_SetString(PyExc_RuntimeError,
                            "Expected all tensors to be on the same device, "
                            "but found at least two devices!");
            return -1;
        }
        if (l->blob_size < sizeof data || at > l->blob_size - sizeof data) {
            PyErr_SetString(PyExc_ValueError, "a pointer lies past its blob");
            return -1;
        }
        memcpy(l->blob + at, &data, sizeof data);
        if (l->ranges != NULL) {
            l->ranges[i] = tktensor_range(&view);
        }
    }
    return 0;
}

/* What the kernel is on the device, and the stream. */
static int
find_function(tk_state *state, launch *l)
{
    tk_geometry *g = &l->geometry;

    if (l->device < 0) {
        return tkkernel_emulated(state, l->kernel, &l->emulated, &l->check);
    }
    int blocks = (int)(g->cluster[0] * g->cluster[1] * g->cluster[2]);
    if (tkkernel_function(state, l->kernel, l->device, (int)g->smem, blocks,
                          &g->function) < 0) {
        return -1;
    }
    return tktensor_stream(state, l->device, &l->stream);
}

static int
run(tk_state *state, launch *l, tk_error *err)
{
    const char *name = tkkernel_name(l->kernel);
    uint64_t seed = state->emulator_seed;
    bool pushed = false;
    int status;

    /* A full queue blocks the launch; others may go on meanwhile. */
    Py_BEGIN_ALLOW_THREADS
    if (l->device < 0) {
        const tk_emulation how = {l->check,         seed,    l->ranges,
                                  (int)l->n_ranges, l->blob, l->blob_size};
        status =
            tkemu_launch(l->emulated, &l->geometry, l->params, &how, name, err);
    }
    else {
        status = tkcu_enter(l->device, &pushed, err);
        if (status == 0) {
            status = tkcu_launch(&l->geometry, l->stream, l->params, name,
                                 l->device, err);
            tkcu_leave(pushed);
        }
    }
    Py_END_ALLOW_THREADS
    return status;
}

PyObject *
tklaunch(tk_state *state, PyObject *args)
{
    PyObject *blob, *offsets, *places, *tensors, *result = NULL;
    tk_error err = {0};
    launch l; /* its arrays are large: filled where they are used */
    tk_geometry *g = &l.geometry;

    l.ranges = NULL;
    l.stream = NULL;
    if (!PyArg_ParseTuple(
            args, "Oi(III)(III)(III)IO!O!O!O!", &l.kernel, &l.device,
            &g->grid[0], &g->grid[1], &g->grid[2], &g->block[0], &g->block[1],
            &g->block[2], &g->cluster[0], &g->cluster[1], &g->cluster[2],
            &g->smem, &PyBytes_Type, &blob, &PyTuple_Type, &offsets,
            &PyTuple_Type, &places, &PyTuple_Type, &tensors) ||
        (state->torch == NULL && tktensor_setup(state) < 0) ||
        place_parameters(&l, blob, offsets) < 0) {
        return NULL;
    }
    if (l.device >= 0 && tkcu_check_fork(&err) < 0) {
        return tk_raise(state, &err);
    }
    if (place_tensors(state, &l, places, tensors) < 0 ||
        find_function(state, &l) < 0) {
        goto done;
    }
    if (run(state, &l, &err) < 0) {
        tkplan_raise(state, l.kernel, &err);
        goto done;
    }
    state->stats.launches++;
    Py_INCREF(Py_None);
    result = Py_None;
done:
    tk_free(l.ranges);
    return result;
}
