// mbarriers, bulk copies and asynchronous copies.
//
// On machines without the instruction a primitive here traps: the host passes no kernel that reaches it.
#pragma once

namespace tk {

// One thread, once, before anyone uses it: a phase ends after `arrivals` arrivals (and all expected bytes). Others (the
// copy engine and neighbour blocks too) may use it after fence_barrier_init by that thread and a block/cluster barrier.
TK_DEVICE void init(Barrier& b, int arrivals)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_address(&b)), "r"(arrivals) : "memory");
#else
    __trap();
#endif
}
TK_DEVICE void fence_barrier_init()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// One arrival, before which the thread's accesses are visible to whoever waits for the phase; and the phase waits for
// `bytes` more bytes. Bytes may come in before they are expected.
TK_DEVICE void arrive_expect(Barrier& b, int bytes)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :: "r"(shared_address(&b)), "r"(bytes) : "memory");
#else
    __trap();
#endif
}

// Returns once the phase of this parity is over; on a fresh barrier, parity 1 counts as over. Accesses before the
// arrivals, and the bytes that counted, are visible after it. The phase waited for is the current or the last one.
TK_DEVICE void wait(Barrier& b, int parity)
{
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again; }"
        :: "r"(shared_address(&b)), "r"(parity) : "memory");
#else
    __trap();
#endif
}
// The same, where the arrivals or bytes come from other blocks of the cluster.
TK_DEVICE void wait_cluster(Barrier& b, int parity)
{
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again; }"
        :: "r"(shared_address(&b)), "r"(parity) : "memory");
#else
    __trap();
#endif
}

// Stores 8 or 16 bytes at `p` in block `rank`'s shared memory and counts them at `b` there. `p` and `b` name the place
// in this block; the layouts agree. Asynchronous: visible to those who wait_cluster on that barrier.
template <int kBytes>
TK_DEVICE void store_peer(void* p, const Words<kBytes>& v, Barrier& b, int rank)
{
#if __CUDA_ARCH__ >= 900
    const uint32_t to = peer_address(p, rank), at = peer_address(&b, rank);
    if constexpr (kBytes == 4) {
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];"
                     :: "r"(to), "r"(v.w[0]), "r"(at) : "memory");
    } else if constexpr (kBytes == 8) {
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [%0], {%1, %2}, [%3];"
                     :: "r"(to), "r"(v.w[0]), "r"(v.w[1]), "r"(at) : "memory");
    } else {
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, [%5];"
                     :: "r"(to), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]), "r"(v.w[3]), "r"(at) : "memory");
    }
#else
    __trap();
#endif
}

// ---- bulk copies: one thread moves kilobytes -----------------------------------------------------------------------

// Starts a copy of `bytes` (a multiple of 16, > 0) from global to this block's shared memory, both 16-byte aligned, and
// counts them at `full` when they are there. Shared accesses of other threads that must come first are ordered by a
// barrier; ordinary *writes* to the place also need fence_async by their thread before that barrier.
TK_DEVICE void bulk_load(void* to, const void* from, int bytes, Barrier& full)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(&full)) : "memory");
#else
    __trap();
#endif
}

// Orders this thread's ordinary shared accesses before later ones of the copy engine (bulk copies).
TK_DEVICE void fence_async()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// ---- cp.async: each thread moves 4, 8 or 16 bytes ------------------------------------------------------------------

// Starts a copy of kBytes, both sides aligned to them. Done, and visible to this thread, after the copy_wait that covers its
// group; to others after a barrier as well. The place may be read before by this thread alone. Where the machine has no
// such copy (before sm_80), it is done at once.
template <int kBytes>
TK_DEVICE void copy_async(void* to, const void* from)
{
#if __CUDA_ARCH__ >= 800
    if constexpr (kBytes == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(shared_address(to)), "l"(from) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;"
                     :: "r"(shared_address(to)), "l"(from), "n"(kBytes) : "memory");
    }
#else
    *static_cast<Words<kBytes>*>(to) = load_global<kBytes>(from);
#endif
}
// The same, or, where nothing is there, zeros: `from` is not read then.
template <int kBytes>
TK_DEVICE void copy_async_or_zero(void* to, const void* from, bool there)
{
#if __CUDA_ARCH__ >= 800
    const int bytes = there ? kBytes : 0;
    if constexpr (kBytes == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                     :: "r"(shared_address(to)), "l"(from), "r"(bytes) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                     :: "r"(shared_address(to)), "l"(from), "n"(kBytes), "r"(bytes) : "memory");
    }
#else
    *static_cast<Words<kBytes>*>(to) = there ? load_global<kBytes>(from) : Words<kBytes>{};
#endif
}
// Makes a group of this thread's copy_async since the last commit; it may be empty.
TK_DEVICE void copy_commit()
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits until at most kPending groups of this thread, the latest ones, are not done.
template <int kPending>
TK_DEVICE void copy_wait()
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" :: "n"(kPending) : "memory");
#endif
}

}  // namespace tk
