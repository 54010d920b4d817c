// Conversions of two-byte numbers, and what is done with two of them at once.
#pragma once

namespace tk {

TK_DEVICE float half_to_float(uint32_t h)
{
    const uint32_t sign = (h & 0x8000u) << 16, e = h >> 10 & 31, m = h & 1023;
    if (e == 31) {
        return float_of(sign | 0x7f800000u | m << 13);
    }
    if (e == 0) {
        const float v = float(m) * 5.9604644775390625e-8f;  // 2^-24
        return float_of(sign | bits_of(v));
    }
    return float_of(sign | (e + 112) << 23 | m << 13);
}

TK_DEVICE uint32_t float_to_half(float v)
{
    const uint32_t u = bits_of(v), sign = u >> 16 & 0x8000u, a = u & 0x7fffffffu;
    if (a > 0x7f800000u) {
        return 0x7fffu;
    }
    if (a >= 0x477ff000u) {  // 65520 and above
        return sign | 0x7c00u;
    }
    if (a < 0x38800000u) {  // below 2^-14: a multiple of 2^-24
        const float scaled = float_of(a) + 0.5f;  // ulp of [0.5, 1) is 2^-24: rounds to nearest even
        return sign | (bits_of(scaled) - 0x3f000000u);
    }
    const uint32_t rounded = a + 0xfffu + (a >> 13 & 1);
    return sign | (rounded - 0x38000000u) >> 13;
}

TK_DEVICE uint32_t float_to_bfloat(float v)
{
    const uint32_t u = bits_of(v);
    return v != v ? 0x7fffu : (u + 0x7fffu + (u >> 16 & 1)) >> 16;
}

TK_DEVICE void unpack2(uint32_t w, float& lo, float& hi, f16)
{
    lo = half_to_float(w & 0xffffu);
    hi = half_to_float(w >> 16);
}
TK_DEVICE void unpack2(uint32_t w, float& lo, float& hi, bf16)
{
    lo = float_of(w << 16);
    hi = float_of(w & 0xffff0000u);
}
TK_DEVICE uint32_t pack2(float lo, float hi, f16) { return float_to_half(lo) | float_to_half(hi) << 16; }
TK_DEVICE uint32_t pack2(float lo, float hi, bf16) { return float_to_bfloat(lo) | float_to_bfloat(hi) << 16; }

template <class T>
TK_DEVICE uint32_t max2(uint32_t a, uint32_t b, T)
{
    float a_lo, a_hi, b_lo, b_hi;
    unpack2(a, a_lo, a_hi, T{});
    unpack2(b, b_lo, b_hi, T{});
    return pack2(fmaxf(a_lo, b_lo), fmaxf(a_hi, b_hi), T{});
}

}  // namespace tk
