// Accesses of global and shared memory. Under checks each is told as a whole, and its bytes are moved unseen by the compiler's
// hooks, which would take 16 bytes for two accesses of 8.
#pragma once

namespace tk {

template <int kBytes>
TK_DEVICE Words<kBytes> load_bytes_at(const void* p)
{
    tkemu::machine->aligned(p, kBytes < 16 ? kBytes : 16);
    Words<kBytes> r;
    r.w[0] = 0;
#ifdef TKEMU_CHECK
    for (int i = 0; i < kBytes; i += 16) {
        tkemu::machine->touch(static_cast<const char*>(p) + i, kBytes < 16 ? kBytes : 16, TKEMU_READ);
    }
    tkemu::machine->copy(&r, p, kBytes);
#else
    memcpy(&r, p, kBytes);
#endif
    return r;
}

template <int kBytes, Hint kHint = kDefault>
TK_DEVICE Words<kBytes> load_global(const void* p) { return load_bytes_at<kBytes>(p); }
template <int kBytes>
TK_DEVICE Words<kBytes> load_shared(const void* p) { return load_bytes_at<kBytes>(p); }

template <int kBytes>
TK_DEVICE void store_global(void* p, const Words<kBytes>& v)
{
    tkemu::machine->aligned(p, kBytes < 16 ? kBytes : 16);
#ifdef TKEMU_CHECK
    for (int i = 0; i < kBytes; i += 16) {
        tkemu::machine->touch(static_cast<char*>(p) + i, kBytes < 16 ? kBytes : 16, TKEMU_WRITE);
    }
    tkemu::machine->copy(p, &v, kBytes);
#else
    memcpy(p, &v, kBytes);
#endif
}

TK_DEVICE uint64_t fetch_add(uint64_t* p, uint64_t v) { return atomicAdd(p, v); }
TK_DEVICE void fence_device() {}

template <int kNumber>
TK_DEVICE uint32_t opaque_zero() { return 0; }
TK_DEVICE void keep(float&) {}
TK_DEVICE void keep(double&) {}

TK_DEVICE char* shared_memory(int bytes)
{
    if (unsigned(bytes) > tkemu::self->shared_size) {
        tkemu::machine->fault("the kernel uses more dynamic shared memory than its launch gives");
    }
    return reinterpret_cast<char*>(tkemu::self->shared);
}

}  // namespace tk
