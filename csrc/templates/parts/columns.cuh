// The column reduction: reduce a dim that has a contiguous dim inside it, (outer, dim, inner), without turning it round.
//
// A block takes a tile: kAcross vectors of kVec columns (elements of the inner dim) times the whole reduced dim, kDown
// threads to a column, kRows vectors a thread, in registers. With kPrefetch the next tile is on its way to shared memory
// while this one is reduced and written: each thread copies what it will itself read, so there is no barrier for it.
#pragma once
#include "parts/row.cuh"

namespace columns {

template <class T_, int kStreams_, int kVec_, int kAcross_, int kDown_, int kRows_, bool kPrefetch_>
struct Geometry {
    using T = T_;
    using Acc = tk::accumulator_t<T>;
    static constexpr int kStreams = kStreams_, kVec = kVec_, kAcross = kAcross_, kDown = kDown_, kRows = kRows_;
    static constexpr bool kPrefetch = kPrefetch_;
    static constexpr int kThreads = kAcross * kDown;
    static constexpr int kCols = kAcross * kVec;
    static constexpr int kBytes = kVec * sizeof(T);
    static constexpr int kGroup = kAcross < 32 ? 32 : kAcross;  // threads whose values meet by shuffles, or don't
    static constexpr int kGroups = kThreads / kGroup;
    static_assert((kAcross & (kAcross - 1)) == 0 && kThreads % kGroup == 0);
    static_assert(!kPrefetch || kBytes >= 4, "the asynchronous copy has no 2-byte form");

    TK_DEVICE static int across() { return int(threadIdx.x) % kAcross; }
    TK_DEVICE static int down() { return int(threadIdx.x) / kAcross; }
    TK_DEVICE static int64_t row(int64_t step, int k) { return (step * kRows + k) * kDown + down(); }
};

template <class G>
struct Shared {
    typename G::Acc partial[G::kGroups][G::kCols];
    typename G::Acc total[2][G::kCols];
    tk::Words<G::kPrefetch ? G::kBytes : 4> ahead[G::kPrefetch ? G::kStreams * G::kRows : 1][G::kThreads];
};

// Where a tile lies. Tile t: inner tile t % n_across of outer index t / n_across.
template <class G, int kDims, int kTensors>
struct Place {
    row::Rows<kDims, kTensors> outer;
    int64_t dim_stride[kTensors];
    int64_t n_dim, n_inner, n_across, n_tiles;

    // Rows of the dim that a thread's rows of a step, 0, kDown, 2 * kDown, ..., lie among; 0 if its columns are outside.
    TK_DEVICE int left(int64_t tile, int64_t step) const
    {
        return inner(tile) < n_inner ? int(tk::min<int64_t>(n_dim - G::row(step, 0), G::kRows * G::kDown)) : 0;
    }
    TK_DEVICE int64_t inner(int64_t tile) const { return tile % n_across * G::kCols + G::across() * G::kVec; }
    // Of the element at row 0 of the tile's dim.
    template <int kTensor>
    TK_DEVICE int64_t offset(int64_t tile) const { return outer.template offset<kTensor>(tile / n_across) + inner(tile); }
};

// Starts the copies of a tile that this thread will take, of stream kStream (tensor kStream + 1).
template <int kStream, class G, int kDims, int kTensors>
TK_DEVICE void prefetch(Shared<G>& shared, const typename G::T* x, const Place<G, kDims, kTensors>& at, int64_t tile)
{
    if (tile >= at.n_tiles || at.inner(tile) >= at.n_inner) {
        return;
    }
    const int64_t stride = at.dim_stride[kStream + 1];
    const typename G::T* p = x + at.template offset<kStream + 1>(tile) + G::row(0, 0) * stride;
#pragma unroll
    for (int k = 0; k < G::kRows; ++k, p += G::kDown * stride) {
        if (G::row(0, k) < at.n_dim) {
            tk::copy_async<G::kBytes>(&shared.ahead[kStream * G::kRows + k][threadIdx.x], p);
        }
    }
}

// This thread's vectors of a tile, rows from step * kRows * kDown on; outside of the tensor, `fill`. With kPrefetch the
// copies were started by prefetch() and waited for.
template <int kStream, class G, int kDims, int kTensors>
TK_DEVICE void load(tk::Vec<typename G::T, G::kVec> (&v)[G::kRows], Shared<G>& shared, const typename G::T* x,
                    const Place<G, kDims, kTensors>& at, int64_t tile, int64_t step, typename G::Acc fill)
{
    const auto filler = tk::Vec<typename G::T, G::kVec>::filled(fill);
    const int left = at.left(tile, step);
    const int64_t stride = at.dim_stride[kStream + 1];
    const typename G::T* p = x + (left > 0 ? at.template offset<kStream + 1>(tile) + G::row(step, 0) * stride : 0);
#pragma unroll
    for (int k = 0; k < G::kRows; ++k, p += G::kDown * stride) {
        v[k] = filler;
        if (k * G::kDown < left) {
            if constexpr (G::kPrefetch) {
                v[k].raw = tk::load_shared<G::kBytes>(&shared.ahead[kStream * G::kRows + k][threadIdx.x]);
            } else {
                v[k].raw = tk::load_global<G::kBytes>(p);
            }
        }
    }
}

// Reduces kVec values a thread over the threads of their columns, in a fixed order; all get the result. `set` is 0 or 1,
// in turn: so the two barriers of one reduction also keep its results apart from the next one's.
template <class G, class Op>
TK_DEVICE void reduce(typename G::Acc (&v)[G::kVec], Shared<G>& shared, int set, Op op)
{
    const int first = G::across() * G::kVec;
#pragma unroll
    for (int i = 0; i < G::kVec; ++i) {
#pragma unroll
        for (int o = 16; o >= G::kAcross; o /= 2) {
            v[i] = op(v[i], tk::shuffle_xor(v[i], o));
        }
    }
    if constexpr (G::kGroups > 1) {
        if (threadIdx.x % G::kGroup < G::kAcross) {
#pragma unroll
            for (int i = 0; i < G::kVec; ++i) {
                shared.partial[threadIdx.x / G::kGroup][first + i] = v[i];
            }
        }
        tk::sync_block();  // the partial values are written
        for (int c = threadIdx.x; c < G::kCols; c += G::kThreads) {
            typename G::Acc all = shared.partial[0][c];
            for (int g = 1; g < G::kGroups; ++g) {
                all = op(all, shared.partial[g][c]);
            }
            shared.total[set][c] = all;
        }
        tk::sync_block();  // the totals are written, the partial values are read
#pragma unroll
        for (int i = 0; i < G::kVec; ++i) {
            v[i] = shared.total[set][first + i];
        }
    }
}

// Writes this thread's vectors of the output (tensor 0), from row step * kRows * kDown on, one after another.
template <class G, class Out, int kDims, int kTensors>
struct Writer {
    Out* p;
    int64_t stride;
    int left;

    TK_DEVICE Writer(Out* y, const Place<G, kDims, kTensors>& at, int64_t tile, int64_t step)
        : p(y + at.template offset<0>(tile) + G::row(step, 0) * at.dim_stride[0]), stride(G::kDown * at.dim_stride[0]),
          left(at.left(tile, step))
    {
    }
    TK_DEVICE void put(const tk::Vec<Out, G::kVec>& v)
    {
        if (left > 0) {
            tk::store_global<tk::Vec<Out, G::kVec>::kBytes>(p, v.raw);
        }
        p += stride;
        left -= G::kDown;
    }
};

}  // namespace columns
