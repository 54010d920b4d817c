// Matrix products on the tensor cores: of a warp (mma), and of a warpgroup that reads shared memory (wgmma, sm_90a).
//
// Not part of tk/tk.cuh: a kernel that multiplies matrices includes it. On machines without the instruction a primitive
// here traps: the host passes no kernel that reaches it.
//
// A fragment is what one lane holds of a matrix, in words of 32 bits; a word holds 1, 2 or 4 neighbours along k, the first
// one lowest. With g = lane / 4 and q = lane % 4, and rows counted from a warp's first:
//     A, 16 rows x 32 bytes of k   Words<16>   w[0]: row g,     word q     w[2]: row g,     word q + 4
//                                              w[1]: row g + 8, word q     w[3]: row g + 8, word q + 4
//     A, 16 rows x 16 bytes of k   Words<8>    w[0], w[1] of the above
//     B, 8 columns x 32 bytes of k Words<8>    w[0]: column g, word q     w[1]: column g, word q + 4
//     B, 8 columns x 16 bytes of k Words<4>    w[0] of the above
//     C, 16 rows x 8 columns       float[4]    [0], [1]: row g, columns 2q and 2q + 1      [2], [3]: the same of row g + 8
// So two neighbours of C along the columns, packed into 16 bits each, are a fragment A of the next product.
#pragma once
#include "tk/async.cuh"

namespace tk {

// Storage types that only the tensor cores multiply. Of tf32 the 13 low bits are ignored: any float will do.
struct e4m3 { uint8_t bits; };
struct e5m2 { uint8_t bits; };
struct tf32 { uint32_t bits; };

template <class T> constexpr bool is_fp8 = is_same<T, e4m3>::value || is_same<T, e5m2>::value;
template <class T> constexpr bool is_two_bytes = is_same<T, f16>::value || is_same<T, bf16>::value;

// What tf32 ignores of a float, rounded to a tf32: of NaN and infinity nothing.
TK_DEVICE uint32_t tf32_rest(uint32_t v);

// Which pair of types is multiplied: an index, or -1 where there is no such product.
template <class TA, class TB>
TK_DEVICE constexpr int product_types()
{
    if constexpr (is_fp8<TA> && is_fp8<TB>) {
        return 3 + 2 * is_same<TA, e5m2>::value + is_same<TB, e5m2>::value;
    } else {
        return !is_same<TA, TB>::value ? -1 : is_same<TA, f16>::value ? 0 : is_same<TA, bf16>::value ? 1
                                              : is_same<TA, tf32>::value ? 2 : -1;
    }
}

// ---- operands of wgmma in shared memory -----------------------------------------------------------------------------

// Which neighbours of a matrix lie side by side in memory. kMajorMN: those of one k; for types of two bytes only.
enum Major { kMajorK = 0, kMajorMN = 1 };

// What wgmma has here: of the machine's widths 8 and the multiples of 16.
template <int kN, class TA, class TB, Major kA, Major kB>
TK_DEVICE constexpr bool is_wgmma()
{
    return (kN == 8 || (kN > 0 && kN % 16 == 0 && kN <= 256)) && product_types<TA, TB>() >= 0 &&
           (is_two_bytes<TA> || (kA == kMajorK && kB == kMajorK));
}

// How 16-byte pieces change places in shared memory, so that a tile's columns are spread over the banks.
enum Swizzle { kSwizzleNone = 0, kSwizzle128 = 1, kSwizzle64 = 2, kSwizzle32 = 3 };

// Bytes of an atom's row: an atom is 8 rows (of m or n; kMajorMN: of k) of so many bytes, one behind the other.
TK_DEVICE constexpr int row_bytes(Swizzle s)
{
    return s == kSwizzle128 ? 128 : s == kSwizzle64 ? 64 : s == kSwizzle32 ? 32 : 16;
}

// Where the byte lies that would be at `at` without swizzle. `at` counts from an address that 1024 divides.
TK_DEVICE constexpr uint32_t swizzled(uint32_t at, Swizzle s)
{
    return at ^ (at >> 3 & uint32_t(row_bytes(s) - 16));
}

// Describes an operand to wgmma. `start` is the address of its first element, aligned to 16 bytes, in the block's shared
// memory; the offsets, multiples of 16 below 2^18, lead from an atom to the next
//               kMajorK                                 kMajorMN
//     stride    8 rows of m or n further                8 rows of k further (kSwizzleNone: 8 elements of m or n)
//     leading   16 bytes of k further (kSwizzleNone;    a row's bytes of m or n further (kSwizzleNone: 8 rows of k)
//               else it is not used)
// Atoms begin at multiples of 8 rows' bytes (1024, 512, 256); else `base` is their address >> 7, of which 3 bits count.
TK_DEVICE uint64_t matrix_descriptor(const void* start, int leading, int stride, Swizzle s, int base = 0);

// The same operand, `bytes` further on, a multiple of 16: the next k of a row, say.
TK_DEVICE uint64_t advanced(uint64_t descriptor, int bytes)
{
    const uint32_t low = uint32_t(descriptor) + (uint32_t(bytes) >> 4);  // the high word is a constant in a loop
    return (descriptor >> 32 << 32) | low;
}

}  // namespace tk

#ifdef TK_EMULATE
#include "tk/emu/mma.cuh"
#else
#include "tk/ptx/mma.cuh"
#endif

namespace tk {

TK_DEVICE uint64_t matrix_descriptor(const void* start, int leading, int stride, Swizzle s, int base)
{
    const auto field = [](uint32_t v) { return uint64_t(v >> 4 & 0x3fff); };
    return field(matrix_address(start)) | field(uint32_t(leading)) << 16 | field(uint32_t(stride)) << 32 |
           uint64_t(base & 7) << 49 | uint64_t(s) << 62;
}

}  // namespace tk
