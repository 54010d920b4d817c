// Approximations that the machine has an instruction for.
#pragma once

namespace tk {

// 2^v within 2 ulp; results under 2^-126 become 0; NaN stays NaN.
TK_DEVICE float exp2(float v)
{
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}

// 1 / v within 1 ulp, for v that is neither tiny nor huge (2^-126 to 2^126) or isn't finite. No call, as a division is.
TK_DEVICE float reciprocal(float v)
{
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}

}  // namespace tk
