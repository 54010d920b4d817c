// The number types of the kernels and their conversions; plain integers by their usual names.
//
// No toolkit header is included anywhere under templates/: these types replace <cuda_fp16.h>, <cuda_bf16.h> and
// <stdint.h>, so that a small kernel compiles in some ten milliseconds.
#pragma once
#ifdef TK_EMULATE
#include "tk/emu/cuda.cuh"
#endif

using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
using uintptr_t = unsigned long long;

#define TK_DEVICE __device__ __forceinline__

namespace tk {

// Storage types: two bytes, no arithmetic. Values are converted to float, computed on, and converted back.
struct f16 { uint16_t bits; };
struct bf16 { uint16_t bits; };

// The type a sum over T is kept in.
template <class T> struct accumulator { using type = float; };
template <> struct accumulator<double> { using type = double; };
template <class T> using accumulator_t = typename accumulator<T>::type;

template <class A, class B> struct is_same { static constexpr bool value = false; };
template <class A> struct is_same<A, A> { static constexpr bool value = true; };

template <bool kWhich, class A, class B> struct select { using type = A; };
template <class A, class B> struct select<false, A, B> { using type = B; };

TK_DEVICE uint32_t bits_of(float v) { return __float_as_uint(v); }
TK_DEVICE float float_of(uint32_t v) { return __uint_as_float(v); }

}  // namespace tk

#ifdef TK_EMULATE
#include "tk/emu/convert.cuh"
#else
#include "tk/ptx/convert.cuh"
#endif

namespace tk {

// One value, to and from the accumulator's type.
TK_DEVICE float to_acc(float v) { return v; }
TK_DEVICE double to_acc(double v) { return v; }
TK_DEVICE float to_acc(f16 v) { float lo, hi; unpack2(v.bits, lo, hi, f16{}); return lo; }
TK_DEVICE float to_acc(bf16 v) { return float_of(uint32_t(v.bits) << 16); }

template <class T> struct from_acc_impl {
    TK_DEVICE static T cast(float v) { return T{uint16_t(pack2(v, 0.0f, T{}))}; }
};
template <> struct from_acc_impl<float> { TK_DEVICE static float cast(float v) { return v; } };
template <> struct from_acc_impl<double> { TK_DEVICE static double cast(double v) { return v; } };
template <class T> TK_DEVICE T from_acc(accumulator_t<T> v) { return from_acc_impl<T>::cast(v); }

template <class I> TK_DEVICE I min(I a, I b) { return a < b ? a : b; }
template <class I> TK_DEVICE I max(I a, I b) { return a > b ? a : b; }

}  // namespace tk
