// Registers <-> memory: vectors of 2 to 32 bytes, cache hints, the block's shared memory.
#pragma once
#include "tk/types.cuh"

namespace tk {

// What is known about the next use of the bytes that are loaded. A hint changes speed, never results.
enum Hint {
    kDefault,   // keep as any data
    kReadOnce,  // nobody reads these bytes again soon: don't fill L1 with them
};

// kBytes (2, 4, 8, 16 or a multiple of 16) of memory in registers. Words, not elements: a register array of 2-byte
// elements would be packed and unpacked at every access.
template <int kBytes>
struct Words {
    static constexpr int kCount = kBytes < 4 ? 1 : kBytes / 4;
    uint32_t w[kCount];
};

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

// 0, which the compiler can't know; number 0 and number 1 are two that it can't know to be equal. The launch's grid is
// one-dimensional.
template <int kNumber>
TK_DEVICE uint32_t opaque_zero()
{
    return (kNumber == 0 ? gridDim.z : gridDim.y) - 1;
}

// kN elements of T in registers.
template <class T, int kN>
struct Vec {
    static constexpr int kBytes = kN * int(sizeof(T));
    using Acc = accumulator_t<T>;
    Words<kBytes> raw;

    // All elements, converted exactly.
    TK_DEVICE void unpack(Acc (&out)[kN]) const
    {
#pragma unroll
        for (int i = 0; i < kN; ++i) {
            if constexpr (sizeof(T) == 8) {
                out[i] = __hiloint2double(int(raw.w[2 * i + 1]), int(raw.w[2 * i]));
            } else if constexpr (sizeof(T) == 4) {
                out[i] = float_of(raw.w[i]);
            } else if constexpr (kN == 1) {
                out[0] = to_acc(T{uint16_t(raw.w[0])});
            } else if (i % 2 == 0) {
                unpack2(raw.w[i / 2], out[i], out[i + 1], T{});
            }
        }
    }

    // The same vector, of which the compiler doesn't know that it was unpacked before: it converts again rather than keep
    // the (twice as large) result of the first time in registers. A third time is again<1>(). Two-byte types only; others
    // cost nothing to unpack.
    template <int kNumber = 0>
    TK_DEVICE Vec again() const
    {
        Vec v = *this;
        if constexpr (sizeof(T) == 2) {
#pragma unroll
            for (int i = 0; i < Words<kBytes>::kCount; ++i) {
                v.raw.w[i] ^= opaque_zero<kNumber>();
            }
        }
        return v;
    }

    // All elements, rounded to nearest even.
    TK_DEVICE static Vec pack(const Acc (&in)[kN])
    {
        Vec v;
#pragma unroll
        for (int i = 0; i < kN; ++i) {
            if constexpr (sizeof(T) == 8) {
                v.raw.w[2 * i] = uint32_t(__double2loint(in[i]));
                v.raw.w[2 * i + 1] = uint32_t(__double2hiint(in[i]));
            } else if constexpr (sizeof(T) == 4) {
                v.raw.w[i] = bits_of(in[i]);
            } else if constexpr (kN == 1) {
                v.raw.w[0] = from_acc<T>(in[0]).bits;
            } else if (i % 2 == 0) {
                v.raw.w[i / 2] = pack2(in[i], in[i + 1], T{});
            }
        }
        return v;
    }

    // Element by element the larger one; a NaN loses to a number. Two-byte types.
    TK_DEVICE static Vec max(const Vec& a, const Vec& b)
    {
        Vec v;
#pragma unroll
        for (int i = 0; i < Words<kBytes>::kCount; ++i) {
            v.raw.w[i] = max2(a.raw.w[i], b.raw.w[i], T{});
        }
        return v;
    }

    TK_DEVICE static Vec filled(Acc value)
    {
        Acc all[kN];
#pragma unroll
        for (int i = 0; i < kN; ++i) {
            all[i] = value;
        }
        return pack(all);
    }
};

// The block's dynamic shared memory as one struct. Every thread of the block gets the same object; its bytes are not
// initialized. The launch gives at least sizeof(Layout) bytes.
extern __shared__ __align__(128) char dynamic_shared[];
template <class Layout>
TK_DEVICE Layout& shared() { return *reinterpret_cast<Layout*>(dynamic_shared); }

}  // namespace tk
