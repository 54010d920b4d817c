// Cross entropy of logits and the class of each row, and its gradient.
//
//   u = x, or cap * tanh(x / cap)        m = max(u), s = sum(exp(u - m)), lse = m + log(s) of a row
//   loss = (1 - a) w[y] (lse - u[y]) + a / C sum_c(w[c] (lse - u[c])) + z lse^2
//   dx[c] = du/dx * (p[c] k - [c = y] k_y - w[c] k_all)        p = exp(u - m) / s
//       k_y = g (1 - a) w[y],  k_all = g a / C,  k = k_y + k_all sum(w) + g 2 z lse + g_lse
//
// g is the gradient of the row's loss; of a mean it is divided by the weights of the rows that count. A row of class
// `ignore` has loss 0, and with a g_lse of 0 a gradient of 0, whatever its logits. A class outside [0, C) is never used as
// an index: the row's loss and gradient are NaN. Differences are taken from m, so that large offsets stay exact.
//
// Bytes: fwd reads the logits once and writes, if kGrad, their gradient once; the rest is a few bytes a row. scan reads
// the logits once, for rows that no register holds; the gradient of those is bwd's, which reads and writes once.
//
// The host guarantees: sizes and strides of the rows (row::Rows: dx, x, target and, for bwd, g and g_lse) reach no element
// outside the tensors. loss, lse and stats are contiguous, a row one behind the other. dx may be x itself: a row's logits have
// all been read, that of its class too, before the barrier behind which the first is written over.
//
// Template: T element type of the logits; Acc its accumulator; L of the losses; kSmooth: a > 0; kCap: cap > 0.
#include "parts/cells.cuh"
#include "parts/max_sum.cuh"

namespace cross_entropy {

template <class T> using Acc = tk::accumulator_t<T>;

template <class V>
TK_DEVICE V get(const V* p)
{
    const tk::Words<sizeof(V)> words = tk::load_global<sizeof(V)>(p);
    V v;
    memcpy(&v, &words, sizeof(V));
    return v;
}
template <class V>
TK_DEVICE void put(V* p, V v)
{
    tk::Words<sizeof(V)> words;
    memcpy(&words, &v, sizeof(V));
    tk::store_global<sizeof(V)>(p, words);
}

// A row's class, or one of these.
constexpr int64_t kIgnored = -1, kOutside = -2;

// What the loss is made of besides the logits. By value.
template <class A>
struct Terms {
    const A* weight;  // (n_classes,), or null: all 1
    int64_t ignore, n_classes;
    A smoothing, z, cap;

    TK_DEVICE A weight_of(int64_t c) const { return weight ? get(weight + c) : A(1); }
    TK_DEVICE int64_t class_of(int64_t y) const
    {
        return y == ignore ? kIgnored : y < 0 || y >= n_classes ? kOutside : y;
    }
};

// The logit as it counts.
template <bool kCap, class A>
TK_DEVICE A capped(A x, A cap) { return kCap ? cap * tk::tanh(x / cap) : x; }

// A set's (m, s), and for kSmooth d = sum(w (u - m)) and w = sum(w).
template <class A, bool kSmooth>
struct Statistics : row::MaxSum<A> {};

template <class A>
struct Statistics<A, true> {
    using Base = row::MaxSum<A>;
    struct alignas(4 * sizeof(A)) Value { A m, s, d, w; };

    TK_DEVICE static Value identity() { return {-tk::limits<A>::inf(), A(0), A(0), A(0)}; }

    // d relative to a maximum `to` >= m.
    TK_DEVICE static A moved(Value v, A to) { return v.d + v.w * (row::shift_of(v.m) - row::shift_of(to)); }

    TK_DEVICE static Value combine(Value a, Value b)
    {
        const auto both = Base::combine({a.m, a.s}, {b.m, b.s});
        return {both.m, both.s, moved(a, both.m) + moved(b, both.m), a.w + b.w};
    }
    template <int kWidth>
    TK_DEVICE static Value lanes(Value v)
    {
        const auto all = Base::template lanes<kWidth>({v.m, v.s});
        A d = moved(v, all.m), w = v.w;
#pragma unroll
        for (int o = kWidth / 2; o > 0; o /= 2) {
            d += tk::shuffle_xor(d, o);
            w += tk::shuffle_xor(w, o);
        }
        return {all.m, all.s, d, w};
    }
};

// Where a row's results go besides its loss; by value. Either may be null.
template <class A>
struct Results {
    A* lse;    // (n_rows,)
    A* stats;  // (2, n_rows), kSmooth: (3, n_rows): m, log(s), sum(w)
    int64_t n_rows;

    // By one thread a row. u: the logit of class y, where there is one.
    template <bool kSmooth, class L, class Value>
    TK_DEVICE void write(L* loss, int64_t r, const Value& all, A log_s, int64_t y, A u, const Terms<A>& terms) const
    {
        const A lse_of_row = all.m + log_s;
        A v = y == kIgnored ? A(0) : tk::limits<A>::inf() - tk::limits<A>::inf();
        if (y >= 0) {
            v = (A(1) - terms.smoothing) * terms.weight_of(y) * (log_s - (u - all.m));
            if constexpr (kSmooth) {
                v += terms.smoothing / A(terms.n_classes) * (all.w * log_s - all.d);
            }
            if (terms.z != A(0)) {
                v += terms.z * lse_of_row * lse_of_row;
            }
        }
        put(loss + r, tk::from_acc<L>(v));
        if (lse) {
            put(lse + r, lse_of_row);
        }
        if (stats) {
            put(stats + r, all.m);
            put(stats + n_rows + r, log_s);
            if constexpr (kSmooth) {
                put(stats + 2 * n_rows + r, all.w);
            }
        }
    }
};

// The factors of a row's gradient.
template <class A>
struct Factors {
    A k, k_y, k_all;
    bool none;  // all of the row's gradient is 0

    template <bool kSmooth>
    TK_DEVICE static Factors of(A lse, A sum_w, int64_t y, A g, A g_lse, const Terms<A>& terms)
    {
        if (y == kIgnored) {
            return {g_lse, A(0), A(0), g_lse == A(0)};
        }
        if (y == kOutside) {
            const A nan = tk::limits<A>::inf() - tk::limits<A>::inf();
            return {nan, nan, nan, false};
        }
        const A k_y = g * (A(1) - terms.smoothing) * terms.weight_of(y);
        const A k_all = kSmooth ? g * terms.smoothing / A(terms.n_classes) : A(0);
        const A z = terms.z != A(0) ? g * A(2) * terms.z * lse : A(0);
        if (terms.n_classes == 1) {  // its probability is 1 whatever its logit: what cancels is left out
            return {z + g_lse, A(0), A(0), false};
        }
        return {k_y + (kSmooth ? k_all * sum_w : A(0)) + z + g_lse, k_y, k_all, false};
    }
};

// The sum of value(i) over [lo, hi), by the whole block.
template <class A, int kThreads, class F>
TK_DEVICE A sum_by_block(int64_t lo, int64_t hi, F value)
{
    using G = row::AnyGeometry<kThreads, A, A>;
    row::Reducer<G, row::Sum<A>> reduce{tk::shared<row::Shared<G, typename row::Sum<A>::Value>>()};
    return reduce({row::sum_of_every<A>(lo + threadIdx.x, hi, kThreads, value)}, row::NoReader{}).s;
}

// ---- rows with unit stride, held in registers ----------------------------------------------------------------------
//
// kSmooth: the host guarantees that there are no weights, whose loads would take the registers that a row needs.
//
// kWhole: the kernel sums the losses too, and finds what divides them, so that nothing has to run before and after it. The rows
// that count are counted by each block, while its first row comes. The last block to finish sums the losses in their order:
// `counter`, of which the blocks draw their rows, counts in its upper half those that finished, after which no draw counts. The
// host guarantees a counter, no weights, and few rows.
//
// Template: row::Geometry's numbers; kDims outer dims. Launch and x_extent, stages, slot_bytes, counter as softmax::fwd.

template <class T, class L, class S, bool kWhole, bool kGrad, bool kSmooth, int kTeam, int kTeams, int kCluster,
          int kVecs, int kChunkVecs, bool kRing, int kVec, int kResident, int kDims>
__global__ void __launch_bounds__(kTeam * kTeams, kResident)
fwd(T* dx,                     // (n_rows, n_cols); kGrad
    const T* x,                // (n_rows, n_cols)
    const int64_t* target,     // (n_rows,)
    Acc<T>* total,             // (1,): what divides the losses, kWhole: is written; null: 1
    L* loss,                   // (n_rows,)
    S* sum,                    // (1,); kWhole
    Results<Acc<T>> results, Terms<Acc<T>> terms, row::Rows<kDims, 3> rows, int64_t n_rows, int n_cols,
    int64_t x_extent, int stages, int slot_bytes, uint64_t* counter)
{
    using G = row::Geometry<T, T, 1, kTeam, kTeams, kCluster, kVecs, kChunkVecs, kRing, kVec>;
    using A = Acc<T>;
    using Op = Statistics<A, kSmooth>;
    using Value = typename Op::Value;
    constexpr bool kPrecise = sizeof(T) >= 4;

    auto& shared = tk::shared<row::Shared<G, Value>>();
    const row::Input<G, kDims> in{{x}, {x_extent}, n_rows, n_cols, stages, slot_bytes, counter};
    row::Reader<G, kDims, 3, Value> reader{shared, in, rows};
    row::Reducer<G, Op> reduce{shared};
    reader.begin();
    A divisor = 1;
    if (total) {
        if constexpr (kWhole) {
            Value counted = Op::identity();
            counted.m = 0;
            counted.s = row::sum_of_every<A>(threadIdx.x, n_rows, kTeam, [&](int64_t r) {
                return terms.class_of(get(target + rows.template offset<2>(r))) >= 0 ? A(1) : A(0);
            });
            if (G::kCluster > 1 && G::part() != 0) {
                counted.s = 0;
            }
            divisor = reduce(counted, row::NoReader{}).s;
        } else if (kGrad) {
            divisor = get(total);
        }
    }
    const A g = A(1) / divisor;
    // Classes are asked for two rows ahead and their logits one, so that no row waits for them.
    auto target_of = [&](int64_t r) { return r < n_rows ? get(target + rows.template offset<2>(r)) : terms.ignore; };
    auto logit_of = [&](int64_t r, int y) { return y >= 0 ? get(x + rows.template offset<1>(r) + y) : T{}; };
    int y = int(terms.class_of(target_of(reader.current())));
    T logit = logit_of(reader.current(), y);
    int64_t ahead = target_of(reader.template current<1>());
    auto look_ahead = [&] {
        y = int(terms.class_of(ahead));
        logit = logit_of(reader.template current<1>(), y);
        ahead = target_of(reader.template current<2>());
    };
    for (; reader.more(); reader.next()) {
        row::Tile<G> t[1];
        reader.load(t, -tk::limits<A>::inf());

        // Relative to the thread's own maximum: one exp an element, and one reduction instead of two. The class's logit is one of
        // the row's; taken into account before the reduction, it has been read before dx, which may be x, is written.
        const A u = y >= 0 ? tk::to_acc(logit) : -tk::limits<A>::inf();
        const A m = tk::fmax(row::maximum<G>(t[0]), u);
        const A shift = row::shift_of(m);
        A e[kVecs][kVec];
        A s[2] = {}, d = 0;
        const int left = (reader.current() < n_rows ? n_cols : 0) - G::first_col();
#pragma unroll
        for (int v = 0; v < kVecs; ++v) {
            t[0].v[v].unpack(e[v]);
#pragma unroll
            for (int i = 0; i < kVec; ++i) {
                const A a = e[v][i];
                e[v][i] = tk::exp<kPrecise>(a - shift);
                s[i % 2] += e[v][i];
                if constexpr (kSmooth) {
                    // Whole vectors lie within the row or outside.
                    if (v * G::kStep + (G::kAligned ? 0 : i) < left) {
                        d += a - shift;
                    }
                }
            }
        }
        Value mine = Op::identity();
        mine.m = m;
        mine.s = s[0] + s[1];
        if constexpr (kSmooth) {
            mine.d = d;
            mine.w = A(row::own_columns<G>(left));
        }
        const Value all = reduce(mine, reader);

        const int64_t r = reader.current();
        const int cols = r < n_rows ? n_cols : 0;
        const A log_s = tk::log(all.s);
        if (cols && G::part() == 0 && G::rank() == 0) {
            results.template write<kSmooth>(loss, r, all, log_s, y, u, terms);
        }
        if constexpr (kGrad) {
            A sum_w = 0;
            if constexpr (kSmooth) {
                sum_w = all.w;
            }
            const auto f = Factors<A>::template of<kSmooth>(all.m + log_s, sum_w, y, g, A(0), terms);
            A scale = row::MaxSum<A>::rescale(m, all.m) * (f.k / all.s);
            if (f.none) {  // not 0 * NaN
                scale = 0;
#pragma unroll
                for (int v = 0; v < kVecs; ++v) {
#pragma unroll
                    for (int i = 0; i < kVec; ++i) {
                        e[v][i] = 0;
                    }
                }
            }
            const int to_y = y < 0 ? -1 : y - G::first_col();
            look_ahead();
            const row::Writer<G> out{dx + (cols ? rows.template offset<0>(r) : 0), cols};
            out.write([&](int v) {
                A o[kVec];
#pragma unroll
                for (int i = 0; i < kVec; ++i) {
                    o[i] = tk::mul(e[v][i], scale) - (kSmooth ? f.k_all : A(0));
                }
                const int at = to_y - v * G::kStep;
                if (uint32_t(at) < uint32_t(kVec)) {  // of one vector in a row: a branch costs less than a choice an element
#pragma unroll
                    for (int i = 0; i < kVec; ++i) {
                        o[i] -= i == at ? f.k_y : A(0);
                    }
                }
                return tk::Vec<T, kVec>::pack(o);
            });
        } else {
            look_ahead();
        }
    }
    reader.end();
    if constexpr (kWhole) {
        auto& last = tk::shared<bool>();
        tk::sync_block();  // all have read what the block's shared memory held, and the losses are written
        if (threadIdx.x == 0) {
            tk::fence_device();
            last = tk::fetch_add(counter, uint64_t(1) << 32) >> 32 == gridDim.x - 1;
        }
        tk::sync_block();
        const bool mine = last;
        tk::sync_block();  // all know
        if (mine) {
            tk::fence_device();
            const A s = sum_by_block<A, kTeam>(0, n_rows, [&](int64_t r) { return tk::to_acc(get(loss + r)); });
            if (threadIdx.x == 0) {
                put(sum, tk::from_acc<S>(s / divisor));
                if (total) {
                    put(total, divisor);
                }
            }
        }
    }
}

// ---- any strides, any length ----------------------------------------------------------------------------------------
//
// A team of kTeam threads a row, 256 / kTeam rows a block of 256 threads; rows of several *spans* of cells (kTeam = 256) a
// block each, whose values merge puts together. The spans are a function of the row's length alone, so a row's bits don't
// depend on the batch.

constexpr int kThreads = 256;

// How rows are cut. By value.
struct Cells {
    int64_t n_rows, n_cells, span;
    int n_spans;

    // Calls f(row, span, lo, hi) for the row and the span of cells of this thread's team; rows past the last have none. The
    // whole block makes each call together.
    template <int kTeam, class F>
    TK_DEVICE void for_rows(F f) const
    {
        constexpr int kTeams = kThreads / kTeam;
        const int64_t tiles = (n_rows + kTeams - 1) / kTeams * n_spans;
        for (int64_t i = blockIdx.x; i < tiles; i += gridDim.x) {
            const int64_t r = i / n_spans * kTeams + int(threadIdx.x) / kTeam;
            const int k = int(i % n_spans);
            f(r, k, k * span, r < n_rows ? tk::min(k * span + span, n_cells) : k * span);
        }
    }
};

// The row's class, and its logit where there is one.
template <bool kCap, class T, class Rows>
TK_DEVICE int64_t class_at(const T* row, const int64_t* target, const Rows& rows, int64_t r, int64_t stride,
                           const Terms<Acc<T>>& terms, Acc<T>& u)
{
    const int64_t y = terms.class_of(get(target + rows.template offset<2>(r)));
    u = y >= 0 ? capped<kCap>(tk::to_acc(get(row + y * stride)), terms.cap) : Acc<T>(0);
    return y;
}

template <class T, class L, bool kSmooth, bool kCap, int kVec, int kTeam, int kDims>
__global__ void __launch_bounds__(kThreads, 1)
scan(typename Statistics<Acc<T>, kSmooth>::Value* partial,  // (n_rows, n_spans), of several spans
     const T* x,                                            // (n_rows, n_cells, kVec)
     const int64_t* target,                                 // (n_rows,)
     L* loss,                                               // (n_rows,)
     Results<Acc<T>> results, Terms<Acc<T>> terms, row::Rows<kDims, 3> rows, Cells cells, int64_t x_stride)
{
    using G = row::AnyGeometry<kTeam, T, T>;
    using A = Acc<T>;
    using Op = Statistics<A, kSmooth>;
    using Value = typename Op::Value;
    row::Reducer<G, Op> reduce{tk::shared<row::Shared<G, Value>>()};
    cells.template for_rows<kTeam>([&](int64_t r, int k, int64_t lo, int64_t hi) {
        const T* row = x + (r < cells.n_rows ? rows.template offset<1>(r) : 0);
        Value all = Op::identity();
        row::for_cells<kVec, kTeam>(row, lo, hi, x_stride, [&](int64_t c, const tk::Vec<T, kVec>& v) {
            A a[kVec], m = all.m;
            v.unpack(a);
#pragma unroll
            for (int i = 0; i < kVec; ++i) {
                a[i] = capped<kCap>(a[i], terms.cap);
                m = tk::fmax(m, a[i]);
            }
            if (m != all.m) {
                if constexpr (kSmooth) {
                    all.d = Op::moved(all, m);
                }
                all.s *= row::MaxSum<A>::rescale(all.m, m);
                all.m = m;
            }
            const A shift = row::shift_of(m);
#pragma unroll
            for (int i = 0; i < kVec; ++i) {
                all.s += tk::exp<(sizeof(T) >= 4)>(a[i] - shift);
                if constexpr (kSmooth) {
                    const A of_class = terms.weight_of(c * kVec + i);
                    all.d += of_class * (a[i] - shift);
                    all.w += of_class;
                }
            }
        });
        all = reduce(all, row::NoReader{});
        if (r < cells.n_rows && G::rank() == 0) {
            if (cells.n_spans > 1) {
                partial[r * cells.n_spans + k] = all;
            } else {
                A u;
                const int64_t y = class_at<kCap>(row, target, rows, r, kVec > 1 ? 1 : x_stride, terms, u);
                results.template write<kSmooth>(loss, r, all, tk::log(all.s), y, u, terms);
            }
        }
    });
}

// The values of a row's spans, in a fixed order. A block a row.
template <class T, class L, bool kSmooth, bool kCap, int kDims>
__global__ void __launch_bounds__(kThreads, 1)
merge(const typename Statistics<Acc<T>, kSmooth>::Value* partial,  // (n_rows, n_spans)
      const T* x,                                                  // (n_rows, n_classes)
      const int64_t* target,                                       // (n_rows,)
      L* loss,                                                     // (n_rows,)
      Results<Acc<T>> results, Terms<Acc<T>> terms, row::Rows<kDims, 3> rows, int n_spans, int64_t x_stride)
{
    using G = row::AnyGeometry<kThreads, T, T>;
    using Op = Statistics<Acc<T>, kSmooth>;
    row::Reducer<G, Op> reduce{tk::shared<row::Shared<G, typename Op::Value>>()};
    for (int64_t r = blockIdx.x; r < results.n_rows; r += gridDim.x) {
        auto all = Op::identity();
        for (int k = threadIdx.x; k < n_spans; k += kThreads) {
            all = Op::combine(all, partial[r * n_spans + k]);
        }
        all = reduce(all, row::NoReader{});
        if (threadIdx.x == 0) {
            Acc<T> u;
            const T* row = x + rows.template offset<1>(r);
            const int64_t y = class_at<kCap>(row, target, rows, r, x_stride, terms, u);
            results.template write<kSmooth>(loss, r, all, tk::log(all.s), y, u, terms);
        }
    }
}

// The gradient, of the logits once more. kOnlyUnlessOne: dx holds it for g = 1 already, so where g is 1 nothing is done.
template <class T, class L, bool kOnlyUnlessOne, bool kSmooth, bool kCap, int kVec, int kTeam, int kDims>
__global__ void __launch_bounds__(kThreads, 1)
bwd(T* dx,                  // (n_rows, n_cells, kVec)
    const T* x,             // (n_rows, n_cells, kVec)
    const int64_t* target,  // (n_rows,)
    const L* g,             // (n_rows,), of a sum or a mean with stride 0; null: 1, or 0 beside g_lse
    const Acc<T>* g_lse,    // (n_rows,); null: 0
    const Acc<T>* stats,    // as fwd wrote it
    const Acc<T>* total,    // (1,), or null: 1
    Terms<Acc<T>> terms, row::Rows<kDims, 5> rows, Cells cells, int64_t dx_stride, int64_t x_stride, bool one_g)
{
    using A = Acc<T>;
    if (kOnlyUnlessOne && one_g && tk::to_acc(get(g)) == A(1)) {
        return;
    }
    const A inverse = total ? A(1) / get(total) : A(1);
    cells.template for_rows<kTeam>([&](int64_t r, int, int64_t lo, int64_t hi) {
        if (r >= cells.n_rows) {
            return;
        }
        const A own = g ? A(tk::to_acc(get(g + rows.template offset<3>(r)))) : A(g_lse ? 0 : 1);
        if (kOnlyUnlessOne && own == A(1)) {
            return;
        }
        const int64_t y = terms.class_of(get(target + rows.template offset<2>(r)));
        const A m = get(stats + r), log_s = get(stats + cells.n_rows + r);
        const A sum_w = kSmooth ? get(stats + 2 * cells.n_rows + r) : A(0);
        const A of_lse = g_lse ? get(g_lse + rows.template offset<4>(r)) : A(0);
        const auto f = Factors<A>::template of<kSmooth>(m + log_s, sum_w, y, own * inverse, of_lse, terms);
        T* to = dx + rows.template offset<0>(r);
        row::for_cells<kVec, kTeam>(x + rows.template offset<1>(r), lo, hi, x_stride,
                                    [&](int64_t c, const tk::Vec<T, kVec>& v) {
            A a[kVec];
            v.unpack(a);
#pragma unroll
            for (int i = 0; i < kVec; ++i) {
                const int64_t column = c * kVec + i;
                const A u = capped<kCap>(a[i], terms.cap);
                A o = tk::exp<(sizeof(T) >= 4)>((u - m) - log_s) * f.k - (column == y ? f.k_y : A(0));
                if constexpr (kSmooth) {
                    o -= f.k_all * terms.weight_of(column);
                }
                if constexpr (kCap) {
                    o *= A(1) - u / terms.cap * (u / terms.cap);
                }
                a[i] = f.none ? A(0) : o;
            }
            tk::store_global<kVec * int(sizeof(T))>(to + c * dx_stride, tk::Vec<T, kVec>::pack(a).raw);
        });
    });
}

// ---- sums over the rows ---------------------------------------------------------------------------------------------
//
// A block of 256 threads for each `chunk` of rows, in a fixed order: no atomics.

// The weights of the rows that count: what a mean is divided by.
template <class A, int kDims>
__global__ void __launch_bounds__(kThreads, 1)
count(A* sums,                // (n_chunks,)
      const int64_t* target,  // (n_rows,)
      Terms<A> terms, row::Rows<kDims, 3> rows, int64_t n_rows, int64_t chunk)
{
    const int64_t lo = blockIdx.x * chunk;
    const A s = sum_by_block<A, kThreads>(lo, tk::min(lo + chunk, n_rows), [&](int64_t r) {
        const int64_t y = terms.class_of(get(target + rows.template offset<2>(r)));
        return y >= 0 ? terms.weight_of(y) : A(0);
    });
    if (threadIdx.x == 0) {
        put(sums + blockIdx.x, s);
    }
}

template <class Out, class A>
__global__ void __launch_bounds__(kThreads, 1)
fold(Out* sums,       // (n_chunks,)
     const A* values, // (n,)
     const A* total,  // (1,): divides the sum; null: 1
     int64_t n, int64_t chunk)
{
    const int64_t lo = blockIdx.x * chunk;
    const A s = sum_by_block<A, kThreads>(lo, tk::min(lo + chunk, n), [&](int64_t i) { return get(values + i); });
    if (threadIdx.x == 0) {
        put(sums + blockIdx.x, tk::from_acc<Out>(total ? s / get(total) : s));
    }
}

}  // namespace cross_entropy
