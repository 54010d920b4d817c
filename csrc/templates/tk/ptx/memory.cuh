// Accesses of global and shared memory.
#pragma once

namespace tk {

// Loads of ordinary global memory. p is aligned to min(kBytes, 16). Another thread's store to these bytes must be
// ordered by a barrier (in the block) or a kernel boundary: loads are not the read-only path, aliasing is allowed.
template <int kBytes, Hint kHint = kDefault>
TK_DEVICE Words<kBytes> load_global(const void* p)
{
    Words<kBytes> r;
    if constexpr (kBytes == 2) {
        uint16_t h;
        asm volatile("ld.global.u16 %0, [%1];" : "=h"(h) : "l"(p) : "memory");
        r.w[0] = h;
    } else if constexpr (kBytes == 4) {
        asm volatile("ld.global.u32 %0, [%1];" : "=r"(r.w[0]) : "l"(p) : "memory");
    } else if constexpr (kBytes == 8) {
        asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(r.w[0]), "=r"(r.w[1]) : "l"(p) : "memory");
    } else {
#pragma unroll
        for (int i = 0; i < kBytes / 16; ++i) {
            const void* q = static_cast<const char*>(p) + 16 * i;
            if constexpr (kHint == kReadOnce) {
                asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(r.w[4 * i]), "=r"(r.w[4 * i + 1]), "=r"(r.w[4 * i + 2]), "=r"(r.w[4 * i + 3])
                             : "l"(q) : "memory");
            } else {
                asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(r.w[4 * i]), "=r"(r.w[4 * i + 1]), "=r"(r.w[4 * i + 2]), "=r"(r.w[4 * i + 3])
                             : "l"(q) : "memory");
            }
        }
    }
    return r;
}

// Stores to global memory. p is aligned to min(kBytes, 16). Visible to the block after a barrier, to others after the
// kernel.
template <int kBytes>
TK_DEVICE void store_global(void* p, const Words<kBytes>& v)
{
    if constexpr (kBytes == 2) {
        asm volatile("st.global.u16 [%0], %1;" :: "l"(p), "h"(uint16_t(v.w[0])) : "memory");
    } else if constexpr (kBytes == 4) {
        asm volatile("st.global.u32 [%0], %1;" :: "l"(p), "r"(v.w[0]) : "memory");
    } else if constexpr (kBytes == 8) {
        asm volatile("st.global.v2.u32 [%0], {%1, %2};" :: "l"(p), "r"(v.w[0]), "r"(v.w[1]) : "memory");
    } else {
#pragma unroll
        for (int i = 0; i < kBytes / 16; ++i) {
            void* q = static_cast<char*>(p) + 16 * i;
            asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" :: "l"(q), "r"(v.w[4 * i]), "r"(v.w[4 * i + 1]),
                         "r"(v.w[4 * i + 2]), "r"(v.w[4 * i + 3]) : "memory");
        }
    }
}

// The 32-bit address of a place in this block's shared memory, for the primitives that need one.
TK_DEVICE uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

// Loads from this block's shared memory; p is aligned to min(kBytes, 16).
template <int kBytes>
TK_DEVICE Words<kBytes> load_shared(const void* p)
{
    Words<kBytes> r;
    const uint32_t a = shared_address(p);
    if constexpr (kBytes == 2) {
        uint16_t h;
        asm volatile("ld.shared.u16 %0, [%1];" : "=h"(h) : "r"(a) : "memory");
        r.w[0] = h;
    } else if constexpr (kBytes == 4) {
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(r.w[0]) : "r"(a) : "memory");
    } else if constexpr (kBytes == 8) {
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(r.w[0]), "=r"(r.w[1]) : "r"(a) : "memory");
    } else {
#pragma unroll
        for (int i = 0; i < kBytes / 16; ++i) {
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(r.w[4 * i]), "=r"(r.w[4 * i + 1]), "=r"(r.w[4 * i + 2]), "=r"(r.w[4 * i + 3])
                         : "r"(a + 16 * i) : "memory");
        }
    }
    return r;
}

// Adds to a place of global memory that other blocks add to as well, and returns what it held before. Orders nothing else.
TK_DEVICE uint64_t fetch_add(uint64_t* p, uint64_t v) { return atomicAdd(p, v); }

// What the thread wrote to global memory before is there for whoever sees what it writes after, and calls this between.
TK_DEVICE void fence_device() { __threadfence(); }

// 0, which the compiler can't know; number 0 and number 1 are two that it can't know to be equal. The launch's grid is
// one-dimensional.
template <int kNumber>
TK_DEVICE uint32_t opaque_zero()
{
    return (kNumber == 0 ? gridDim.z : gridDim.y) - 1;
}

// The value stays in its register: the compiler doesn't find it again from what it came of.
TK_DEVICE void keep(float& v) { asm("" : "+f"(v)); }
TK_DEVICE void keep(double& v) { asm("" : "+d"(v)); }

// The block's dynamic shared memory, of which the launch gave at least `bytes`.
extern __shared__ __align__(128) char dynamic_shared[];
TK_DEVICE char* shared_memory(int) { return dynamic_shared; }

}  // namespace tk
