// softmax and log_softmax along one dimension, and their gradients.
//
//   fwd   y = exp(x - m) / s                     m = max(x), s = sum(exp(x - m)) of a row
//         y = (x - m) - log(s)                   kLog; in this form, so that large offsets stay exact
//   bwd   dx = y * (dy - sum(dy * y))
//         dx = dy - exp(y) * sum(dy)             kLog
//
// A row of -inf alone, with a +inf or with a NaN is all NaN, as torch's.
//
// Bytes: fwd, bwd, fwd_cols and bwd_cols read each input once and write the output once. fwd_any and bwd_any read twice, for
// any strides whatever; fwd_part + fwd_apply and bwd_part + bwd_apply read twice, for rows longer than a cluster holds.
//
// The host guarantees: nothing is empty; sizes and strides of the rows (row::Rows: the output first, then the inputs in
// the order of the parameters) reach no element outside the tensors; the output overlaps an input not at all or exactly.
//
// Template: T input and Out output element types (equal, or half and float); the rest is said at each group of kernels.
#include "parts/cells.cuh"
#include "parts/columns.cuh"
#include "parts/max_sum.cuh"

namespace softmax {

using row::MaxSum;
using row::maximum;
using row::shift_of;

// ---- rows with unit stride, held in registers ----------------------------------------------------------------------
//
// Template: row::Geometry's numbers; kDims outer dims. Launch: blocks of kTeam * kTeams
// threads, a grid of any multiple of kCluster. x_extent, stages, slot_bytes: see row::Input.

template <class T, class Out, bool kLog, int kTeam, int kTeams, int kCluster, int kVecs, int kChunkVecs, bool kRing,
          int kVec, int kResident, int kDims>
__global__ void __launch_bounds__(kTeam * kTeams, kResident)
fwd(Out* y,      // (n_rows, n_cols)
    const T* x,  // (n_rows, n_cols)
    row::Rows<kDims, 2> rows, int64_t n_rows, int n_cols, int64_t x_extent, int stages, int slot_bytes,
    uint64_t* counter)
{
    using G = row::Geometry<T, Out, 1, kTeam, kTeams, kCluster, kVecs, kChunkVecs, kRing, kVec>;
    using Acc = tk::accumulator_t<T>;
    using Op = MaxSum<Acc>;
    constexpr bool kPrecise = sizeof(Out) >= 4;

    auto& shared = tk::shared<row::Shared<G, typename Op::Value>>();
    const row::Input<G, kDims> in{{x}, {x_extent}, n_rows, n_cols, stages, slot_bytes, counter};
    row::Reader<G, kDims, 2, typename Op::Value> reader{shared, in, rows};
    row::Reducer<G, Op> reduce{shared};
    reader.begin();
    for (; reader.more(); reader.next()) {
        row::Tile<G> t[1];
        reader.load(t, -tk::limits<Acc>::inf());

        // Relative to the thread's own maximum: one exp an element, and one reduction instead of two.
        const Acc m = maximum<G>(t[0]);
        const Acc shift = shift_of(m);
        Acc e[kVecs][kVec];
        Acc s[2] = {};
#pragma unroll
        for (int v = 0; v < kVecs; ++v) {
            t[0].v[v].unpack(e[v]);
#pragma unroll
            for (int i = 0; i < kVec; ++i) {
                const Acc p = tk::exp<kPrecise>(e[v][i] - shift);
                s[i % 2] += p;
                if constexpr (!kLog) {
                    e[v][i] = p;
                }
            }
        }
        const auto all = reduce({m, s[0] + s[1]}, reader);

        const int64_t r = reader.current();
        const int cols = r < n_rows ? n_cols : 0;
        const Acc scale = kLog ? tk::log(all.s) : Op::rescale(m, all.m) * tk::reciprocal(all.s);
        const row::Writer<G> out{y + (cols ? rows.template offset<0>(r) : 0), cols};
        out.write([&](int v) {
            Acc o[kVec];
            if constexpr (kLog) {
                t[0].v[v].again().unpack(o);
            }
#pragma unroll
            for (int i = 0; i < kVec; ++i) {
                o[i] = kLog ? (o[i] - all.m) - scale : e[v][i] * scale;
            }
            return tk::Vec<Out, kVec>::pack(o);
        });
    }
    reader.end();
}

template <class T, class Out, bool kLog, int kTeam, int kTeams, int kCluster, int kVecs, int kChunkVecs, bool kRing,
          int kVec, int kResident, int kDims>
__global__ void __launch_bounds__(kTeam * kTeams, kResident)
bwd(Out* dx,      // (n_rows, n_cols)
    const T* dy,  // (n_rows, n_cols)
    const T* y,   // (n_rows, n_cols)
    row::Rows<kDims, 3> rows, int64_t n_rows, int n_cols, int64_t dy_extent, int64_t y_extent, int stages,
    int slot_bytes, uint64_t* counter)
{
    using G = row::Geometry<T, Out, 2, kTeam, kTeams, kCluster, kVecs, kChunkVecs, kRing, kVec>;
    using Acc = tk::accumulator_t<T>;
    using Op = row::Sum<Acc>;
    constexpr bool kPrecise = sizeof(Out) >= 4;

    auto& shared = tk::shared<row::Shared<G, typename Op::Value>>();
    const row::Input<G, kDims> in{{dy, y}, {dy_extent, y_extent}, n_rows, n_cols, stages, slot_bytes, counter};
    row::Reader<G, kDims, 3, typename Op::Value> reader{shared, in, rows};
    row::Reducer<G, Op> reduce{shared};
    reader.begin();
    for (; reader.more(); reader.next()) {
        row::Tile<G> t[2];
        reader.load(t, Acc(0));

        Acc s[2] = {};
#pragma unroll
        for (int v = 0; v < kVecs; ++v) {
            Acc a[kVec], b[kVec];
            t[0].v[v].unpack(a);
            t[1].v[v].unpack(b);
#pragma unroll
            for (int i = 0; i < kVec; ++i) {
                s[i % 2] += kLog ? a[i] : a[i] * b[i];
            }
        }
        const Acc sum = reduce({s[0] + s[1]}, reader).s;

        const int64_t r = reader.current();
        const int cols = r < n_rows ? n_cols : 0;
        const row::Writer<G> out{dx + (cols ? rows.template offset<0>(r) : 0), cols};
        out.write([&](int v) {
            Acc a[kVec], b[kVec];
            t[0].v[v].again().unpack(a);
            t[1].v[v].again().unpack(b);
#pragma unroll
            for (int i = 0; i < kVec; ++i) {
                a[i] = kLog ? a[i] - tk::exp<kPrecise>(b[i]) * sum : b[i] * (a[i] - sum);
            }
            return tk::Vec<Out, kVec>::pack(a);
        });
    }
    reader.end();
}

// ---- a dim with a contiguous dim inside it -------------------------------------------------------------------------
//
// Template: columns::Geometry's numbers. kLoop: the reduced dim is longer than kDown * kRows; it is read twice, in steps.
// Launch: blocks of kAcross * kDown threads, any grid. The host guarantees: kVec divides n_inner, the strides and the
// alignment of every tensor.

template <class T, class Out, bool kLog, bool kLoop, int kVec, int kAcross, int kDown, int kRows, int kCluster,
          bool kPrefetch, int kDims>
__global__ void __launch_bounds__(kAcross * kDown / kCluster, kCluster > 1 ? (kRows * kVec <= 16 ? 768 : 512) / (kAcross * kDown / kCluster)
                                                                    : sizeof(T) == 4 && kAcross * kDown == 256 ? 2 : 1)
fwd_cols(Out* y,      // (n_outer, n_dim, n_inner)
         const T* x,  // (n_outer, n_dim, n_inner)
         columns::Place<columns::Geometry<T, 1, kVec, kAcross, kDown, kRows, kCluster, kPrefetch>, kDims, 2> at)
{
    using G = columns::Geometry<T, 1, kVec, kAcross, kDown, kRows, kCluster, kPrefetch>;
    using Acc = typename G::Acc;
    static_assert(!(kLoop && kPrefetch));
    constexpr bool kPrecise = sizeof(Out) >= 4;
    const Acc kInf = tk::limits<Acc>::inf();
    auto& shared = tk::shared<columns::Shared<G>>();
    const int64_t steps = kLoop ? (at.n_dim + kRows * kDown - 1) / (kRows * kDown) : 1;

    columns::Reader<G, kDims, 2> reader{shared, at, {x}};
    reader.begin();
    columns::Reducer<G> reduce{shared};
    reduce.begin();
    for (int64_t tile = G::first_tile(); tile < at.n_tiles; tile += G::tile_step()) {
        tk::Vec<T, kVec> t[1][kRows];
        auto& v = t[0];
        Acc m[kVec], s[kVec];
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
            m[i] = -kInf;
            s[i] = 0;
        }
        auto maxima = [&] {
#pragma unroll
            for (int k = 0; k < kRows; ++k) {
                Acc a[kVec];
                v[k].unpack(a);
#pragma unroll
                for (int i = 0; i < kVec; ++i) {
                    m[i] = tk::fmax(m[i], a[i]);
                }
            }
        };
        // exp(v) relative to the thread's own maxima; kept, where the tile is (kHold), so that there is one exp an element.
        constexpr bool kHold = !kLoop && !kLog;
        Acc e[kHold ? kRows : 1][kVec];
        auto sums = [&] {
#pragma unroll
            for (int k = 0; k < kRows; ++k) {
                Acc a[kVec];
                v[k].again().unpack(a);
#pragma unroll
                for (int i = 0; i < kVec; ++i) {
                    a[i] = tk::exp<kPrecise>(a[i] - shift_of(m[i]));
                    s[i] += a[i];
                    if constexpr (kHold) {
                        e[k][i] = a[i];
                    }
                }
            }
        };

        for (int64_t step = 0; step < steps; ++step) {
            reader.load(t, tile, step, -kInf);
            Acc old[kVec];
#pragma unroll
            for (int i = 0; i < kVec; ++i) {
                old[i] = m[i];
            }
            maxima();
#pragma unroll
            for (int i = 0; i < kVec; ++i) {
                s[i] *= kLoop ? MaxSum<Acc>::rescale(old[i], m[i]) : Acc(1);
            }
            sums();
        }
        Acc own[kVec];
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
            own[i] = m[i];
        }
        reduce(m, [](Acc a, Acc b) { return tk::fmax(a, b); });
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
            own[i] = MaxSum<Acc>::rescale(own[i], m[i]);
            s[i] *= own[i];
        }
        reduce(s, [](Acc a, Acc b) { return a + b; });
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
            s[i] = kLog ? tk::log(s[i]) : tk::reciprocal(s[i]) * (kHold ? own[i] : Acc(1));
        }
        for (int64_t step = 0; step < steps; ++step) {
            if constexpr (kLoop) {
                reader.load(t, tile, step, -kInf);
            }
            columns::Writer<G, Out, kDims, 2> out(y, at, tile, step);
#pragma unroll
            for (int k = 0; k < kRows; ++k) {
                Acc a[kVec];
                if constexpr (!kHold) {
                    v[k].template again<1>().unpack(a);
                }
#pragma unroll
                for (int i = 0; i < kVec; ++i) {
                    if constexpr (kHold) {
                        a[i] = e[k][i] * s[i];
                    } else {
                        a[i] = kLog ? (a[i] - m[i]) - s[i] : tk::exp<kPrecise>(a[i] - m[i]) * s[i];
                    }
                }
                out.put(tk::Vec<Out, kVec>::pack(a));
            }
        }
    }
    reduce.end();
}

template <class T, class Out, bool kLog, bool kLoop, int kVec, int kAcross, int kDown, int kRows, int kCluster,
          bool kPrefetch, int kDims>
__global__ void __launch_bounds__(kAcross * kDown / kCluster, kCluster > 1 ? (kRows * kVec * sizeof(T) <= 64 ? 768 : 512) / (kAcross * kDown / kCluster) : 1)
bwd_cols(Out* dx,      // (n_outer, n_dim, n_inner)
         const T* dy,  // (n_outer, n_dim, n_inner)
         const T* y,   // (n_outer, n_dim, n_inner)
         columns::Place<columns::Geometry<T, 2, kVec, kAcross, kDown, kRows, kCluster, kPrefetch>, kDims, 3> at)
{
    using G = columns::Geometry<T, 2, kVec, kAcross, kDown, kRows, kCluster, kPrefetch>;
    using Acc = typename G::Acc;
    static_assert(!(kLoop && kPrefetch));
    constexpr bool kPrecise = sizeof(Out) >= 4;
    auto& shared = tk::shared<columns::Shared<G>>();
    const int64_t steps = kLoop ? (at.n_dim + kRows * kDown - 1) / (kRows * kDown) : 1;

    columns::Reader<G, kDims, 3> reader{shared, at, {dy, y}};
    reader.begin();
    columns::Reducer<G> reduce{shared};
    reduce.begin();
    for (int64_t tile = G::first_tile(); tile < at.n_tiles; tile += G::tile_step()) {
        tk::Vec<T, kVec> t[2][kRows];
        auto &g = t[0], &v = t[1];
        Acc s[kVec] = {};
        for (int64_t step = 0; step < steps; ++step) {
            reader.load(t, tile, step, Acc(0));
#pragma unroll
            for (int k = 0; k < kRows; ++k) {
                Acc a[kVec], b[kVec];
                g[k].unpack(a);
                v[k].unpack(b);
#pragma unroll
                for (int i = 0; i < kVec; ++i) {
                    s[i] += kLog ? a[i] : a[i] * b[i];
                }
            }
        }
        reduce(s, [](Acc a, Acc b) { return a + b; });
        for (int64_t step = 0; step < steps; ++step) {
            if constexpr (kLoop) {
                reader.load(t, tile, step, Acc(0));
            }
            columns::Writer<G, Out, kDims, 3> out(dx, at, tile, step);
#pragma unroll
            for (int k = 0; k < kRows; ++k) {
                Acc a[kVec], b[kVec];
                g[k].again().unpack(a);
                v[k].again().unpack(b);
#pragma unroll
                for (int i = 0; i < kVec; ++i) {
                    a[i] = kLog ? a[i] - tk::exp<kPrecise>(b[i]) * s[i] : b[i] * (a[i] - s[i]);
                }
                out.put(tk::Vec<Out, kVec>::pack(a));
            }
        }
    }
    reduce.end();
}

// ---- any strides, any length: two reads ----------------------------------------------------------------------------
//
// fwd_any, bwd_any: a team of kTeam threads a row, 256 / kTeam rows a block of 256 threads. fwd_part and bwd_part reduce a
// *span* of a row's cells (one block of 512) to a value in scratch; fwd_apply and bwd_apply combine a row's values and
// write a span. The spans are a function of the row's length alone, so a row's bits don't depend on the batch.

using row::AnyGeometry;
using row::for_cells;

// This thread's (m, s) of the cells [lo, hi), kept as it goes: the sum is rescaled when the maximum grows.
template <bool kPrecise, int kVec, int kTeam, class T>
TK_DEVICE typename MaxSum<tk::accumulator_t<T>>::Value scan(const T* x, int64_t lo, int64_t hi, int64_t cell_stride)
{
    using Acc = tk::accumulator_t<T>;
    auto all = MaxSum<Acc>::identity();
    for_cells<kVec, kTeam>(x, lo, hi, cell_stride, [&](int64_t, const tk::Vec<T, kVec>& v) {
        Acc a[kVec], m = all.m;
        v.unpack(a);
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
            m = tk::fmax(m, a[i]);
        }
        if (m != all.m) {
            all.s *= MaxSum<Acc>::rescale(all.m, m);
            all.m = m;
        }
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
            all.s += tk::exp<kPrecise>(a[i] - shift_of(m));
        }
    });
    return all;
}

// Writes the cells [lo, hi) of y, given the row's (m, s).
template <bool kLog, int kVec, int kTeam, class Out, class T, class Value>
TK_DEVICE void apply(Out* y, const T* x, int64_t lo, int64_t hi, int64_t y_stride, int64_t x_stride, Value all)
{
    using Acc = tk::accumulator_t<T>;
    const Acc scale = kLog ? tk::log(all.s) : tk::reciprocal(all.s);
    for_cells<kVec, kTeam>(x, lo, hi, x_stride, [&](int64_t c, const tk::Vec<T, kVec>& v) {
        Acc a[kVec];
        v.unpack(a);
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
            a[i] = kLog ? (a[i] - all.m) - scale : tk::exp<(sizeof(Out) >= 4)>(a[i] - all.m) * scale;
        }
        tk::store_global<kVec * int(sizeof(Out))>(y + c * y_stride, tk::Vec<Out, kVec>::pack(a).raw);
    });
}

// This thread's part of sum(dy * y), or of sum(dy).
template <bool kLog, int kVec, int kTeam, class T>
TK_DEVICE tk::accumulator_t<T> scan_grad(const T* dy, const T* y, int64_t lo, int64_t hi, int64_t dy_stride,
                                         int64_t y_stride)
{
    using Acc = tk::accumulator_t<T>;
    Acc s = 0;
    auto add = [&](const tk::Vec<T, kVec>& g, const tk::Vec<T, kVec>& v) {
        Acc a[kVec], b[kVec];
        g.unpack(a);
        v.unpack(b);
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
            s += kLog ? a[i] : a[i] * b[i];
        }
    };
    if constexpr (kLog) {
        for_cells<kVec, kTeam>(dy, lo, hi, dy_stride, [&](int64_t, const tk::Vec<T, kVec>& g) { add(g, g); });
    } else {
        for_cells<kVec, kTeam>(dy, y, lo, hi, dy_stride, y_stride,
                               [&](int64_t, const tk::Vec<T, kVec>& g, const tk::Vec<T, kVec>& v) { add(g, v); });
    }
    return s;
}

// Writes the cells [lo, hi) of dx, given the row's sum.
template <bool kLog, int kVec, int kTeam, class Out, class T>
TK_DEVICE void apply_grad(Out* dx, const T* dy, const T* y, int64_t lo, int64_t hi, int64_t dx_stride, int64_t dy_stride,
                          int64_t y_stride, tk::accumulator_t<T> sum)
{
    using Acc = tk::accumulator_t<T>;
    for_cells<kVec, kTeam>(dy, y, lo, hi, dy_stride, y_stride,
                           [&](int64_t c, const tk::Vec<T, kVec>& g, const tk::Vec<T, kVec>& v) {
        Acc a[kVec], b[kVec];
        g.unpack(a);
        v.unpack(b);
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
            a[i] = kLog ? a[i] - tk::exp<(sizeof(Out) >= 4)>(b[i]) * sum : b[i] * (a[i] - sum);
        }
        tk::store_global<kVec * int(sizeof(Out))>(dx + c * dx_stride, tk::Vec<Out, kVec>::pack(a).raw);
    });
}

template <class T, class Out, bool kLog, int kTeam, int kDims>
__global__ void __launch_bounds__(256, 1)
fwd_any(Out* y,      // (n_rows, n_cols)
        const T* x,  // (n_rows, n_cols)
        row::Rows<kDims, 2> rows, int64_t n_rows, int64_t n_cols, int64_t y_stride, int64_t x_stride)
{
    using G = AnyGeometry<kTeam, T, Out>;
    using Op = MaxSum<tk::accumulator_t<T>>;
    row::Reducer<G, Op> reduce{tk::shared<row::Shared<G, typename Op::Value>>()};
    for (int64_t tile = G::first_tile(); tile < G::tiles(n_rows); tile += G::tile_step()) {
        const int64_t r = tile * G::kTeams + G::team();
        const int64_t cols = r < n_rows ? n_cols : 0;
        const T* row = x + (cols ? rows.template offset<1>(r) : 0);
        const auto all = reduce(scan<(sizeof(Out) >= 4), 1, kTeam>(row, 0, cols, x_stride), row::NoReader{});
        apply<kLog, 1, kTeam>(y + (cols ? rows.template offset<0>(r) : 0), row, 0, cols, y_stride, x_stride, all);
    }
}

template <class T, class Out, bool kLog, int kTeam, int kDims>
__global__ void __launch_bounds__(256, 1)
bwd_any(Out* dx,      // (n_rows, n_cols)
        const T* dy,  // (n_rows, n_cols)
        const T* y,   // (n_rows, n_cols)
        row::Rows<kDims, 3> rows, int64_t n_rows, int64_t n_cols, int64_t dx_stride, int64_t dy_stride, int64_t y_stride)
{
    using G = AnyGeometry<kTeam, T, Out>;
    using Op = row::Sum<tk::accumulator_t<T>>;
    row::Reducer<G, Op> reduce{tk::shared<row::Shared<G, typename Op::Value>>()};
    for (int64_t tile = G::first_tile(); tile < G::tiles(n_rows); tile += G::tile_step()) {
        const int64_t r = tile * G::kTeams + G::team();
        const int64_t cols = r < n_rows ? n_cols : 0;
        const T* g = dy + (cols ? rows.template offset<1>(r) : 0);
        const T* v = y + (cols ? rows.template offset<2>(r) : 0);
        const auto sum = reduce({scan_grad<kLog, 1, kTeam>(g, v, 0, cols, dy_stride, y_stride)}, row::NoReader{}).s;
        apply_grad<kLog, 1, kTeam>(dx + (cols ? rows.template offset<0>(r) : 0), g, v, 0, cols, dx_stride, dy_stride,
                                   y_stride, sum);
    }
}

constexpr int kSpanThreads = 512;

// The values of a row's spans, reduced over the block. Fixed order.
template <class Op, class Reduce, class Value>
TK_DEVICE Value combine_spans(Reduce& reduce, const Value* partial, int n_spans)
{
    Value all = Op::identity();
    for (int i = threadIdx.x; i < n_spans; i += kSpanThreads) {
        all = Op::combine(all, partial[i]);
    }
    return reduce(all, row::NoReader{});
}

template <class T, class Out, int kVec, int kDims>
__global__ void __launch_bounds__(kSpanThreads, 1)
fwd_part(typename MaxSum<tk::accumulator_t<T>>::Value* partial,  // (n_rows, n_spans)
         const T* x,                                             // (n_rows, n_cells, kVec)
         row::Rows<kDims, 2> rows, int64_t n_rows, int64_t n_cells, int64_t x_stride, int64_t span, int n_spans)
{
    using G = AnyGeometry<kSpanThreads, T, Out>;
    using Op = MaxSum<tk::accumulator_t<T>>;
    row::Reducer<G, Op> reduce{tk::shared<row::Shared<G, typename Op::Value>>()};
    for (int64_t i = blockIdx.x; i < n_rows * n_spans; i += gridDim.x) {
        const int64_t lo = i % n_spans * span, hi = tk::min(lo + span, n_cells);
        const T* row = x + rows.template offset<1>(i / n_spans);
        const auto all = reduce(scan<(sizeof(Out) >= 4), kVec, kSpanThreads>(row, lo, hi, x_stride), row::NoReader{});
        if (threadIdx.x == 0) {
            partial[i] = all;
        }
    }
}

template <class T, class Out, bool kLog, int kVec, int kDims>
__global__ void __launch_bounds__(kSpanThreads, 1)
fwd_apply(Out* y,                                                       // (n_rows, n_cells, kVec)
          const T* x,                                                   // (n_rows, n_cells, kVec)
          const typename MaxSum<tk::accumulator_t<T>>::Value* partial,  // (n_rows, n_spans)
          row::Rows<kDims, 2> rows, int64_t n_rows, int64_t n_cells, int64_t y_stride, int64_t x_stride, int64_t span,
          int n_spans)
{
    using G = AnyGeometry<kSpanThreads, T, Out>;
    using Op = MaxSum<tk::accumulator_t<T>>;
    row::Reducer<G, Op> reduce{tk::shared<row::Shared<G, typename Op::Value>>()};
    for (int64_t i = blockIdx.x; i < n_rows * n_spans; i += gridDim.x) {
        const int64_t r = i / n_spans, lo = i % n_spans * span, hi = tk::min(lo + span, n_cells);
        const auto all = combine_spans<Op>(reduce, partial + r * n_spans, n_spans);
        apply<kLog, kVec, kSpanThreads>(y + rows.template offset<0>(r), x + rows.template offset<1>(r), lo, hi, y_stride,
                                        x_stride, all);
    }
}

template <class T, class Out, bool kLog, int kVec, int kDims>
__global__ void __launch_bounds__(kSpanThreads, 1)
bwd_part(typename row::Sum<tk::accumulator_t<T>>::Value* partial,  // (n_rows, n_spans)
         const T* dy,                                              // (n_rows, n_cells, kVec)
         const T* y,                                               // (n_rows, n_cells, kVec)
         row::Rows<kDims, 3> rows, int64_t n_rows, int64_t n_cells, int64_t dy_stride, int64_t y_stride, int64_t span,
         int n_spans)
{
    using G = AnyGeometry<kSpanThreads, T, Out>;
    using Op = row::Sum<tk::accumulator_t<T>>;
    row::Reducer<G, Op> reduce{tk::shared<row::Shared<G, typename Op::Value>>()};
    for (int64_t i = blockIdx.x; i < n_rows * n_spans; i += gridDim.x) {
        const int64_t r = i / n_spans, lo = i % n_spans * span, hi = tk::min(lo + span, n_cells);
        const auto sum = reduce({scan_grad<kLog, kVec, kSpanThreads>(
            dy + rows.template offset<1>(r), y + rows.template offset<2>(r), lo, hi, dy_stride, y_stride)}, row::NoReader{});
        if (threadIdx.x == 0) {
            partial[i] = sum;
        }
    }
}

template <class T, class Out, bool kLog, int kVec, int kDims>
__global__ void __launch_bounds__(kSpanThreads, 1)
bwd_apply(Out* dx,                                                        // (n_rows, n_cells, kVec)
          const T* dy,                                                    // (n_rows, n_cells, kVec)
          const T* y,                                                     // (n_rows, n_cells, kVec)
          const typename row::Sum<tk::accumulator_t<T>>::Value* partial,  // (n_rows, n_spans)
          row::Rows<kDims, 3> rows, int64_t n_rows, int64_t n_cells, int64_t dx_stride, int64_t dy_stride,
          int64_t y_stride, int64_t span, int n_spans)
{
    using G = AnyGeometry<kSpanThreads, T, Out>;
    using Op = row::Sum<tk::accumulator_t<T>>;
    row::Reducer<G, Op> reduce{tk::shared<row::Shared<G, typename Op::Value>>()};
    for (int64_t i = blockIdx.x; i < n_rows * n_spans; i += gridDim.x) {
        const int64_t r = i / n_spans, lo = i % n_spans * span, hi = tk::min(lo + span, n_cells);
        const auto sum = combine_spans<Op>(reduce, partial + r * n_spans, n_spans).s;
        apply_grad<kLog, kVec, kSpanThreads>(dx + rows.template offset<0>(r), dy + rows.template offset<1>(r),
                                             y + rows.template offset<2>(r), lo, hi, dx_stride, dy_stride, y_stride, sum);
    }
}

}  // namespace softmax
