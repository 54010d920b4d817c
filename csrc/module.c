/* module.c - the Python surface of the core, and the only place where a
 * tk_error becomes an exception.
 *
 * Owns the module's state.  The types stand in kernel.c and planned.c.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define TK_PYTHON
#include "tkjit.h"

#include <string.h>

static struct PyModuleDef core_module;

tk_state *
tk_state_of(PyObject *module)
{
    return PyModule_GetState(module);
}

tk_state *
tk_state_of_type(PyTypeObject *type)
{
    return PyType_GetModuleState(type);
}

/* --- Errors -------------------------------------------------------------- */

/* A class of tkjit._errors, new reference; NULL with an exception. */
static PyObject *
error_class(tk_state *state, const char *name)
{
    if (state->errors == NULL) {
        state->errors = PyImport_ImportModule("tkjit._errors");
        if (state->errors == NULL) {
            return NULL;
        }
    }
    return PyObject_GetAttrString(state->errors, name);
}

PyObject *
tk_raise(tk_state *state, tk_error *err)
{
    const char *message = err->message != NULL ? err->message : "out of memory";
    PyObject *type = NULL;

    switch (err->kind) {
    case TK_COMPILE:
        type = error_class(state, "CompileError");
        break;
    case TK_LAUNCH:
        type = error_class(state, "LaunchError");
        break;
    case TK_DEVICE:
        type = error_class(state, "DeviceError");
        break;
    case TK_EMULATOR:
        type = error_class(state, "EmulatorError");
        break;
    case TK_MEMORY:
    case TK_OK:
        type = PyExc_MemoryError;
        Py_INCREF(type);
        break;
    }
    if (type != NULL) {
        /* A compiler's log may quote the user's text cut in mid-character. */
        PyObject *text = PyUnicode_DecodeUTF8(
            message, (Py_ssize_t)strlen(message), "replace");
        if (text != NULL) {
            PyErr_SetObject(type, text);
            Py_DECREF(text);
        }
        Py_DECREF(type);
    }
    tk_error_clear(err);
    return NULL;
}

/* --- NVRTC --------------------------------------------------------------- */

PyDoc_STRVAR(
    nvrtc_open_doc,
    "nvrtc_open(paths): open the first library that works, unless one is\n"
    "open.");

static PyObject *
nvrtc_open(PyObject *module, PyObject *args)
{
    enum { MOST = 32 };
    PyObject *paths;
    const char *texts[MOST];
    tk_error err = {0};
    int status;

    if (!PyArg_ParseTuple(args, "O!", &PyTuple_Type, &paths)) {
        return NULL;
    }
    Py_ssize_t n = PyTuple_Size(paths);
    n = n < MOST ? n : MOST;
    for (Py_ssize_t i = 0; i < n; i++) {
        texts[i] = PyUnicode_AsUTF8AndSize(PyTuple_GetItem(paths, i), NULL);
        if (texts[i] == NULL) {
            return NULL;
        }
    }
    Py_BEGIN_ALLOW_THREADS
    status = tkrtc_open((int)n, texts, &err);
    Py_END_ALLOW_THREADS
    if (status < 0) {
        return tk_raise(tk_state_of(module), &err);
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(
    nvrtc_info_doc,
    "nvrtc_info() -> (path, (major, minor), supported architectures), or None\n"
    "where no library is open.");

static PyObject *
nvrtc_info(PyObject *module, PyObject *Py_UNUSED(ignored))
{
    int major = 0, minor = 0, archs[128];
    tk_error err = {0};

    if (!tkrtc_is_open()) {
        Py_RETURN_NONE;
    }
    int n = tkrtc_version(&major, &minor, &err);
    n = n < 0 ? -1 : tkrtc_archs(archs, 128, &err);
    if (n < 0) {
        return tk_raise(tk_state_of(module), &err);
    }
    n = n < 128 ? n : 128;
    PyObject *tuple = PyTuple_New(n);
    for (int i = 0; tuple != NULL && i < n; i++) {
        PyTuple_SetItem(tuple, i, PyLong_FromLong(archs[i]));
    }
    if (tuple == NULL) {
        return NULL;
    }
    return Py_BuildValue("s(ii)N", tkrtc_path(), major, minor, tuple);
}

/* --- The driver ---------------------------------------------------------- */

PyDoc_STRVAR(
    driver_info_doc,
    "driver_info() -> (CUDA version as 1000 * major + 10 * minor, devices).");

static PyObject *
driver_info(PyObject *module, PyObject *Py_UNUSED(ignored))
{
    int version = 0, count = 0;
    tk_error err = {0};

    if (tkcu_driver_version(&version, &err) < 0 ||
        tkcu_device_count(&count, &err) < 0) {
        return tk_raise(tk_state_of(module), &err);
    }
    return Py_BuildValue("ii", version, count);
}

PyDoc_STRVAR(device_info_doc, "device_info(index) -> dict of a GPU's facts.");

static PyObject *
device_info(PyObject *module, PyObject *args)
{
    int index;
    tk_device d;
    tk_error err = {0};

    if (!PyArg_ParseTuple(args, "i", &index)) {
        return NULL;
    }
    if (tkcu_device(index, &d, &err) < 0) {
        return tk_raise(tk_state_of(module), &err);
    }
    return Py_BuildValue("{s:s,s:(ii),s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:K}",
                         "name", d.name, "cc", d.major, d.minor, "sms", d.sms,
                         "smem_block", d.smem_block, "smem_sm", d.smem_sm,
                         "l2_bytes", d.l2_bytes, "max_threads_sm",
                         d.max_threads_sm, "registers_sm", d.registers_sm,
                         "bus_bits", d.bus_bits, "memory_khz", d.memory_khz,
                         "memory_bytes", (unsigned long long)d.memory_bytes);
}

/* --- The cache ----------------------------------------------------------- */

PyDoc_STRVAR(
    read_entry_doc,
    "read_entry(path) -> (meta, lowered name, image size), or None where the\n"
    "file is not a whole entry of the cache.");

static PyObject *
read_entry(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *path = NULL;
    tk_binary binary = {0};
    char *meta = NULL;

    if (!PyArg_ParseTuple(args, "O&", PyUnicode_FSConverter, &path)) {
        return NULL;
    }
    tk_lookup found = tkcache_read_file(PyBytes_AsString(path), &binary, &meta);
    Py_DECREF(path);
    if (found != TK_HIT) {
        Py_RETURN_NONE;
    }
    PyObject *result = Py_BuildValue("ssn", meta, binary.lowered,
                                     (Py_ssize_t)binary.image_size);
    tk_binary_clear(&binary);
    tk_free(meta);
    return result;
}

PyDoc_STRVAR(sha256_doc, "sha256(bytes) -> bytes, as the cache computes it.");

static PyObject *
sha256(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *data;
    Py_ssize_t size;
    unsigned char digest[32];

    if (!PyArg_ParseTuple(args, "y#", &data, &size)) {
        return NULL;
    }
    tkcache_sha256(data, (size_t)size, digest);
    return PyBytes_FromStringAndSize((char *)digest, sizeof digest);
}

PyDoc_STRVAR(stats_doc, "stats() -> dict of the process's counters.");

static PyObject *
stats(PyObject *module, PyObject *Py_UNUSED(ignored))
{
    const tk_stats *s = &tk_state_of(module)->stats;
    return Py_BuildValue(
        "{s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K}", "compiles",
        (unsigned long long)(tkrtc_compiles() + tkcc_compiles()), "disk_hits",
        (unsigned long long)s->disk_hits, "damaged",
        (unsigned long long)s->damaged, "published",
        (unsigned long long)s->published, "publish_failures",
        (unsigned long long)s->publish_failures, "lock_waits",
        (unsigned long long)s->lock_waits, "plan_hits",
        (unsigned long long)s->plan_hits, "plan_misses",
        (unsigned long long)s->plan_misses, "plan_evictions",
        (unsigned long long)s->plan_evictions, "launches",
        (unsigned long long)s->launches);
}

PyDoc_STRVAR(
    emulator_seed_doc,
    "emulator_seed(n): the order in which the emulator's threads take\n"
    "turns in kernels compiled for checks.");

static PyObject *
emulator_seed(PyObject *module, PyObject *number)
{
    unsigned long long seed = PyLong_AsUnsignedLongLong(number);
    if (PyErr_Occurred()) {
        return NULL;
    }
    tk_state_of(module)->emulator_seed = seed;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(
    describe_doc,
    "describe(tensor) -> (code, bits, lanes, device type, device, shape,\n"
    "strides, alignment): what a planner is told of a tensor.");

static PyObject *
describe(PyObject *module, PyObject *tensor)
{
    tk_state *state = tk_state_of(module);
    return tktensor_setup(state) < 0 ? NULL : tktensor_describe(state, tensor);
}

PyDoc_STRVAR(
    route_doc,
    "route(*args) -> 0 where a kernel can be given the tensors as they are, 1\n"
    "where a gradient is wanted besides, 2 where torch has to see the call.");

static PyObject *
route(PyObject *module, PyObject *const *args, Py_ssize_t n_args)
{
    tk_state *state = tk_state_of(module);
    if (tktensor_setup(state) < 0) {
        return NULL;
    }
    DLTensor views[TK_MAX_ARGS];
    if (n_args > TK_MAX_ARGS) {
        PyErr_SetString(PyExc_TypeError, "too many arguments");
        return NULL;
    }
    tk_route found = tktensor_route(state, args, n_args, views);
    return found == TK_FAILED ? NULL : PyLong_FromLong(found);
}

#ifdef TKJIT_HOSTILE
PyDoc_STRVAR(
    hostile_doc,
    "hostile(place, nth) -> visits of the place since it was last armed; lets\n"
    "the nth visit from now fail. 0: alloc, 1: read, 2: write, 3: NVRTC.");

static PyObject *
hostile(PyObject *Py_UNUSED(module), PyObject *args)
{
    int place, nth;
    if (!PyArg_ParseTuple(args, "ii", &place, &nth)) {
        return NULL;
    }
    int visits = tk_hostile_visits((tk_place)place);
    tk_hostile_arm((tk_place)place, nth);
    return PyLong_FromLong(visits);
}
#endif

/* --- The module ---------------------------------------------------------- */

PyDoc_STRVAR(
    launch_doc,
    "launch(kernel, device, grid, block, cluster, smem, blob, offsets,\n"
    "places, tensors): launch a compiled kernel once, on torch's stream of\n"
    "the device (-1: the CPU). The blob has its parameters at the offsets;\n"
    "each tensor's address is written to its place in it.");

static PyObject *
launch(PyObject *module, PyObject *args)
{
    return tklaunch(tk_state_of(module), args);
}

static PyMethodDef core_methods[] = {
    {"nvrtc_open", nvrtc_open, METH_VARARGS, nvrtc_open_doc},
    {"nvrtc_info", nvrtc_info, METH_NOARGS, nvrtc_info_doc},
    {"driver_info", driver_info, METH_NOARGS, driver_info_doc},
    {"device_info", device_info, METH_VARARGS, device_info_doc},
    {"read_entry", read_entry, METH_VARARGS, read_entry_doc},
    {"sha256", sha256, METH_VARARGS, sha256_doc},
    {"stats", stats, METH_NOARGS, stats_doc},
    {"emulator_seed", emulator_seed, METH_O, emulator_seed_doc},
    {"describe", describe, METH_O, describe_doc},
    {"launch", launch, METH_VARARGS, launch_doc},
    {"route", (PyCFunction)(void (*)(void))route, METH_FASTCALL, route_doc},
#ifdef TKJIT_HOSTILE
    {"hostile", hostile, METH_VARARGS, hostile_doc},
#endif
    {NULL, NULL, 0, NULL},
};

static int
add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **out)
{
    *out = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, NULL);
    return *out == NULL ? -1 : PyModule_AddType(module, *out);
}

static int
core_exec(PyObject *module)
{
    tk_state *state = tk_state_of(module);
    if (add_type(module, &tk_kernel_spec, &state->kernel_type) < 0 ||
        add_type(module, &tk_planned_spec, &state->planned_type) < 0) {
        return -1;
    }
    return PyModule_AddStringConstant(module, "__version__", TKJIT_VERSION);
}

static int
core_traverse(PyObject *module, visitproc visit, void *arg)
{
    tk_state *state = tk_state_of(module);
    Py_VISIT(state->kernel_type);
    Py_VISIT(state->planned_type);
    Py_VISIT(state->errors);
    return 0;
}

static int
core_clear(PyObject *module)
{
    tk_state *state = tk_state_of(module);
    Py_CLEAR(state->kernel_type);
    Py_CLEAR(state->planned_type);
    Py_CLEAR(state->errors);
    tktensor_teardown(state);
    return 0;
}

static void
core_free(void *module)
{
    core_clear(module);
}

static PyModuleDef_Slot core_slots[] = {
    {Py_mod_exec, core_exec},
    {0, NULL},
};

static struct PyModuleDef core_module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "tkjit._core",
    .m_doc = "The core of tkjit: compile, cache, plan, launch.",
    .m_size = sizeof(tk_state),
    .m_methods = core_methods,
    .m_slots = core_slots,
    .m_traverse = core_traverse,
    .m_clear = core_clear,
    .m_free = core_free,
};

PyMODINIT_FUNC
PyInit__core(void)
{
    return PyModuleDef_Init(&core_module);
}
