// layer_norm and rms_norm over rows of contiguous elements, and their gradients.
//
//   fwd   h = x + residual                        kAdd; else h = x. Rounded to T: what is normalized is what is returned
//         y = (h - mean) * rstd * w + b           rstd = 1 / sqrt(mean((h - mean)^2) + eps); kRms: the mean counts as 0
//   bwd   dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) + dh         g = dy * w, xhat = (h - mean) * rstd;
//         dw = sum over rows(dy * xhat)                                  kRms: without mean(g); dh: what came for h
//         db = sum over rows(dy)
//
// w = weight, or weight + 1, a zero-centred one; 1 and 0 without weight and bias.
//
// A row's mean is kept in two numbers: mean, rounded, and rest, the mean of h - mean. So neither the variance nor h - mean loses
// digits when all of a row lies far from 0. A row's statistics are rstd, and but for kRms mean and rest: (3 or 1, n_rows). fwd
// finds them in one reduction: each thread takes its elements relative to one of them.
//
// Bytes: fwd reads x (and residual) and writes y (and h) once. bwd reads dy and x (and dh) and writes dx once; the sums over
// rows are kept in registers, a block's rows in their order, and go through (blocks, n_cols) partial sums that `total` adds in
// their order: the same bits every time, without atomics. fwd_wide reads x three times, bwd_wide dy and x twice, and
// bwd_weight once more, for rows longer than a cluster holds.
//
// The host guarantees: nothing is empty; rows are contiguous and reach no element outside the tensors; y, h, dx and dh are
// contiguous; weight and bias are contiguous and begin on 16 bytes. No output overlaps an input.
//
// Template: T element type of everything but W of weight and dw, B of bias and db; kWeight how the weight counts; kBias: there is
// a bias.
#include "parts/cells.cuh"

namespace layer_norm {

// What a row is reduced to: two sums, of which an rms norm has only the second.
template <class T, bool kRms>
using Op = typename tk::select<kRms, row::Sum<tk::accumulator_t<T>>, row::Sums<tk::accumulator_t<T>>>::type;

template <class T, bool kRms, class Reducer, class Reader>
TK_DEVICE auto reduced(Reducer& reduce, tk::accumulator_t<T> a, tk::accumulator_t<T> b, const Reader& reader)
{
    if constexpr (kRms) {
        return typename row::Sums<tk::accumulator_t<T>>::Value{0, reduce({b}, reader).s};
    } else {
        return reduce({a, b}, reader);
    }
}

// How a parameter counts: not at all, as it is, or as one more, which is a zero-centred weight.
enum Counts { kAbsent, kPlain, kPlusOne };

template <int kCounts, int kVec, class A, class Acc>
TK_DEVICE void counted(const A (&a)[kVec], Acc (&out)[kVec])
{
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
        out[i] = kCounts == kPlusOne ? Acc(a[i]) + Acc(1) : Acc(a[i]);
    }
}

// A parameter's elements [col, col + kVec) before n_cols, as they count. kWhole: all of them are there, in whole vectors.
template <int kCounts, bool kWhole, int kVec, class P, class Acc>
TK_DEVICE void parameters(const P* p, int64_t col, int64_t n_cols, Acc (&out)[kVec])
{
    typename tk::Vec<P, kVec>::Acc a[kVec] = {};
    if constexpr (kWhole) {
        if (col < n_cols) {
            tk::Vec<P, kVec>{tk::load_global<kVec * int(sizeof(P))>(p + col)}.unpack(a);
        }
    } else {
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
            if (col + i < n_cols) {
                a[i] = tk::to_acc(p[col + i]);
            }
        }
    }
    counted<kCounts>(a, out);
}

// Where a thread has the parameters of its columns: with each row from the caches, in registers, or in a place of its own in the
// block's shared memory, whose blocks take row after row of whole vectors.
enum Hold { kReload, kRegisters, kShared };

// kUnpack: there are the registers to keep it as what it is calculated with.
template <class G, int kCounts, int kHold, bool kUnpack, class P>
struct Along {
    static constexpr bool kHeld = kCounts != kAbsent && kHold == kRegisters;
    static constexpr bool kStaged = kCounts != kAbsent && kHold == kShared;
    using Acc = typename row::Tile<G>::Acc;
    using Vec = tk::Vec<P, G::kVec>;
    const P* p;
    Vec kept[kHeld ? G::kVecs : 1];
    Vec* place = nullptr;  // of the thread's first vector in shared memory; the others are kThreads behind each other

    // room: of the block's shared memory; what is taken is taken from it.
    TK_DEVICE Along(const P* p, int n_cols, char*& room) : p(p)
    {
        if constexpr (kStaged) {
            place = reinterpret_cast<Vec*>(room) + threadIdx.x;
            room += G::kVecs * G::kThreads * sizeof(Vec);
        }
        if constexpr (kHeld || kStaged) {
#pragma unroll
            for (int v = 0; v < G::kVecs; ++v) {
                const int col = G::first_col() + v * G::kStep;
                Vec vec = Vec::filled(typename Vec::Acc(0));
                if (col < n_cols) {
                    vec.raw = tk::load_global<Vec::kBytes>(p + col);
                }
                (kStaged ? place[v * G::kThreads] : kept[kHeld ? v : 0]) = vec;
            }
        }
    }

    // Vector v's elements, if the parameter counts.
    TK_DEVICE void get(int v, int n_cols, Acc (&out)[G::kVec]) const
    {
        if constexpr (kCounts == kAbsent) {
            return;
        } else if constexpr (kHeld || kStaged) {
            typename Vec::Acc a[G::kVec];
            if constexpr (kStaged) {
                Vec{tk::load_shared<Vec::kBytes>(place + v * G::kThreads)}.unpack(a);
            } else {
                (kUnpack ? kept[v] : kept[v].again()).unpack(a);
            }
            counted<kCounts>(a, out);
        } else {
            parameters<kCounts, G::kAligned>(p, G::first_col() + v * G::kStep, n_cols, out);
        }
    }
};

// a * w + b, of what there is of w and b. Fused by hand, as all that a compiler might fuse in two ways: a row has the same bits
// whatever holds it.
template <bool kWeight, bool kBias, class Acc>
TK_DEVICE Acc affine(Acc a, Acc w, Acc b)
{
    if constexpr (kWeight && kBias) {
        return tk::fma(a, w, b);
    } else {
        return kWeight ? tk::mul(a, w) : kBias ? a + b : a;
    }
}

// Whether a thread has the registers for so many bytes beside what every kernel here needs.
template <class G, int kResident>
TK_DEVICE constexpr bool has_room(int bytes)
{
    constexpr int kAll = 65536 / (G::kThreads * kResident);
    return bytes / 4 + 48 <= (kAll < 255 ? kAll : 255);
}

// How numbers spread: n of them have the mean shift + mean, and m2 is the sum of their squared distances from it. The shift is one
// of them, so nothing here loses digits where all lie far from 0.
template <class Acc>
struct Moments {
    struct alignas(4 * sizeof(Acc)) Value { Acc n, shift, mean, m2; };

    TK_DEVICE static Value combine(Value a, Value b)
    {
        const Acc n = a.n + b.n, share = n > Acc(0) ? b.n / n : Acc(0);
        const Acc d = (b.shift - a.shift) + (b.mean - a.mean);
        return {n, a.shift, tk::fma(d, share, a.mean), tk::fma(tk::mul(d, a.n), tk::mul(d, share), a.m2 + b.m2)};
    }
    template <int kWidth>
    TK_DEVICE static Value lanes(Value v)
    {
        const Acc n = row::Sum<Acc>::template lanes<kWidth>({v.n}).s;
        return lanes<kWidth>(v, n, Acc(1) / n);
    }
    // Where it is known how many all lanes' are.
    template <int kWidth>
    TK_DEVICE static Value lanes(Value v, Acc n, Acc inverse_n)
    {
        using Sum = row::Sum<Acc>;
        const Acc shift = tk::shuffle<kWidth>(v.shift, 0), own = (v.shift - shift) + v.mean;
        const Acc mean = tk::mul(Sum::template lanes<kWidth>({tk::mul(v.n, own)}).s, inverse_n), d = own - mean;
        return {n, shift, mean, Sum::template lanes<kWidth>({tk::fma(tk::mul(v.n, d), d, v.m2)}).s};
    }
};

// A thread's shift: of some of its elements, of which `left` are in the row, that which is nearest 0, so that it is none that
// stands out, from which others would be far.
template <class G>
TK_DEVICE typename row::Tile<G>::Acc shift_of(const row::Tile<G>& t, int left)
{
    using Acc = typename row::Tile<G>::Acc;
    Acc a[G::kVec], shift;
    t.v[0].unpack(a);
    shift = a[0];
    auto consider = [&](Acc b, int at) { shift = at < left && tk::abs(b) < tk::abs(shift) ? b : shift; };
    consider(a[G::kVec - 1], G::kVec - 1);
    if constexpr (G::kVecs > 1) {
        t.v[1].unpack(a);
        consider(a[0], G::kStep);
        consider(a[G::kVec - 1], G::kStep + G::kVec - 1);
    }
    return shift;
}

template <class Acc>
constexpr Acc kSmall = Acc(1) / (1ull << 40) / (1ull << 40);

template <class Acc>
struct Stats {
    Acc rstd, mean, rest;

    template <bool kRms>
    TK_DEVICE void save(Acc* to, int64_t r, int64_t n_rows) const
    {
        to[r] = rstd;
        if constexpr (!kRms) {
            to[n_rows + r] = mean;
            to[2 * n_rows + r] = rest;
        }
    }
    template <bool kRms>
    TK_DEVICE static Stats of(const Acc* from, int64_t r, int64_t n_rows)
    {
        return {from[r], kRms ? Acc(0) : from[n_rows + r], kRms ? Acc(0) : from[2 * n_rows + r]};
    }
    // False where squares overflow, or there is a NaN.
    TK_DEVICE bool finish(const typename Moments<Acc>::Value& all, Acc inverse_n, Acc eps)
    {
        mean = all.shift + all.mean;
        rest = (all.shift - mean) + all.mean;  // what rounding took
        rstd = tk::inverse_sqrt((all.m2 < Acc(0) ? Acc(0) : tk::mul(all.m2, inverse_n)) + eps);
        return all.m2 < tk::limits<Acc>::inf();
    }
    // Of the sums s of h - mean and q of their squares. False where these overflow.
    template <bool kRms>
    TK_DEVICE bool finish(Acc s, Acc q, Acc inverse_n, Acc eps)
    {
        rest = kRms ? Acc(0) : tk::mul(s, inverse_n);
        const Acc var = tk::fma(-rest, rest, tk::mul(q, inverse_n));  // rest: what rounding took from the mean, or gave to it
        rstd = tk::inverse_sqrt((kRms || !(var < Acc(0)) ? var : Acc(0)) + eps);
        return q != tk::limits<Acc>::inf();
    }
    // Of d = h - mean.
    TK_DEVICE Acc normal(Acc d) const { return tk::fma(d, rstd, -tk::mul(rest, rstd)); }
};

// The mean of at(c) over a row, by a warp, or by each thread for itself.
template <bool kWarp, class Acc, class At>
TK_DEVICE Acc mean_of(int64_t n, At at)
{
    Acc s = 0;
#pragma unroll 1
    for (int64_t c = kWarp ? tk::lane() : 0; c < n; c += kWarp ? 32 : 1) {
        s += at(c);
    }
    return row::Sum<Acc>::template lanes<(kWarp ? 32 : 1)>({s}).s / Acc(n);
}

// The statistics of a row whose squares overflow, of smaller numbers: small(c), element c times kSmall. Each warp for itself,
// or each thread where a warp has several rows: slow, but rare, and without a reduction that other rows would have to join.
template <bool kRms, bool kWarp, class Acc, class At>
TK_DEVICE Stats<Acc> of_huge(int64_t n, Acc eps, At small)
{
    Acc mean = 0, rest = 0;
    if constexpr (!kRms) {
        mean = mean_of<kWarp, Acc>(n, small);
        rest = mean_of<kWarp, Acc>(n, [&](int64_t c) { return small(c) - mean; });
    }
    const Acc square = mean_of<kWarp, Acc>(n, [&](int64_t c) { return (small(c) - mean) * (small(c) - mean); });
    const Acc var = square - rest * rest, whole = var / kSmall<Acc> / kSmall<Acc>;
    const Acc rstd = whole < tk::limits<Acc>::inf() ? Acc(1) / tk::sqrt(whole + eps) : kSmall<Acc> / tk::sqrt(var);
    return {rstd, mean / kSmall<Acc>, rest / kSmall<Acc>};
}

// ---- rows held in registers ----------------------------------------------------------------------------------------
//
// Template: row::Geometry's numbers; kDims outer dims; kHold, a Hold: of the parameters. Launch: blocks of kTeam * kTeams threads, a
// grid of any multiple of kCluster. extents, stages, slot_bytes, counter: see row::Input.

template <class T, class W, int kWeight, class B, bool kBias, bool kRms, bool kAdd, int kHold, int kTeam, int kTeams,
          int kCluster, int kVecs, int kChunkVecs, bool kRing, int kVec, int kResident, int kDims>
__global__ void __launch_bounds__(kTeam * kTeams, kResident)
fwd(T* y,                         // (n_rows, n_cols)
    T* h,                         // (n_rows, n_cols); kAdd only
    tk::accumulator_t<T>* stats,  // (3 or 1, n_rows), or null
    const T* x,                   // (n_rows, n_cols)
    const T* residual,            // (n_rows, n_cols); kAdd only
    const W* weight,              // (n_cols,)
    const B* bias,                // (n_cols,)
    row::Rows<kDims, kAdd ? 3 : 2> rows, int64_t n_rows, int n_cols, int64_t x_extent, int64_t residual_extent,
    int stages, int slot_bytes, uint64_t* counter, tk::accumulator_t<T> eps)
{
    using G = row::Geometry<T, T, kAdd ? 2 : 1, kTeam, kTeams, kCluster, kVecs, kChunkVecs, kRing, kVec>;
    using Acc = tk::accumulator_t<T>;
    using Op = typename tk::select<kRms, row::Sum<Acc>, Moments<Acc>>::type;
    constexpr int kTensors = kAdd ? 3 : 2;

    auto& shared = tk::shared<row::Shared<G, typename Op::Value>>();
    row::Input<G, kDims> in{{x}, {x_extent}, n_rows, n_cols, stages, slot_bytes, counter};
    if constexpr (kAdd) {
        in.base[1] = residual;
        in.extent[1] = residual_extent;
    }
    row::Reader<G, kDims, kTensors, typename Op::Value> reader{shared, in, rows};
    row::Reducer<G, Op> reduce{shared};
    reader.begin();
    const Acc inverse_n = Acc(1) / Acc(n_cols);
    // How many elements are the thread's, and how many its warp's of the row.
    const int left = n_cols - G::first_col(), of_warp = tk::min(n_cols - G::warp_col(), G::kLanes * kVecs * kVec);
    const Acc own = Acc(row::own_columns<G>(left)), inverse_own = own > Acc(0) ? Acc(1) / own : Acc(0);
    const Acc shared_n = of_warp > 0 ? Acc(of_warp) : Acc(0), inverse_shared = of_warp > 0 ? Acc(1) / shared_n : Acc(0);
    constexpr int kN = kVecs * kVec, kParameters = kHold == kRegisters ? (kWeight != kAbsent) + kBias : 0;
    constexpr int kPacked = kHold == kRegisters ? (kWeight != kAbsent ? sizeof(W) : 0) + (kBias ? sizeof(B) : 0) : 0;
    constexpr bool kUnpacked = sizeof(T) > 2 || has_room<G, kResident>(kN * (kPacked + int(sizeof(Acc))));
    constexpr bool kUnpack = kUnpacked && has_room<G, kResident>(kN * (kParameters + 1) * int(sizeof(Acc)));
    char* room = reader.room();
    const Along<G, kWeight, kHold, kUnpack, W> along_w{weight, n_cols, room};
    const Along<G, kBias ? kPlain : kAbsent, kHold, kUnpack, B> along_b{bias, n_cols, room};
    for (; reader.more(); reader.next()) {
        row::Tile<G> t[G::kStreams];
        reader.load(t, Acc(0));
        const int64_t r = reader.current();
        const int cols = r < n_rows ? n_cols : 0;
        const int64_t at = cols ? rows.template offset<0>(r) : 0;
        if constexpr (kAdd) {
#pragma unroll
            for (int v = 0; v < kVecs; ++v) {
                Acc a[kVec], b[kVec];
                t[0].v[v].unpack(a);
                t[1].v[v].unpack(b);
#pragma unroll
                for (int i = 0; i < kVec; ++i) {
                    a[i] += b[i];
                }
                t[0].v[v] = tk::Vec<T, kVec>::pack(a);
            }
            const row::Writer<G> out{h + at, cols};
            out.write([&](int v) { return t[0].v[v]; });
        }

        // h - shift, and 0 past the row's end; of an rms norm h. Where a thread lacks the registers, found again instead.
        Acc d[kUnpacked ? kVecs : 1][kVec];
        const Acc shift = kRms ? Acc(0) : shift_of<G>(t[0], left);
        auto shifted = [&](int v, const tk::Vec<T, kVec>& from, Acc (&a)[kVec]) {
            from.unpack(a);
            if constexpr (!kRms) {
#pragma unroll
                for (int i = 0; i < kVec; ++i) {  // whole vectors lie within the row or outside
                    a[i] -= v * G::kStep + (G::kAligned ? 0 : i) < left ? shift : Acc(0);
                }
            }
        };
        Acc s[2] = {}, q[2] = {};
#pragma unroll
        for (int v = 0; v < kVecs; ++v) {
            Acc(&a)[kVec] = d[kUnpacked ? v : 0];
            shifted(v, t[0].v[v], a);
#pragma unroll
            for (int i = 0; i < kVec; ++i) {
                if constexpr (kUnpacked) {
                    tk::keep(a[i]);
                }
                if constexpr (!kRms) {
                    s[i % 2] += a[i];
                }
                q[i % 2] = tk::fma(a[i], a[i], q[i % 2]);
            }
        }
        Stats<Acc> of{Acc(0), Acc(0), Acc(0)};
        bool huge;
        if constexpr (kRms) {
            huge = !of.template finish<true>(Acc(0), reduce({q[0] + q[1]}, reader).s, inverse_n, eps);
        } else {
            const Acc sum = s[0] + s[1], mean = tk::mul(sum, inverse_own);
            const typename Op::Value mine{own, shift, mean, tk::fma(-mean, sum, q[0] + q[1])};
            const auto all = reduce.across(Op::template lanes<G::kLanes>(mine, shared_n, inverse_shared), reader);
            huge = !of.finish(all, inverse_n, eps);
        }
        huge = huge && !tk::is_same<T, tk::f16>::value;
        if (huge) {
            auto element = [&](int64_t c) {
                Acc a = tk::to_acc(x[rows.template offset<1>(r) + c]);
                if constexpr (kAdd) {
                    a = tk::to_acc(tk::from_acc<T>(a + tk::to_acc(residual[rows.template offset<2>(r) + c])));
                }
                return a;
            };
            of = of_huge<kRms, (kTeam >= 32)>(cols, eps, [&](int64_t c) { return element(c) * kSmall<Acc>; });
#pragma unroll 1
            for (int c = G::part() * kTeam + G::rank(); c < cols; c += kTeam * kCluster) {
                Acc w[1] = {}, b[1] = {};
                if constexpr (kWeight != kAbsent) {
                    parameters<kWeight, false>(weight, c, n_cols, w);
                }
                if constexpr (kBias) {
                    parameters<kPlain, false>(bias, c, n_cols, b);
                }
                const Acc a = of.normal(element(c) - of.mean);
                y[at + c] = tk::from_acc<T>(affine<(kWeight != kAbsent), kBias>(a, w[0], b[0]));
            }
        }
        if (stats && cols && G::rank() == 0 && G::part() == 0) {
            of.template save<kRms>(stats, r, n_rows);
        }
        const Acc to_normal = kRms ? Acc(0) : tk::mul((shift - of.mean) - of.rest, of.rstd);
        const row::Writer<G> out{y + at, huge ? 0 : cols};
        out.write([&](int v) {
            Acc w[kVec], b[kVec];
            along_w.get(v, cols, w);
            along_b.get(v, cols, b);
            Acc(&a)[kVec] = d[kUnpacked ? v : 0];
            if constexpr (!kUnpacked) {
                shifted(v, t[0].v[v].again(), a);
            }
#pragma unroll
            for (int i = 0; i < kVec; ++i) {
                a[i] = kRms ? tk::mul(a[i], of.rstd) : tk::fma(a[i], of.rstd, to_normal);
                a[i] = affine<(kWeight != kAbsent), kBias>(a[i], w[i], b[i]);
            }
            return tk::Vec<T, kVec>::pack(a);
        });
    }
    reader.end();
}

// This thread's sums over rows, to its group's row of the partial sums: a group is a team, or the teams of a warp together.
template <class G, class Acc>
TK_DEVICE void save_sums(Acc (&sum)[G::kVecs][G::kVec], Acc* partial, int n_cols)
{
    constexpr int kGroups = G::kThreads / (G::kTeam < 32 ? 32 : G::kTeam);
    const int group = int(threadIdx.x) / (G::kTeam < 32 ? 32 : G::kTeam);
    Acc* to = partial + (G::first_tile() * kGroups + group) * n_cols;
#pragma unroll
    for (int v = 0; v < G::kVecs; ++v) {
#pragma unroll
        for (int i = 0; i < G::kVec; ++i) {
#pragma unroll
            for (int o = G::kLanes; o < 32; o *= 2) {
                sum[v][i] += tk::shuffle_xor(sum[v][i], o);
            }
        }
        const int col = G::first_col() + v * G::kStep;
        if (tk::lane() >= G::kLanes) {
            continue;
        }
        if constexpr (G::kAligned) {
            if (col < n_cols) {
                tk::store_global<G::kVec * int(sizeof(Acc))>(to + col, tk::Vec<Acc, G::kVec>::pack(sum[v]).raw);
            }
        } else {
#pragma unroll
            for (int i = 0; i < G::kVec; ++i) {
                if (col + i < n_cols) {
                    to[col + i] = sum[v][i];
                }
            }
        }
    }
}

// Rows are dealt out in turn, never drawn by the counter: so a block's sums are of the same rows every time.
template <class T, class W, int kWeight, bool kRms, bool kDw, bool kDb, int kHold, int kTeam, int kTeams,
          int kCluster, int kVecs, int kChunkVecs, bool kRing, int kVec, int kResident, int kDims>
__global__ void __launch_bounds__(kTeam * kTeams, kResident)
bwd(T* dx,                               // (n_rows, n_cols)
    tk::accumulator_t<T>* partial_dw,    // (groups of the grid, n_cols); kDw only
    tk::accumulator_t<T>* partial_db,    // (groups of the grid, n_cols); kDb only
    const T* dy,                         // (n_rows, n_cols)
    const T* h,                          // (n_rows, n_cols)
    const T* dh,                         // (n_rows, n_cols), or null
    const tk::accumulator_t<T>* stats,   // (3 or 1, n_rows)
    const W* weight,                     // (n_cols,), or null
    row::Rows<kDims, 3> rows, int64_t n_rows, int n_cols, int64_t dy_extent, int64_t h_extent, int stages,
    int slot_bytes, uint64_t*)
{
    using G = row::Geometry<T, T, 2, kTeam, kTeams, kCluster, kVecs, kChunkVecs, kRing, kVec>;
    using Acc = tk::accumulator_t<T>;
    using Op = layer_norm::Op<T, kRms>;

    auto& shared = tk::shared<row::Shared<G, typename Op::Value>>();
    const row::Input<G, kDims> in{{dy, h}, {dy_extent, h_extent}, n_rows, n_cols, stages, slot_bytes, nullptr};
    row::Reader<G, kDims, 3, typename Op::Value> reader{shared, in, rows};
    row::Reducer<G, Op> reduce{shared};
    Acc dw[kVecs][kVec] = {}, db[kVecs][kVec] = {};
    reader.begin();
    const Acc inverse_n = Acc(1) / Acc(n_cols);
    constexpr int kN = kVecs * kVec, kKept = 2 + kDw + kDb;
    constexpr bool kHeld = kHold == kRegisters && kWeight != kAbsent;
    constexpr bool kUnpacked =
        sizeof(T) > 2 || has_room<G, kResident>(kN * ((kHeld ? int(sizeof(W)) : 0) + kKept * int(sizeof(Acc))));
    constexpr bool kUnpack = kUnpacked && has_room<G, kResident>(kN * (kHeld + kKept) * int(sizeof(Acc)));
    char* room = reader.room();
    const Along<G, kWeight, kHold, kUnpack, W> along_w{weight, n_cols, room};
    for (; reader.more(); reader.next()) {
        const int64_t r = reader.current();
        const int cols = r < n_rows ? n_cols : 0;
        Stats<Acc> of{Acc(0), Acc(0), Acc(0)};
        if (cols) {
            of = Stats<Acc>::template of<kRms>(stats, r, n_rows);
        }
        row::Tile<G> t[2];
        reader.load(t, Acc(0));

        // dy, and then g; h, and then xhat; where a thread lacks the registers, unpacked again instead.
        Acc g[kUnpacked ? kVecs : 1][kVec], xhat[kUnpacked ? kVecs : 1][kVec], w[kVec];
        Acc s[2] = {}, p[2] = {};
#pragma unroll
        for (int v = 0; v < kVecs; ++v) {
            Acc(&a)[kVec] = g[kUnpacked ? v : 0], (&b)[kVec] = xhat[kUnpacked ? v : 0];
            t[0].v[v].unpack(a);  // 0 past the row's end, and so is all it adds
            t[1].v[v].unpack(b);
            along_w.get(v, cols, w);
#pragma unroll
            for (int i = 0; i < kVec; ++i) {
                b[i] = of.normal(b[i] - of.mean);
                if constexpr (kDw) {
                    dw[v][i] = tk::fma(a[i], b[i], dw[v][i]);
                }
                if constexpr (kDb) {
                    db[v][i] += a[i];
                }
                a[i] = affine<(kWeight != kAbsent), false>(a[i], w[i], Acc(0));
                if constexpr (kUnpacked) {
                    tk::keep(a[i]);
                    tk::keep(b[i]);
                }
                if constexpr (!kRms) {
                    s[i % 2] += a[i];
                }
                p[i % 2] = tk::fma(a[i], b[i], p[i % 2]);
            }
        }
        const auto all = reduced<T, kRms>(reduce, s[0] + s[1], p[0] + p[1], reader);
        const Acc mean_g = kRms ? Acc(0) : tk::mul(all.a, inverse_n), mean_p = tk::mul(all.b, inverse_n);
        const Acc by_p = -tk::mul(mean_p, of.rstd), less_g = -tk::mul(mean_g, of.rstd);

        const int64_t at = cols ? rows.template offset<0>(r) : 0;
        const row::Writer<G> out{dx + at, cols};
        out.write([&](int v) {
            Acc(&b)[kVec] = xhat[kUnpacked ? v : 0];
            Acc a[kVec];
            if constexpr (!kUnpacked) {
                t[0].v[v].again().unpack(g[0]);
                t[1].v[v].again().unpack(b);
                along_w.get(v, cols, w);
            }
#pragma unroll
            for (int i = 0; i < kVec; ++i) {
                a[i] = g[kUnpacked ? v : 0][i];
                if constexpr (!kUnpacked) {
                    a[i] = affine<(kWeight != kAbsent), false>(a[i], w[i], Acc(0));
                    b[i] = of.normal(b[i] - of.mean);
                }
                a[i] = tk::fma(a[i], of.rstd, kRms ? tk::mul(b[i], by_p) : tk::fma(b[i], by_p, less_g));
            }
            if (dh) {
                const int col = G::first_col() + v * G::kStep;
                const auto zero = tk::Vec<T, kVec>::filled(Acc(0));
                const char* more = reinterpret_cast<const char*>(dh + at + col);
                Acc c[kVec];
                row::load_vec<G, false, false, !G::kPairs>(more, cols - col, zero).unpack(c);
#pragma unroll
                for (int i = 0; i < kVec; ++i) {
                    a[i] += c[i];
                }
            }
            return tk::Vec<T, kVec>::pack(a);
        });
    }
    reader.end();
    if constexpr (kDw) {
        save_sums<G>(dw, partial_dw, n_cols);
    }
    if constexpr (kDb) {
        save_sums<G>(db, partial_db, n_cols);
    }
}

// ---- the sums over rows --------------------------------------------------------------------------------------------
//
// Launch: blocks of 32 columns, up to kWarps warps; the grid covers the columns.

constexpr int kWarps = 16;

template <class Acc>
struct Totals { Acc of[kWarps][32]; };

template <class P, class Acc>
TK_DEVICE void total_of(P* out, const Acc* partial, int64_t n_partial, int64_t n_cols, Totals<Acc>& shared)
{
    const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, warps = int(blockDim.x) / 32;
    const int64_t col = int64_t(blockIdx.x) * 32 + lane;
    Acc s = 0;
    if (col < n_cols) {
        s = row::sum_of_every<Acc>(warp, n_partial, warps, [&](int64_t i) { return partial[i * n_cols + col]; });
    }
    shared.of[warp][lane] = s;
    tk::sync_block();  // every warp's sum is written
    if (warp == 0 && col < n_cols) {
        for (int i = 1; i < warps; ++i) {
            s += shared.of[i][lane];
        }
        out[col] = tk::from_acc<P>(tk::accumulator_t<P>(s));
    }
    tk::sync_block();  // and read, before the next parameter's
}

template <class Acc, class W, class B, bool kDw, bool kDb>
__global__ void __launch_bounds__(32 * kWarps, 1)
total(W* dw,                  // (n_cols,); kDw only
      B* db,                  // (n_cols,); kDb only
      const Acc* partial_dw,  // (n_partial, n_cols); kDw only
      const Acc* partial_db,  // (n_partial, n_cols); kDb only
      int64_t n_partial, int64_t n_cols)
{
    auto& shared = tk::shared<Totals<Acc>>();
    if constexpr (kDw) {
        total_of(dw, partial_dw, n_partial, n_cols, shared);
    }
    if constexpr (kDb) {
        total_of(db, partial_db, n_partial, n_cols, shared);
    }
}

// ---- rows longer than a cluster holds ------------------------------------------------------------------------------
//
// A block of 512 threads a row. Cells of kVec elements: see row::for_cells.

constexpr int kThreads = 512;

template <class T, class W, int kWeight, class B, bool kBias, bool kRms, bool kAdd, int kVec, int kDims>
__global__ void __launch_bounds__(kThreads, 1)
fwd_wide(T* y,                         // (n_rows, n_cells, kVec)
         T* h,                         // (n_rows, n_cells, kVec); kAdd only
         tk::accumulator_t<T>* stats,  // (3 or 1, n_rows), or null
         const T* x,                   // (n_rows, n_cells, kVec)
         const T* residual,            // (n_rows, n_cells, kVec); kAdd only
         const W* weight,              // (n_cells, kVec), or null
         const B* bias,                // (n_cells, kVec), or null
         row::Rows<kDims, kAdd ? 3 : 2> rows, int64_t n_rows, int64_t n_cells,
         tk::accumulator_t<T> eps)
{
    using G = row::AnyGeometry<kThreads, T, T>;
    using Acc = tk::accumulator_t<T>;
    using Op = layer_norm::Op<T, kRms>;
    using Vec = tk::Vec<T, kVec>;
    const Acc n = Acc(n_cells * kVec);
    row::Reducer<G, Op> reduce{tk::shared<row::Shared<G, typename Op::Value>>()};
    for (int64_t r = blockIdx.x; r < n_rows; r += gridDim.x) {
        const int64_t at = rows.template offset<0>(r);
        const T* from = x + rows.template offset<1>(r);
        if constexpr (kAdd) {
            // Each thread reads again what it wrote itself.
            const T* other = residual + rows.template offset<2>(r);
            row::for_cells<kVec, kThreads>(from, other, 0, n_cells, kVec, kVec,
                                           [&](int64_t c, const Vec& v, const Vec& w) {
                Acc a[kVec], b[kVec];
                v.unpack(a);
                w.unpack(b);
#pragma unroll
                for (int i = 0; i < kVec; ++i) {
                    a[i] += b[i];
                }
                tk::store_global<Vec::kBytes>(h + at + c * kVec, Vec::pack(a).raw);
            });
            from = h + at;
        }
        Stats<Acc> of{Acc(0), Acc(0), Acc(0)};
        if constexpr (!kRms) {
            Acc s = 0;
            row::for_cells<kVec, kThreads>(from, 0, n_cells, kVec, [&](int64_t, const Vec& v) {
                Acc a[kVec];
                v.unpack(a);
#pragma unroll
                for (int i = 0; i < kVec; ++i) {
                    s += a[i];
                }
            });
            of.mean = reduce({s, Acc(0)}, row::NoReader{}).a / n;
        }
        Acc s = 0, q = 0;
        row::for_cells<kVec, kThreads>(from, 0, n_cells, kVec, [&](int64_t, const Vec& v) {
            Acc a[kVec];
            v.unpack(a);
#pragma unroll
            for (int i = 0; i < kVec; ++i) {
                a[i] = kRms ? a[i] : a[i] - of.mean;
                s += a[i];
                q += a[i] * a[i];
            }
        });
        const auto all = reduced<T, kRms>(reduce, s, q, row::NoReader{});
        if (!of.template finish<kRms>(all.a, all.b, Acc(1) / n, eps)) {
            // Of h what all of the block's threads wrote, before the reductions.
            of = of_huge<kRms, true>(n_cells * kVec, eps, [&](int64_t c) { return tk::to_acc(from[c]) * kSmall<Acc>; });
        }
        if (stats && threadIdx.x == 0) {
            of.template save<kRms>(stats, r, n_rows);
        }
        row::for_cells<kVec, kThreads>(from, 0, n_cells, kVec, [&](int64_t c, const Vec& v) {
            Acc a[kVec], w[kVec], b[kVec];
            v.unpack(a);
            if constexpr (kWeight != kAbsent) {
                parameters<kWeight, true>(weight, c * kVec, n_cells * kVec, w);
            }
            if constexpr (kBias) {
                parameters<kPlain, true>(bias, c * kVec, n_cells * kVec, b);
            }
#pragma unroll
            for (int i = 0; i < kVec; ++i) {
                a[i] = affine<(kWeight != kAbsent), kBias>(of.normal(a[i] - of.mean), w[i], b[i]);
            }
            tk::store_global<Vec::kBytes>(y + at + c * kVec, Vec::pack(a).raw);
        });
    }
}

template <class T, class W, int kWeight, bool kRms, int kVec, int kDims>
__global__ void __launch_bounds__(kThreads, 1)
bwd_wide(T* dx,                              // (n_rows, n_cells, kVec)
         const T* dy,                        // (n_rows, n_cells, kVec)
         const T* h,                         // (n_rows, n_cells, kVec)
         const T* dh,                        // (n_rows, n_cells, kVec), or null
         const tk::accumulator_t<T>* stats,  // (3 or 1, n_rows)
         const W* weight,                    // (n_cells, kVec), or null
         row::Rows<kDims, 3> rows, int64_t n_rows, int64_t n_cells)
{
    using G = row::AnyGeometry<kThreads, T, T>;
    using Acc = tk::accumulator_t<T>;
    using Op = layer_norm::Op<T, kRms>;
    using Vec = tk::Vec<T, kVec>;
    const Acc n = Acc(n_cells * kVec);
    row::Reducer<G, Op> reduce{tk::shared<row::Shared<G, typename Op::Value>>()};
    for (int64_t r = blockIdx.x; r < n_rows; r += gridDim.x) {
        const auto of = Stats<Acc>::template of<kRms>(stats, r, n_rows);
        const int64_t at = rows.template offset<0>(r);
        const T *grad = dy + rows.template offset<1>(r), *from = h + rows.template offset<2>(r);
        // g = dy * w and xhat of a cell.
        auto terms = [&](int64_t c, const Vec& v, const Vec& u, Acc (&g)[kVec], Acc (&a)[kVec]) {
            Acc w[kVec];
            v.unpack(g);
            u.unpack(a);
            if constexpr (kWeight != kAbsent) {
                parameters<kWeight, true>(weight, c * kVec, n_cells * kVec, w);
            }
#pragma unroll
            for (int i = 0; i < kVec; ++i) {
                g[i] *= kWeight != kAbsent ? w[i] : Acc(1);
                a[i] = of.normal(a[i] - of.mean);
            }
        };
        Acc s = 0, p = 0;
        row::for_cells<kVec, kThreads>(grad, from, 0, n_cells, kVec, kVec, [&](int64_t c, const Vec& v, const Vec& u) {
            Acc g[kVec], a[kVec];
            terms(c, v, u, g, a);
#pragma unroll
            for (int i = 0; i < kVec; ++i) {
                s += g[i];
                p += g[i] * a[i];
            }
        });
        const auto all = reduced<T, kRms>(reduce, s, p, row::NoReader{});
        const Acc mean_g = kRms ? Acc(0) : all.a / n, mean_p = all.b / n;
        row::for_cells<kVec, kThreads>(grad, from, 0, n_cells, kVec, kVec, [&](int64_t c, const Vec& v, const Vec& u) {
            Acc g[kVec], a[kVec];
            terms(c, v, u, g, a);
#pragma unroll
            for (int i = 0; i < kVec; ++i) {
                g[i] = of.rstd * ((g[i] - mean_g) - a[i] * mean_p);
            }
            if (dh) {
                Vec more;
                more.raw = tk::load_global<Vec::kBytes>(dh + at + c * kVec);
                more.unpack(a);
#pragma unroll
                for (int i = 0; i < kVec; ++i) {
                    g[i] += a[i];
                }
            }
            tk::store_global<Vec::kBytes>(dx + at + c * kVec, Vec::pack(g).raw);
        });
    }
}

// The partial sums of bwd_wide's rows: a thread has a cell of the columns (blockIdx.x) and every gridDim.y'th row.
template <class T, bool kRms, bool kDw, bool kDb, int kVec, int kDims>
__global__ void __launch_bounds__(kThreads, 1)
bwd_weight(tk::accumulator_t<T>* partial_dw,   // (gridDim.y, n_cells, kVec); kDw only
           tk::accumulator_t<T>* partial_db,   // (gridDim.y, n_cells, kVec); kDb only
           const T* dy,                        // (n_rows, n_cells, kVec)
           const T* h,                         // (n_rows, n_cells, kVec)
           const tk::accumulator_t<T>* stats,  // (3 or 1, n_rows)
           row::Rows<kDims, 3> rows, int64_t n_rows, int64_t n_cells)
{
    using Acc = tk::accumulator_t<T>;
    using Vec = tk::Vec<T, kVec>;
    const int64_t c = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    if (c >= n_cells) {
        return;
    }
    Acc dw[kVec] = {}, db[kVec] = {};
    for (int64_t r = blockIdx.y; r < n_rows; r += gridDim.y) {
        const auto of = Stats<Acc>::template of<kRms>(stats, r, n_rows);
        Vec v, u;
        v.raw = tk::load_global<Vec::kBytes>(dy + rows.template offset<1>(r) + c * kVec);
        u.raw = tk::load_global<Vec::kBytes>(h + rows.template offset<2>(r) + c * kVec);
        Acc g[kVec], a[kVec];
        v.unpack(g);
        u.unpack(a);
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
            dw[i] += g[i] * of.normal(a[i] - of.mean);
            db[i] += g[i];
        }
    }
    const int64_t at = (blockIdx.y * n_cells + c) * kVec;
    if constexpr (kDw) {
        tk::store_global<kVec * int(sizeof(Acc))>(partial_dw + at, tk::Vec<Acc, kVec>::pack(dw).raw);
    }
    if constexpr (kDb) {
        tk::store_global<kVec * int(sizeof(Acc))>(partial_db + at, tk::Vec<Acc, kVec>::pack(db).raw);
    }
}

// ---- rows that are not contiguous ----------------------------------------------------------------------------------
//
// Their copy, made before the others run. Launch: any grid of any blocks.

template <class T, int kDims>
__global__ void __launch_bounds__(256)
dense(T* out,      // (n,)
      const T* x,  // n elements, a "row" each
      row::Rows<kDims, 1> at, int64_t n)
{
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x) {
        out[i] = x[at.template offset<0>(i)];
    }
}

}  // namespace layer_norm
