/* emulator.c - runs a kernel that was compiled for the CPU, thread by thread.
 *
 * Each CUDA thread is a fiber with a stack of its own; the blocks of a cluster
 * live at once, clusters follow each other.  A fiber runs until it waits
 * (barrier, warp collective, mbarrier) or ends; then another goes on, in turn,
 * or in seeded random order where accesses are checked.  Where none can go on,
 * that is a deadlock.
 *
 * The check of shared memory is by vector clocks.  A thread has
 *     seen    what it knows to have happened, by thread and asynchronous agent
 *     fenced  the part of it that asynchronous operations may touch too
 *     read    the reads it knows to be over: like `seen`, and more of them, as
 *             a shuffle's result depends on the reads of its lanes
 * and each byte knows its last write and up to KEPT reads since.  A barrier
 * joins clocks; a warp is the agent of the asynchronous operations it issues.
 *
 * Knows nothing of Python, and runs without the GIL, one launch at a time.
 */
#define _GNU_SOURCE
#include "tkjit.h"

#include "templates/tk/emu/abi.cuh"

#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum {
    WARP = 32,
    WARPGROUP = 128,
    NAMED = 16,       /* barriers of a block */
    MBARRIERS = 4096, /* of a block, at most */
    KEPT = 3,         /* reads remembered of a byte */
    RENDEZVOUS = 4,   /* collectives under way in a warp, of different masks */
    STACK = 128 << 10,
    STRIDE = 256 << 10, /* from one block's shared memory to the next one's */
    GAP = 1024,         /* at least, before its __shared__ variables */
    MAX_CHECKED =
        4096, /* threads of a cluster, for whose clocks there is room */
    NOBODY = 0xffff,
};

/* Steps after which a kernel is given up: a spin that nothing ends. */
#define STEP_LIMIT (1ull << 33)

struct tk_emulated {
    void *library; /* owned */
    tkemu_kernel kernel;
    size_t variables; /* bytes of its __shared__ variables */
    uintptr_t base;   /* where it is loaded */
    uintptr_t begin, end, data_begin, data_end; /* it, and what is writable */
    tk_counts *counts; /* owned; NULL before a launch that counts */
};

/* The three clocks of a thread, or of what threads meet at; see above.  NULL
 * unless the launch is checked. */
typedef struct {
    uint32_t *seen, *fenced, *read;
} clocks;

/* --- What a launch works on ---------------------------------------------- */

typedef struct {
    uint32_t when;
    uint16_t who;
    uint16_t how;
    uint32_t where; /* in the kernel's object */
} visit;

typedef struct {
    visit write;
    visit reads[KEPT];
} shadow;

typedef struct {
    int count, expected;
    uint64_t generation;
    clocks known;  /* by those that arrived, */
    clocks passed; /* and by those whose meeting was complete */
} meeting;

typedef struct {
    int what;
    unsigned mask, arrived, bytes;
    uint64_t generation;
} rendezvous;

typedef struct {
    uint32_t offset; /* in the block's shared memory */
    int arrivals, pending;
    long bytes; /* expected and not there yet; may be negative */
    uint64_t phase;
    uint16_t maker;
    bool fenced;
    uint32_t made, where;
    clocks known, passed; /* as a meeting's; a phase is one */
} mbarrier;

typedef enum { READY, WAITING, DONE } fiber_state;

/* What a fiber waits for, as the deadlock report tells it. */
typedef enum {
    ON_BARRIER,
    ON_WARP,
    ON_WARPGROUP,
    ON_CLUSTER,
    ON_MBARRIER
} wait_kind;

typedef struct fiber {
    tkemu_thread head; /* first: the kernel's view */
    void *stack_pointer;
    uint16_t id, block, warp; /* in the cluster */
    fiber_state state;
    wait_kind kind;
    int number, parity; /* of the barrier; of the phase */
    const void *object;
    uint32_t where;
    uint32_t now; /* its own clock */
    clocks known;
    uint64_t cluster_generation;
    unsigned turn;
    unsigned char given[2][TKEMU_MAX_EXCHANGE];
    const void *others[2][WARP];
    /* Groups of asynchronous operations, oldest first: the agent's clock at
     * each commit; open: there are operations since the last. */
    struct {
        uint32_t commits[64];
        int n;
        uint32_t open;
        const void *where; /* the last operation's place */
    } groups[TKEMU_GROUPS];
} fiber;

typedef struct {
    rendezvous meets[RENDEZVOUS];
    uint32_t agent; /* its agent's clock */
} warp;

typedef struct {
    meeting named[NAMED];
    meeting groups[1024 / WARPGROUP];
    uint64_t agreed[1024 / WARPGROUP]; /* what the first of a group named */
    mbarrier *mbarriers;
    unsigned n_mbarriers;
    int alive;
} block;

typedef struct {
    tk_emulated *object;
    const tk_geometry *geometry;
    const tk_emulation *options;
    void *const *params;
    const char *name;
    int threads, blocks, warps,
        n;          /* a block's; a cluster's; a cluster's; all */
    unsigned width; /* entries of a clock: threads and agents */
    fiber *fibers;
    warp *warp_of;
    block *block_of;
    unsigned char *stacks, *shared;
    size_t variables, span; /* where a block's __shared__ variables lie in its
                               shared memory, and where this ends */
    shadow *shadows;        /* by byte of the blocks' spans */
    size_t n_shadows;
    uint32_t *fiber_clocks;
    meeting cluster;
    uint16_t *ready;
    int n_ready, n_done;
    void *scheduler;
    fiber *current;
    uint64_t random, steps;
    bool failed, checked;
    char *message; /* owned */
} machine;

/* One launch at a time, so that a kernel's calls need no handle. */
static pthread_mutex_t one_launch = PTHREAD_MUTEX_INITIALIZER;
static machine *M;

/* AddressSanitizer marks the frames of a stack, and a stopped fiber's are never
 * left: what a new fiber's stack was marked as is void. */
#ifdef __SANITIZE_ADDRESS__
void __asan_unpoison_memory_region(void const volatile *p, size_t size);
#else
#define __asan_unpoison_memory_region(p, size) ((void)(p), (void)(size))
#endif

/* --- Switching ----------------------------------------------------------- */

/* Saves the callee's registers and the stack pointer in *from, goes on where
 * `to` was saved. */
void tkemu_switch(void **from, void *to);

#if defined(__x86_64__)
__asm__(".text\n"
        ".hidden tkemu_switch\n"
        ".globl tkemu_switch\n"
        ".type tkemu_switch,@function\n"
        "tkemu_switch:\n"
        "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n"
        "  pushq %r13\n  pushq %r14\n  pushq %r15\n"
        "  movq %rsp, (%rdi)\n"
        "  movq %rsi, %rsp\n"
        "  popq %r15\n  popq %r14\n  popq %r13\n"
        "  popq %r12\n  popq %rbx\n  popq %rbp\n"
        "  ret\n"
        ".size tkemu_switch,.-tkemu_switch\n");
enum { SAVED = 6 }; /* words below the return address */
#elif defined(__aarch64__)
__asm__(".text\n"
        ".hidden tkemu_switch\n"
        ".globl tkemu_switch\n"
        ".type tkemu_switch,%function\n"
        "tkemu_switch:\n"
        "  sub sp, sp, #160\n"
        "  stp x19, x20, [sp, #0]\n  stp x21, x22, [sp, #16]\n"
        "  stp x23, x24, [sp, #32]\n  stp x25, x26, [sp, #48]\n"
        "  stp x27, x28, [sp, #64]\n  stp x29, x30, [sp, #80]\n"
        "  stp d8, d9, [sp, #96]\n  stp d10, d11, [sp, #112]\n"
        "  stp d12, d13, [sp, #128]\n  stp d14, d15, [sp, #144]\n"
        "  mov x9, sp\n  str x9, [x0]\n  mov sp, x1\n"
        "  ldp x19, x20, [sp, #0]\n  ldp x21, x22, [sp, #16]\n"
        "  ldp x23, x24, [sp, #32]\n  ldp x25, x26, [sp, #48]\n"
        "  ldp x27, x28, [sp, #64]\n  ldp x29, x30, [sp, #80]\n"
        "  ldp d8, d9, [sp, #96]\n  ldp d10, d11, [sp, #112]\n"
        "  ldp d12, d13, [sp, #128]\n  ldp d14, d15, [sp, #144]\n"
        "  add sp, sp, #160\n"
        "  ret\n"
        ".size tkemu_switch,.-tkemu_switch\n");
#else
#error "the emulator's switch is written for x86-64 and aarch64"
#endif

/* The fiber goes back to the scheduler and runs on when it is chosen again. */
static void
yield(void)
{
    fiber *f = M->current;
    tkemu_switch(&f->stack_pointer, M->scheduler);
}

/* A place of the kernel's code, counted from where its object lies. */
static uint32_t
place_of(const void *pc)
{
    return (uint32_t)((uintptr_t)pc - M->object->base);
}

static void
wait_here(wait_kind kind, const void *pc)
{
    fiber *f = M->current;
    f->state = WAITING;
    f->kind = kind;
    f->where = place_of(pc);
    yield();
}

static void
make_ready(fiber *f)
{
    f->state = READY;
    M->ready[M->n_ready++] = f->id;
}

/* --- Faults -------------------------------------------------------------- */

/* Appends to the launch's message; "<at 0x12>" is a place in the object. */
static void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void
say(const char *format, ...)
{
    char *text = NULL, *all = NULL;
    va_list args;

    va_start(args, format);
    if (vasprintf(&text, format, args) >= 0) {
        if (asprintf(&all, "%s%s", M->message != NULL ? M->message : "",
                     text) >= 0) {
            free(M->message);
            M->message = all;
        }
        free(text);
    }
    va_end(args);
}

static void
say_thread(const fiber *f)
{
    const tkemu_thread *t = &f->head;
    say("block (%u, %u, %u) thread (%u, %u, %u)", t->block.x, t->block.y,
        t->block.z, t->thread.x, t->thread.y, t->thread.z);
}

static void
say_who(uint16_t who)
{
    if (who < M->n) {
        say_thread(&M->fibers[who]);
    }
    else {
        const fiber *f = &M->fibers[0];
        for (int i = 0; i < M->n && f->warp != who - M->n; i++) {
            f = &M->fibers[i];
        }
        say("an asynchronous operation of the warp of ");
        say_thread(f);
    }
}

/* Ends the launch: nothing of the kernel runs any more. */
static void __attribute__((noreturn))
stop(void)
{
    M->failed = true;
    yield();
    abort(); /* a stopped fiber is never chosen */
}

static void __attribute__((noreturn))
fault_at(const char *what, const void *pc)
{
    say("%s\n  at <at 0x%x>, ", what, place_of(pc));
    say_thread(M->current);
    say("\n");
    stop();
}

#define HERE __builtin_return_address(0)

static void
machine_fault(const char *what)
{
    fault_at(what, HERE);
}

/* --- Clocks -------------------------------------------------------------- */

static void
join(uint32_t *into, const uint32_t *from)
{
    for (unsigned i = 0; i < M->width; i++) {
        into[i] = into[i] < from[i] ? from[i] : into[i];
    }
}

static void
join_all(const clocks *into, const clocks *from)
{
    join(into->seen, from->seen);
    join(into->fenced, from->fenced);
    join(into->read, from->read);
}

static size_t
clock_bytes(void)
{
    return M->width * sizeof(uint32_t);
}

/* Three clocks in one piece of memory, which begins with `seen`. */
static clocks
clocks_in(uint32_t *memory)
{
    return (clocks){memory, memory + M->width, memory + 2 * (size_t)M->width};
}

/* For what threads meet at, on the first need. */
static void
give_clocks(clocks *c)
{
    if (M->checked && c->seen == NULL) {
        uint32_t *memory = calloc(3, clock_bytes());
        if (memory == NULL) {
            fault_at("no memory for a clock", M->object->kernel.run);
        }
        *c = clocks_in(memory);
    }
}

/* What the thread does from now on is later than what others have learnt. */
static void
tick(fiber *f)
{
    if (M->checked) {
        f->now++;
        f->known.seen[f->id] = f->known.read[f->id] = f->now;
    }
}

/* The thread's past becomes known to whoever joins these clocks. */
static void
release(fiber *f, const clocks *to)
{
    if (M->checked) {
        join_all(to, &f->known);
        tick(f);
    }
}

static void
acquire(fiber *f, const clocks *from)
{
    if (M->checked && from->seen != NULL) {
        join_all(&f->known, from);
        join(f->known.read, from->seen);
    }
}

/* What those that arrived know becomes what those that waited learn, who run
 * later: some may have arrived for the next time by then. */
static void
pass_on(const clocks *known, clocks *passed)
{
    give_clocks(passed);
    if (M->checked && known->seen != NULL) {
        join_all(passed, known);
    }
}

static bool
lies_in(const void *p, const void *begin, size_t size)
{
    return (uintptr_t)p - (uintptr_t)begin < size;
}

/* --- Shared memory ------------------------------------------------------- */

/* Where shared memory is touched. */
typedef struct {
    int owner;    /* the block */
    bool outside; /* it is not all the block's */
    size_t index; /* in the shadows */
} spot;

/* Fills *out; false for other memory.  What lies around a block's memory is
 * known as well, as far as a stride goes. */
static bool
find_shared(const void *p, unsigned bytes, spot *out)
{
    const unsigned char *first = M->shared - STRIDE;

    if (!lies_in(p, first, (size_t)(M->blocks + 2) * STRIDE)) {
        return false;
    }
    size_t offset = (size_t)((const unsigned char *)p - first);
    size_t within = offset % STRIDE;
    out->owner = (int)(offset / STRIDE) - 1;
    out->outside =
        out->owner < 0 || out->owner >= M->blocks || within + bytes > M->span ||
        (within + bytes > M->geometry->smem && within < M->variables);
    out->index = (size_t)out->owner * M->span + within;
    return true;
}

/* Which byte of shared memory it is. */
static void
say_byte(const void *p)
{
    size_t offset = (size_t)((const unsigned char *)p - M->shared);
    size_t within = offset % STRIDE;
    bool dynamic = within < M->geometry->smem;

    say("byte %zu of block %zu's %s", dynamic ? within : within - M->variables,
        offset / STRIDE, dynamic ? "shared memory" : "__shared__ variables");
}

static void __attribute__((noreturn))
race(const char *what, const visit *before, uint16_t who, const void *p,
     const char *does, const void *pc)
{
    say("%s: ", what);
    say_who(who);
    say("\n  %s at <at 0x%x>,\n  after ", does, place_of(pc));
    say_who(before->who);
    say("\n  %s at <at 0x%x>, and nothing orders the two\n",
        before->how & TKEMU_WRITE ? "wrote the same byte"
                                  : "read the same byte",
        before->where);
    say("  ");
    say_byte(p);
    say("\n");
    stop();
}

/* Whether `who` may touch a byte that `before` touched. */
static bool
is_ordered(const fiber *f, uint16_t who, const visit *before, bool is_write)
{
    if (before->who == who) {
        return true;
    }
    const uint32_t *clock = (before->how & TKEMU_WRITE) || !is_write
                                ? f->known.seen
                                : f->known.read;
    return before->when <= clock[before->who];
}

/* An access of one byte by a thread, or by its warp's agent (who >= n) on its
 * behalf.  proxy: the agent goes by another way than threads do. */
static void
touch(fiber *f, uint16_t who, uint32_t when, shadow *s, unsigned how,
      bool proxy, const void *p, const void *pc)
{
    bool writes = (how & TKEMU_WRITE) != 0;
    const char *does = writes ? "writes" : "reads";

    if (s->write.who == NOBODY) {
        if (!writes) {
            say("shared memory is read before anything is written to it: ");
            say_byte(p);
            say(", by ");
            say_who(who);
            say("\n  at <at 0x%x>\n", place_of(pc));
            stop();
        }
    }
    else if (!((how & TKEMU_ATOMIC) && (s->write.how & TKEMU_ATOMIC))) {
        if (!is_ordered(f, who, &s->write, writes)) {
            race("a race on shared memory", &s->write, who, p, does, pc);
        }
        if (proxy && s->write.who < M->n &&
            s->write.when > f->known.fenced[s->write.who]) {
            race(
                "a fence between ordinary writes and an asynchronous operation "
                "is missing (tk::fence_async)",
                &s->write, who, p, does, pc);
        }
    }
    visit now = {when, who, (uint16_t)how, place_of(pc)};
    if (writes) {
        for (int i = 0; i < KEPT; i++) {
            if (s->reads[i].who != NOBODY &&
                !is_ordered(f, who, &s->reads[i], true)) {
                race("a race on shared memory", &s->reads[i], who, p, does, pc);
            }
            s->reads[i].who = NOBODY;
        }
        s->write = now;
        return;
    }
    /* A read that this one's thread knows of is no loss. */
    int place = (int)(M->steps % KEPT);
    for (int i = KEPT - 1; i >= 0; i--) {
        if (s->reads[i].who == NOBODY || s->reads[i].who == who ||
            s->reads[i].when <= f->known.seen[s->reads[i].who]) {
            place = i;
        }
    }
    s->reads[place] = now;
}

static const tkemu_machine functions;

/* --- Global memory ------------------------------------------------------- */

static bool
in_a_tensor(const void *p, unsigned bytes)
{
    uintptr_t at = (uintptr_t)p;
    for (int i = 0; i < M->options->n_ranges; i++) {
        const tk_range *r = &M->options->ranges[i];
        if (at >= r->begin && at + bytes <= r->end) {
            return true;
        }
    }
    return false;
}

/* Stacks, parameters, what the built-in variables are read from, and the
 * object's own constants. */
static bool
is_private(const void *p)
{
    const tk_emulated *e = M->object;
    const tkemu_kernel *k = &e->kernel;

    return lies_in(p, M->stacks, (size_t)M->n * STACK) ||
           lies_in(p, M->options->params, M->options->params_size) ||
           lies_in(p, M->params, (size_t)k->n_parameters * sizeof *M->params) ||
           lies_in(p, M->fibers, (size_t)M->n * sizeof *M->fibers) ||
           lies_in(p, &functions, sizeof functions) ||
           lies_in(p, k->self, sizeof *k->self) ||
           lies_in(p, k->machine, sizeof *k->machine) ||
           (lies_in(p, (void *)e->begin, e->end - e->begin) &&
            !lies_in(p, (void *)e->data_begin, e->data_end - e->data_begin));
}

static void
check(fiber *f, uint16_t who, uint32_t when, const void *p, unsigned bytes,
      unsigned how, bool proxy, const void *pc)
{
    spot at_shared;

    if (find_shared(p, bytes, &at_shared)) {
        if (at_shared.outside) {
            fault_at("an access outside the block's shared memory", pc);
        }
        for (unsigned i = 0; M->checked && i < bytes; i++) {
            touch(f, who, when, &M->shadows[at_shared.index + i], how, proxy,
                  (const unsigned char *)p + i, pc);
        }
        return;
    }
    if (in_a_tensor(p, bytes) || is_private(p)) {
        return;
    }
    char what[160];
    uintptr_t at = (uintptr_t)p, nearest = UINTPTR_MAX;
    int tensor = -1;
    for (int i = 0; i < M->options->n_ranges; i++) {
        const tk_range *r = &M->options->ranges[i];
        uintptr_t away = at < r->begin ? r->begin - at : at + bytes - r->end;
        if (away < nearest) {
            nearest = away;
            tensor = i;
        }
    }
    if (tensor >= 0 && nearest < 1 << 20) {
        snprintf(
            what, sizeof what,
            "%u bytes of global memory at %p are %s outside every tensor: %zu "
            "bytes %s tensor %d",
            bytes, p, how & TKEMU_WRITE ? "written" : "read", (size_t)nearest,
            at < M->options->ranges[tensor].begin ? "before" : "behind",
            tensor);
    }
    else {
        snprintf(what, sizeof what,
                 "%u bytes of global memory are %s outside every tensor (%p)",
                 bytes, how & TKEMU_WRITE ? "written" : "read", p);
    }
    fault_at(what, pc);
}

/* Notes an access for the table of costs. */
static void
count(const fiber *f, const void *p, unsigned bytes, unsigned how,
      const void *pc)
{
    tk_touch t = {.where = place_of(pc),
                  .address = (uint64_t)(uintptr_t)p,
                  .warp = f->warp,
                  .bytes = (uint16_t)bytes,
                  .lane = (uint8_t)f->head.lane,
                  .writes = (how & TKEMU_WRITE) != 0};
    spot at;

    t.shared = find_shared(p, bytes, &at);
    if (t.shared || in_a_tensor(p, bytes)) {
        tkcount_note(M->object->counts, &t);
    }
}

static void
machine_access(const void *p, unsigned bytes, unsigned how, const void *pc)
{
    fiber *f = M->current;
    const unsigned char *at = p;
    /* Most accesses are of the thread's own stack. */
    if (at >= M->stacks && at < M->stacks + (size_t)M->n * STACK) {
        return;
    }
    M->steps++;
    check(f, f->id, f->now, p, bytes, how, false, pc);
    if (M->options->check > 1) {
        count(f, p, bytes, how, pc);
    }
}

static void
machine_touch(const void *p, unsigned bytes, unsigned how)
{
    machine_access(p, bytes, how, HERE);
}

static void
machine_atomic(const void *p, unsigned bytes)
{
    fiber *f = M->current;
    if (M->options->check) {
        check(f, f->id, f->now, p, bytes, TKEMU_WRITE | TKEMU_ATOMIC, false,
              HERE);
    }
}

static void
machine_aligned(const void *p, unsigned bytes)
{
    if ((uintptr_t)p % bytes != 0) {
        char what[96];
        snprintf(what, sizeof what,
                 "an address is not aligned to %u bytes: it ends in 0x%zx",
                 bytes, (size_t)((uintptr_t)p % 256));
        fault_at(what, HERE);
    }
}

static void
machine_copy(void *to, const void *from, unsigned bytes)
{
    memcpy(to, from, bytes);
}

/* --- Barriers of a block and of the cluster ------------------------------ */

static void
end_meeting(meeting *m)
{
    m->count = 0;
    m->expected = 0;
    m->generation++;
}

static void
wake(wait_kind kind, const void *object)
{
    for (int i = 0; i < M->n; i++) {
        fiber *f = &M->fibers[i];
        if (f->state == WAITING && f->kind == kind && f->object == object) {
            make_ready(f);
        }
    }
}

/* After an arrival, or the end of a thread: is the meeting complete? */
static bool
complete_meeting(meeting *m, wait_kind kind)
{
    if (m->count == 0 || m->count < m->expected) {
        return false;
    }
    pass_on(&m->known, &m->passed);
    end_meeting(m);
    wake(kind, m);
    return true;
}

static void
machine_barrier(int id, int threads, int arrive_only)
{
    fiber *f = M->current;
    const void *pc = HERE;
    block *b = &M->block_of[f->block];

    if (id < 0 || id >= NAMED) {
        fault_at("a block has barriers 0 to 15", pc);
    }
    if (threads % WARP != 0) {
        fault_at("a barrier's count of threads is a multiple of 32", pc);
    }
    meeting *m = &b->named[id];
    int expected = threads > 0 ? threads : b->alive;
    give_clocks(&m->known);
    if (m->count > 0 && threads > 0 && m->expected != expected) {
        char what[120];
        snprintf(what, sizeof what,
                 "threads name barrier %d for %d and for %d threads", id,
                 m->expected, expected);
        fault_at(what, pc);
    }
    m->expected = expected;
    m->count++;
    release(f, &m->known);
    f->object = m;
    f->number = id;
    uint64_t mine = m->generation;
    complete_meeting(m, ON_BARRIER);
    if (arrive_only) {
        return;
    }
    while (m->generation == mine) {
        wait_here(ON_BARRIER, pc);
    }
    acquire(f, &m->passed);
}

static void
machine_cluster_arrive(void)
{
    fiber *f = M->current;
    meeting *m = &M->cluster;

    give_clocks(&m->known);
    f->cluster_generation = m->generation + 1;
    m->expected = M->n - M->n_done;
    m->count++;
    release(f, &m->known);
    complete_meeting(m, ON_CLUSTER);
}

static void
machine_cluster_wait(void)
{
    fiber *f = M->current;
    meeting *m = &M->cluster;

    f->object = m;
    while (m->generation < f->cluster_generation) {
        wait_here(ON_CLUSTER, HERE);
    }
    acquire(f, &m->passed);
}

/* --- Collectives of a warp ----------------------------------------------- */

static rendezvous *
meet(fiber *f, int what, unsigned mask, unsigned bytes, const void *pc)
{
    rendezvous *free_one = NULL;
    warp *w = &M->warp_of[f->warp];

    if (!(mask >> f->head.lane & 1)) {
        fault_at("a lane calls a collective whose mask leaves it out", pc);
    }
    for (int i = 0; i < RENDEZVOUS; i++) {
        rendezvous *r = &w->meets[i];
        if (r->arrived == 0) {
            free_one = free_one == NULL ? r : free_one;
        }
        else if (r->mask == mask) {
            if (r->what != what || r->bytes != bytes) {
                fault_at("lanes of a warp are at different collectives", pc);
            }
            return r;
        }
    }
    if (free_one == NULL) {
        fault_at("too many collectives of different masks in a warp", pc);
    }
    free_one->what = what;
    free_one->mask = mask;
    free_one->bytes = bytes;
    return free_one;
}

/* Lanes of the warp that a mask may name: a block's last warp may be short. */
static unsigned
lanes_of(const fiber *f)
{
    int first = f->id - f->head.lane, left = 0;
    int end = (f->block + 1) * M->threads;
    left = end - first < WARP ? end - first : WARP;
    return left == WARP ? ~0u : (1u << left) - 1;
}

/* Waits until all lanes of the mask are there; true for the last. */
static bool
gather(fiber *f, rendezvous *r, const void *pc)
{
    uint64_t mine = r->generation;

    r->arrived |= 1u << f->head.lane;
    f->object = r;
    if (r->arrived == (r->mask & lanes_of(f))) {
        r->arrived = 0;
        r->generation++;
        wake(ON_WARP, r);
        return true;
    }
    while (r->generation == mine) {
        wait_here(ON_WARP, pc);
    }
    return false;
}

static void
machine_warp_sync(unsigned mask)
{
    fiber *f = M->current;
    rendezvous *r = meet(f, 0, mask, 0, HERE);

    if (gather(f, r, HERE) && M->checked) {
        /* The last to come does it for all: each learns what all know. */
        clocks all = {NULL, NULL, NULL};
        give_clocks(&all);
        fiber *first = f - f->head.lane;
        unsigned lanes = mask & lanes_of(f);
        for (int i = 0; i < WARP; i++) {
            if (lanes >> i & 1) {
                release(first + i, &all);
            }
        }
        for (int i = 0; i < WARP; i++) {
            if (lanes >> i & 1) {
                acquire(first + i, &all);
            }
        }
        free(all.seen);
    }
}

/* Four warps come to one instruction, and name the same; orders no memory. */
static void
machine_warpgroup(unsigned long long what)
{
    fiber *f = M->current;
    int group = f->id % M->threads / WARPGROUP;
    block *b = &M->block_of[f->block];
    meeting *m = &b->groups[group];
    uint64_t mine = m->generation;

    if ((group + 1) * WARPGROUP > M->threads) {
        fault_at("an instruction of a warpgroup is called by fewer than four "
                 "warps",
                 HERE);
    }
    if (m->count > 0 && b->agreed[group] != what) {
        fault_at("the warps of a warpgroup are at different instructions, or "
                 "name different operands",
                 HERE);
    }
    b->agreed[group] = what;
    m->expected = WARPGROUP;
    m->count++;
    f->object = m;
    f->number = group;
    complete_meeting(m, ON_WARPGROUP);
    while (m->generation == mine) {
        wait_here(ON_WARPGROUP, HERE);
    }
}

/* Gives a lane what each lane of the mask gave, and its own for the others;
 * their reads are over, as far as it is concerned. */
static void
hand_round(fiber *first, unsigned lanes, fiber *to)
{
    for (int j = 0; j < WARP; j++) {
        const fiber *from = lanes >> j & 1 ? first + j : to;
        to->others[to->number][j] = from->given[from->number];
        if (M->checked && to->known.read[from->id] < from->now) {
            to->known.read[from->id] = from->now;
        }
    }
}

static const void *const *
machine_exchange(int what, unsigned mask, const void *mine, unsigned bytes)
{
    fiber *f = M->current;
    fiber *first = f - f->head.lane;
    unsigned lanes = mask & lanes_of(f), set = f->turn++ & 1;

    if (bytes > TKEMU_MAX_EXCHANGE) {
        fault_at("a collective of too many bytes", HERE);
    }
    rendezvous *r = meet(f, what, mask, bytes, HERE);
    memcpy(f->given[set], mine, bytes);
    f->number = (int)set;
    if (gather(f, r, HERE)) {
        /* Who comes last hands the values round, before anyone goes on. */
        for (int i = 0; i < WARP; i++) {
            if (lanes >> i & 1) {
                hand_round(first, lanes, first + i);
            }
        }
        for (int i = 0; i < WARP; i++) {
            if (lanes >> i & 1) {
                tick(first + i);
            }
        }
    }
    return f->others[set];
}

/* --- mbarriers ----------------------------------------------------------- */

static void *
machine_peer(const void *p, int rank)
{
    spot at;

    if (rank < 0 || rank >= M->blocks) {
        fault_at("the cluster has no block of this rank", HERE);
    }
    if (!find_shared(p, 1, &at) || at.outside) {
        fault_at("an address of a neighbour block is asked for outside shared "
                 "memory",
                 HERE);
    }
    return (unsigned char *)p +
           ((ptrdiff_t)rank - M->current->block) * (ptrdiff_t)STRIDE;
}

/* The record of the mbarrier at p; made if `make`, else NULL where none is. */
static mbarrier *
mbarrier_at(const void *p, bool make, int *owner, const void *pc)
{
    spot at;

    if ((uintptr_t)p % 8 != 0) {
        fault_at("an mbarrier is not aligned to 8 bytes", pc);
    }
    if (!find_shared(p, 8, &at) || at.outside) {
        fault_at("an mbarrier lies outside shared memory", pc);
    }
    *owner = at.owner;
    block *b = &M->block_of[at.owner];
    uint32_t offset =
        (uint32_t)(((const unsigned char *)p - M->shared) % STRIDE);
    for (unsigned i = 0; i < b->n_mbarriers; i++) {
        if (b->mbarriers[i].offset == offset) {
            return &b->mbarriers[i];
        }
    }
    if (!make) {
        return NULL;
    }
    if (b->n_mbarriers == MBARRIERS) {
        /* Their addresses name what fibers wait for: never moved. */
        fault_at("a block has too many mbarriers", pc);
    }
    mbarrier *m = &b->mbarriers[b->n_mbarriers++];
    memset(m, 0, sizeof *m);
    m->offset = offset;
    return m;
}

static void
machine_mbarrier_init(void *p, int arrivals)
{
    fiber *f = M->current;
    int owner = 0;

    if (arrivals < 1 || arrivals > (1 << 20) - 1) {
        fault_at("an mbarrier counts 1 to 2^20 - 1 arrivals", HERE);
    }
    mbarrier *m = mbarrier_at(p, true, &owner, HERE);
    if (m->arrivals != 0) {
        fault_at("an mbarrier is initialized again while it is in use", HERE);
    }
    give_clocks(&m->known);
    m->arrivals = m->pending = arrivals;
    m->bytes = 0;
    m->phase = 0;
    m->maker = f->id;
    m->made = f->now;
    m->fenced = false;
    m->where = place_of(HERE);
    tick(f);
}

static mbarrier *
mbarrier_used(fiber *f, const void *p, bool by_agent, const void *pc)
{
    int owner = 0;
    mbarrier *m = mbarrier_at(p, false, &owner, pc);

    if (m == NULL) {
        fault_at("an mbarrier is used that was never initialized", pc);
    }
    if (M->checked && m->maker != f->id && m->made > f->known.seen[m->maker]) {
        fault_at("an mbarrier is used, and nothing orders that after its "
                 "initialization",
                 pc);
    }
    if (by_agent && !m->fenced) {
        fault_at("an asynchronous operation uses an mbarrier without a fence "
                 "after its initialization (tk::fence_barrier_init)",
                 pc);
    }
    return m;
}

static void
settle(mbarrier *m)
{
    if (m->pending == 0 && m->bytes == 0) {
        m->pending = m->arrivals;
        m->phase++;
        pass_on(&m->known, &m->passed);
        wake(ON_MBARRIER, m);
    }
}

static void
machine_mbarrier_arrive(void *p, int arrivals, long expected)
{
    fiber *f = M->current;
    mbarrier *m = mbarrier_used(f, p, false, HERE);

    if (arrivals > m->pending) {
        fault_at("more threads arrive at an mbarrier than it counts in a phase",
                 HERE);
    }
    m->bytes += expected;
    if (m->bytes > (1 << 20) - 1) {
        fault_at("an mbarrier expects more than 2^20 - 1 bytes", HERE);
    }
    m->pending -= arrivals;
    release(f, &m->known);
    settle(m);
}

static int
machine_mbarrier_test(void *p, int parity)
{
    fiber *f = M->current;
    mbarrier *m = mbarrier_used(f, p, false, HERE);

    if ((int)(m->phase & 1) == (parity & 1)) {
        M->steps++;
        make_ready(f);
        yield(); /* who asks again and again lets others run */
        if ((int)(m->phase & 1) == (parity & 1)) {
            return 0;
        }
    }
    acquire(f, &m->passed);
    return 1;
}

static void
machine_mbarrier_wait(void *p, int parity)
{
    fiber *f = M->current;
    mbarrier *m = mbarrier_used(f, p, false, HERE);

    f->object = m;
    f->number = (int)m->offset;
    f->parity = parity & 1;
    while ((int)(m->phase & 1) == (parity & 1)) {
        wait_here(ON_MBARRIER, HERE);
    }
    acquire(f, &m->passed);
}

static void
machine_fence(int what)
{
    fiber *f = M->current;

    if (what == TKEMU_FENCE_BARRIER_INIT || what == TKEMU_FENCE_ASYNC) {
        for (int b = 0; b < M->blocks; b++) {
            for (unsigned i = 0; i < M->block_of[b].n_mbarriers; i++) {
                mbarrier *m = &M->block_of[b].mbarriers[i];
                m->fenced = m->fenced || m->maker == f->id;
            }
        }
    }
    if (what == TKEMU_FENCE_ASYNC && M->checked) {
        join(f->known.fenced, f->known.seen);
        tick(f);
    }
}

/* --- Asynchronous operations --------------------------------------------- */

static int
machine_async_begin(int group)
{
    fiber *f = M->current;
    M->warp_of[f->warp].agent++;
    if (group >= 0) {
        f->groups[group].where = HERE;
        f->groups[group].open = M->warp_of[f->warp].agent;
    }
    return group;
}

static void
machine_async_access(int op, const void *p, unsigned bytes, unsigned how)
{
    fiber *f = M->current;
    /* cp.async goes the way of ordinary accesses. */
    if (M->options->check) {
        check(f, (uint16_t)(M->n + f->warp), M->warp_of[f->warp].agent, p,
              bytes, how, op != TKEMU_COPIES, HERE);
    }
}

static void
machine_async_complete(int op, void *p, long bytes)
{
    fiber *f = M->current;
    mbarrier *m = mbarrier_used(f, p, true, HERE);
    (void)op;

    m->bytes -= bytes;
    if (M->checked) {
        uint32_t agent = M->warp_of[f->warp].agent;
        m->known.seen[M->n + f->warp] = agent;
        m->known.read[M->n + f->warp] = agent;
        /* The issuing thread's reads are over: their values went along. */
        join(m->known.read, f->known.read);
    }
    settle(m);
}

static void
machine_async_commit(int group)
{
    fiber *f = M->current;
    int *n = &f->groups[group].n;

    if (*n == 64) {
        memmove(f->groups[group].commits, f->groups[group].commits + 1,
                63 * sizeof(uint32_t));
        (*n)--;
    }
    f->groups[group].commits[(*n)++] = f->groups[group].open;
    f->groups[group].open = 0;
}

static void
machine_async_wait(int group, int pending)
{
    fiber *f = M->current;
    int n = f->groups[group].n;

    if (n <= pending) {
        return;
    }
    int done = n - pending;
    uint32_t when = 0;
    for (int i = 0; i < done; i++) { /* an empty group has no time */
        uint32_t one = f->groups[group].commits[i];
        when = one > when ? one : when;
    }
    memmove(f->groups[group].commits, f->groups[group].commits + done,
            (size_t)pending * sizeof(uint32_t));
    f->groups[group].n = pending;
    if (M->checked) {
        uint32_t *seen = &f->known.seen[M->n + f->warp];
        *seen = *seen < when ? when : *seen;
        f->known.read[M->n + f->warp] = *seen;
    }
}

static const tkemu_machine functions = {
    .access = machine_access,
    .touch = machine_touch,
    .atomic = machine_atomic,
    .aligned = machine_aligned,
    .copy = machine_copy,
    .barrier = machine_barrier,
    .warp_sync = machine_warp_sync,
    .warpgroup = machine_warpgroup,
    .exchange = machine_exchange,
    .cluster_arrive = machine_cluster_arrive,
    .cluster_wait = machine_cluster_wait,
    .peer = machine_peer,
    .mbarrier_init = machine_mbarrier_init,
    .mbarrier_arrive = machine_mbarrier_arrive,
    .mbarrier_test = machine_mbarrier_test,
    .mbarrier_wait = machine_mbarrier_wait,
    .fence = machine_fence,
    .async_begin = machine_async_begin,
    .async_access = machine_async_access,
    .async_complete = machine_async_complete,
    .async_commit = machine_async_commit,
    .async_wait = machine_async_wait,
    .fault = machine_fault,
};

/* --- A cluster's life ---------------------------------------------------- */

/* What a fiber runs. */
static void __attribute__((noreturn))
live(void)
{
    fiber *f = M->current;

    M->object->kernel.run(M->params);
    if (M->options->check &&
        (f->groups[TKEMU_BULK].n > 0 || f->groups[TKEMU_BULK].open != 0)) {
        fault_at("a thread ends with bulk stores that it has not waited for",
                 f->groups[TKEMU_BULK].where);
    }
    f->state = DONE;
    M->n_done++;
    block *b = &M->block_of[f->block];
    b->alive--;
    /* Barriers without a count wait for those that are left. */
    meeting *m = &b->named[0];
    if (m->count > 0 && m->expected > b->alive) {
        m->expected = b->alive;
        complete_meeting(m, ON_BARRIER);
    }
    yield();
    abort();
}

static void
start_fiber(fiber *f)
{
    uintptr_t top = (uintptr_t)M->stacks + (size_t)(f->id + 1) * STACK;
    void **sp = (void **)(top & ~(uintptr_t)15);
#if defined(__x86_64__)
    *--sp = NULL; /* keeps the stack as a call leaves it */
    *--sp = (void *)(uintptr_t)live;
    sp -= SAVED;
    memset(sp, 0, SAVED * sizeof *sp);
#else
    sp -= 20;
    memset(sp, 0, 20 * sizeof *sp);
    sp[11] = (void *)(uintptr_t)live; /* x30 */
#endif
    f->stack_pointer = sp;
    make_ready(f);
}

static uint64_t
next_random(void)
{
    M->random ^= M->random << 13;
    M->random ^= M->random >> 7;
    M->random ^= M->random << 17;
    return M->random;
}

static void
say_wait(const fiber *f)
{
    const meeting *m = f->object;
    const rendezvous *r = f->object;
    const mbarrier *b = f->object;

    switch (f->kind) {
    case ON_BARRIER:
        say("barrier %d, where %d of %d threads are", f->number, m->count,
            m->expected);
        break;
    case ON_WARPGROUP:
        say("the rest of warpgroup %d, of which %d of %d threads are there",
            f->number, m->count, m->expected);
        break;
    case ON_CLUSTER:
        say("the cluster's barrier, where %d of %d threads are", m->count,
            m->expected);
        break;
    case ON_WARP:
        say("lanes 0x%08x of its warp, of which 0x%08x are there", r->mask,
            r->arrived);
        break;
    case ON_MBARRIER:
        say("the mbarrier at byte %d, parity %d; it is in phase %llu, %d "
            "arrivals and %ld bytes short",
            f->number, f->parity, (unsigned long long)b->phase, b->pending,
            b->bytes);
        break;
    }
    say(" at <at 0x%x>", f->where);
}

static bool
wait_alike(const fiber *a, const fiber *b)
{
    return a->block == b->block && a->kind == b->kind &&
           a->object == b->object && a->where == b->where &&
           a->parity == b->parity;
}

/* Every waiting thread, those that wait alike as one line. */
static void
say_deadlock(void)
{
    say("deadlock: no thread can go on\n");
    for (int i = 0; i < M->n; i++) {
        const fiber *f = &M->fibers[i];
        int alike = 0;
        bool first = true;
        if (f->state != WAITING) {
            continue;
        }
        for (int j = 0; j < M->n; j++) {
            const fiber *g = &M->fibers[j];
            if (g->state == WAITING && wait_alike(f, g)) {
                first = first && j >= i;
                alike++;
            }
        }
        if (first) {
            say("  ");
            say_thread(f);
            say(alike > 1 ? " and %d more wait for " : " waits for ",
                alike - 1);
            say_wait(f);
            say("\n");
        }
    }
    if (M->n_done > 0) {
        say("  %d threads have ended\n", M->n_done);
    }
}

static void
check_ends(void)
{
    for (int b = 0; b < M->blocks && M->options->check; b++) {
        for (unsigned i = 0; i < M->block_of[b].n_mbarriers; i++) {
            const mbarrier *m = &M->block_of[b].mbarriers[i];
            if (m->bytes != 0) {
                say("the block ends while an mbarrier is %ld bytes short: that "
                    "of byte %u, initialized at <at 0x%x>\n",
                    m->bytes, m->offset, m->where);
                M->failed = true;
            }
        }
    }
}

static void
run_fibers(void)
{
    const tkemu_kernel *k = &M->object->kernel;

    while (M->n_ready > 0 && !M->failed) {
        int at = M->options->check ? (int)(next_random() % (unsigned)M->n_ready)
                                   : M->n_ready - 1;
        fiber *f = &M->fibers[M->ready[at]];
        M->ready[at] = M->ready[--M->n_ready];
        M->current = f;
        *k->self = &f->head;
        if (++M->steps > STEP_LIMIT) {
            say("the kernel does not end: given up after %llu steps\n",
                STEP_LIMIT);
            M->failed = true;
            return;
        }
        tkemu_switch(&M->scheduler, f->stack_pointer);
    }
    if (!M->failed && M->n_done < M->n) {
        say_deadlock();
        M->failed = true;
    }
}

static tkemu_index
index_of(unsigned long long i, const unsigned size[3])
{
    tkemu_index at = {(unsigned)(i % size[0]),
                      (unsigned)(i / size[0] % size[1]),
                      (unsigned)(i / size[0] / size[1])};
    return at;
}

static void
free_meeting(meeting *m)
{
    free(m->known.seen);
    free(m->passed.seen);
    memset(m, 0, sizeof *m);
}

static void
clear_cluster(void)
{
    for (int b = 0; b < M->blocks; b++) {
        block *o = &M->block_of[b];
        for (int i = 0; i < NAMED; i++) {
            free_meeting(&o->named[i]);
        }
        for (unsigned i = 0; i < o->n_mbarriers; i++) {
            free(o->mbarriers[i].known.seen);
            free(o->mbarriers[i].passed.seen);
        }
        memset(o->groups, 0, sizeof o->groups);
        o->n_mbarriers = 0;
        o->alive = M->threads;
    }
    free_meeting(&M->cluster);
    memset(M->warp_of, 0, (size_t)M->warps * sizeof *M->warp_of);
}

/* Blocks [first, first + blocks) of the grid. */
static void
run_cluster(unsigned long long first)
{
    const tk_geometry *g = M->geometry;

    clear_cluster();
    __asan_unpoison_memory_region(M->stacks, (size_t)M->n * STACK);
    M->n_ready = M->n_done = 0;
    for (int b = 0; b < M->blocks; b++) {
        memset(M->shared + (size_t)b * STRIDE, 0xff, M->span);
    }
    if (M->checked) {
        memset(M->fiber_clocks, 0, 3 * clock_bytes() * (size_t)M->n);
        memset(M->shadows, 0xff, M->n_shadows * sizeof *M->shadows);
    }
    for (int i = 0; i < M->n; i++) {
        fiber *f = &M->fibers[i];
        memset(f, 0, sizeof *f);
        f->id = (uint16_t)i;
        f->block = (uint16_t)(i / M->threads);
        int t = i % M->threads, warps = (M->threads + WARP - 1) / WARP;
        f->warp = (uint16_t)(f->block * warps + t / WARP);
        f->head.thread = index_of((unsigned)t, g->block);
        f->head.block = index_of(first + f->block, g->grid);
        f->head.block_dim =
            (tkemu_index){g->block[0], g->block[1], g->block[2]};
        f->head.grid_dim = (tkemu_index){g->grid[0], g->grid[1], g->grid[2]};
        f->head.shared = M->shared + (size_t)f->block * STRIDE;
        f->head.variables = f->head.shared + M->variables;
        f->head.shared_size = g->smem;
        f->head.shared_span = (unsigned)M->span;
        f->head.lane = t % WARP;
        f->head.cluster_rank = f->block;
        f->head.cluster_size = M->blocks;
        if (M->checked) {
            f->known = clocks_in(M->fiber_clocks + (size_t)(3 * i) * M->width);
            tick(f);
        }
        start_fiber(f);
    }
    run_fibers();
    if (!M->failed) {
        check_ends();
    }
    if (M->object->counts != NULL) {
        tkcount_settle(M->object->counts);
    }
}

/* --- A launch ------------------------------------------------------------ */

static void
free_machine(machine *m)
{
    if (m->block_of != NULL) {
        clear_cluster();
        for (int b = 0; b < m->blocks; b++) {
            free(m->block_of[b].mbarriers);
        }
    }
    if (m->stacks != NULL) {
        __asan_unpoison_memory_region(m->stacks, (size_t)m->n * STACK);
        munmap(m->stacks, (size_t)m->n * STACK);
    }
    free(m->fibers);
    free(m->warp_of);
    free(m->block_of);
    if (m->shared != NULL) {
        munmap(m->shared - STRIDE, (size_t)(m->blocks + 2) * STRIDE);
    }
    free(m->shadows);
    free(m->fiber_clocks);
    free(m->ready);
    free(m->message);
}

static int
fill_machine(machine *m, tk_error *err)
{
    const tk_geometry *g = m->geometry;
    size_t n, own = m->object->variables;

    m->threads = (int)(g->block[0] * g->block[1] * g->block[2]);
    m->blocks = (int)(g->cluster[0] * g->cluster[1] * g->cluster[2]);
    m->n = m->threads * m->blocks;
    m->warps = (m->threads + WARP - 1) / WARP * m->blocks;
    m->width = (unsigned)(m->n + m->warps);
    if (m->threads < 1 || m->threads > 1024 || m->blocks < 1 ||
        m->blocks > 16) {
        return tk_fail(err, TK_LAUNCH,
                       "%s: a block has 1 to 1024 threads, a cluster 1 to 16 "
                       "blocks",
                       m->name);
    }
    for (int i = 0; i < 3; i++) {
        unsigned most = i == 0 ? INT32_MAX : UINT16_MAX;
        if (g->grid[i] < 1 || g->grid[i] > most ||
            g->grid[i] % g->cluster[i] != 0) {
            return tk_fail(err, TK_LAUNCH,
                           "%s: a GPU refuses a grid of (%u, %u, %u) blocks in "
                           "clusters of (%u, %u, %u)",
                           m->name, g->grid[0], g->grid[1], g->grid[2],
                           g->cluster[0], g->cluster[1], g->cluster[2]);
        }
    }
    m->checked = m->options->check && m->n <= MAX_CHECKED;
    m->random = m->options->seed * 2 + 0x9e3779b97f4a7c15u;
    n = (size_t)m->n;
    m->variables = (g->smem + 2 * GAP - 1) / GAP * GAP;
    m->span = own > 0 ? m->variables + own : g->smem;
    m->n_shadows = m->span * (size_t)m->blocks;
    m->fibers = calloc(n, sizeof *m->fibers);
    m->warp_of = calloc((size_t)m->warps, sizeof *m->warp_of);
    m->block_of = calloc((size_t)m->blocks, sizeof *m->block_of);
    m->ready = calloc(n, sizeof *m->ready);
    void *stacks = mmap(NULL, n * STACK, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    m->stacks = stacks == MAP_FAILED ? NULL : stacks;
    void *shared =
        mmap(NULL, (size_t)(m->blocks + 2) * STRIDE, PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    m->shared = shared == MAP_FAILED ? NULL : (unsigned char *)shared + STRIDE;
    bool good = m->fibers != NULL && m->warp_of != NULL &&
                m->block_of != NULL && m->ready != NULL && m->shared != NULL &&
                m->stacks != NULL;
    for (int b = 0; good && b < m->blocks; b++) {
        m->block_of[b].mbarriers = calloc(MBARRIERS, sizeof(mbarrier));
        good = m->block_of[b].mbarriers != NULL;
    }
    if (good && m->checked) {
        m->shadows = malloc(m->n_shadows * sizeof *m->shadows);
        m->fiber_clocks = calloc(3 * n, m->width * sizeof(uint32_t));
        good = m->shadows != NULL && m->fiber_clocks != NULL;
    }
    return good ? 0
                : tk_fail(err, TK_MEMORY, "no memory for the threads of %s",
                          m->name);
}

static int
run_grid(machine *m, tk_error *err)
{
    const tk_geometry *g = m->geometry;
    unsigned long long blocks =
        (unsigned long long)g->grid[0] * g->grid[1] * g->grid[2];

    if (m->options->check > 1 && m->object->counts == NULL) {
        m->object->counts = tkcount_new();
        if (m->object->counts == NULL) {
            return tk_fail(err, TK_MEMORY, "no memory for a table of counts");
        }
    }
    *m->object->kernel.machine = &functions;
    for (unsigned long long i = 0; i < blocks && !m->failed;
         i += (unsigned)m->blocks) {
        run_cluster(i);
    }
    if (!m->failed) {
        return 0;
    }
    return tk_fail(err, TK_EMULATOR, "%s, seed %llu: %s", m->name,
                   (unsigned long long)m->options->seed,
                   m->message != NULL ? m->message : "out of memory");
}

int
tkemu_launch(tk_emulated *object, const tk_geometry *geometry,
             void *const *params, const tk_emulation *options, const char *name,
             tk_error *err)
{
    machine m = {.object = object,
                 .geometry = geometry,
                 .options = options,
                 .params = params,
                 .name = name};
    int status = -1;

    pthread_mutex_lock(&one_launch);
    M = &m;
    if (fill_machine(&m, err) == 0) {
        status = run_grid(&m, err);
    }
    free_machine(&m);
    M = NULL;
    pthread_mutex_unlock(&one_launch);
    return status;
}

/* --- Loading ------------------------------------------------------------- */

/* For dl_iterate_phdr: where the object lies that is loaded at its base, and
 * how much thread-local memory it has. */
static int
note_segments(struct dl_phdr_info *info, size_t size, void *object)
{
    tk_emulated *e = object;
    (void)size;

    if (info->dlpi_addr != e->base) {
        return 0;
    }
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *h = &info->dlpi_phdr[i];
        if (h->p_type == PT_TLS) {
            e->variables = h->p_memsz;
        }
        if (h->p_type != PT_LOAD) {
            continue;
        }
        uintptr_t begin = e->base + h->p_vaddr, end = begin + h->p_memsz;
        e->begin = e->begin == 0 || begin < e->begin ? begin : e->begin;
        e->end = end > e->end ? end : e->end;
        if (h->p_flags & PF_W) {
            e->data_begin = begin;
            e->data_end = end;
        }
    }
    return 1;
}

/* A path of the open file that no earlier one was named by: the loader takes a
 * name that it has seen for the library it has. */
static void
name_of_file(int fd, char *path, size_t size)
{
    static _Atomic unsigned loads;
    unsigned number = loads++;
    size_t at = (size_t)snprintf(path, size, "/proc/self/fd");

    for (int bit = 0; bit < 32 && at + 16 < size; bit++) {
        at += (size_t)snprintf(path + at, size - at,
                               number >> bit & 1 ? "/." : "//");
    }
    snprintf(path + at, size - at, "/%d", fd);
}

int
tkemu_load(const tk_binary *binary, tk_emulated **out, tk_error *err)
{
    char path[128];
    Dl_info info;
    tk_emulated *e = tk_calloc(sizeof *e);
    if (e == NULL) {
        return tk_fail(err, TK_MEMORY, "no memory for a kernel");
    }
    int fd = memfd_create("tkjit-kernel", MFD_CLOEXEC);
    const unsigned char *at = binary->image;
    size_t left = fd < 0 ? 0 : binary->image_size;
    while (left > 0) {
        ssize_t n = write(fd, at, left);
        if (n <= 0) {
            break;
        }
        at += n;
        left -= (size_t)n;
    }
    name_of_file(fd, path, sizeof path);
    if (fd >= 0 && left == 0) {
        e->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    }
    int (*describe)(tkemu_kernel *) = NULL;
    if (e->library != NULL) {
        *(void **)&describe = dlsym(e->library, "tkemu_describe");
    }
    if (describe == NULL || describe(&e->kernel) != 0 ||
        e->kernel.abi != TKEMU_ABI || dladdr(*(void **)&describe, &info) == 0) {
        const char *why = fd < 0 ? strerror(errno) : dlerror();
        tk_fail(err, TK_LAUNCH,
                "a kernel compiled for the CPU cannot be "
                "loaded: %s",
                why != NULL ? why : "it is of another version");
        if (e->library != NULL) {
            dlclose(e->library);
        }
        tk_free(e);
        e = NULL;
    }
    else {
        e->base = (uintptr_t)info.dli_fbase;
        dl_iterate_phdr(note_segments, e);
        *out = e;
    }
    if (fd >= 0) {
        close(fd);
    }
    return e != NULL ? 0 : -1;
}

void
tkemu_unload(tk_emulated *e)
{
    if (e != NULL) {
        tkcount_free(e->counts);
        dlclose(e->library);
        tk_free(e);
    }
}

const tk_counts *
tkemu_counts(const tk_emulated *e)
{
    return e->counts;
}
