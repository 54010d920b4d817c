/* planned.c - Planned: a launch is decided once per kind of call, and repeated.
 *
 * Owns the plans of one op, by the keys of key.c, and knows the ways a call can
 * go.  A hit runs no Python of ours.  A miss calls the planner of
 * python/tkjit/_plan.py, whose answer plan.c freezes.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#define TK_PYTHON
#include "tkjit.h"

#include <string.h>

/* --- The cache ----------------------------------------------------------- */

/* A plan under its key. */
typedef struct entry {
    struct entry *next; /* in its bucket */
    struct entry *newer, *older;
    uint64_t hash;
    uint64_t *words; /* the key */
    size_t n_words;
    PyObject *held; /* the arguments that the key names by identity */
    tk_plan *plan;
} entry;

typedef struct {
    PyObject ob_base;
    tk_state *state; /* borrowed: the type keeps the module alive */
    PyObject *planner;
    PyObject *autograd; /* arguments -> what applies for a gradient */
    PyObject *applied;  /* dict: scalars, as bytes -> autograd's answer */
    PyObject *slow;     /* called where torch has to see the call */
    entry **buckets;
    size_t n_buckets;       /* a power of two */
    entry *newest, *oldest; /* by last use */
    size_t n_plans, limit;
    unsigned long long hits, misses, evictions;
} planned;

static entry **
bucket_of(planned *self, uint64_t hash)
{
    return &self->buckets[hash & (self->n_buckets - 1)];
}

static entry *
find(planned *self, uint64_t hash, const tk_key *key)
{
    entry *e = *bucket_of(self, hash);
    while (e != NULL &&
           (e->hash != hash || e->n_words != key->n ||
            memcmp(e->words, key->words, key->n * sizeof *e->words) != 0)) {
        e = e->next;
    }
    return e;
}

static void
unlink_use(planned *self, entry *e)
{
    *(e->newer != NULL ? &e->newer->older : &self->newest) = e->older;
    *(e->older != NULL ? &e->older->newer : &self->oldest) = e->newer;
}

static void
link_newest(planned *self, entry *e)
{
    e->newer = NULL;
    e->older = self->newest;
    *(self->newest != NULL ? &self->newest->newer : &self->oldest) = e;
    self->newest = e;
}

static void
free_entry(entry *e)
{
    tkplan_release(e->plan);
    Py_XDECREF(e->held);
    tk_free(e->words);
    tk_free(e);
}

static void
evict_oldest(planned *self)
{
    entry *e = self->oldest;
    entry **at = bucket_of(self, e->hash);
    while (*at != e) {
        at = &(*at)->next;
    }
    *at = e->next;
    unlink_use(self, e);
    self->n_plans--;
    free_entry(e);
}

/* Keeps the plan under the key; -1 with an exception. */
static int
insert(planned *self, uint64_t hash, const tk_key *key, PyObject *const *args,
       Py_ssize_t n_args, tk_plan *plan)
{
    entry *e = tk_calloc(sizeof *e);
    if (e == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    tkplan_retain(plan);
    e->plan = plan;
    e->hash = hash;
    e->n_words = key->n;
    e->words = tk_alloc(key->n * sizeof *e->words);
    e->held = PyTuple_New(n_args);
    if (e->words == NULL || e->held == NULL) {
        free_entry(e);
        PyErr_NoMemory();
        return -1;
    }
    memcpy(e->words, key->words, key->n * sizeof *e->words);
    for (Py_ssize_t i = 0; i < n_args; i++) {
        bool tensor = tktensor_check(self->state, args[i]);
        PyObject *hold = tensor ? Py_None : args[i];
        Py_INCREF(hold);
        PyTuple_SetItem(e->held, i, hold);
    }
    while (self->n_plans >= self->limit) {
        self->evictions++;
        self->state->stats.plan_evictions++;
        evict_oldest(self);
    }
    entry **bucket = bucket_of(self, hash);
    e->next = *bucket;
    *bucket = e;
    link_newest(self, e);
    self->n_plans++;
    return 0;
}

/* planner(arguments, descriptions): a tensor is None in the one, a scalar in
 * the other. */
static PyObject *
ask_planner(planned *self, PyObject *const *args, Py_ssize_t n_args)
{
    PyObject *answer = NULL;
    PyObject *scalars = PyTuple_New(n_args);
    PyObject *tensors = PyTuple_New(n_args);

    for (Py_ssize_t i = 0; scalars != NULL && tensors != NULL && i < n_args;
         i++) {
        bool tensor = tktensor_check(self->state, args[i]);
        PyObject *description = Py_None;
        if (tensor) {
            description = tktensor_describe(self->state, args[i]);
            if (description == NULL) {
                goto done;
            }
        }
        else {
            Py_INCREF(description);
        }
        PyObject *scalar = tensor ? Py_None : args[i];
        Py_INCREF(scalar);
        PyTuple_SetItem(tensors, i, description);
        PyTuple_SetItem(scalars, i, scalar);
    }
    if (scalars != NULL && tensors != NULL) {
        answer =
            PyObject_CallFunctionObjArgs(self->planner, scalars, tensors, NULL);
    }
done:
    Py_XDECREF(scalars);
    Py_XDECREF(tensors);
    return answer;
}

/* A new plan for the call, kept under its key; NULL with an exception. */
static tk_plan *
make_plan(planned *self, uint64_t hash, const tk_key *key,
          PyObject *const *args, Py_ssize_t n_args)
{
    PyObject *answer = ask_planner(self, args, n_args);
    if (answer == NULL) {
        return NULL;
    }
    tk_plan *plan = tkplan_freeze(self->state, answer, (int)n_args);
    Py_DECREF(answer);
    /* Another thread may have planned the same call meanwhile. */
    if (plan != NULL && find(self, hash, key) == NULL &&
        insert(self, hash, key, args, n_args, plan) < 0) {
        tkplan_release(plan);
        return NULL;
    }
    return plan;
}

/* A reference to the plan of the call; NULL with an exception. */
static tk_plan *
plan_for(planned *self, PyObject *const *args, Py_ssize_t n_args,
         const tk_key *key)
{
    uint64_t hash = tkkey_hash(key);
    entry *e = find(self, hash, key);

    if (e == NULL) {
        self->misses++;
        self->state->stats.plan_misses++;
        return make_plan(self, hash, key, args, n_args);
    }
    self->hits++;
    self->state->stats.plan_hits++;
    if (e != self->newest) {
        unlink_use(self, e);
        link_newest(self, e);
    }
    tkplan_retain(e->plan);
    return e->plan;
}

/* --- The ways of a call -------------------------------------------------- */

/* raw() of a call whose views are known. */
static PyObject *
run_call(planned *self, PyObject *const *args, Py_ssize_t n_args,
         const DLTensor *views)
{
    tk_key key;
    tk_plan *plan = NULL;

    tkkey_begin(&key);
    if (tkkey_build(args, n_args, views, &key) == 0) {
        plan = plan_for(self, args, n_args, &key);
    }
    tkkey_end(&key);
    if (plan == NULL) {
        return NULL;
    }
    PyObject *result = tkplan_run(self->state, plan, args, views);
    tkplan_release(plan);
    return result;
}

/* What every call begins with. */
static int
begin_call(planned *self, Py_ssize_t n_args)
{
    if (n_args > TK_MAX_ARGS) {
        PyErr_Format(PyExc_TypeError, "at most %d arguments", TK_MAX_ARGS);
        return -1;
    }
    return self->state->torch != NULL ? 0 : tktensor_setup(self->state);
}

PyDoc_STRVAR(raw_doc,
             "raw(*args): plan the call if it is new, and run its kernels; no\n"
             "autograd.");

static PyObject *
planned_raw(PyObject *object, PyObject *const *args, Py_ssize_t n_args)
{
    planned *self = (planned *)object;
    DLTensor views[TK_MAX_ARGS];

    if (begin_call(self, n_args) < 0 ||
        tktensor_views(self->state, args, n_args, views) < 0) {
        return NULL;
    }
    return run_call(self, args, n_args, views);
}

/* A tuple of the arguments that are tensors. */
static PyObject *
tensors_of(PyObject *const *args, Py_ssize_t n_args, const DLTensor *views)
{
    Py_ssize_t n = 0, at = 0;

    for (Py_ssize_t i = 0; i < n_args; i++) {
        n += views[i].ndim >= 0;
    }
    PyObject *tuple = PyTuple_New(n);
    for (Py_ssize_t i = 0; tuple != NULL && i < n_args; i++) {
        if (views[i].ndim >= 0) {
            Py_INCREF(args[i]);
            PyTuple_SetItem(tuple, at++, args[i]);
        }
    }
    return tuple;
}

/* The argument, and ... for a tensor. */
static PyObject *
scalar_of(PyObject *const *args, Py_ssize_t i, const DLTensor *views)
{
    return views[i].ndim >= 0 ? Py_Ellipsis : args[i];
}

/* The scalars of a call as bytes, by type and value as in a plan's key: to a
 * dict, 1 and True and 1.0 would be one. */
static PyObject *
name_of_scalars(PyObject *const *args, Py_ssize_t n_args, const DLTensor *views)
{
    PyObject *name = NULL;
    tk_key key;
    int status = 0;

    tkkey_begin(&key);
    for (Py_ssize_t i = 0; status == 0 && i < n_args; i++) {
        status = tkkey_add_scalar(&key, scalar_of(args, i, views));
    }
    if (status == 0) {
        name = PyBytes_FromStringAndSize(
            (const char *)key.words, (Py_ssize_t)(key.n * sizeof *key.words));
    }
    tkkey_end(&key);
    return name;
}

/* autograd(*arguments) with ... for each tensor, new reference. */
static PyObject *
make_function(planned *self, PyObject *const *args, Py_ssize_t n_args,
              const DLTensor *views)
{
    PyObject *autograd = self->autograd, *function = NULL;
    PyObject *scalars = PyTuple_New(n_args);

    for (Py_ssize_t i = 0; scalars != NULL && i < n_args; i++) {
        PyObject *scalar = scalar_of(args, i, views);
        Py_INCREF(scalar);
        PyTuple_SetItem(scalars, i, scalar);
    }
    if (scalars != NULL) {
        Py_INCREF(autograd); /* it may set another in its place */
        function = PyObject_CallObject(autograd, scalars);
        Py_DECREF(autograd);
        Py_DECREF(scalars);
    }
    return function;
}

/* What applies the op with the call's scalars, new reference.  One
 * autograd.Function for each set of scalars, so that apply() gets tensors only:
 * it is the slowest part of a call, and slower with each argument. */
static PyObject *
function_of(planned *self, PyObject *const *args, Py_ssize_t n_args,
            const DLTensor *views)
{
    enum { MOST = 4096 };
    PyObject *found = NULL;

    PyObject *name = name_of_scalars(args, n_args, views);
    if (name == NULL) {
        return NULL;
    }
    found = PyDict_GetItemWithError(self->applied, name);
    if (found != NULL) {
        Py_INCREF(found);
        goto done;
    }
    if (PyErr_Occurred()) {
        goto done;
    }
    /* It holds the scalars, so that a name by identity stays its own. */
    found = make_function(self, args, n_args, views);
    if (found != NULL && PyDict_Size(self->applied) >= MOST) {
        PyDict_Clear(self->applied);
    }
    if (found != NULL && PyDict_SetItem(self->applied, name, found) < 0) {
        Py_DECREF(found);
        found = NULL;
    }
done:
    Py_DECREF(name);
    return found;
}

static PyObject *
apply(planned *self, PyObject *const *args, Py_ssize_t n_args,
      const DLTensor *views)
{
    PyObject *result = NULL, *tensors = NULL;

    PyObject *function = function_of(self, args, n_args, views);
    if (function != NULL) {
        tensors = tensors_of(args, n_args, views);
    }
    if (tensors != NULL) {
        result = PyObject_CallObject(function, tensors);
        Py_DECREF(tensors);
    }
    Py_XDECREF(function);
    return result;
}

static PyObject *
call_slow(planned *self, PyObject *const *args, Py_ssize_t n_args)
{
    PyObject *slow = self->slow, *result = NULL;

    PyObject *tuple = PyTuple_New(n_args);
    for (Py_ssize_t i = 0; tuple != NULL && i < n_args; i++) {
        Py_INCREF(args[i]);
        PyTuple_SetItem(tuple, i, args[i]);
    }
    if (tuple != NULL) {
        Py_INCREF(slow); /* it may set another in its place */
        result = PyObject_CallObject(slow, tuple);
        Py_DECREF(slow);
        Py_DECREF(tuple);
    }
    return result;
}

PyDoc_STRVAR(
    call_doc,
    "call(*args): raw(); or, where a gradient is wanted, what autograd()\n"
    "gives for the arguments, called with the tensors; or slow() where torch\n"
    "has to see the call (modes, subclasses, other devices, views of a kind).");

/* A call by one of its ways. */
static PyObject *
go(planned *self, tk_route route, PyObject *const *args, Py_ssize_t n_args,
   const DLTensor *views)
{
    if (self->autograd == NULL || self->slow == NULL) {
        PyErr_SetString(PyExc_AttributeError,
                        "call() needs autograd and slow to be set");
        return NULL;
    }
    switch (route) {
    case TK_RAW:
        return run_call(self, args, n_args, views);
    case TK_AUTOGRAD:
        return apply(self, args, n_args, views);
    case TK_SLOW:
        return call_slow(self, args, n_args);
    default:
        return NULL;
    }
}

static PyObject *
planned_call(PyObject *object, PyObject *const *args, Py_ssize_t n_args)
{
    planned *self = (planned *)object;
    DLTensor views[TK_MAX_ARGS];

    if (begin_call(self, n_args) < 0) {
        return NULL;
    }
    tk_route route = tktensor_route(self->state, args, n_args, views);
    return go(self, route, args, n_args, views);
}

PyDoc_STRVAR(
    direct_doc,
    "direct(*args): call() without slow(), which calls it when torch has\n"
    "seen the call.");

static PyObject *
planned_direct(PyObject *object, PyObject *const *args, Py_ssize_t n_args)
{
    planned *self = (planned *)object;
    DLTensor views[TK_MAX_ARGS];

    if (begin_call(self, n_args) < 0) {
        return NULL;
    }
    tk_route route = tktensor_direct_route(self->state, args, n_args, views);
    return go(self, route, args, n_args, views);
}

PyDoc_STRVAR(clear_doc, "clear(): forget every plan.");

static PyObject *
planned_clear_plans(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    planned *self = (planned *)object;
    while (self->oldest != NULL) {
        evict_oldest(self);
    }
    Py_RETURN_NONE;
}

/* --- The type ------------------------------------------------------------ */

static int
planned_traverse(PyObject *object, visitproc visit, void *arg)
{
    planned *self = (planned *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->planner);
    Py_VISIT(self->autograd);
    Py_VISIT(self->applied);
    Py_VISIT(self->slow);
    for (entry *e = self->newest; e != NULL; e = e->older) {
        Py_VISIT(e->held);
    }
    return 0;
}

static int
planned_clear(PyObject *object)
{
    planned *self = (planned *)object;
    while (self->oldest != NULL) {
        evict_oldest(self);
    }
    Py_CLEAR(self->planner);
    Py_CLEAR(self->autograd);
    Py_CLEAR(self->applied);
    Py_CLEAR(self->slow);
    return 0;
}

static void
planned_dealloc(PyObject *object)
{
    planned *self = (planned *)object;
    PyTypeObject *type = Py_TYPE(object);

    PyObject_GC_UnTrack(object);
    planned_clear(object);
    tk_free(self->buckets);
    freefunc release = PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

static PyObject *
planned_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {"planner", "limit", NULL};
    PyObject *planner;
    Py_ssize_t limit = 1024;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|n", (char **)names,
                                     &planner, &limit)) {
        return NULL;
    }
    if (!PyCallable_Check(planner) || limit < 1 || limit > 1 << 20) {
        PyErr_SetString(PyExc_TypeError,
                        "Planned takes a callable and a limit of 1 to 2**20");
        return NULL;
    }
    allocfunc allocate = PyType_GetSlot(type, Py_tp_alloc);
    planned *self = (planned *)allocate(type, 0);
    if (self == NULL) {
        return NULL;
    }
    Py_INCREF(planner);
    self->planner = planner;
    self->applied = PyDict_New();
    self->limit = (size_t)limit;
    self->n_buckets = 16;
    while (self->n_buckets < self->limit) {
        self->n_buckets *= 2;
    }
    self->buckets = tk_calloc(self->n_buckets * sizeof *self->buckets);
    self->state = tk_state_of_type(type);
    if (self->buckets == NULL || self->applied == NULL || self->state == NULL) {
        Py_DECREF(self);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static PyObject *
get_size(PyObject *object, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(((planned *)object)->n_plans);
}

static PyMethodDef planned_methods[] = {
    {"raw", (PyCFunction)(void (*)(void))planned_raw, METH_FASTCALL, raw_doc},
    {"call", (PyCFunction)(void (*)(void))planned_call, METH_FASTCALL,
     call_doc},
    {"direct", (PyCFunction)(void (*)(void))planned_direct, METH_FASTCALL,
     direct_doc},
    {"clear", planned_clear_plans, METH_NOARGS, clear_doc},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef planned_members[] = {
    {"autograd", T_OBJECT, offsetof(planned, autograd), 0,
     "(*scalars) -> what is called with the tensors where a gradient is "
     "wanted."},
    {"slow", T_OBJECT, offsetof(planned, slow), 0,
     "Called in raw()'s place where torch has to see the call."},
    {"hits", T_ULONGLONG, offsetof(planned, hits), READONLY, NULL},
    {"misses", T_ULONGLONG, offsetof(planned, misses), READONLY, NULL},
    {"evictions", T_ULONGLONG, offsetof(planned, evictions), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef planned_getset[] = {
    {"size", get_size, NULL, "Plans in the cache.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot planned_slots[] = {
    {Py_tp_doc, (void *)"The launch-plan cache of one op."},
    {Py_tp_new, planned_new},
    {Py_tp_dealloc, planned_dealloc},
    {Py_tp_traverse, planned_traverse},
    {Py_tp_clear, planned_clear},
    {Py_tp_methods, planned_methods},
    {Py_tp_members, planned_members},
    {Py_tp_getset, planned_getset},
    {0, NULL},
};

PyType_Spec tk_planned_spec = {
    .name = "tkjit._core.Planned",
    .basicsize = sizeof(planned),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = planned_slots,
};
