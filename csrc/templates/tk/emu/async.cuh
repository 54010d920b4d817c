// mbarriers, bulk copies and asynchronous copies. A copy is made when it is issued, and counts as made when it is waited for:
// who touches its bytes in between is reported.
#pragma once

namespace tk {

TK_DEVICE void require_arch(int arch)
{
    if (__CUDA_ARCH__ < arch) {
        tkemu::machine->fault("the architecture has no such instruction");
    }
}

TK_DEVICE void init(Barrier& b, int arrivals)
{
    require_arch(900);
    tkemu::machine->mbarrier_init(&b, arrivals);
}
TK_DEVICE void fence_barrier_init() { tkemu::machine->fence(TKEMU_FENCE_BARRIER_INIT); }
TK_DEVICE void arrive_expect(Barrier& b, int bytes) { tkemu::machine->mbarrier_arrive(&b, 1, bytes); }
TK_DEVICE void wait(Barrier& b, int parity) { tkemu::machine->mbarrier_wait(&b, parity); }
TK_DEVICE void wait_cluster(Barrier& b, int parity) { tkemu::machine->mbarrier_wait(&b, parity); }

template <int kBytes>
TK_DEVICE void store_peer(void* p, const Words<kBytes>& v, Barrier& b, int rank)
{
    require_arch(900);
    void* to = tkemu::machine->peer(p, rank);
    tkemu::machine->aligned(to, kBytes);
    const int op = tkemu::machine->async_begin(-1);
    tkemu::machine->async_access(op, to, kBytes, TKEMU_WRITE);
    tkemu::machine->copy(to, &v, kBytes);
    tkemu::machine->async_complete(op, tkemu::machine->peer(&b, rank), kBytes);
}

TK_DEVICE void bulk_load(void* to, const void* from, int bytes, Barrier& full)
{
    require_arch(900);
    if (bytes <= 0 || bytes % 16 != 0) {
        tkemu::machine->fault("a bulk copy moves a positive multiple of 16 bytes");
    }
    tkemu::machine->aligned(to, 16);
    tkemu::machine->aligned(from, 16);
    const int op = tkemu::machine->async_begin(-1);
    tkemu::machine->async_access(op, from, unsigned(bytes), TKEMU_READ);
    tkemu::machine->async_access(op, to, unsigned(bytes), TKEMU_WRITE);
    tkemu::machine->copy(to, from, unsigned(bytes));
    tkemu::machine->async_complete(op, &full, bytes);
}
TK_DEVICE void fence_async() { tkemu::machine->fence(TKEMU_FENCE_ASYNC); }

template <int kBytes>
TK_DEVICE void copy_async(void* to, const void* from)
{
    tkemu::machine->aligned(to, kBytes);
    tkemu::machine->aligned(from, kBytes);
    const int op = tkemu::machine->async_begin(TKEMU_COPIES);
    tkemu::machine->async_access(op, from, kBytes, TKEMU_READ);
    tkemu::machine->async_access(op, to, kBytes, TKEMU_WRITE);
    tkemu::machine->copy(to, from, kBytes);
}
template <int kBytes>
TK_DEVICE void copy_async_or_zero(void* to, const void* from, bool there)
{
    if (there) {
        copy_async<kBytes>(to, from);
        return;
    }
    tkemu::machine->aligned(to, kBytes);
    const int op = tkemu::machine->async_begin(TKEMU_COPIES);
    tkemu::machine->async_access(op, to, kBytes, TKEMU_WRITE);
    const Words<kBytes> zeros{};
    tkemu::machine->copy(to, &zeros, kBytes);
}
TK_DEVICE void copy_commit() { tkemu::machine->async_commit(TKEMU_COPIES); }
template <int kPending>
TK_DEVICE void copy_wait() { tkemu::machine->async_wait(TKEMU_COPIES, kPending); }

}  // namespace tk
