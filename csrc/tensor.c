/* tensor.c - torch tensors through the DLPack exchange table, and the question
 * how torch wants a call to go.
 *
 * Owns what the core takes from torch.  The table gives views and the current
 * stream; outputs come from torch's own functions, since a tensor that the
 * table's own allocator makes is foreign memory to torch (no record_stream, no
 * storage resize).
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define TK_PYTHON
#include "tkjit.h"

#include <string.h>

struct tk_torch {
    const DLPackExchangeAPI *api;
    PyObject *tensor;        /* torch.Tensor */
    PyObject *parameter;     /* torch.nn.Parameter */
    PyObject *empty_strided; /* torch.empty_strided */
    PyObject *empty_like;    /* torch.empty_like */
    PyObject *grad_enabled;  /* torch.is_grad_enabled */
    PyObject *modes[3];      /* callables: is torch in a mode of this kind? */
    PyObject *transforms;    /* is a functorch transform active? */
    PyObject *forward_ad;    /* the dict of torch.autograd.forward_ad */
    PyObject *current_level; /* "_current_level" */
    PyObject *requires_grad; /* "requires_grad" */
    PyObject *is_neg;        /* torch.Tensor.is_neg */
};

/* --- Setup --------------------------------------------------------------- */

static void
free_torch(struct tk_torch *t)
{
    if (t == NULL) {
        return;
    }
    Py_XDECREF(t->tensor);
    Py_XDECREF(t->parameter);
    Py_XDECREF(t->empty_strided);
    Py_XDECREF(t->empty_like);
    Py_XDECREF(t->grad_enabled);
    for (size_t i = 0; i < sizeof t->modes / sizeof *t->modes; i++) {
        Py_XDECREF(t->modes[i]);
    }
    Py_XDECREF(t->transforms);
    Py_XDECREF(t->forward_ad);
    Py_XDECREF(t->current_level);
    Py_XDECREF(t->requires_grad);
    Py_XDECREF(t->is_neg);
    tk_free(t);
}

/* module.attribute, imported; NULL with an exception. */
static PyObject *
import_from(const char *module, const char *attribute)
{
    PyObject *m = PyImport_ImportModule(module);
    if (m == NULL) {
        return NULL;
    }
    PyObject *value = PyObject_GetAttrString(m, attribute);
    Py_DECREF(m);
    return value;
}

/* The newest table of our major version, or NULL with an exception. */
static const DLPackExchangeAPI *
find_table(PyObject *tensor_type)
{
    PyObject *capsule =
        PyObject_GetAttrString(tensor_type, "__dlpack_c_exchange_api__");
    if (capsule == NULL) {
        PyErr_SetString(PyExc_ImportError,
                        "tkjit needs torch 2.10 or newer: torch.Tensor has no "
                        "__dlpack_c_exchange_api__");
        return NULL;
    }
    const DLPackExchangeAPIHeader *h =
        PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    /* The table lives as long as the process; the capsule need not. */
    Py_DECREF(capsule);
    while (h != NULL && h->version.major != DLPACK_MAJOR_VERSION) {
        h = h->prev_api;
    }
    const DLPackExchangeAPI *api = (const DLPackExchangeAPI *)h;
    if (api == NULL || api->dltensor_from_py_object_no_sync == NULL ||
        api->current_work_stream == NULL) {
        PyErr_SetString(PyExc_ImportError,
                        "this torch's DLPack exchange table is not of a kind "
                        "that tkjit knows; update tkjit");
        return NULL;
    }
    return api;
}

int
tktensor_setup(tk_state *state)
{
    if (state->torch != NULL) {
        return 0;
    }
    struct tk_torch *t = tk_calloc(sizeof *t);
    if (t == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    PyObject *forward_ad = NULL;
    if ((t->tensor = import_from("torch", "Tensor")) == NULL ||
        (t->api = find_table(t->tensor)) == NULL ||
        (t->parameter = import_from("torch.nn", "Parameter")) == NULL ||
        (t->empty_strided = import_from("torch", "empty_strided")) == NULL ||
        (t->empty_like = import_from("torch", "empty_like")) == NULL ||
        (t->grad_enabled = import_from("torch", "is_grad_enabled")) == NULL ||
        (t->modes[0] = import_from("torch._C", "_len_torch_dispatch_stack")) ==
            NULL ||
        (t->modes[1] = import_from("torch._C", "_is_any_autocast_enabled")) ==
            NULL ||
        (t->modes[2] = import_from("torch._C", "_is_tracing")) == NULL ||
        (t->transforms = import_from(
             "torch._C", "_are_functorch_transforms_active")) == NULL ||
        (forward_ad = PyImport_ImportModule("torch.autograd.forward_ad")) ==
            NULL ||
        (t->forward_ad = PyObject_GetAttrString(forward_ad, "__dict__")) ==
            NULL ||
        (t->current_level = PyUnicode_InternFromString("_current_level")) ==
            NULL ||
        (t->requires_grad = PyUnicode_InternFromString("requires_grad")) ==
            NULL ||
        (t->is_neg = PyObject_GetAttrString(t->tensor, "is_neg")) == NULL) {
        Py_XDECREF(forward_ad);
        free_torch(t);
        return -1;
    }
    Py_DECREF(forward_ad);
    if (state->torch != NULL) { /* another thread, while we imported */
        free_torch(t);
        return 0;
    }
    state->torch = t;
    return 0;
}

void
tktensor_teardown(tk_state *state)
{
    free_torch(state->torch);
    state->torch = NULL;
}

/* --- Views, stream, allocation ------------------------------------------- */

bool
tktensor_is_exact(const tk_state *state, PyObject *object)
{
    PyObject *type = (PyObject *)Py_TYPE(object);
    return type == state->torch->tensor || type == state->torch->parameter;
}

bool
tktensor_check(const tk_state *state, PyObject *object)
{
    return tktensor_is_exact(state, object) ||
           PyType_IsSubtype(Py_TYPE(object),
                            (PyTypeObject *)state->torch->tensor);
}

int
tktensor_view(const tk_state *state, PyObject *tensor, DLTensor *out)
{
    if (state->torch->api->dltensor_from_py_object_no_sync(tensor, out) == 0) {
        return 0;
    }
    if (!PyErr_Occurred()) {
        PyErr_SetString(PyExc_RuntimeError, "torch gave no view of a tensor");
    }
    return -1;
}

void *
tktensor_data(const DLTensor *view)
{
    return view->data == NULL ? NULL : (char *)view->data + view->byte_offset;
}

tk_range
tktensor_range(const DLTensor *view)
{
    uintptr_t begin = (uintptr_t)tktensor_data(view);
    int64_t size = (view->dtype.bits * view->dtype.lanes + 7) / 8, last = 0;

    for (int i = 0; i < view->ndim; i++) {
        if (view->shape[i] == 0) {
            return (tk_range){begin, begin};
        }
        last += (view->shape[i] - 1) * view->strides[i];
    }
    return (tk_range){begin, begin + (uintptr_t)((last + 1) * size)};
}

uint64_t
tktensor_alignment(const DLTensor *view)
{
    uint64_t low = ((uint64_t)(uintptr_t)tktensor_data(view) | 16) & 31;
    return low & (~low + 1);
}

PyObject *
tktensor_describe(const tk_state *state, PyObject *tensor)
{
    DLTensor view;

    if (tktensor_view(state, tensor, &view) < 0) {
        return NULL;
    }
    PyObject *shape = PyTuple_New(view.ndim);
    PyObject *strides = PyTuple_New(view.ndim);
    for (int i = 0; shape != NULL && strides != NULL && i < view.ndim; i++) {
        PyTuple_SetItem(shape, i, PyLong_FromLongLong(view.shape[i]));
        PyTuple_SetItem(strides, i, PyLong_FromLongLong(view.strides[i]));
    }
    if (PyErr_Occurred()) {
        Py_XDECREF(shape);
        Py_XDECREF(strides);
        return NULL;
    }
    return Py_BuildValue("iiiiiNNi", (int)view.dtype.code, (int)view.dtype.bits,
                         (int)view.dtype.lanes, (int)view.device.device_type,
                         (int)view.device.device_id, shape, strides,
                         (int)tktensor_alignment(&view));
}

int
tktensor_stream(const tk_state *state, int device, CUstream *out)
{
    void *stream = NULL;
    if (state->torch->api->current_work_stream(kDLCUDA, device, &stream) == 0) {
        *out = stream;
        return 0;
    }
    if (!PyErr_Occurred()) {
        PyErr_SetString(PyExc_RuntimeError, "torch gave no current stream");
    }
    return -1;
}

PyObject *
tktensor_empty(const tk_state *state, PyObject *args, PyObject *kwargs)
{
    return PyObject_Call(state->torch->empty_strided, args, kwargs);
}

PyObject *
tktensor_empty_like(const tk_state *state, PyObject *tensor)
{
    return PyObject_CallFunctionObjArgs(state->torch->empty_like, tensor, NULL);
}

/* Whether it has elements but no memory: an efficient zero tensor, or one whose
 * storage was resized to nothing. */
static bool
lacks_memory(const DLTensor *view)
{
    for (int i = 0; i < view->ndim; i++) {
        if (view->shape[i] == 0) {
            return false;
        }
    }
    return view->data == NULL;
}

int
tktensor_views(const tk_state *state, PyObject *const *args, Py_ssize_t n_args,
               DLTensor *views)
{
    for (Py_ssize_t i = 0; i < n_args; i++) {
        views[i].ndim = -1;
        if (!tktensor_check(state, args[i])) {
            continue;
        }
        if (tktensor_view(state, args[i], &views[i]) < 0) {
            return -1;
        }
        if (lacks_memory(&views[i])) {
            PyErr_Format(PyExc_RuntimeError,
                         "argument %zd has elements, but its memory is not "
                         "allocated",
                         i);
            return -1;
        }
    }
    return 0;
}

/* --- The route of a call ------------------------------------------------- */

/* Truth of a call without arguments: 1, 0, or -1 with an exception. */
static int
ask(PyObject *callable)
{
    PyObject *answer = PyObject_CallNoArgs(callable);
    if (answer == NULL) {
        return -1;
    }
    int truth = PyObject_IsTrue(answer);
    Py_DECREF(answer);
    return truth;
}

/* Whether torch is in a mode in which a call must be seen by it: a dispatch
 * mode, autocast, tracing, forward-mode AD. */
static int
in_a_mode(const struct tk_torch *t)
{
    for (size_t i = 0; i < sizeof t->modes / sizeof *t->modes; i++) {
        int truth = ask(t->modes[i]);
        if (truth != 0) {
            return truth;
        }
    }
    PyObject *level = PyDict_GetItemWithError(t->forward_ad, t->current_level);
    if (level == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    long value = PyLong_AsLong(level);
    return value == -1 && PyErr_Occurred() ? -1 : value >= 0;
}

/* Whether the tensor is plain memory of a GPU: what a kernel can be given. */
static int
is_plain(const tk_state *state, PyObject *tensor, DLTensor *view)
{
    if (!tktensor_is_exact(state, tensor)) {
        return 0;
    }
    if (tktensor_view(state, tensor, view) < 0) {
        PyErr_Clear(); /* meta, sparse, nested, wrapped by a transform, ... */
        return 0;
    }
    if (view->device.device_type != kDLCUDA || lacks_memory(view)) {
        return 0;
    }
    /* A lazily negated view has the memory of what it negates. */
    PyObject *neg =
        PyObject_CallFunctionObjArgs(state->torch->is_neg, tensor, NULL);
    if (neg == NULL) {
        return -1;
    }
    int plain = neg == Py_False;
    Py_DECREF(neg);
    return plain;
}

/* Whether a tensor wants a gradient, and gradients are enabled; -1 with
 * an exception. */
static int
wants_gradient(const tk_state *state, PyObject *const *args, Py_ssize_t n_args,
               const DLTensor *views)
{
    for (Py_ssize_t i = 0; i < n_args; i++) {
        if (views[i].ndim < 0) {
            continue;
        }
        PyObject *flag = PyObject_GetAttr(args[i], state->torch->requires_grad);
        if (flag == NULL) {
            return -1;
        }
        Py_DECREF(flag);
        if (flag == Py_True) {
            return ask(state->torch->grad_enabled);
        }
    }
    return 0;
}

/* Fills the views; 0 where a tensor is not plain, or -1 with an exception. */
static int
are_plain(const tk_state *state, PyObject *const *args, Py_ssize_t n_args,
          DLTensor *views)
{
    for (Py_ssize_t i = 0; i < n_args; i++) {
        views[i].ndim = -1;
        if (tktensor_check(state, args[i])) {
            int plain = is_plain(state, args[i], &views[i]);
            if (plain <= 0) {
                return plain;
            }
        }
        else if (i == 0) {
            return 0; /* not a tensor: the slow path says so */
        }
    }
    return 1;
}

tk_route
tktensor_route(const tk_state *state, PyObject *const *args, Py_ssize_t n_args,
               DLTensor *views)
{
    int plain = are_plain(state, args, n_args, views);
    if (plain <= 0) {
        return plain < 0 ? TK_FAILED : TK_SLOW;
    }
    int mode = in_a_mode(state->torch);
    if (mode != 0) {
        return mode < 0 ? TK_FAILED : TK_SLOW;
    }
    int wanted = wants_gradient(state, args, n_args, views);
    if (wanted <= 0) {
        return wanted < 0 ? TK_FAILED : TK_RAW;
    }
    /* A transform wraps what it is about, and that is not plain; but within one
     * not even other tensors may go through an autograd.Function directly. */
    int transformed = ask(state->torch->transforms);
    return transformed < 0 ? TK_FAILED : transformed ? TK_SLOW : TK_AUTOGRAD;
}

tk_route
tktensor_direct_route(const tk_state *state, PyObject *const *args,
                      Py_ssize_t n_args, DLTensor *views)
{
    if (tktensor_views(state, args, n_args, views) < 0) {
        return TK_FAILED;
    }
    int wanted = wants_gradient(state, args, n_args, views);
    return wanted < 0 ? TK_FAILED : wanted ? TK_AUTOGRAD : TK_RAW;
}
