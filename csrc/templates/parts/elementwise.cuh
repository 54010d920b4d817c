// Every element of the outputs from the elements of the inputs in the same place, whatever the shapes broadcast to.
//
//   run     out[i], ... = Op::apply(in[i], ...)
//
// Bytes: each input is read and each output written once; what is broadcast comes from the caches.
// The host guarantees: dims that are one step in every tensor are one; kVec > 1: the innermost dim is whole vectors, in each
// tensor contiguous or of stride 0, and each contiguous vector begins at a multiple of its size, or of 16 bytes.
// Template: Op has apply(values of the inputs..., references to the outputs'...); Outs and Ins are Lists of element types,
// Number<V> for what is one number for all, Random<> for a random number of each; kDims dims; kVec elements a vector;
// kUnroll vectors a thread; kSplat has bit t for a tensor (outputs first) whose innermost stride is 0; Index counts vectors.
#pragma once
#include "tk/cuda_math.cuh"
#include "tk/philox.cuh"
#include "tk/tk.cuh"

namespace elementwise {

inline constexpr int kThreads = 128;

template <class...> struct List {};
// A number among the inputs: 8 bytes of double or int64_t in the arguments, V in the expression.
template <class V> struct Number {};
// 32 random bits among the inputs, which depend on the seed and the element's place in row-major order alone, wherever it lies
// in memory: element i has word i of the seed's subsequence 0, see tk::philox. What counts as its tensor is the seed, whose
// strides are of that order. kConsecutive: so are the elements of a vector. kHalves: elements 2i and 2i + 1 share word i, its
// upper half first or its lower. Compared with a number, each is as random as if it had 32 bits of its own, and so are the two
// together but where an upper half alone doesn't decide, once in 2^16.
template <bool kConsecutive, bool kHalves> struct Random {};

// Philox's rounds: the fewest that pass BigCrush in the paper. Ten take longer than the bytes of two-byte elements.
constexpr int kRounds = 7;

// What an element counts as in an expression: float for the two-byte types, else what it is.
template <class S> struct value { using type = S; };
template <> struct value<tk::f16> { using type = float; };
template <> struct value<tk::bf16> { using type = float; };
template <class V> struct value<Number<V>> { using type = V; };
template <class S> using value_t = typename value<S>::type;

template <class S> inline constexpr bool kIsNumber = false;
template <class V> inline constexpr bool kIsNumber<Number<V>> = true;
template <class S> inline constexpr bool kIsFloat = false;
template <> inline constexpr bool kIsFloat<float> = true;
template <> inline constexpr bool kIsFloat<double> = true;
template <> inline constexpr bool kIsFloat<tk::f16> = true;
template <> inline constexpr bool kIsFloat<tk::bf16> = true;

// Elements before place i of dims in row-major order. 64 bits: the reach of the strides may pass 2^31 whatever the count of elements.
template <int kDims, class Index>
TK_DEVICE int64_t offset_of(Index i, const Index (&size)[kDims], const int64_t (&stride)[kDims])
{
    int64_t o = 0;
#pragma unroll
    for (int d = kDims - 1; d > 0; --d) {
        const Index q = i / size[d];
        o += int64_t(i - q * size[d]) * stride[d];
        i = q;
    }
    return o + int64_t(i) * stride[0];
}

template <int kTensors, int kNumbers, int kDims, class Index>
struct Arguments {
    void* tensor[kTensors];
    uint64_t number[kNumbers > 0 ? kNumbers : 1];
    int64_t stride[kTensors][kDims];  // elements; the innermost between vectors
    Index size[kDims];                // the innermost in vectors
    Index n;                          // vectors

    TK_DEVICE int64_t offset(int t, Index i) const { return offset_of(i, size, stride[t]); }
};

// kN elements as they lie in memory.
template <class S, int kN>
struct Elements {
    static constexpr int kBytes = kN * int(sizeof(S));
    tk::Words<kBytes> raw;

    TK_DEVICE void load(const S* p) { raw = tk::load_global<kBytes>(p); }
    TK_DEVICE void store(S* p) const { tk::store_global<kBytes>(p, raw); }

    TK_DEVICE void unpack(value_t<S> (&v)[kN]) const
    {
        if constexpr (kIsFloat<S>) {
            tk::Vec<S, kN>{raw}.unpack(v);
        } else {
            memcpy(v, raw.w, kBytes);
        }
    }
    TK_DEVICE void pack(const value_t<S> (&v)[kN])
    {
        if constexpr (kIsFloat<S>) {
            raw = tk::Vec<S, kN>::pack(v).raw;
        } else {
            memcpy(raw.w, v, kBytes);
        }
    }
};

template <class S>
TK_DEVICE value_t<S> from_memory(S v)
{
    if constexpr (kIsFloat<S>) {
        return tk::to_acc(v);
    } else {
        return v;
    }
}

template <class S>
TK_DEVICE S to_memory(value_t<S> v)
{
    if constexpr (kIsFloat<S>) {
        return tk::from_acc<S>(v);
    } else {
        return v;
    }
}

// Vectors of the inputs, one a stream; kTensor and kNumber tell the place of the first in the arguments.
template <int kVec, unsigned kSplat, int kTensor, int kNumber, class L> struct Inputs;

template <int kVec, unsigned kSplat, int kTensor, int kNumber>
struct Inputs<kVec, kSplat, kTensor, kNumber, List<>> {
    template <class A, class Index> TK_DEVICE void load(const A&, Index) {}
    TK_DEVICE void unpack() {}
    template <class Op, class Outs, class... V>
    TK_DEVICE void apply(int i, Outs& outs, V... values) const { outs.template apply<Op>(i, values...); }
};

template <int kVec, unsigned kSplat, int kTensor, int kNumber, class S, class... Rest>
struct Inputs<kVec, kSplat, kTensor, kNumber, List<S, Rest...>> {
    static constexpr bool kVector = kVec > 1 && !(kSplat >> kTensor & 1);
    Elements<S, kVector ? kVec : 2> raw;
    value_t<S> v[kVector ? kVec : 1];
    Inputs<kVec, kSplat, kTensor + 1, kNumber, List<Rest...>> rest;

    template <class A, class Index>
    TK_DEVICE void load(const A& a, Index i)
    {
        const S* p = static_cast<const S*>(a.tensor[kTensor]) + a.offset(kTensor, i);
        if constexpr (kVector) {
            raw.load(p);
        } else {
            v[0] = from_memory<S>(*p);
        }
        rest.load(a, i);
    }
    TK_DEVICE void unpack()
    {
        if constexpr (kVector) {
            raw.unpack(v);
        }
        rest.unpack();
    }
    template <class Op, class Outs, class... V>
    TK_DEVICE void apply(int i, Outs& outs, V... values) const
    {
        rest.template apply<Op>(i, outs, values..., v[kVector ? i : 0]);
    }
};

template <int kVec, unsigned kSplat, int kTensor, int kNumber, class N, class... Rest>
struct Inputs<kVec, kSplat, kTensor, kNumber, List<Number<N>, Rest...>> {
    N v;
    Inputs<kVec, kSplat, kTensor, kNumber + 1, List<Rest...>> rest;

    template <class A, class Index>
    TK_DEVICE void load(const A& a, Index i)
    {
        const uint64_t bits = a.number[kNumber];
        v = kIsFloat<N> ? N(__longlong_as_double(int64_t(bits))) : N(int64_t(bits));
        rest.load(a, i);
    }
    TK_DEVICE void unpack() { rest.unpack(); }
    template <class Op, class Outs, class... V>
    TK_DEVICE void apply(int i, Outs& outs, V... values) const { rest.template apply<Op>(i, outs, values..., v); }
};

// What the element in a place of a quad gets: a word, or half a word with its neighbour's half behind it.
template <bool kHalves>
TK_DEVICE uint32_t bits_of_place(const tk::Quad& quad, int place)
{
    const int at = kHalves ? place / 2 : place;
    const uint32_t even = at & 2 ? quad.w[2] : quad.w[0], odd = at & 2 ? quad.w[3] : quad.w[1];
    const uint32_t word = at & 1 ? odd : even;
    return kHalves && place & 1 ? word << 16 | word >> 16 : word;
}

template <int kVec, unsigned kSplat, int kTensor, int kNumber, bool kConsecutive, bool kHalves, class... Rest>
struct Inputs<kVec, kSplat, kTensor, kNumber, List<Random<kConsecutive, kHalves>, Rest...>> {
    uint64_t seed;
    int64_t first, step;
    uint32_t v[kVec];
    Inputs<kVec, kSplat, kTensor + 1, kNumber, List<Rest...>> rest;

    template <class A, class Index>
    TK_DEVICE void load(const A& a, Index i)
    {
        constexpr int kDims = int(sizeof(a.size) / sizeof(a.size[0]));
        seed = *static_cast<const uint64_t*>(a.tensor[kTensor]);
        first = a.offset(kTensor, i);
        step = kConsecutive ? 1 : a.stride[kTensor][kDims - 1] / kVec;
        rest.load(a, i);
    }
    // Here rather than in load: the words are computed while the other inputs are on their way.
    TK_DEVICE void unpack()
    {
        constexpr int kOfQuad = kHalves ? 8 : 4;  // elements
        if constexpr (kConsecutive) {
            // A vector begins at a multiple of its size.
            constexpr int kQuads = kVec > kOfQuad ? kVec / kOfQuad : 1;
            tk::Quad quads[kQuads];
#pragma unroll
            for (int q = 0; q < kQuads; ++q) {
                const uint64_t n = uint64_t(first) / kOfQuad + q;
                quads[q] = tk::Quad{{uint32_t(n), uint32_t(n >> 32), 0, 0}};
            }
            tk::philox<kRounds>(seed, quads);
            const int at = kVec >= kOfQuad ? 0 : int(first % kOfQuad);
#pragma unroll
            for (int e = 0; e < kVec; ++e) {
                v[e] = bits_of_place<kHalves>(quads[e / kOfQuad], at + e % kOfQuad);
            }
        } else {
#pragma unroll
            for (int e = 0; e < kVec; ++e) {
                const int64_t at = first + e * step;
                v[e] = bits_of_place<kHalves>(tk::philox<kRounds>(seed, 0, uint64_t(at) / kOfQuad), int(at % kOfQuad));
            }
        }
        rest.unpack();
    }
    template <class Op, class Outs, class... V>
    TK_DEVICE void apply(int i, Outs& outs, V... values) const { rest.template apply<Op>(i, outs, values..., v[i]); }
};

template <int kVec, int kTensor, class L> struct Outputs;

template <int kVec, int kTensor>
struct Outputs<kVec, kTensor, List<>> {
    template <class A, class Index> TK_DEVICE void store(const A&, Index) {}
    template <class Op, class... V> TK_DEVICE void apply(int, V&&... values) { Op::apply(values...); }
};

template <int kVec, int kTensor, class S, class... Rest>
struct Outputs<kVec, kTensor, List<S, Rest...>> {
    value_t<S> v[kVec];
    Outputs<kVec, kTensor + 1, List<Rest...>> rest;

    template <class Op, class... V>
    TK_DEVICE void apply(int i, V&&... values) { rest.template apply<Op>(i, values..., v[i]); }

    template <class A, class Index>
    TK_DEVICE void store(const A& a, Index i)
    {
        S* p = static_cast<S*>(a.tensor[kTensor]) + a.offset(kTensor, i);
        if constexpr (kVec > 1) {
            Elements<S, kVec> raw;
            raw.pack(v);
            raw.store(p);
        } else {
            *p = to_memory<S>(v[0]);
        }
        rest.store(a, i);
    }
};

template <class L> inline constexpr int kCount = 0;
template <class... S> inline constexpr int kCount<List<S...>> = int(sizeof...(S));
template <class L> inline constexpr int kNumbers = 0;
template <class... S> inline constexpr int kNumbers<List<S...>> = (0 + ... + int(kIsNumber<S>));

template <class Op, class Outs, class Ins, int kVec, int kUnroll, int kDims, unsigned kSplat, class Index>
__global__ void __launch_bounds__(kThreads)
run(Arguments<kCount<Outs> + kCount<Ins> - kNumbers<Ins>, kNumbers<Ins>, kDims, Index> a)
{
    const Index first = Index(blockIdx.x) * (kThreads * kUnroll) + threadIdx.x;
    Inputs<kVec, kSplat, kCount<Outs>, 0, Ins> in[kUnroll];
    // All loads first: as many bytes on their way as the registers have room for.
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
        if (first + u * kThreads < a.n) {
            in[u].load(a, first + u * kThreads);
        }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
        if (first + u * kThreads < a.n) {
            Outputs<kVec, 0, Outs> out;
            in[u].unpack();
#pragma unroll
            for (int i = 0; i < kVec; ++i) {
                in[u].template apply<Op>(i, out);
            }
            out.store(a, first + u * kThreads);
        }
    }
}

}  // namespace elementwise
