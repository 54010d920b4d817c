// Conversions of two-byte numbers, and what is done with two of them at once.
#pragma once

namespace tk {

// Two values from the two halves of a word, the low half first. Exact.
TK_DEVICE void unpack2(uint32_t w, float& lo, float& hi, f16)
{
    asm("{ .reg .f16 l, h;\n mov.b32 {l, h}, %2;\n cvt.f32.f16 %0, l;\n cvt.f32.f16 %1, h; }"
        : "=f"(lo), "=f"(hi) : "r"(w));
}
TK_DEVICE void unpack2(uint32_t w, float& lo, float& hi, bf16)
{
    lo = float_of(w << 16);
    hi = float_of(w & 0xffff0000u);
}

// Two values into the two halves of a word, the low half first; round to nearest, ties to even; NaN stays NaN.
TK_DEVICE uint32_t pack2(float lo, float hi, f16)
{
    uint32_t w;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(hi), "f"(lo));
#else
    asm("{ .reg .f16 l, h;\n cvt.rn.f16.f32 l, %1;\n cvt.rn.f16.f32 h, %2;\n mov.b32 %0, {l, h}; }"
        : "=r"(w) : "f"(lo), "f"(hi));
#endif
    return w;
}
TK_DEVICE uint32_t pack2(float lo, float hi, bf16)
{
#if __CUDA_ARCH__ >= 800
    uint32_t w;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(hi), "f"(lo));
    return w;
#else
    auto round = [](float v) {
        const uint32_t u = bits_of(v);
        return v != v ? 0x7fffu : (u + 0x7fffu + ((u >> 16) & 1)) >> 16;
    };
    return round(lo) | (round(hi) << 16);
#endif
}

// The larger of two in each half of a word; a NaN loses to a number.
template <class T>
TK_DEVICE uint32_t max2(uint32_t a, uint32_t b, T)
{
#if __CUDA_ARCH__ >= 800
    uint32_t w;
    if constexpr (is_same<T, f16>::value) {
        asm("max.f16x2 %0, %1, %2;" : "=r"(w) : "r"(a), "r"(b));
    } else {
        asm("max.bf16x2 %0, %1, %2;" : "=r"(w) : "r"(a), "r"(b));
    }
    return w;
#else
    float a_lo, a_hi, b_lo, b_hi;
    unpack2(a, a_lo, a_hi, T{});
    unpack2(b, b_lo, b_hi, T{});
    return pack2(::fmaxf(a_lo, b_lo), ::fmaxf(a_hi, b_hi), T{});
#endif
}

}  // namespace tk
