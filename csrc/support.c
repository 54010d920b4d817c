/* support.c - errors, memory, and the switch of a hostile build.
 *
 * Owns no state but the hostile build's counters.  Must not call Python.
 */
#include "tkjit.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int
tk_fail(tk_error *err, tk_error_kind kind, const char *format, ...)
{
    va_list list;

    tk_error_clear(err);
    err->kind = kind;
    va_start(list, format);
    int size = vsnprintf(NULL, 0, format, list);
    va_end(list);
    if (size < 0) {
        return -1;
    }
    /* Not tk_alloc: a hostile build tests what fails, not how it is told. */
    err->message = malloc((size_t)size + 1);
    if (err->message != NULL) {
        va_start(list, format);
        vsnprintf(err->message, (size_t)size + 1, format, list);
        va_end(list);
    }
    return -1;
}

void
tk_error_clear(tk_error *err)
{
    free(err->message);
    err->message = NULL;
    err->kind = TK_OK;
}

void *
tk_alloc(size_t size)
{
    if (tk_hostile(TK_AT_ALLOC)) {
        return NULL;
    }
    return malloc(size > 0 ? size : 1);
}

void *
tk_calloc(size_t size)
{
    void *pointer = tk_alloc(size);
    if (pointer != NULL) {
        memset(pointer, 0, size);
    }
    return pointer;
}

char *
tk_strdup(const char *text)
{
    size_t size = strlen(text) + 1;
    char *copy = tk_alloc(size);
    if (copy != NULL) {
        memcpy(copy, text, size);
    }
    return copy;
}

void
tk_free(void *pointer)
{
    free(pointer);
}

#ifdef TKJIT_HOSTILE

#include <stdatomic.h>

static atomic_int armed[TK_AT_NVRTC + 1];
static atomic_int visits[TK_AT_NVRTC + 1];

bool
tk_hostile(tk_place place)
{
    int visit = atomic_fetch_add(&visits[place], 1) + 1;
    return visit == atomic_load(&armed[place]);
}

void
tk_hostile_arm(tk_place place, int nth)
{
    atomic_store(&visits[place], 0);
    atomic_store(&armed[place], nth);
}

int
tk_hostile_visits(tk_place place)
{
    return atomic_load(&visits[place]);
}

#endif
