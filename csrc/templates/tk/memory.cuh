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

}  // namespace tk

#ifdef TK_EMULATE
#include "tk/emu/memory.cuh"
#else
#include "tk/ptx/memory.cuh"
#endif

namespace tk {

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
template <class Layout>
TK_DEVICE Layout& shared() { return *reinterpret_cast<Layout*>(shared_memory(int(sizeof(Layout)))); }

}  // namespace tk
