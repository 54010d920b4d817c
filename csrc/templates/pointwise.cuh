// Activations and gates, element by element, and their slopes.
//
//   relu x+     leaky_relu x+ - slope x-     sigmoid s(x)     tanh     softplus log(1 + e^x)     silu x s(x)
//   mish x tanh(softplus(x))     gelu x P(x), P the normal distribution;  by tanh: x s(2u), u = sqrt(2/pi) (x + 0.044715 x^3)
//   a gate: f(gate) * up
//
// At infinities each is its limit: what multiplies x is 0 fast enough, so there x counts as a number.
// Bytes: parts/elementwise.cuh. The host guarantees nothing: these are functions of a value.
// Template: F float or double; kFast: float results are rounded to two bytes, so 2^-20 is close enough.
#include "parts/elementwise.cuh"

namespace pointwise {

// Clamped, so that times 0 it is 0. NaN becomes a number; what it is multiplied with is NaN then.
template <class F> TK_DEVICE F above(F x, double low) { return tk::fmax(x, F(low)); }
template <class F> TK_DEVICE F within(F x, double most) { return above(-above(-x, -most), -most); }
constexpr double kLargest = 3.402823466e38;

template <bool kFast, class F>
TK_DEVICE F sigmoid(F x)
{
    if constexpr (kFast) {
        return tk::reciprocal(1.0f + tk::exp2(x * -1.44269504f));
    } else {
        return F(1) / (F(1) + exp(-x));
    }
}

template <bool kFast, class F> TK_DEVICE F silu(F x) { return above(x, -kLargest) * sigmoid<kFast>(x); }
template <bool kFast, class F>
TK_DEVICE F silu_slope(F x)
{
    const F s = sigmoid<kFast>(x);
    return s * (F(1) + within(x, kLargest) * sigmoid<kFast>(-x));
}

// The normal distribution at -|x|: Abramowitz and Stegun, 7.1.26, within 1e-7. NaN stays NaN.
TK_DEVICE float normal_tail(float x)
{
    const float t = tk::reciprocal(tk::fma(0.3275911f * 0.70710678f, fabs(x), 1.0f));
    float p = tk::fma(0.5f * 1.061405429f, t, 0.5f * -1.453152027f);
    p = tk::fma(p, t, 0.5f * 1.421413741f);
    p = tk::fma(p, t, 0.5f * -0.284496736f);
    p = tk::fma(p, t, 0.5f * 0.254829592f);
    return p * t * tk::exp2(x * (x * -0.72134752f));
}

// The normal distribution.
template <bool kFast, class F>
TK_DEVICE F normal(F x)
{
    if constexpr (kFast) {
        const float tail = normal_tail(x);
        return x < 0.0f ? tail : 1.0f - tail;
    } else if constexpr (sizeof(F) == 4) {
        return 0.5f + 0.5f * erf(x * 0.70710678f);  // fewer instructions than erfc's, and torch's error
    } else {
        return 0.5 * erfc(-x * M_SQRT1_2);
    }
}

template <bool kFast, class F>
TK_DEVICE F gelu(F x)
{
    if constexpr (kFast) {
        return tk::fma(above(-fabs(x), -kLargest), normal_tail(x), above(x, 0));
    } else {
        return above(x, -kLargest) * normal<kFast>(x);
    }
}
template <bool kFast, class F>
TK_DEVICE F gelu_slope(F x)
{
    const F square = F(-0.5) * x * x;
    const F density = F(0.3989422804014327) * (kFast ? F(tk::exp2(square * F(M_LOG2E))) : exp(square));
    return normal<kFast>(x) + within(x, kLargest) * density;
}

constexpr double kGeluScale = 0.7978845608028654, kGeluCube = 0.044715;

template <bool kFast, class F>
TK_DEVICE F tanh_gelu(F x)
{
    return above(x, -kLargest) * sigmoid<kFast>(F(2 * kGeluScale) * (x + F(kGeluCube) * x * x * x));
}
template <bool kFast, class F>
TK_DEVICE F tanh_gelu_slope(F x)
{
    const F u = F(2 * kGeluScale) * (x + F(kGeluCube) * x * x * x);
    const F s = sigmoid<kFast>(u), rest = sigmoid<kFast>(-u);
    const F c = within(x, 100);  // beyond, s * rest is 0
    return s + c * s * rest * F(2 * kGeluScale) * (F(1) + F(3 * kGeluCube) * c * c);
}

// 0 for -0 too, as torch has it; NaN stays.
template <class F> TK_DEVICE F relu(F x) { return x <= F(0) ? F(0) : x; }

template <class F>
TK_DEVICE F softplus(F x, F beta, F threshold) { return x * beta > threshold ? x : log1p(exp(x * beta)) / beta; }
template <class F>
TK_DEVICE F softplus_slope(F x, F beta, F threshold)
{
    return x * beta > threshold ? F(1) : F(1) / (F(1) + exp(-x * beta));
}

// tanh(log(1 + e^x)) = n / (n + 2) with n = e^x (e^x + 2); from 20 on it is 1.
template <class F>
TK_DEVICE F mish_gate(F x)
{
    const F e = exp(x > F(20) ? F(20) : x), n = e * (e + F(2));
    return n / (n + F(2));
}
template <class F> TK_DEVICE F mish(F x) { return above(x, -kLargest) * mish_gate(x); }
template <class F>
TK_DEVICE F mish_slope(F x)
{
    const F w = mish_gate(x), c = within(x, 100);
    return w + c * (F(1) - w * w) * sigmoid<false>(x);
}

}  // namespace pointwise
