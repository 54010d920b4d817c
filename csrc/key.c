/* key.c - the key of a call: what its launch plan may depend on.
 *
 * Dtype, shape, strides, device and alignment of each tensor; type and value of
 * each scalar.  Packed into words, so that a look-up compares memory.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define TK_PYTHON
#include "tkjit.h"

#include <string.h>

enum { TAG_TENSOR = 1, TAG_NONE, TAG_BOOL, TAG_INT, TAG_FLOAT, TAG_OBJECT };

void
tkkey_begin(tk_key *k)
{
    k->words = k->inline_words;
    k->n = 0;
    k->room = TK_KEY_WORDS;
}

void
tkkey_end(tk_key *k)
{
    if (k->words != k->inline_words) {
        tk_free(k->words);
    }
}

/* Room for `more` words; -1 with an exception. */
static int
key_reserve(tk_key *k, size_t more)
{
    if (k->n + more <= k->room) {
        return 0;
    }
    size_t room = 2 * (k->n + more);
    uint64_t *words = tk_alloc(room * sizeof *words);
    if (words == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    memcpy(words, k->words, k->n * sizeof *words);
    tkkey_end(k);
    k->words = words;
    k->room = room;
    return 0;
}

static int
key_add_tensor(tk_key *k, const DLTensor *view)
{
    size_t ndim = (size_t)view->ndim;

    if (key_reserve(k, 2 + 2 * ndim) < 0) {
        return -1;
    }
    uint64_t *w = k->words + k->n;
    *w++ = TAG_TENSOR | (uint64_t)view->dtype.code << 8 |
           (uint64_t)view->dtype.bits << 16 |
           (uint64_t)view->dtype.lanes << 24 | (uint64_t)ndim << 40 |
           tktensor_alignment(view) << 56;
    *w++ = (uint64_t)(uint32_t)view->device.device_type << 32 |
           (uint32_t)view->device.device_id;
    memcpy(w, view->shape, ndim * sizeof *w);
    memcpy(w + ndim, view->strides, ndim * sizeof *w);
    k->n += 2 + 2 * ndim;
    return 0;
}

/* Numbers by value.  Anything else (a torch.dtype, a str) by identity: the
 * plan keeps a reference, so the address stays its own. */
int
tkkey_add_scalar(tk_key *k, PyObject *object)
{
    uint64_t tag, value = 0;

    if (key_reserve(k, 2) < 0) {
        return -1;
    }
    if (object == Py_None) {
        tag = TAG_NONE;
    }
    else if (PyBool_Check(object)) {
        tag = TAG_BOOL;
        value = object == Py_True;
    }
    else if (PyIndex_Check(object)) { /* int, NumPy's integers */
        PyObject *number = PyNumber_Index(object);
        if (number == NULL) {
            return -1;
        }
        tag = TAG_INT;
        value = (uint64_t)PyLong_AsLongLong(number);
        Py_DECREF(number);
        if (value == UINT64_MAX && PyErr_Occurred()) {
            return -1;
        }
    }
    else if (PyFloat_Check(object)) {
        double d = PyFloat_AsDouble(object);
        tag = TAG_FLOAT;
        memcpy(&value, &d, sizeof value);
    }
    else {
        tag = TAG_OBJECT;
        value = (uint64_t)(uintptr_t)object;
    }
    k->words[k->n++] = tag;
    k->words[k->n++] = value;
    return 0;
}

uint64_t
tkkey_hash(const tk_key *key)
{
    uint64_t h = 0x9e3779b97f4a7c15u * (key->n + 1);
    for (size_t i = 0; i < key->n; i++) {
        h = (h ^ key->words[i]) * 0xff51afd7ed558ccdu;
        h ^= h >> 32;
    }
    return h;
}

int
tkkey_build(PyObject *const *args, Py_ssize_t n_args, const DLTensor *views,
            tk_key *key)
{
    for (Py_ssize_t i = 0; i < n_args; i++) {
        int status = views[i].ndim < 0 ? tkkey_add_scalar(key, args[i])
                                       : key_add_tensor(key, &views[i]);
        if (status < 0) {
            return -1;
        }
    }
    return 0;
}
