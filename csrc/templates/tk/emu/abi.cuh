/* abi.cuh - what a kernel that runs on the CPU and the emulator know of each other.
 *
 * Plain C, included by both: csrc/emulator.c, which implements it, and the
 * primitives in this folder, which call it.  A call's place in the kernel is
 * its return address. */
#ifndef TKEMU_ABI_H
#define TKEMU_ABI_H

enum { TKEMU_ABI = 3 }; /* a kernel of another number is not run */

/* How memory is touched. */
enum {
    TKEMU_READ = 0,
    TKEMU_WRITE = 1,
    TKEMU_ATOMIC = 2, /* races with plain accesses only */
};

/* What lanes exchange: all of a mask name the same, and as many bytes. */
enum {
    TKEMU_SHUFFLE = 1,
    TKEMU_VOTE,
    TKEMU_MATCH,
    TKEMU_REDUX,
    TKEMU_LDMATRIX,
    TKEMU_STMATRIX,
    TKEMU_MMA,
    TKEMU_WGMMA,
    TKEMU_ELECT,
};

/* Asynchronous operations that are waited for by group. */
enum { TKEMU_COPIES, TKEMU_BULK, TKEMU_MMAS, TKEMU_GROUPS };

enum {
    TKEMU_FENCE_ASYNC,        /* fence.proxy.async */
    TKEMU_FENCE_BARRIER_INIT, /* fence.mbarrier_init */
    TKEMU_FENCE_MMA,          /* wgmma.fence */
};

enum { TKEMU_MAX_EXCHANGE = 64 }; /* bytes a lane */

typedef struct {
    unsigned x, y, z;
} tkemu_index;

/* The running thread: the head of the emulator's own record. */
typedef struct {
    tkemu_index thread, block, block_dim, grid_dim;
    unsigned char *shared;    /* the block's: first what is dynamic, */
    unsigned char *variables; /* behind a gap its __shared__ variables */
    unsigned shared_size;     /* of what is dynamic */
    unsigned shared_span;     /* of all */
    int lane, cluster_rank, cluster_size;
} tkemu_thread;

typedef struct {
    /* A plain access, seen by the compiler's hook at `pc`: in bounds,
     * initialized, ordered? */
    void (*access)(const void *p, unsigned bytes, unsigned how, const void *pc);
    /* The same of a primitive, at the call's place. */
    void (*touch)(const void *p, unsigned bytes, unsigned how);
    /* An atomic one, and an address that has to be aligned. */
    void (*atomic)(const void *p, unsigned bytes);
    void (*aligned)(const void *p, unsigned bytes);
    /* memcpy that no hook sees. */
    void (*copy)(void *to, const void *from, unsigned bytes);
    /* bar.sync, or bar.arrive, of `threads` threads; 0: of all. */
    void (*barrier)(int id, int threads, int arrive_only);
    void (*warp_sync)(unsigned mask);
    /* All four warps of a warpgroup come to one instruction, and say the same
     * of it; orders no memory. */
    void (*warpgroup)(unsigned long long what);
    /* Gives `mine` to the lanes of the mask and returns what each gave; the
     * pointers hold until this thread's next exchange but one. */
    const void *const *(*exchange)(int what, unsigned mask, const void *mine,
                                   unsigned bytes);
    void (*cluster_arrive)(void);
    void (*cluster_wait)(void);
    /* The same place in the shared memory of a block of the cluster. */
    void *(*peer)(const void *p, int rank);
    /* mbarriers; they may lie in another block of the cluster. */
    void (*mbarrier_init)(void *b, int arrivals);
    void (*mbarrier_arrive)(void *b, int arrivals, long expected_bytes);
    int (*mbarrier_test)(void *b, int parity);
    void (*mbarrier_wait)(void *b, int parity);
    void (*fence)(int what);
    /* An asynchronous operation: what it touches is ordered after what its
     * thread has seen, and before those who wait for its barrier or group. */
    int (*async_begin)(int group); /* a group, or -1: by barrier */
    void (*async_access)(int op, const void *p, unsigned bytes, unsigned how);
    void (*async_complete)(int op, void *barrier, long bytes);
    void (*async_commit)(int group);
    void (*async_wait)(int group, int pending);
    /* Stops the kernel. */
    void (*fault)(const char *what);
} tkemu_machine;

/* A kernel's object exports one `tkemu_kernel`. */
typedef struct {
    int abi, arch;
    void (*run)(void *const *parameters);
    int n_parameters;
    const unsigned *parameter_sizes;
    tkemu_thread **self;           /* set whenever a thread goes on */
    const tkemu_machine **machine; /* set before the first */
} tkemu_kernel;

#endif
