// Maximum and sum of exponentials in one reduction: what softmax and the losses on it begin with.
#pragma once
#include "parts/row.cuh"

namespace row {

// (m, s) of a set of values: their maximum m and the sum of exp(v - m). m is -inf when no value is above it.
template <class Acc>
struct MaxSum {
    struct alignas(2 * sizeof(Acc)) Value { Acc m, s; };

    TK_DEVICE static Value identity() { return {-tk::limits<Acc>::inf(), Acc(0)}; }

    // The factor that brings a sum relative to m to one relative to `to` >= m.
    TK_DEVICE static Acc rescale(Acc m, Acc to)
    {
        return m == -tk::limits<Acc>::inf() ? Acc(0) : tk::exp<true>(m - to);
    }
    TK_DEVICE static Value combine(Value a, Value b)
    {
        const Acc m = tk::fmax(a.m, b.m);
        return {m, a.s * rescale(a.m, m) + b.s * rescale(b.m, m)};
    }
    // The maximum first, then the sum relative to it: one exp a lane. Every lane gets the same bits.
    template <int kWidth>
    TK_DEVICE static Value lanes(Value v)
    {
        Acc m = v.m;
#pragma unroll
        for (int o = kWidth / 2; o > 0; o /= 2) {
            m = tk::fmax(m, tk::shuffle_xor(m, o));
        }
        Acc s = v.s * rescale(v.m, m);
#pragma unroll
        for (int o = kWidth / 2; o > 0; o /= 2) {
            s += tk::shuffle_xor(s, o);
        }
        return {m, s};
    }
};

// exp(v - shift) is right for a set whose maximum is m, be it -inf.
template <class Acc>
TK_DEVICE Acc shift_of(Acc m) { return m == -tk::limits<Acc>::inf() ? Acc(0) : m; }

// The maximum of a thread's elements; a NaN loses to a number.
template <class G>
TK_DEVICE typename Tile<G>::Acc maximum(const Tile<G>& t)
{
    using Acc = typename Tile<G>::Acc;
    Acc m = -tk::limits<Acc>::inf();
    auto take = [&](const tk::Vec<typename G::T, G::kVec>& v) {
        Acc a[G::kVec];
        v.unpack(a);
#pragma unroll
        for (int i = 0; i < G::kVec; ++i) {
            m = tk::fmax(m, a[i]);
        }
    };
    if constexpr (G::kAligned && sizeof(typename G::T) == 2) {
        auto top = t.v[0];  // two at a time; pairs don't gain: 0.80 of the copy at 1023 columns, where this gives 0.84
#pragma unroll
        for (int k = 1; k < G::kVecs; ++k) {
            top = decltype(top)::max(top, t.v[k]);
        }
        take(top);
    } else {
#pragma unroll
        for (int k = 0; k < G::kVecs; ++k) {
            take(t.v[k]);
        }
    }
    return m;
}

}  // namespace row
