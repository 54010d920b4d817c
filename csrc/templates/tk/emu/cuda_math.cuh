// The same functions for a C++ compiler, of the C library's. Not there: the inverse error functions and Bessel's i0 and i1.
#pragma once

#define TKEMU_DECLARE(name) \
    extern "C" double name(double); \
    extern "C" float name##f(float); \
    TKEMU_INLINE float name(float v) { return name##f(v); }
#define TKEMU_DECLARE2(name) \
    extern "C" double name(double, double); \
    extern "C" float name##f(float, float); \
    TKEMU_INLINE float name(float a, float b) { return name##f(a, b); }

TKEMU_DECLARE(acos) TKEMU_DECLARE(acosh) TKEMU_DECLARE(asin) TKEMU_DECLARE(asinh) TKEMU_DECLARE(atan) TKEMU_DECLARE(atanh)
TKEMU_DECLARE(cbrt) TKEMU_DECLARE(ceil) TKEMU_DECLARE(cos) TKEMU_DECLARE(cosh) TKEMU_DECLARE(erf) TKEMU_DECLARE(erfc)
TKEMU_DECLARE(exp) TKEMU_DECLARE(exp2) TKEMU_DECLARE(exp10) TKEMU_DECLARE(expm1) TKEMU_DECLARE(fabs) TKEMU_DECLARE(floor)
TKEMU_DECLARE(j0) TKEMU_DECLARE(j1) TKEMU_DECLARE(y0) TKEMU_DECLARE(y1) TKEMU_DECLARE(lgamma) TKEMU_DECLARE(log)
TKEMU_DECLARE(log10) TKEMU_DECLARE(log1p) TKEMU_DECLARE(log2) TKEMU_DECLARE(logb) TKEMU_DECLARE(nearbyint) TKEMU_DECLARE(rint)
TKEMU_DECLARE(round) TKEMU_DECLARE(sin) TKEMU_DECLARE(sinh) TKEMU_DECLARE(sqrt) TKEMU_DECLARE(tan) TKEMU_DECLARE(tanh)
TKEMU_DECLARE(tgamma) TKEMU_DECLARE(trunc)
TKEMU_DECLARE2(atan2) TKEMU_DECLARE2(copysign) TKEMU_DECLARE2(fdim) TKEMU_DECLARE2(fmax) TKEMU_DECLARE2(fmin)
TKEMU_DECLARE2(fmod) TKEMU_DECLARE2(hypot) TKEMU_DECLARE2(nextafter) TKEMU_DECLARE2(pow) TKEMU_DECLARE2(remainder)

TKEMU_INLINE float fma(float a, float b, float c) { return fmaf(a, b, c); }
TKEMU_INLINE double rsqrt(double v) { return 1.0 / sqrt(v); }
TKEMU_INLINE float rsqrt(float v) { return 1.0f / sqrtf(v); }
TKEMU_INLINE double normcdf(double v) { return 0.5 * erfc(-v * M_SQRT1_2); }
TKEMU_INLINE float normcdf(float v) { return float(normcdf(double(v))); }
TKEMU_INLINE float normcdff(float v) { return normcdf(v); }

template <class F> TKEMU_INLINE bool isnan(F v) { return v != v; }
template <class F> TKEMU_INLINE bool isinf(F v) { return v - v != v - v && v == v; }
template <class F> TKEMU_INLINE bool isfinite(F v) { return v - v == v - v; }
TKEMU_INLINE bool signbit(float v) { return __builtin_signbitf(v) != 0; }
TKEMU_INLINE bool signbit(double v) { return __builtin_signbit(v) != 0; }

TKEMU_INLINE float __sinf(float v) { return sinf(v); }
TKEMU_INLINE float __cosf(float v) { return cosf(v); }
TKEMU_INLINE float __tanf(float v) { return tanf(v); }
TKEMU_INLINE float __log2f(float v) { return log2f(v); }
TKEMU_INLINE float __log10f(float v) { return log10f(v); }
TKEMU_INLINE float __exp10f(float v) { return exp10f(v); }
TKEMU_INLINE float __powf(float a, float b) { return powf(a, b); }
TKEMU_INLINE float __fdividef(float a, float b) { return a / b; }
TKEMU_INLINE float __saturatef(float v) { return v > 0.0f ? v < 1.0f ? v : 1.0f : 0.0f; }
TKEMU_INLINE float __fadd_rn(float a, float b) { return a + b; }
TKEMU_INLINE float __fdiv_rn(float a, float b) { return a / b; }
TKEMU_INLINE float __frcp_rn(float v) { return 1.0f / v; }
TKEMU_INLINE float __fsqrt_rn(float v) { return sqrtf(v); }
TKEMU_INLINE float __frsqrt_rn(float v) { return 1.0f / sqrtf(v); }
TKEMU_INLINE int __popc(unsigned v) { return __builtin_popcount(v); }
TKEMU_INLINE int __clz(int v) { return v == 0 ? 32 : __builtin_clz(unsigned(v)); }
TKEMU_INLINE int __ffs(int v) { return __builtin_ffs(v); }

#define TKEMU_ORDER(type) \
    TKEMU_INLINE type max(type a, type b) { return a > b ? a : b; } \
    TKEMU_INLINE type min(type a, type b) { return a < b ? a : b; }
TKEMU_ORDER(int) TKEMU_ORDER(unsigned) TKEMU_ORDER(long) TKEMU_ORDER(unsigned long) TKEMU_ORDER(long long)
TKEMU_ORDER(unsigned long long)
TKEMU_INLINE float max(float a, float b) { return fmaxf(a, b); }
TKEMU_INLINE float min(float a, float b) { return fminf(a, b); }
TKEMU_INLINE double max(double a, double b) { return fmax(a, b); }
TKEMU_INLINE double min(double a, double b) { return fmin(a, b); }
TKEMU_INLINE int abs(int v) { return v < 0 ? -v : v; }
TKEMU_INLINE long long abs(long long v) { return v < 0 ? -v : v; }
TKEMU_INLINE float abs(float v) { return fabsf(v); }
TKEMU_INLINE double abs(double v) { return fabs(v); }

#undef TKEMU_DECLARE
#undef TKEMU_DECLARE2
#undef TKEMU_ORDER
