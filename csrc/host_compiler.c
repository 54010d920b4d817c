/* host_compiler.c - compiles a kernel's text for the CPU, with the system's C++
 * compiler.
 *
 * Two runs of it: one makes the object, one links it, since an object that is
 * compiled for checks (-fsanitize=thread) must not be linked with the library
 * that this option stands for.  Everything happens in a folder of its own,
 * which is gone afterwards.
 *
 * Knows nothing of Python, and runs without the GIL.
 */
#define _GNU_SOURCE
#include "tkjit.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <link.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MAX_ARGS = 64, MAX_IMAGE = 256 << 20 };

extern char **environ;

static _Atomic uint64_t compiles;

uint64_t
tkcc_compiles(void)
{
    return compiles;
}

/* --- Files --------------------------------------------------------------- */

typedef struct {
    char folder[PATH_MAX - 16];
    char source[PATH_MAX], object[PATH_MAX], library[PATH_MAX], log[PATH_MAX];
} workplace;

static int
open_workplace(const char *base, workplace *w, tk_error *err)
{
    int n = snprintf(w->folder, sizeof w->folder, "%s/tkjit-XXXXXX", base);
    if (n < 0 || (size_t)n >= sizeof w->folder || mkdtemp(w->folder) == NULL) {
        return tk_fail(err, TK_DEVICE,
                       "no folder to compile in could be made below %s: %s",
                       base, strerror(errno));
    }
    snprintf(w->source, sizeof w->source, "%s/kernel.cpp", w->folder);
    snprintf(w->object, sizeof w->object, "%s/kernel.o", w->folder);
    snprintf(w->library, sizeof w->library, "%s/kernel.so", w->folder);
    snprintf(w->log, sizeof w->log, "%s/log", w->folder);
    return 0;
}

static void
close_workplace(const workplace *w)
{
    unlink(w->source);
    unlink(w->object);
    unlink(w->library);
    unlink(w->log);
    rmdir(w->folder);
}

static int
write_text(const char *path, const char *text)
{
    FILE *file = fopen(path, "wxe");
    if (file == NULL) {
        return -1;
    }
    size_t size = strlen(text);
    int status = fwrite(text, 1, size, file) == size ? 0 : -1;
    return fclose(file) == 0 ? status : -1;
}

/* The file's bytes and a NUL behind them, owned; NULL where it cannot be. */
static char *
read_whole(const char *path, size_t *size)
{
    struct stat found;
    char *data = NULL;
    size_t at = 0;

    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return NULL;
    }
    if (fstat(fd, &found) == 0 && found.st_size <= MAX_IMAGE) {
        data = tk_alloc((size_t)found.st_size + 1);
    }
    while (data != NULL && at < (size_t)found.st_size) {
        ssize_t n = read(fd, data + at, (size_t)found.st_size - at);
        if (n <= 0) {
            break;
        }
        at += (size_t)n;
    }
    close(fd);
    if (data != NULL) {
        data[at] = '\0';
        *size = at;
    }
    return data;
}

/* --- Running the compiler ------------------------------------------------ */

/* What it prints goes to the end of the log.  Returns its exit status, or -1
 * with errno set where it could not be run. */
static int
run(const char *const *args, const char *log)
{
    posix_spawn_file_actions_t actions;
    pid_t child = 0;
    int status = 0;

    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&actions, 1, log,
                                     O_WRONLY | O_CREAT | O_APPEND, 0600);
    posix_spawn_file_actions_adddup2(&actions, 1, 2);
    int failed = posix_spawnp(&child, args[0], &actions, NULL,
                              (char *const *)(uintptr_t)args, environ);
    posix_spawn_file_actions_destroy(&actions);
    if (failed != 0) {
        errno = failed;
        return -1;
    }
    while (waitpid(child, &status, 0) < 0) {
        if (errno != EINTR) {
            return -1;
        }
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/* One of the two runs; -1 with *err filled in. */
static int
step(const tk_program *p, const char *const *args, const workplace *w,
     tk_error *err)
{
    int status = run(args, w->log);
    if (status == 0) {
        return 0;
    }
    if (status < 0) {
        return tk_fail(err, TK_DEVICE, "%s cannot be run: %s", args[0],
                       strerror(errno));
    }
    size_t size = 0;
    char *said = read_whole(w->log, &size);
    tk_fail(err, TK_COMPILE, "%s", said != NULL ? said : p->name);
    tk_free(said);
    return -1;
}

static int
compile_in(const tk_program *p, const workplace *w, tk_error *err)
{
    const char *args[MAX_ARGS];
    int n = 0;

    if (write_text(w->source, p->source) < 0) {
        return tk_fail(err, TK_DEVICE, "%s cannot be written: %s", w->source,
                       strerror(errno));
    }
    for (int i = 1; i < p->n_options; i++) {
        args[n++] = p->options[i];
    }
    args[n++] = "-c";
    args[n++] = "-o";
    args[n++] = w->object;
    args[n++] = w->source;
    args[n] = NULL;
    if (step(p, args, w, err) < 0) {
        return -1;
    }
    const char *link[] = {p->options[1], "-shared", "-o", w->library,
                          w->object,     "-lm",     NULL};
    return step(p, link, w, err);
}

/* A library's thread-local variables are the kernel's __shared__ ones. */
static int
shared_bytes(const char *library)
{
    const ElfW(Ehdr) *head = (const void *)library;
    const ElfW(Phdr) *segments = (const void *)(library + head->e_phoff);

    for (int i = 0; i < head->e_phnum; i++) {
        if (segments[i].p_type == PT_TLS) {
            return (int)segments[i].p_memsz;
        }
    }
    return 0;
}

int
tkcc_compile(const tk_program *p, tk_binary *out, tk_error *err)
{
    workplace w;
    size_t size = 0, log_size = 0;
    char *image = NULL, *log = NULL, *lowered = NULL;
    int status = -1;

    if (p->n_options < 2 || p->n_options > MAX_ARGS - 8) {
        return tk_fail(err, TK_COMPILE,
                       "a folder, a compiler and up to %d options",
                       MAX_ARGS - 10);
    }
    if (open_workplace(p->options[0], &w, err) < 0) {
        return -1;
    }
    if (compile_in(p, &w, err) < 0) {
        goto done;
    }
    image = read_whole(w.library, &size);
    log = read_whole(w.log, &log_size);
    lowered = tk_strdup("tkemu_describe");
    if (image == NULL || log == NULL || lowered == NULL) {
        tk_fail(err, TK_MEMORY, "no memory for a kernel's object");
        goto done;
    }
    *out = (tk_binary){.image = (unsigned char *)image,
                       .image_size = size,
                       .lowered = lowered,
                       .log = log,
                       .facts = {-1, shared_bytes(image), -1, -1, -1}};
    image = log = lowered = NULL;
    compiles++;
    status = 0;
done:
    tk_free(image);
    tk_free(log);
    tk_free(lowered);
    close_workplace(&w);
    return status;
}
