// Arithmetic: maxima, exponentials, logarithms.
#pragma once
#include "tk/types.cuh"
#ifdef TK_EMULATE
#include "tk/emu/math.cuh"
#else
#include "tk/ptx/math.cuh"
#endif

namespace tk {

template <class Acc> struct limits;
template <> struct limits<float> { TK_DEVICE static float inf() { return float_of(0x7f800000u); } };
template <> struct limits<double> { TK_DEVICE static double inf() { return __longlong_as_double(0x7ff0000000000000ll); } };

// The larger of two; a NaN loses to a number.
TK_DEVICE float fmax(float a, float b) { return ::fmaxf(a, b); }
TK_DEVICE double fmax(double a, double b) { return ::fmax(a, b); }

// a * b + c, rounded once; and a product that no compiler fuses with a sum.
TK_DEVICE float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
TK_DEVICE double fma(double a, double b, double c) { return __fma_rn(a, b, c); }
TK_DEVICE float mul(float a, float b) { return __fmul_rn(a, b); }
TK_DEVICE double mul(double a, double b) { return __dmul_rn(a, b); }

// e^v for v <= 0 (larger v: right, until it overflows). kPrecise: within 3 ulp. Otherwise the relative error grows as
// |v| * 2^-24, which is far below what a 16-bit result can show. Results under 2^-126 become 0; e^-inf is 0; NaN stays.
template <bool kPrecise>
TK_DEVICE float exp(float v)
{
    constexpr float kLog2e = 1.44269502e+00f, kLn2 = 6.93147182e-01f, kLn2Low = -1.90465421e-09f;
    if constexpr (!kPrecise) {
        return exp2(v * kLog2e);
    } else {
        // v = head * ln2 + rest, so e^v = 2^head * (1 + rest). The clamp keeps -inf out of the rest (inf - inf) and lets
        // NaN through, which fmaxf would not.
        v = v < -110.0f ? -110.0f : v;
        const float head = v * kLog2e;
        const float rest = __fmaf_rn(head, -kLn2Low, __fmaf_rn(head, -kLn2, v));
        const float r = exp2(head);
        return __fmaf_rn(r, rest, r);
    }
}
template <bool kPrecise>
TK_DEVICE double exp(double v) { return ::exp(v); }

TK_DEVICE double exp2(double v) { return ::exp2(v); }
TK_DEVICE double reciprocal(double v) { return 1.0 / v; }

// Within 2 ulp; NaN stays NaN.
TK_DEVICE float tanh(float v) { return ::tanhf(v); }
TK_DEVICE double tanh(double v) { return ::tanh(v); }

TK_DEVICE float abs(float v) { return ::fabsf(v); }
TK_DEVICE double abs(double v) { return ::fabs(v); }

// Correctly rounded.
TK_DEVICE float sqrt(float v) { return ::sqrtf(v); }
TK_DEVICE double sqrt(double v) { return ::sqrt(v); }
TK_DEVICE float inverse_sqrt(float v) { return ::rsqrtf(v); }  // within 2 units in the last place
TK_DEVICE double inverse_sqrt(double v) { return 1.0 / ::sqrt(v); }

// Natural logarithm, within 2 ulp.
TK_DEVICE float log(float v) { return ::logf(v); }
TK_DEVICE double log(double v) { return ::log(v); }

}  // namespace tk
