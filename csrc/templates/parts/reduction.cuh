// Outputs from the elements of the inputs along the dims that go, whatever the shapes broadcast to.
//
//   run     v = combine of map(in[i], ...) over the places i that are reduced to one;  out, ... = finish(v)
//
// Who does what. A *cell* is one output, or, where vectors lie across outputs, kVec of them. A team of kTeam threads steps
// along a cell's reduced places, kUnroll loads of each input ahead; kInner cells lie side by side in a warp, so that its
// lanes touch neighbours in memory either way: along a row (kInner = 1) or across columns. A row longer than a block is to
// read comes in *spans*: a block leaves the accumulators of one (kPart), and a second launch combines them. Which thread
// combines what, in which order, depends on the layout alone, so the same call gives the same bits every time.
//
// Bytes: each input is read once, each output written once; spans are some thousands of accumulators.
// The host guarantees: dims that are one step in every tensor are one; kVec > 1: as parts/elementwise.cuh has it, for the
// innermost reduced dim (kAlong), or the innermost kept one; kDense: of the outputs too.
// Template: Op has Value, kIdentity, identity(), combine(a, b), apply(value, count, references to the outputs'...); Map has
// map(values of the inputs...), a Value or a Total; Outs and Ins are as in parts/elementwise.cuh, Position besides.
#pragma once
#include "parts/elementwise.cuh"

namespace reduction {

using elementwise::kCount;
using elementwise::kNumbers;

inline constexpr int kThreads = 256;

// Among the inputs: an element's place among those it is reduced with, in row-major order, wherever it lies in memory. What
// counts as its tensor is null, and its strides are of that order.
struct Position {};

template <int kTensors, int kNumbers, int kKept, int kReduced, int kVec, bool kAlong, class Index>
struct Arguments {
    void* tensor[kTensors];
    void* totals;  // (spans, outputs)
    uint64_t number[kNumbers > 0 ? kNumbers : 1];
    int64_t kept_stride[kTensors][kKept];        // elements; the innermost of one of the two between vectors
    int64_t reduced_stride[kTensors][kReduced];
    int64_t count;                               // elements that are reduced to one
    Index kept[kKept], reduced[kReduced];        // sizes
    Index cells, n, span;                        // n: places of a cell, span: those of one block
    Index spans;                                 // of a cell

    // A place of a cell; what its offsets begin with is found once a cell.
    struct At { int64_t base[kTensors]; Index place; };
    struct Output { const int64_t (&base)[kTensors]; int i; };

    TK_DEVICE At cell(Index i) const
    {
        At at{};
#pragma unroll
        for (int d = kKept - 1; d >= 0; --d) {
            const Index q = d > 0 ? i / kept[d] : 0;
#pragma unroll
            for (int t = 0; t < kTensors; ++t) {
                at.base[t] += int64_t(i - q * kept[d]) * kept_stride[t][d];
            }
            i = q;
        }
        return at;
    }
    TK_DEVICE int64_t offset(int t, const At& at) const
    {
        return at.base[t] + elementwise::offset_of(at.place, reduced, reduced_stride[t]);
    }
    TK_DEVICE int64_t offset(int t, const Output& out) const { return out.base[t] + out.i * step(t, false); }
    // Between the elements of a vector; 0 where it lies along the other dims.
    TK_DEVICE int64_t step(int t, bool along) const
    {
        return along != kAlong ? 0 : (kAlong ? reduced_stride[t][kReduced - 1] : kept_stride[t][kKept - 1]) / kVec;
    }
};

// The accumulators of some elements; of none where the op has no identity.
template <class Op, bool = Op::kIdentity>
struct Total {
    typename Op::Value v;

    TK_DEVICE static Total none() { return {Op::identity()}; }
    TK_DEVICE void add(const typename Op::Value& w) { v = Op::combine(v, w); }
    TK_DEVICE void add(const Total& w) { add(w.v); }
};
template <class Op>
struct Total<Op, false> {
    typename Op::Value v;
    bool some;

    TK_DEVICE static Total none() { return {}; }
    TK_DEVICE void add(const typename Op::Value& w)
    {
        v = some ? Op::combine(v, w) : w;
        some = true;
    }
    TK_DEVICE void add(const Total& w)
    {
        if (w.some) {
            add(w.v);
        }
    }
};

// The Map of the second launch, whose input are the spans' totals.
template <class Op>
struct Spans {
    TK_DEVICE static Total<Op> map(const Total<Op>& v) { return v; }
};

// What elementwise::Inputs gives a vector's element to.
template <class Map, class T>
struct Sink {
    T& total;
    template <class, class... V>
    TK_DEVICE void apply(int, V... values) { total.add(Map::map(values...)); }
};

template <class T>
TK_DEVICE T shuffle_xor(const T& v, int mask)
{
    uint32_t w[(sizeof(T) + 3) / 4] = {};
    memcpy(w, &v, sizeof(T));
#pragma unroll
    for (auto& word : w) {
        word = tk::shuffle_xor(word, mask);
    }
    T other;
    memcpy(&other, w, sizeof(T));
    return other;
}

template <class T, int kInner, int kOwn>
struct Shared {
    T total[kThreads / 32][kOwn][kInner];  // each warp's
};

// Totals of a thread: an output's elements go to several, so that they don't wait for each other and round less.
TK_DEVICE constexpr int ways(int vec, int bytes) { return vec > 1 && vec * bytes > 64 ? ways(vec / 2, bytes) : vec; }

template <class Outs, class Ins, int kVec, bool kAlong, int kKept, int kReduced, class Index>
using ArgumentsOf = Arguments<kCount<Outs> + kCount<Ins> - kNumbers<Ins>, kNumbers<Ins>, kKept, kReduced, kVec, kAlong, Index>;

template <class Op, class Map, class Outs, class Ins, int kVec, bool kAlong, bool kDense, int kInner, int kTeam, int kUnroll,
          int kKept, int kReduced, unsigned kSplat, bool kPart, int kBytes, class Index>
__global__ void __launch_bounds__(kThreads, 2)
run(const __grid_constant__ ArgumentsOf<Outs, Ins, kVec, kAlong, kKept, kReduced, Index> a)
{
    using Arguments = ArgumentsOf<Outs, Ins, kVec, kAlong, kKept, kReduced, Index>;
    using T = Total<Op>;
    static_assert(sizeof(T) == kBytes && kInner <= 32 && kInner * kTeam <= kThreads);
    constexpr int kCells = kThreads / kTeam;        // of a block
    constexpr int kOwn = kAlong ? 1 : kVec;         // outputs of a cell
    constexpr int kWays = kAlong ? ways(kVec, kBytes) : kVec;
    constexpr int kWarps = kInner * kTeam / 32;     // of a team, if more than 1
    auto& shared = tk::shared<Shared<T, kInner, kOwn>>();
    const int rank = int(threadIdx.x) / kInner % kTeam;
    const int own_cell = int(threadIdx.x) / (kInner * kTeam) * kInner + int(threadIdx.x) % kInner;
    const int64_t tiles = (int64_t(a.cells) + kCells - 1) / kCells;

    for (int64_t i = blockIdx.x; i < tiles * a.spans; i += gridDim.x) {
        const int64_t cell = i / a.spans * kCells + own_cell;
        const bool there = cell < int64_t(a.cells);
        const Index span = Index(i % a.spans), lo = span * a.span;
        const Index hi = there ? tk::min<Index>(lo + a.span, a.n) : lo;
        typename Arguments::At at = a.cell(there ? Index(cell) : 0);
        T total[kWays];
#pragma unroll
        for (T& t : total) {
            t = T::none();
        }
        for (Index first = lo + rank; first < hi; first += kTeam * kUnroll) {
            elementwise::Inputs<kVec, kSplat, kCount<Outs>, 0, Ins> in[kUnroll];
            // All loads first: as many bytes on their way as the registers have room for.
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
                if ((at.place = first + u * kTeam) < hi) {
                    in[u].load(a, at);
                }
            }
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
                if (first + u * kTeam < hi) {
                    in[u].unpack();
#pragma unroll
                    for (int e = 0; e < kVec; ++e) {
                        Sink<Map, T> sink{total[e % kWays]};
                        in[u].template apply<Map>(e, sink);
                    }
                }
            }
        }
        if constexpr (kAlong) {
#pragma unroll
            for (int w = kWays / 2; w > 0; w /= 2) {
#pragma unroll
                for (int k = 0; k < w; ++k) {
                    total[k].add(total[k + w]);
                }
            }
        }
        // Only rank 0 has the cell's total in the end: the others combine in another order.
#pragma unroll
        for (int o = kInner; o < 32 && o < kInner * kTeam; o *= 2) {
#pragma unroll
            for (int k = 0; k < kOwn; ++k) {
                total[k].add(shuffle_xor(total[k], o));
            }
        }
        if constexpr (kWarps > 1) {
            const int warp = int(threadIdx.x) / 32, lane = tk::lane();
            if (lane < kInner) {
#pragma unroll
                for (int k = 0; k < kOwn; ++k) {
                    shared.total[warp][k][lane] = total[k];
                }
            }
            tk::sync_block();  // the warps' totals are written
            if (rank == 0) {
#pragma unroll
                for (int w = 1; w < kWarps; ++w) {
#pragma unroll
                    for (int k = 0; k < kOwn; ++k) {
                        total[k].add(shared.total[warp + w][k][lane]);
                    }
                }
            }
            tk::sync_block();  // and read, before the next tile's are written
        }
        if (!there || rank != 0) {
            continue;
        }
        if constexpr (kPart) {
            T* to = static_cast<T*>(a.totals) + (int64_t(span) * int64_t(a.cells) + cell) * kOwn;
#pragma unroll
            for (int k = 0; k < kOwn; ++k) {
                to[k] = total[k];
            }
        } else {
            constexpr int kStore = kDense ? kOwn : 1;
#pragma unroll
            for (int k = 0; k < kOwn; k += kStore) {
                elementwise::Outputs<kStore, 0, Outs> out;
#pragma unroll
                for (int j = 0; j < kStore; ++j) {
                    out.template apply<Op>(j, total[k + j].v, a.count);
                }
                out.store(a, typename Arguments::Output{at.base, k});
            }
        }
    }
}

}  // namespace reduction

// Positions of a vector's elements.
template <int kVec, unsigned kSplat, int kTensor, int kNumber, class... Rest>
struct elementwise::Inputs<kVec, kSplat, kTensor, kNumber, elementwise::List<reduction::Position, Rest...>> {
    int64_t first, step;
    Inputs<kVec, kSplat, kTensor + 1, kNumber, List<Rest...>> rest;

    template <class A, class At>
    TK_DEVICE void load(const A& a, const At& at)
    {
        first = a.offset(kTensor, at);
        step = a.step(kTensor, true);
        rest.load(a, at);
    }
    TK_DEVICE void unpack() { rest.unpack(); }
    template <class Op, class Outs, class... V>
    TK_DEVICE void apply(int i, Outs& outs, V... values) const
    {
        rest.template apply<Op>(i, outs, values..., first + i * step);
    }
};
