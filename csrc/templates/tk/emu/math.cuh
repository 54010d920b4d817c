// Approximations that the machine has an instruction for: here within half a unit in the last place.
#pragma once

namespace tk {

TK_DEVICE float flushed(float v) { return fabsf(v) < 1.17549435e-38f ? float_of(bits_of(v) & 0x80000000u) : v; }

TK_DEVICE float exp2(float v) { return flushed(exp2f(flushed(v))); }
TK_DEVICE float reciprocal(float v) { return flushed(1.0f / flushed(v)); }

}  // namespace tk
