/* kernel.c - Kernel: one instance of a template for one architecture.
 *
 * Owns the program text until it is compiled, the binary after, and the loaded
 * function on each device.  The text and every decision about it come from
 * python/tkjit/_template.py; this file compiles or reads once, however many
 * threads ask, and loads on first need.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#define TK_PYTHON
#include "tkjit.h"

#include <pthread.h>
#include <string.h>

/* Where a binary came from. */
typedef enum { NOWHERE, FROM_DISK, FROM_NVRTC, FROM_HOST } tk_origin;

struct tk_kernel {
    PyObject ob_base;
    tk_state *state; /* borrowed: the type keeps the module alive */
    PyObject *key, *name, *source, *expression, *headers, *options, *meta;
    char ptx;
    int host; /* for the emulator: 1 + how much it checks; 0: for a GPU */
    pthread_mutex_t lock; /* the first thread works, the others wait */
    bool has_lock;
    /* Written under the lock (without the GIL), read after `origin` is set. */
    _Atomic tk_origin origin;
    tk_binary binary;
    int publish_errno;
    int damaged; /* files already counted as damaged */
    /* Under the GIL and the lock. */
    CUmodule modules[TK_MAX_DEVICES];
    CUfunction functions[TK_MAX_DEVICES];
    int allowed_smem[TK_MAX_DEVICES];
    bool allowed_cluster[TK_MAX_DEVICES];
    tk_emulated *emulated; /* owned */
};

/* --- From Python's text to C's ------------------------------------------- */

/* UTF-8 of a str without NULs, borrowed from it; NULL with an exception. */
static const char *
text_of(PyObject *object)
{
    Py_ssize_t size = 0;
    const char *text = PyUnicode_AsUTF8AndSize(object, &size);
    if (text != NULL && strlen(text) != (size_t)size) {
        PyErr_SetString(PyExc_ValueError,
                        "CUDA source must not contain a NUL character");
        return NULL;
    }
    return text;
}

/* An array of the tuple's texts, or of member `part` of its pairs; owned by the
 * caller, the texts borrowed from the tuple. */
static const char **
texts_of(PyObject *tuple, int part)
{
    Py_ssize_t n = PyTuple_Size(tuple);
    if (n < 0) {
        return NULL;
    }
    const char **texts = tk_alloc((size_t)n * sizeof *texts);
    if (texts == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *item = PyTuple_GetItem(tuple, i);
        if (item != NULL && part >= 0) {
            item = PyTuple_GetItem(item, part);
        }
        texts[i] = item != NULL ? text_of(item) : NULL;
        if (texts[i] == NULL) {
            tk_free(texts);
            return NULL;
        }
    }
    return texts;
}

/* --- Making the binary --------------------------------------------------- */

/* What ensure() was asked, in C's terms. */
typedef struct {
    const char *key, *meta;
    const char **folders; /* looked through in this order */
    int n_folders;
    const char *home; /* the one that is written to, or NULL */
    bool trust;
    bool may_compile;
    int patience_ms;
    tk_program program;
} tk_request;

typedef struct {
    int damaged;
    bool published, waited;
} tk_tally;

static bool
look_up(const tk_request *r, tk_binary *out, tk_tally *tally)
{
    for (int i = 0; i < r->n_folders; i++) {
        tk_lookup found = tkcache_read(r->folders[i], r->key, r->trust, out);
        if (found == TK_HIT) {
            return true;
        }
        tally->damaged += found == TK_DAMAGED;
    }
    return false;
}

/* Under the kernel's lock, without the GIL. */
static int
make_binary(tk_kernel *k, const tk_request *r, tk_tally *tally, tk_error *err)
{
    int token = -1, status = -1;
    bool waited = false;

    if (look_up(r, &k->binary, tally)) {
        k->origin = FROM_DISK;
        return 0;
    }
    if (!r->may_compile) {
        return 0;
    }
    if (r->home != NULL) {
        token = tkcache_lock(r->home, r->key, r->patience_ms, &waited);
    }
    tally->waited = waited;
    /* Whoever held the lock, maybe until now, was making this very entry. */
    if (r->home != NULL && look_up(r, &k->binary, &(tk_tally){0})) {
        k->origin = FROM_DISK;
        status = 0;
        goto done;
    }
    if ((k->host != 0 ? tkcc_compile : tkrtc_compile)(&r->program, &k->binary,
                                                      err) < 0) {
        goto done;
    }
    k->origin = k->host != 0 ? FROM_HOST : FROM_NVRTC;
    status = 0;
    if (r->home != NULL) {
        tally->published = tkcache_write(r->home, r->key, r->meta, &k->binary,
                                         &k->publish_errno) == 0;
    }
done:
    tkcache_unlock(token);
    return status;
}

static void
free_request(tk_request *r)
{
    tk_free(r->folders);
    tk_free((void *)r->program.header_names);
    tk_free((void *)r->program.header_texts);
    tk_free((void *)r->program.options);
}

/* The request points into the kernel's objects and into `folders`. */
static int
fill_request(tk_kernel *k, PyObject *folders, PyObject *home, tk_request *r)
{
    tk_program *p = &r->program;

    r->n_folders = (int)PyTuple_Size(folders);
    p->n_headers = (int)PyTuple_Size(k->headers);
    p->n_options = (int)PyTuple_Size(k->options);
    p->ptx = k->ptx != 0;
    if ((r->folders = texts_of(folders, -1)) == NULL ||
        (home != Py_None && (r->home = text_of(home)) == NULL) ||
        (r->key = text_of(k->key)) == NULL ||
        (r->meta = text_of(k->meta)) == NULL ||
        (p->name = text_of(k->name)) == NULL ||
        (p->source = text_of(k->source)) == NULL ||
        (p->expression = text_of(k->expression)) == NULL ||
        (p->header_names = texts_of(k->headers, 0)) == NULL ||
        (p->header_texts = texts_of(k->headers, 1)) == NULL ||
        (p->options = texts_of(k->options, -1)) == NULL) {
        return -1;
    }
    return 0;
}

PyDoc_STRVAR(
    ensure_doc,
    "ensure(folders, home, trust, may_compile, patience_ms) -> str\n"
    "\n"
    "Make sure there is a binary: from a folder of the cache, else from\n"
    "the compiler. Says where it came from: 'memory', 'disk', 'nvrtc' or\n"
    "'host'; or 'nowhere', where it is in no folder and may not be compiled.");

static PyObject *
kernel_ensure(PyObject *self, PyObject *args)
{
    tk_kernel *k = (tk_kernel *)self;
    PyObject *folders, *home;
    int trust, may_compile, status = 0;
    tk_request r = {0};
    tk_tally tally = {0};
    tk_error err = {0};
    bool was_there = false;

    if (!PyArg_ParseTuple(args, "O!Oppi", &PyTuple_Type, &folders, &home,
                          &trust, &may_compile, &r.patience_ms)) {
        return NULL;
    }
    r.trust = trust;
    r.may_compile = may_compile;
    if (fill_request(k, folders, home, &r) < 0) {
        free_request(&r);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&k->lock);
    was_there = k->origin != NOWHERE;
    if (!was_there) {
        status = make_binary(k, &r, &tally, &err);
    }
    pthread_mutex_unlock(&k->lock);
    Py_END_ALLOW_THREADS
    free_request(&r);

    tk_stats *stats = &k->state->stats;
    if (tally.damaged > k->damaged) {
        stats->damaged += (uint64_t)(tally.damaged - k->damaged);
        k->damaged = tally.damaged;
    }
    stats->published += tally.published;
    stats->publish_failures += k->publish_errno != 0 && !was_there;
    stats->lock_waits += tally.waited;
    if (status < 0) {
        return tk_raise(k->state, &err);
    }
    stats->disk_hits += !was_there && k->origin == FROM_DISK;
    return PyUnicode_FromString(was_there                 ? "memory"
                                : k->origin == FROM_DISK  ? "disk"
                                : k->origin == FROM_NVRTC ? "nvrtc"
                                : k->origin == FROM_HOST  ? "host"
                                                          : "nowhere");
}

/* --- Loading ------------------------------------------------------------- */

static int
load_locked(tk_kernel *k, int device, int smem, bool large, tk_error *err)
{
    if (k->functions[device] == NULL &&
        tkcu_load(device, &k->binary, &k->modules[device],
                  &k->functions[device], err) < 0) {
        return -1;
    }
    int more = smem > k->allowed_smem[device] ? smem : 0;
    large = large && !k->allowed_cluster[device];
    if (more == 0 && !large) {
        return 0;
    }
    if (tkcu_allow(device, k->functions[device], more, large, err) < 0) {
        return -1;
    }
    k->allowed_smem[device] = more > 0 ? more : k->allowed_smem[device];
    k->allowed_cluster[device] = large || k->allowed_cluster[device];
    return 0;
}

/* Loads for a device, or for the emulator (device -1), on first need; -1 with
 * an exception. */
static int
load(tk_kernel *k, int device, int smem, bool large_cluster)
{
    tk_error err = {0};
    int status = 0;

    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&k->lock);
    if (device >= 0) {
        status = load_locked(k, device, smem, large_cluster, &err);
    }
    else if (k->emulated == NULL) {
        status = tkemu_load(&k->binary, &k->emulated, &err);
    }
    pthread_mutex_unlock(&k->lock);
    Py_END_ALLOW_THREADS
    if (status < 0) {
        tk_raise(k->state, &err);
    }
    return status;
}

int
tkkernel_function(tk_state *state, PyObject *kernel, int device, int smem,
                  int cluster_blocks, CUfunction *out)
{
    tk_kernel *k = (tk_kernel *)kernel;

    if (!PyObject_TypeCheck(kernel, state->kernel_type)) {
        PyErr_SetString(PyExc_TypeError, "a plan's kernel must be a Kernel");
        return -1;
    }
    if (k->origin == NOWHERE || device < 0 || device >= TK_MAX_DEVICES) {
        PyErr_SetString(PyExc_ValueError,
                        "a kernel was asked for before it was compiled, or for "
                        "a device that cannot be");
        return -1;
    }
    if (load(k, device, smem, cluster_blocks > 8) < 0) {
        return -1;
    }
    *out = k->functions[device];
    return 0;
}

int
tkkernel_emulated(tk_state *state, PyObject *kernel, tk_emulated **out,
                  int *check)
{
    tk_kernel *k = (tk_kernel *)kernel;

    if (!PyObject_TypeCheck(kernel, state->kernel_type) || k->host == 0 ||
        k->origin == NOWHERE) {
        PyErr_SetString(PyExc_TypeError,
                        "a plan for the CPU takes kernels compiled for it");
        return -1;
    }
    if (load(k, -1, 0, false) < 0) {
        return -1;
    }
    *out = k->emulated;
    *check = k->host - 1;
    return 0;
}

const char *
tkkernel_name(PyObject *kernel)
{
    const char *name =
        PyUnicode_AsUTF8AndSize(((tk_kernel *)kernel)->expression, NULL);
    if (name == NULL) {
        PyErr_Clear();
    }
    return name != NULL ? name : "a kernel";
}

/* --- The type ------------------------------------------------------------ */

static int
kernel_traverse(PyObject *self, visitproc visit, void *arg)
{
    tk_kernel *k = (tk_kernel *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(k->headers);
    Py_VISIT(k->options);
    return 0;
}

static void
kernel_dealloc(PyObject *self)
{
    tk_kernel *k = (tk_kernel *)self;
    PyTypeObject *type = Py_TYPE(self);

    PyObject_GC_UnTrack(self);
    /* Not the modules: a captured graph may still hold their functions. */
    tkemu_unload(k->emulated);
    tk_binary_clear(&k->binary);
    Py_XDECREF(k->key);
    Py_XDECREF(k->name);
    Py_XDECREF(k->source);
    Py_XDECREF(k->expression);
    Py_XDECREF(k->headers);
    Py_XDECREF(k->options);
    Py_XDECREF(k->meta);
    if (k->has_lock) {
        pthread_mutex_destroy(&k->lock);
    }
    freefunc release = PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyObject *
kernel_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {
        "key",     "name", "source", "expression", "headers",
        "options", "ptx",  "meta",   "host",       NULL};
    PyObject *key, *name, *source, *expression, *headers, *options, *meta;
    int ptx = 0, host = 0;

    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "UUUUO!O!pU|i", (char **)names, &key, &name, &source,
            &expression, &PyTuple_Type, &headers, &PyTuple_Type, &options, &ptx,
            &meta, &host)) {
        return NULL;
    }
    if (PyUnicode_GetLength(key) != TK_KEY_SIZE) {
        PyErr_SetString(PyExc_ValueError, "key must be 64 hexadecimal digits");
        return NULL;
    }
    allocfunc allocate = PyType_GetSlot(type, Py_tp_alloc);
    tk_kernel *k = (tk_kernel *)allocate(type, 0);
    if (k == NULL) {
        return NULL;
    }
    Py_INCREF(key);
    Py_INCREF(name);
    Py_INCREF(source);
    Py_INCREF(expression);
    Py_INCREF(headers);
    Py_INCREF(options);
    Py_INCREF(meta);
    k->key = key;
    k->name = name;
    k->source = source;
    k->expression = expression;
    k->headers = headers;
    k->options = options;
    k->meta = meta;
    k->ptx = (char)ptx;
    k->host = host;
    k->state = tk_state_of_type(type);
    if (k->state == NULL) {
        Py_DECREF(k);
        return NULL;
    }
    k->has_lock = pthread_mutex_init(&k->lock, NULL) == 0;
    if (!k->has_lock) {
        Py_DECREF(k);
        return PyErr_NoMemory();
    }
    return (PyObject *)k;
}

/* NULL with an exception where there is no binary yet. */
static tk_binary *
binary_of(PyObject *self)
{
    tk_kernel *k = (tk_kernel *)self;
    if (k->origin == NOWHERE) {
        PyErr_SetString(PyExc_ValueError, "the kernel is not compiled yet");
        return NULL;
    }
    return &k->binary;
}

PyDoc_STRVAR(
    counts_doc,
    "counts() -> [(place, shared, writes, requests, actual, ideal)] of the\n"
    "accesses of a kernel that the emulator ran with check 2.");

static PyObject *
kernel_counts(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    tk_kernel *k = (tk_kernel *)self;
    const tk_count *rows = NULL;
    const tk_counts *counts =
        k->emulated != NULL ? tkemu_counts(k->emulated) : NULL;
    size_t n = counts != NULL ? tkcount_rows(counts, &rows) : 0;

    PyObject *list = PyList_New((Py_ssize_t)n);
    for (size_t i = 0; list != NULL && i < n; i++) {
        const tk_count *r = &rows[i];
        PyObject *row = Py_BuildValue(
            "IOOKKK", r->where, r->shared ? Py_True : Py_False,
            r->writes ? Py_True : Py_False, (unsigned long long)r->requests,
            (unsigned long long)r->actual, (unsigned long long)r->ideal);
        if (row == NULL || PyList_SetItem(list, (Py_ssize_t)i, row) < 0) {
            Py_DECREF(list);
            return NULL;
        }
    }
    return list;
}

static PyObject *
get_image(PyObject *self, void *Py_UNUSED(closure))
{
    tk_binary *b = binary_of(self);
    return b == NULL ? NULL
                     : PyBytes_FromStringAndSize((char *)b->image,
                                                 (Py_ssize_t)b->image_size);
}

static PyObject *
get_lowered_name(PyObject *self, void *Py_UNUSED(closure))
{
    tk_binary *b = binary_of(self);
    return b == NULL ? NULL : PyUnicode_FromString(b->lowered);
}

static PyObject *
get_log(PyObject *self, void *Py_UNUSED(closure))
{
    tk_binary *b = binary_of(self);
    return b == NULL ? NULL
                     : PyUnicode_DecodeUTF8(b->log, (Py_ssize_t)strlen(b->log),
                                            "replace");
}

static PyObject *
get_facts(PyObject *self, void *Py_UNUSED(closure))
{
    tk_binary *b = binary_of(self);
    if (b == NULL) {
        return NULL;
    }
    const tk_facts *f = &b->facts;
    return Py_BuildValue("{s:i,s:i,s:i,s:i,s:i}", "registers", f->registers,
                         "shared_bytes", f->shared_bytes, "stack_bytes",
                         f->stack_bytes, "spill_stores", f->spill_stores,
                         "spill_loads", f->spill_loads);
}

static PyObject *
get_publish_errno(PyObject *self, void *Py_UNUSED(closure))
{
    return PyLong_FromLong(((tk_kernel *)self)->publish_errno);
}

static PyMethodDef kernel_methods[] = {
    {"ensure", kernel_ensure, METH_VARARGS, ensure_doc},
    {"counts", kernel_counts, METH_NOARGS, counts_doc},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef kernel_members[] = {
    {"key", T_OBJECT_EX, offsetof(tk_kernel, key), READONLY, NULL},
    {"expression", T_OBJECT_EX, offsetof(tk_kernel, expression), READONLY,
     NULL},
    {"options", T_OBJECT_EX, offsetof(tk_kernel, options), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef kernel_getset[] = {
    {"image", get_image, NULL, "The cubin (or PTX) as bytes.", NULL},
    {"lowered_name", get_lowered_name, NULL, "The mangled name.", NULL},
    {"log", get_log, NULL, "What the compiler printed.", NULL},
    {"facts", get_facts, NULL, "Registers, shared memory, spills.", NULL},
    {"publish_errno", get_publish_errno, NULL,
     "errno of the failed write to the cache, or 0.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot kernel_slots[] = {
    {Py_tp_doc, (void *)"One instance of a template for one architecture."},
    {Py_tp_new, kernel_new},
    {Py_tp_dealloc, kernel_dealloc},
    {Py_tp_traverse, kernel_traverse},
    {Py_tp_methods, kernel_methods},
    {Py_tp_members, kernel_members},
    {Py_tp_getset, kernel_getset},
    {0, NULL},
};

PyType_Spec tk_kernel_spec = {
    .name = "tkjit._core.Kernel",
    .basicsize = sizeof(tk_kernel),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = kernel_slots,
};
