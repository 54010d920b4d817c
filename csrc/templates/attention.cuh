// Attention of L queries to S keys, each a row of d numbers, with values of dv numbers, and its gradients.
//
//   t = scale * q k^T, capped (+ mask)    p = exp(t - max t) / sum exp(t - max t)        o = dropout(p) v
//
//   fwd         o, and of each row max t and sum exp(t - max t)
//   combine     the same of what blocks found that had some of the keys each
//   bwd_rows    of each row what the kernels below take p from, and delta = sum(do * o)
//   bwd_delta   delta = sum(p * dropout(do v^T)) instead: without the output's rounding, for two products more
//   bwd         dv, dk and dq as below, at once; bwd_round rounds dq
//   bwd_dkv     dv = dropout(p)^T do,  dk = scale * ds^T q      where ds = p * (dropout(do v^T) - delta)
//   bwd_dq      dq = scale * ds k
//   bwd_dmask   the mask's gradient: ds, summed over the dims in which the mask is broadcast
//
// Scores live in registers only: a block walks over the keys (bwd_dkv: the queries) in tiles, and the softmax is online: the
// sums so far are scaled down when a larger score turns up (Dao et al., "FlashAttention-2", 2023). The backward computes p
// again. Nothing but bwd's dq is added to by two blocks, so every other result has the same bits each time; and the heads that
// share a key's head are summed in the block that has the key.
//
// Multiplications: fwd 2 products of L * S * d, bwd 5, bwd_dkv 4, bwd_dq 3, bwd_dmask and bwd_delta 2. Causal: half.
// The host guarantees: kVector as tile::load has it; kD >= d, kDv >= dv but where chunks of kOut columns are computed by a
// block each (then they divide into d or dv as padded); fewer than 2^31 blocks; lengths below 2^30, limits of a window up to 2^30.
// Template: T element type; S scores::Scores; BLOCK_M queries and BLOCK_N keys a tile; kWarps and kTiles (or rows) of the engine.
#include "parts/scores.cuh"
#include "parts/tile.cuh"
#include "tk/tensor.cuh"

namespace attention {

// Strides in elements. A mask's dims that are broadcast have stride 0.
struct Strides {
    int64_t b, h, l, d;
};

struct Problem {
    Strides q, k, v, o, g, mask;  // g: the output's gradient
    double scale, kept, cap;
    int heads, group;  // of queries; that share a head of keys and values
    int q_len, k_len, d, dv;
    int offset, lower;  // causal: query i sees the keys up to i + offset; window: from i + lower on
    uint32_t dropped;
};

template <class T, int kWarps, int kTiles>
struct engine {
    using type = typename tk::select<sizeof(T) == 2, tile::Tensor16<T, kWarps, kTiles>, tile::Scalar<T, kWarps, kTiles>>::type;
};

// Which tile, head and batch entry a block has, and which chunk of its columns or which part of the keys.
struct Place {
    int first, chunk, part, head, batch;

    // Tiles of one head are neighbours, so that what they all read stays in L2. last_first: blocks begin in their order.
    TK_DEVICE Place(int block, int tile, int length, int heads, int chunks, bool last_first, int parts = 1)
    {
        const int tiles = (length + tile - 1) / tile;
        chunk = block % chunks;
        block /= chunks;
        part = block % parts;
        block /= parts;
        const int n = block % tiles;
        block /= tiles;
        first = (last_first ? tiles - 1 - n : n) * tile;
        head = block % heads;
        batch = block / heads;
    }
};

template <class T>
TK_DEVICE tile::Matrix<T> matrix(const T* p, const Strides& s, int batch, int head, int rows, int cols, int first_col = 0)
{
    return {p + batch * s.b + head * s.h + first_col * s.d, s.l, s.d, rows, cols - first_col};
}

// The number of a query's row among all, batch by batch and head by head; and where row r is in a tensor.
TK_DEVICE int64_t row_of(const Problem& a, int batch, int head, int query)
{
    return (int64_t(batch) * a.heads + head) * a.q_len + query;
}
template <class T>
TK_DEVICE T* row_at(T* p, const Strides& s, const Problem& a, int64_t r)
{
    return p + r / a.q_len / a.heads * s.b + r / a.q_len % a.heads * s.h + r % a.q_len * s.l;
}

template <class S>
TK_DEVICE S scores_of(const Problem& a, const typename S::Mask* mask, const uint64_t* seed, int batch, int head)
{
    S s{};
    if constexpr (S::kMasked) {
        s.mask = mask + batch * a.mask.b + head * a.mask.h;
        s.mask_q = a.mask.l;
        s.mask_k = a.mask.d;
    }
    s.q_len = a.q_len;
    s.k_len = a.k_len;
    s.offset = a.offset;
    s.lower = a.lower;
    s.scale = typename S::Acc(a.scale);
    s.cap = typename S::Acc(a.cap);
    if constexpr (S::kDropout) {
        s.seed = *seed;
        s.sequence = uint64_t(batch) * uint64_t(a.heads) + uint64_t(head);
        s.dropped = a.dropped;
        s.kept = typename S::Acc(a.kept);
    }
    return s;
}

// ---- forward -------------------------------------------------------------------------------------------------------

// A block: BLOCK_M queries of one head, kDv of the output's columns. kParts: and one of `parts` parts of the keys, and o is what
// combine takes.
template <class T, class S, bool kVector, bool kStats, bool kParts, int BLOCK_N, int kD, int kDv, int kWarps, int kTiles>
__global__ void __launch_bounds__(32 * kWarps)
fwd(typename tk::select<kParts, typename S::Acc, T>::type* o,  // (batch, heads, q_len, dv); kParts: (parts, n_rows, dv)
    typename S::Acc* stats,        // (2, batch, heads, q_len): maxima, sums; kParts: (parts, 2, n_rows)
    const T* q,                    // (batch, heads, q_len, d)
    const T* k,                    // (batch, heads / group, k_len, d)
    const T* v,                    // (batch, heads / group, k_len, dv)
    const typename S::Mask* mask,  // (batch, heads, q_len, k_len)
    const uint64_t* seed, Problem a, int64_t n_rows, int chunks, int parts)
{
    using E = typename engine<T, kWarps, kTiles>::type;
    using Acc = typename E::Acc;
    constexpr int BLOCK_M = E::kM;
    struct Shared {
        tile::Tile<T, BLOCK_M, kD> q;
        tile::Tile<T, BLOCK_N, kD> k;
        tile::Tile<T, BLOCK_N, kDv> v;
    };
    Shared& shared = tk::shared<Shared>();
    const Place at(int(blockIdx.x), BLOCK_M, a.q_len, a.heads, chunks, S::kCausal, kParts ? parts : 1);
    const int column = at.chunk * kDv, head_kv = at.head / a.group;
    const S scores = scores_of<S>(a, mask, seed, at.batch, at.head);
    const auto keys = matrix(k, a.k, at.batch, head_kv, a.k_len, a.d);
    const auto values = matrix(v, a.v, at.batch, head_kv, a.k_len, a.dv, column);

    // Keys that some query of the block sees, and of those the tiles that each query sees all of.
    int end = a.k_len, whole = a.k_len;
    if constexpr (S::kCausal) {
        end = tk::max(0, tk::min(end, tk::min(at.first + BLOCK_M, a.q_len) + a.offset));
        whole = tk::max(0, tk::min(whole, at.first + a.offset + 1));
    }
    int n_begin = 0, n_tiles = (end + BLOCK_N - 1) / BLOCK_N;
    const int n_whole = whole / BLOCK_N;
    // Before this key some query of the block sees nothing.
    const int late = S::kWindow ? tk::min(at.first + BLOCK_M, a.q_len) - 1 + a.lower : 0;
    if constexpr (S::kWindow) {
        n_begin = tk::max(0, at.first + a.lower) / BLOCK_N;
    }
    if constexpr (kParts) {
        const int each = (n_tiles - n_begin + parts - 1) / parts;
        n_begin += at.part * each;
        n_tiles = tk::min(n_tiles, n_begin + each);
    }

    Acc out[E::kRows][kDv / E::kLanes], m[E::kRows], sum[E::kRows];
    tile::fill(out, Acc(0));
#pragma unroll
    for (int i = 0; i < E::kRows; ++i) {
        m[i] = -tk::limits<Acc>::inf();
        sum[i] = Acc(0);
    }
    tile::load<E::kThreads, kVector>(shared.q, matrix(q, a.q, at.batch, at.head, a.q_len, a.d), at.first);
    if (n_begin < n_tiles) {
        tile::load<E::kThreads, kVector>(shared.k, keys, n_begin * BLOCK_N);
    }
    tk::copy_commit();

    for (int n = n_begin; n < n_tiles; ++n) {
        tk::copy_wait<0>();
        tk::sync_block();  // the keys are there (and the queries); all have read the last values
        tile::load<E::kThreads, kVector>(shared.v, values, n * BLOCK_N);
        tk::copy_commit();
        Acc p[E::kRows][BLOCK_N / E::kLanes];
        tile::fill(p, Acc(0));
        E::template nt<BLOCK_N, kD>(p, shared.q, shared.k);
        tk::copy_wait<0>();
        tk::sync_block();  // the values are there; all have read the keys
        if (n + 1 < n_tiles) {
            tile::load<E::kThreads, kVector>(shared.k, keys, (n + 1) * BLOCK_N);
            tk::copy_commit();
        }
        scores::see<E, S, false>(p, scores, at.first, n * BLOCK_N, n >= n_whole || n * BLOCK_N < late);
#pragma unroll
        for (int i = 0; i < E::kRows; ++i) {
            Acc top = m[i];
#pragma unroll
            for (int j = 0; j < BLOCK_N / E::kLanes; ++j) {
                top = tk::fmax(top, p[i][j]);
            }
            top = tile::across<E::kLanes>(top, [](Acc x, Acc y) { return tk::fmax(x, y); });
            const Acc less = scores.less(top), shrink = scores.power(m[i], less);
            m[i] = top;
            sum[i] *= shrink;
#pragma unroll
            for (int j = 0; j < BLOCK_N / E::kLanes; ++j) {
                p[i][j] = scores.power(p[i][j], less);
                sum[i] += p[i][j];
            }
#pragma unroll
            for (int j = 0; j < kDv / E::kLanes; ++j) {
                out[i][j] *= shrink;
            }
        }
        if constexpr (S::kDropout) {
            scores::drop<E, S, false>(p, scores, at.first, n * BLOCK_N);
        }
        E::template rn<kDv, BLOCK_N>(out, p, shared.v);
    }
    tk::copy_wait<0>();

    const int rows = a.q_len - at.first;
    const int64_t first_row = row_of(a, at.batch, at.head, at.first);
    Acc factor[E::kRows];
#pragma unroll
    for (int i = 0; i < E::kRows; ++i) {
        sum[i] = tile::across<E::kLanes>(sum[i], [](Acc x, Acc y) { return x + y; });
        factor[i] = sum[i] == Acc(0) ? Acc(0) : Acc(1) / sum[i];
        if (kStats && at.chunk == 0 && E::column(0) == 0 && E::row(i) < rows) {
            const int64_t r = first_row + E::row(i) + (kParts ? at.part * 2 * n_rows : 0);
            stats[r] = S::kFold ? m[i] * scores.scale : m[i];
            stats[n_rows + r] = sum[i];
        }
    }
    if constexpr (kParts) {
        tile::store<E>(o + (at.part * n_rows + first_row) * a.dv + column, a.dv, out, factor, rows, a.dv - column);
    } else {
        T* to = o + at.batch * a.o.b + at.head * a.o.h + int64_t(at.first) * a.o.l + column;
        tile::store<E>(to, a.o.l, out, factor, rows, a.dv - column);
    }
}

// A warp a row: the mean of the parts' outputs, weighted with their sums.
template <class T, bool kStats>
__global__ void __launch_bounds__(128)
combine(T* o,                                    // (batch, heads, q_len, dv)
        tk::accumulator_t<T>* stats,             // (2, n_rows)
        const tk::accumulator_t<T>* part,        // (parts, n_rows, dv)
        const tk::accumulator_t<T>* part_stats,  // (parts, 2, n_rows)
        Problem a, int64_t n_rows, int parts)
{
    using Acc = tk::accumulator_t<T>;
    constexpr int kMost = 4;  // parts of a lane; 128 in all
    const int64_t r = int64_t(blockIdx.x) * 4 + int(threadIdx.x) / 32;
    if (r >= n_rows) {
        return;
    }
    Acc top[kMost], sums[kMost], m = -tk::limits<Acc>::inf(), sum = Acc(0);
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
        const int p = 32 * i + tk::lane();
        top[i] = p < parts ? part_stats[2 * p * n_rows + r] : -tk::limits<Acc>::inf();
        sums[i] = p < parts ? part_stats[(2 * p + 1) * n_rows + r] : Acc(0);
        m = tk::fmax(m, top[i]);
    }
    m = tile::across<32>(m, [](Acc x, Acc y) { return tk::fmax(x, y); });
    const Acc less = m == -tk::limits<Acc>::inf() ? Acc(0) : m;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
        sums[i] *= tk::exp<true>(top[i] - less);
        sum += sums[i];
    }
    sum = tile::across<32>(sum, [](Acc x, Acc y) { return x + y; });
    const Acc factor = sum == Acc(0) ? Acc(0) : Acc(1) / sum;
    T* row = row_at(o, a.o, a, r);
    for (int first = 0; first < a.dv; first += 32) {  // all lanes, for the shuffles
        const int col = first + tk::lane();
        Acc total = Acc(0);
#pragma unroll
        for (int i = 0; i < kMost; ++i) {
#pragma unroll 8
            for (int p = 32 * i; p < tk::min(parts, 32 * i + 32); ++p) {
                const Acc weight = tk::shuffle<32>(sums[i], p % 32);
                total += col < a.dv ? weight * part[(p * n_rows + r) * a.dv + col] : Acc(0);
            }
        }
        if (col < a.dv) {
            row[col] = tk::from_acc<T>(total * factor);
        }
    }
    if (kStats && tk::lane() == 0) {
        stats[r] = m;
        stats[n_rows + r] = sum;
    }
}

// ---- backward ------------------------------------------------------------------------------------------------------

// Whether every query of a tile sees every key of it, but for a mask, and none lies outside.
template <class S, int BLOCK_M, int BLOCK_N>
TK_DEVICE bool is_whole(const Problem& a, int query, int key)
{
    return key + BLOCK_N <= a.k_len && query + BLOCK_M <= a.q_len && (!S::kCausal || key + BLOCK_N - 1 <= query + a.offset) &&
           (!S::kWindow || key >= query + BLOCK_M - 1 + a.lower);
}

// What p is computed from again: p = power(t, less) * factor. A warp a row. kDelta: else it is left at 0, for bwd_delta.
template <class T, class S, bool kDelta>
__global__ void __launch_bounds__(256)
bwd_rows(typename S::Acc* rows,         // (3, n_rows): less, factor, delta
         const typename S::Acc* stats,  // (2, n_rows)
         const T* o,                    // (batch, heads, q_len, dv)
         const T* g,                    // (batch, heads, q_len, dv)
         Problem a, int64_t n_rows)
{
    using Acc = typename S::Acc;
    const int64_t r = int64_t(blockIdx.x) * 8 + int(threadIdx.x) / 32;
    if (r >= n_rows) {
        return;
    }
    const T *o_row = row_at(o, a.o, a, r), *g_row = row_at(g, a.g, a, r);
    Acc delta = Acc(0);
    for (int i = tk::lane(); kDelta && i < a.dv; i += 32) {
        delta += tk::to_acc(o_row[i * a.o.d]) * tk::to_acc(g_row[i * a.g.d]);
    }
    delta = tile::across<32>(delta, [](Acc x, Acc y) { return x + y; });
    if (tk::lane() == 0) {
        const Acc m = stats[r], sum = stats[n_rows + r];
        Acc less = m == -tk::limits<Acc>::inf() ? Acc(0) : m, factor = sum == Acc(0) ? Acc(0) : Acc(1) / sum;
        if constexpr (S::kFold) {
            // The sum goes into the exponent. A row without keys has p = 0.
            less = sum == Acc(0) ? tk::limits<Acc>::inf() : less * Acc(S::kLog2e) + tk::log(sum) * Acc(S::kLog2e);
        }
        rows[r] = less;
        rows[n_rows + r] = factor;
        rows[2 * n_rows + r] = delta;
    }
}

// A tile's rows of bwd_rows.
template <class Acc, int kN>
struct Rows {
    Acc less[kN], factor[kN], delta[kN];

    // Starts to load `count` rows, and zeros beyond; as tile::load does.
    template <int kThreads>
    TK_DEVICE void load(const Acc* rows, int64_t n_rows, int64_t r, int count)
    {
        for (int i = int(threadIdx.x); i < kN; i += kThreads) {
            tk::copy_async_or_zero<sizeof(Acc)>(less + i, i < count ? rows + r + i : rows, i < count);
            tk::copy_async_or_zero<sizeof(Acc)>(factor + i, i < count ? rows + n_rows + r + i : rows, i < count);
            tk::copy_async_or_zero<sizeof(Acc)>(delta + i, i < count ? rows + 2 * n_rows + r + i : rows, i < count);
        }
    }
};

// A block: BLOCK_N keys of one head of keys, all queries that see them, of each head in the group. kDK, kDV: which of the two
// gradients; kOut of its columns (both: all).
template <class T, class S, bool kVector, bool kDK, bool kDV, int BLOCK_M, int kD, int kDv, int kOut, int kWarps, int kTiles>
__global__ void __launch_bounds__(32 * kWarps)
bwd_dkv(T* dk,                          // (batch, heads / group, k_len, d)
        T* dv,                          // (batch, heads / group, k_len, dv)
        const typename S::Acc* rows,    // (3, n_rows)
        const T* q,                     // (batch, heads, q_len, d)
        const T* k,                     // (batch, heads / group, k_len, d)
        const T* v,                     // (batch, heads / group, k_len, dv)
        const T* g,                     // (batch, heads, q_len, dv)
        const typename S::Mask* mask,   // (batch, heads, q_len, k_len)
        const uint64_t* seed, Problem a, Strides to_k, Strides to_v, int64_t n_rows, int chunks)
{
    using E = typename engine<T, kWarps, kTiles>::type;
    using Acc = typename E::Acc;
    constexpr int BLOCK_N = E::kM;
    constexpr int kOutK = kDK && kDV ? kD : kDK ? kOut : E::kLanes, kOutV = kDK && kDV ? kDv : kDV ? kOut : E::kLanes;
    struct Shared {
        tile::Tile<T, BLOCK_N, kD> k;
        tile::Tile<T, kDK ? BLOCK_N : 1, kDv> v;
        tile::Tile<T, BLOCK_M, kD> q;
        tile::Tile<T, BLOCK_M, kDv> g;
        Rows<Acc, BLOCK_M> rows;
    };
    Shared& shared = tk::shared<Shared>();
    const int heads_kv = a.heads / a.group;
    // Causal: the first keys have the most queries.
    const Place at(int(blockIdx.x), BLOCK_N, a.k_len, heads_kv, chunks, false);
    const int column = at.chunk * kOut;

    tile::load<E::kThreads, kVector>(shared.k, matrix(k, a.k, at.batch, at.head, a.k_len, a.d), at.first);
    if constexpr (kDK) {
        tile::load<E::kThreads, kVector>(shared.v, matrix(v, a.v, at.batch, at.head, a.k_len, a.dv), at.first);
    }
    tk::copy_commit();
    Acc dk_sum[E::kRows][kOutK / E::kLanes], dv_sum[E::kRows][kOutV / E::kLanes];
    tile::fill(dk_sum, Acc(0));
    tile::fill(dv_sum, Acc(0));

    const int begin = S::kCausal ? tk::max(0, at.first - a.offset) / BLOCK_M * BLOCK_M : 0;
    const int end = S::kWindow ? tk::min(a.q_len, at.first + BLOCK_N - a.lower) : a.q_len;
    for (int head = at.head * a.group; head < (at.head + 1) * a.group; ++head) {
        const S scores = scores_of<S>(a, mask, seed, at.batch, head);
        const auto queries = matrix(q, a.q, at.batch, head, a.q_len, a.d);
        const auto gradients = matrix(g, a.g, at.batch, head, a.q_len, a.dv);
        for (int first = begin; first < end; first += BLOCK_M) {
            const bool whole = is_whole<S, BLOCK_M, BLOCK_N>(a, first, at.first);
            tk::sync_block();  // all have read the last queries
            tile::load<E::kThreads, kVector>(shared.q, queries, first);
            tile::load<E::kThreads, kVector>(shared.g, gradients, first);
            shared.rows.template load<E::kThreads>(rows, n_rows, row_of(a, at.batch, head, first), a.q_len - first);
            tk::copy_commit();
            tk::copy_wait<0>();
            tk::sync_block();  // the queries are there
            Acc p[E::kRows][BLOCK_M / E::kLanes];
            tile::fill(p, Acc(0));
            E::template nt<BLOCK_M, kD>(p, shared.k, shared.q);
            const scores::Slopes<S, E::kRows, BLOCK_M / E::kLanes> slopes(p, scores);
            scores::see<E, S, true>(p, scores, at.first, first, !whole);
#pragma unroll
            for (int j = 0; j < BLOCK_M / E::kLanes; ++j) {
                const int c = E::column(j);
                const Acc less = shared.rows.less[c], factor = shared.rows.factor[c];
#pragma unroll
                for (int i = 0; i < E::kRows; ++i) {
                    p[i][j] = scores::weight(scores, p[i][j], less, factor);
                }
            }
            if constexpr (kDV) {
                if constexpr (S::kDropout) {
                    Acc dropped[E::kRows][BLOCK_M / E::kLanes];
                    tile::copy(dropped, p);
                    scores::drop<E, S, true>(dropped, scores, at.first, first);
                    E::template rn<kOutV, BLOCK_M>(dv_sum, dropped, shared.g, kDK ? 0 : column);
                } else {
                    E::template rn<kOutV, BLOCK_M>(dv_sum, p, shared.g, kDK ? 0 : column);
                }
            }
            if constexpr (kDK) {
                Acc ds[E::kRows][BLOCK_M / E::kLanes];
                tile::fill(ds, Acc(0));
                E::template nt<BLOCK_M, kDv>(ds, shared.v, shared.g);
                if constexpr (S::kDropout) {
                    scores::drop<E, S, true>(ds, scores, at.first, first);
                }
#pragma unroll
                for (int j = 0; j < BLOCK_M / E::kLanes; ++j) {
                    const Acc delta = shared.rows.delta[E::column(j)];
#pragma unroll
                    for (int i = 0; i < E::kRows; ++i) {
                        ds[i][j] = slopes.times(p[i][j] * (ds[i][j] - delta), i, j);
                    }
                }
                E::template rn<kOutK, BLOCK_M>(dk_sum, ds, shared.q, kDV ? 0 : column);
            }
        }
    }
    tk::copy_wait<0>();

    const int n_keys = a.k_len - at.first;
    if constexpr (kDV) {
        T* to = dv + at.batch * to_v.b + at.head * to_v.h + int64_t(at.first) * to_v.l;
        tile::store_scaled<E>(to + (kDK ? 0 : column), to_v.l, dv_sum, Acc(1), n_keys, a.dv - (kDK ? 0 : column));
    }
    if constexpr (kDK) {
        T* to = dk + at.batch * to_k.b + at.head * to_k.h + int64_t(at.first) * to_k.l;
        tile::store_scaled<E>(to + (kDV ? 0 : column), to_k.l, dk_sum, Acc(a.scale), n_keys, a.d - (kDV ? 0 : column));
    }
}

// Where a warp's part of a tile begins: of kAcross parts side by side.
template <int kAcross, int kRows, int kCols>
struct Part {
    int row, col;
    TK_DEVICE Part() : row(int(threadIdx.x) / 32 / kAcross * kRows), col(int(threadIdx.x) / 32 % kAcross * kCols) {}
};

// All three gradients at once, of two-byte types: 5 products where bwd_dkv and bwd_dq have 7. Blocks add to dq in any order, so
// its last bits differ from call to call. A block: BLOCK_N keys of one head of keys, all queries that see them, of each head
// in the group. kAcross warps side by side share the rows of dk and dv.
template <class T, class S, bool kVector, int BLOCK_M, int BLOCK_N, int kD, int kDv, int kWarps, int kAcross, int kStages>
__global__ void __launch_bounds__(32 * kWarps)
bwd(T* dk,                          // (batch, heads / group, k_len, d)
    T* dv,                          // (batch, heads / group, k_len, dv)
    float* dq,                      // (batch, heads, q_len, kD), zeros: ds k is added
    const float* rows,              // (3, n_rows)
    const T* q,                     // (batch, heads, q_len, d)
    const T* k,                     // (batch, heads / group, k_len, d)
    const T* v,                     // (batch, heads / group, k_len, dv)
    const T* g,                     // (batch, heads, q_len, dv)
    const typename S::Mask* mask,   // (batch, heads, q_len, k_len)
    const uint64_t* seed, Problem a, Strides to_k, Strides to_v, int64_t n_rows)
{
    constexpr int kThreads = 32 * kWarps, kDown = kWarps / kAcross;
    constexpr int kTiles = BLOCK_N / kDown / 16;
    // Of dq a warp has two tiles of rows, where its columns then are whole tiles.
    constexpr int kTilesQ = BLOCK_M >= 64 && kD * (BLOCK_M / 32) / kWarps % 16 == 0 ? 2 : 1, kDownQ = BLOCK_M / 16 / kTilesQ;
    using Scored = tile::Warp<T, kTiles, BLOCK_M / kAcross>;    // keys down, queries across
    using Keys = tile::Warp<T, kTiles, kD / kAcross>;
    using Values = tile::Warp<T, kTiles, kDv / kAcross>;
    using Queries = tile::Warp<T, kTilesQ, kD * kDownQ / kWarps>;
    static_assert(kTiles * 16 * kDown == BLOCK_N && kTilesQ * 16 * kDownQ == BLOCK_M);
    struct Stage {
        tile::Tile<T, BLOCK_M, kD> q;
        tile::Tile<T, BLOCK_M, kDv> g;
        Rows<float, BLOCK_M> rows;
    };
    struct Shared {
        tile::Tile<T, BLOCK_N, kD> k;
        tile::Tile<T, BLOCK_N, kDv> v;
        tile::Tile<T, BLOCK_N, BLOCK_M> p, ds;
        Stage stage[kStages];
    };
    Shared& shared = tk::shared<Shared>();
    const int heads_kv = a.heads / a.group;
    const Place at(int(blockIdx.x), BLOCK_N, a.k_len, heads_kv, 1, false);
    tile::load<kThreads, kVector>(shared.k, matrix(k, a.k, at.batch, at.head, a.k_len, a.d), at.first);
    tile::load<kThreads, kVector>(shared.v, matrix(v, a.v, at.batch, at.head, a.k_len, a.dv), at.first);

    // Steps: of each head in the group the tiles of queries that see a key.
    const int begin = S::kCausal ? tk::max(0, at.first - a.offset) / BLOCK_M : 0;
    const int end = S::kWindow ? tk::max(0, tk::min(a.q_len, at.first + BLOCK_N - a.lower)) : a.q_len;
    const int tiles = tk::max(0, (end + BLOCK_M - 1) / BLOCK_M - begin), steps = tiles * a.group;
    auto fetch = [&](int step) {
        const int head = at.head * a.group + step / tiles, first = (begin + step % tiles) * BLOCK_M;
        Stage& s = shared.stage[step % kStages];
        tile::load<kThreads, kVector>(s.q, matrix(q, a.q, at.batch, head, a.q_len, a.d), first);
        tile::load<kThreads, kVector>(s.g, matrix(g, a.g, at.batch, head, a.q_len, a.dv), first);
        s.rows.template load<kThreads>(rows, n_rows, row_of(a, at.batch, head, first), a.q_len - first);
    };
    if (steps > 0) {
        fetch(0);
    }
    tk::copy_commit();

    typename Keys::Sums dk_sum;
    typename Values::Sums dv_sum;
    tile::fill(dk_sum, 0.0f);
    tile::fill(dv_sum, 0.0f);
    const Part<kAcross, 16 * kTiles, BLOCK_M / kAcross> scored;
    const Part<kAcross, 16 * kTiles, kD / kAcross> of_dk;
    const Part<kAcross, 16 * kTiles, kDv / kAcross> of_dv;
    const Part<kWarps / kDownQ, 16 * kTilesQ, kD * kDownQ / kWarps> of_dq;
    for (int step = 0; step < steps; ++step) {
        const int head = at.head * a.group + step / tiles, first = (begin + step % tiles) * BLOCK_M;
        const S scores = scores_of<S>(a, mask, seed, at.batch, head);
        tk::copy_wait<0>();
        tk::sync_block();  // the queries are there; all have read the last step's p and ds, and its queries
        Stage& s = shared.stage[step % kStages];
        if (kStages > 1 && step + 1 < steps) {
            fetch(step + 1);
            tk::copy_commit();
        }
        const bool whole = is_whole<S, BLOCK_M, BLOCK_N>(a, first, at.first);
        typename Scored::Sums p, ds;
        tile::fill(p, 0.0f);
        Scored::template nt<kD>(p, shared.k, scored.row, s.q, scored.col);
        tile::fill(ds, 0.0f);
        Scored::template nt<kDv>(ds, shared.v, scored.row, s.g, scored.col);
        const scores::Slopes<S, Scored::kRows, Scored::kCols> slopes(p, scores);
        scores::see<Scored, S, true>(p, scores, at.first + scored.row, first + scored.col, !whole);
        if constexpr (S::kDropout) {
            scores::drop<Scored, S, true>(ds, scores, at.first + scored.row, first + scored.col);
        }
#pragma unroll
        for (int j = 0; j < Scored::kCols; ++j) {
            const int c = scored.col + Scored::column(j);
            const float less = s.rows.less[c], factor = s.rows.factor[c], delta = s.rows.delta[c];
#pragma unroll
            for (int i = 0; i < Scored::kRows; ++i) {
                p[i][j] = scores::weight(scores, p[i][j], less, factor);
                ds[i][j] = slopes.times(p[i][j] * (ds[i][j] - delta), i, j);
            }
        }
        if constexpr (S::kDropout) {
            scores::drop<Scored, S, true>(p, scores, at.first + scored.row, first + scored.col);
        }
#pragma unroll
        for (int i = 0; i < Scored::kRows; ++i) {
            const int row = scored.row + Scored::row(i);
#pragma unroll
            for (int j = 0; j < Scored::kCols; j += 2) {
                const int c = scored.col + Scored::column(j);
                *reinterpret_cast<uint32_t*>(shared.p.row(row) + c) = tk::pack2(p[i][j], p[i][j + 1], T{});
                *reinterpret_cast<uint32_t*>(shared.ds.row(row) + c) = tk::pack2(ds[i][j], ds[i][j + 1], T{});
            }
        }
        tk::sync_block();  // p and ds are there
        Values::template nn<BLOCK_M, false>(dv_sum, shared.p, of_dv.row, s.g, of_dv.col);
        Keys::template nn<BLOCK_M, false>(dk_sum, shared.ds, of_dk.row, s.q, of_dk.col);
        typename Queries::Sums dq_sum;
        tile::fill(dq_sum, 0.0f);
        Queries::template nn<BLOCK_N, true>(dq_sum, shared.ds, of_dq.row, shared.k, of_dq.col);
        float* to = dq + row_of(a, at.batch, head, first) * kD + of_dq.col;
#pragma unroll
        for (int i = 0; i < Queries::kRows; ++i) {
            const int row = of_dq.row + Queries::row(i);
            if (first + row < a.q_len) {
#pragma unroll
                for (int j = 0; j < Queries::kCols; j += 2) {
                    tk::reduce_add<float, 8>(to + int64_t(row) * kD + Queries::column(j),
                                             tk::Words<8>{{tk::bits_of(dq_sum[i][j]), tk::bits_of(dq_sum[i][j + 1])}});
                }
            }
        }
        if (kStages == 1 && step + 1 < steps) {
            tk::sync_block();  // all have read the queries
            fetch(step + 1);
            tk::copy_commit();
        }
    }
    tk::copy_wait<0>();

    T* to = dv + at.batch * to_v.b + at.head * to_v.h + int64_t(at.first + of_dv.row) * to_v.l + of_dv.col;
    tile::store_scaled<Values>(to, to_v.l, dv_sum, 1.0f, a.k_len - at.first - of_dv.row, a.dv - of_dv.col);
    to = dk + at.batch * to_k.b + at.head * to_k.h + int64_t(at.first + of_dk.row) * to_k.l + of_dk.col;
    tile::store_scaled<Keys>(to, to_k.l, dk_sum, float(a.scale), a.k_len - at.first - of_dk.row, a.d - of_dk.col);
}

// dq of its sums: scaled and rounded.
template <class T>
__global__ void __launch_bounds__(256)
bwd_round(T* dq,            // (batch, heads, q_len, d)
          const float* sum, // (batch, heads, q_len, width)
          Problem a, Strides to, int64_t n_rows, int width)
{
    const int64_t r = int64_t(blockIdx.x) * 8 + int(threadIdx.x) / 32;
    if (r >= n_rows) {
        return;
    }
    T* row = row_at(dq, to, a, r);
    for (int i = tk::lane(); i < a.d; i += 32) {
        row[i] = tk::from_acc<T>(sum[r * width + i] * float(a.scale));
    }
}

// ds of BLOCK_M queries and the keys from `first` on; the tiles are there. kOfProducts: the gradient of the products rather than
// of the scores, which a cap tells apart.
template <class E, class S, bool kOfProducts, int BLOCK_N, class Shared>
TK_DEVICE void score_gradients(typename E::Acc (&ds)[E::kRows][BLOCK_N / E::kLanes], const S& scores, const Shared& shared,
                               int first_query, int first_key, bool edge)
{
    using Acc = typename E::Acc;
    Acc p[E::kRows][BLOCK_N / E::kLanes];
    tile::fill(p, Acc(0));
    E::template nt<BLOCK_N, decltype(shared.q)::kCols>(p, shared.q, shared.k);
    const scores::Slopes<S, E::kRows, BLOCK_N / E::kLanes> slopes(p, scores);
    scores::see<E, S, false>(p, scores, first_query, first_key, edge);
    tile::fill(ds, Acc(0));
    E::template nt<BLOCK_N, decltype(shared.g)::kCols>(ds, shared.g, shared.v);
    if constexpr (S::kDropout) {
        scores::drop<E, S, false>(ds, scores, first_query, first_key);
    }
#pragma unroll
    for (int i = 0; i < E::kRows; ++i) {
        const int row = E::row(i);
        const Acc less = shared.rows.less[row], factor = shared.rows.factor[row], delta = shared.rows.delta[row];
#pragma unroll
        for (int j = 0; j < BLOCK_N / E::kLanes; ++j) {
            ds[i][j] = scores::weight(scores, p[i][j], less, factor) * (ds[i][j] - delta);
            ds[i][j] = kOfProducts ? slopes.times(ds[i][j], i, j) : ds[i][j];
        }
    }
}

template <class T, class Acc, int BLOCK_M, int BLOCK_N, int kD, int kDv>
struct QueryShared {
    tile::Tile<T, BLOCK_M, kD> q;
    tile::Tile<T, BLOCK_M, kDv> g;
    tile::Tile<T, BLOCK_N, kD> k;
    tile::Tile<T, BLOCK_N, kDv> v;
    Rows<Acc, BLOCK_M> rows;
};

// Loads a block's queries, and from `begin` to `end` the tiles of keys; use(ds) of each: see score_gradients.
template <class E, class S, bool kVector, bool kOfProducts, int BLOCK_N, class Shared, class Use>
TK_DEVICE void walk_keys(Shared& shared, const S& scores, const Problem& a, const Place& at, const typename E::Acc* rows,
                         int64_t n_rows, const typename E::T* q, const typename E::T* k, const typename E::T* v,
                         const typename E::T* g, int begin, int end, Use use)
{
    const auto keys = matrix(k, a.k, at.batch, at.head / a.group, a.k_len, a.d);
    const auto values = matrix(v, a.v, at.batch, at.head / a.group, a.k_len, a.dv);
    tile::load<E::kThreads, kVector>(shared.q, matrix(q, a.q, at.batch, at.head, a.q_len, a.d), at.first);
    tile::load<E::kThreads, kVector>(shared.g, matrix(g, a.g, at.batch, at.head, a.q_len, a.dv), at.first);
    const int64_t r = row_of(a, at.batch, at.head, at.first);
    shared.rows.template load<E::kThreads>(rows, n_rows, r, a.q_len - at.first);
    tk::copy_commit();
    for (int first = begin; first < end; first += BLOCK_N) {
        tk::sync_block();  // all have read the last keys
        tile::load<E::kThreads, kVector>(shared.k, keys, first);
        tile::load<E::kThreads, kVector>(shared.v, values, first);
        tk::copy_commit();
        tk::copy_wait<0>();
        tk::sync_block();  // the keys are there
        typename E::Acc ds[E::kRows][BLOCK_N / E::kLanes];
        const bool edge = !is_whole<S, E::kM, BLOCK_N>(a, at.first, first);
        score_gradients<E, S, kOfProducts, BLOCK_N>(ds, scores, shared, at.first, first, edge);
        use(ds);
    }
    tk::copy_wait<0>();
}

// A block: BLOCK_M queries of one head.
template <class T, class S, bool kVector, int BLOCK_N, int kD, int kDv, int kWarps, int kTiles>
__global__ void __launch_bounds__(32 * kWarps)
bwd_delta(typename S::Acc* rows,         // (3, n_rows): less, factor, delta, which is 0 and is written
          const T* q,                    // (batch, heads, q_len, d)
          const T* k,                    // (batch, heads / group, k_len, d)
          const T* v,                    // (batch, heads / group, k_len, dv)
          const T* g,                    // (batch, heads, q_len, dv)
          const typename S::Mask* mask,  // (batch, heads, q_len, k_len)
          const uint64_t* seed, Problem a, int64_t n_rows)
{
    using E = typename engine<T, kWarps, kTiles>::type;
    using Acc = typename E::Acc;
    constexpr int BLOCK_M = E::kM;
    auto& shared = tk::shared<QueryShared<T, Acc, BLOCK_M, BLOCK_N, kD, kDv>>();
    const Place at(int(blockIdx.x), BLOCK_M, a.q_len, a.heads, 1, S::kCausal);
    const S scores = scores_of<S>(a, mask, seed, at.batch, at.head);
    Acc delta[E::kRows] = {};
    const auto add = [&](const Acc (&terms)[E::kRows][BLOCK_N / E::kLanes]) {
#pragma unroll
        for (int i = 0; i < E::kRows; ++i) {
#pragma unroll
            for (int j = 0; j < BLOCK_N / E::kLanes; ++j) {
                delta[i] += terms[i][j];
            }
        }
    };
    walk_keys<E, S, kVector, false, BLOCK_N>(shared, scores, a, at, rows, n_rows, q, k, v, g, 0, a.k_len, add);
    const int64_t r = row_of(a, at.batch, at.head, at.first);
#pragma unroll
    for (int i = 0; i < E::kRows; ++i) {
        delta[i] = tile::across<E::kLanes>(delta[i], [](Acc x, Acc y) { return x + y; });
        if (E::column(0) == 0 && E::row(i) < a.q_len - at.first) {
            rows[2 * n_rows + r + E::row(i)] = delta[i];
        }
    }
}

// A block: BLOCK_M queries of one head, kOut of the gradient's columns.
template <class T, class S, bool kVector, int BLOCK_N, int kD, int kDv, int kOut, int kWarps, int kTiles>
__global__ void __launch_bounds__(32 * kWarps)
bwd_dq(T* dq,                         // (batch, heads, q_len, d)
       const typename S::Acc* rows,   // (3, n_rows)
       const T* q,                    // (batch, heads, q_len, d)
       const T* k,                    // (batch, heads / group, k_len, d)
       const T* v,                    // (batch, heads / group, k_len, dv)
       const T* g,                    // (batch, heads, q_len, dv)
       const typename S::Mask* mask,  // (batch, heads, q_len, k_len)
       const uint64_t* seed, Problem a, Strides to, int64_t n_rows, int chunks)
{
    using E = typename engine<T, kWarps, kTiles>::type;
    using Acc = typename E::Acc;
    constexpr int BLOCK_M = E::kM;
    auto& shared = tk::shared<QueryShared<T, Acc, BLOCK_M, BLOCK_N, kD, kDv>>();
    const Place at(int(blockIdx.x), BLOCK_M, a.q_len, a.heads, chunks, S::kCausal);
    const int column = at.chunk * kOut;
    const S scores = scores_of<S>(a, mask, seed, at.batch, at.head);
    int begin = 0, end = a.k_len;
    if constexpr (S::kCausal) {
        end = tk::max(0, tk::min(end, tk::min(at.first + BLOCK_M, a.q_len) + a.offset));
    }
    if constexpr (S::kWindow) {
        begin = tk::max(0, at.first + a.lower) / BLOCK_N * BLOCK_N;
    }
    Acc sum[E::kRows][kOut / E::kLanes];
    tile::fill(sum, Acc(0));
    const auto add = [&](const Acc (&ds)[E::kRows][BLOCK_N / E::kLanes]) {
        E::template rn<kOut, BLOCK_N>(sum, ds, shared.k, column);
    };
    walk_keys<E, S, kVector, true, BLOCK_N>(shared, scores, a, at, rows, n_rows, q, k, v, g, begin, end, add);
    T* p = dq + at.batch * to.b + at.head * to.h + int64_t(at.first) * to.l + column;
    tile::store_scaled<E>(p, to.l, sum, Acc(a.scale), a.q_len - at.first, a.d - column);
}

// The mask's sizes; 1 where it is broadcast (or the dim is 1).
struct MaskSizes {
    int batch, heads, q_len, k_len;
};

// A block: a tile of the mask and one of `parts` of what is summed for it: batch entries and heads that share it, and all
// tiles along a broadcast length.
template <class T, class S, class Out, bool kVector, int BLOCK_N, int kD, int kDv, int kWarps, int kTiles>
__global__ void __launch_bounds__(32 * kWarps)
bwd_dmask(Out* dmask,                    // (parts, size.batch, size.heads, size.q_len, size.k_len)
          const typename S::Acc* rows,   // (3, n_rows)
          const T* q,                    // (batch, heads, q_len, d)
          const T* k,                    // (batch, heads / group, k_len, d)
          const T* v,                    // (batch, heads / group, k_len, dv)
          const T* g,                    // (batch, heads, q_len, dv)
          const typename S::Mask* mask,  // (batch, heads, q_len, k_len)
          const uint64_t* seed, Problem a, MaskSizes size, int batch, int64_t n_rows, int parts)
{
    using E = typename engine<T, kWarps, kTiles>::type;
    using Acc = typename E::Acc;
    constexpr int BLOCK_M = E::kM;
    struct Shared : QueryShared<T, Acc, BLOCK_M, BLOCK_N, kD, kDv> {
        Acc sums[BLOCK_M][BLOCK_N + 1];
    };
    Shared& shared = tk::shared<Shared>();
    const int m_tiles = (size.q_len + BLOCK_M - 1) / BLOCK_M, n_tiles = (size.k_len + BLOCK_N - 1) / BLOCK_N;
    int block = int(blockIdx.x);
    const int n0 = block % n_tiles * BLOCK_N;
    block /= n_tiles;
    const int m0 = block % m_tiles * BLOCK_M;
    block /= m_tiles;
    const int part = block % parts;
    block /= parts;
    const int mask_head = block % size.heads, mask_batch = block / size.heads;

    Acc sum[E::kRows][BLOCK_N / E::kLanes];
    tile::fill(sum, Acc(0));
    // All that share the tile: batch entry, head, and where in a broadcast length.
    const int n_batch = size.batch == 1 ? batch : 1, n_heads = size.heads == 1 ? a.heads : 1;
    const int n_m = size.q_len == 1 ? (a.q_len + BLOCK_M - 1) / BLOCK_M : 1;
    const int n_n = size.k_len == 1 ? (a.k_len + BLOCK_N - 1) / BLOCK_N : 1;
    const int64_t all = int64_t(n_batch) * n_heads * n_m;
    for (int64_t i = part; i < all; i += parts) {
        const int m = m0 + int(i % n_m) * BLOCK_M;
        const int head = mask_head + int(i / n_m % n_heads), b = mask_batch + int(i / n_m / n_heads);
        const S scores = scores_of<S>(a, mask, seed, b, head);
        tk::sync_block();  // all have read the last tiles
        tile::load<E::kThreads, kVector>(shared.q, matrix(q, a.q, b, head, a.q_len, a.d), m);
        tile::load<E::kThreads, kVector>(shared.g, matrix(g, a.g, b, head, a.q_len, a.dv), m);
        shared.rows.template load<E::kThreads>(rows, n_rows, row_of(a, b, head, m), a.q_len - m);
        for (int n = n0; n < n0 + n_n * BLOCK_N; n += BLOCK_N) {
            tk::sync_block();  // all have read the last keys
            tile::load<E::kThreads, kVector>(shared.k, matrix(k, a.k, b, head / a.group, a.k_len, a.d), n);
            tile::load<E::kThreads, kVector>(shared.v, matrix(v, a.v, b, head / a.group, a.k_len, a.dv), n);
            tk::copy_commit();
            tk::copy_wait<0>();
            tk::sync_block();  // the tiles are there
            Acc ds[E::kRows][BLOCK_N / E::kLanes];
            score_gradients<E, S, false, BLOCK_N>(ds, scores, shared, m, n, true);
#pragma unroll
            for (int row = 0; row < E::kRows; ++row) {
#pragma unroll
                for (int j = 0; j < BLOCK_N / E::kLanes; ++j) {
                    sum[row][j] += ds[row][j];
                }
            }
        }
    }

#pragma unroll
    for (int i = 0; i < E::kRows; ++i) {
#pragma unroll
        for (int j = 0; j < BLOCK_N / E::kLanes; ++j) {
            shared.sums[E::row(i)][E::column(j)] = sum[i][j];
        }
    }
    tk::sync_block();  // the sums are there
    const int rows_here = size.q_len == 1 ? 1 : tk::min(BLOCK_M, size.q_len - m0);
    const int cols_here = size.k_len == 1 ? 1 : tk::min(BLOCK_N, size.k_len - n0);
    const int n_rows_summed = size.q_len == 1 ? BLOCK_M : 1, n_cols_summed = size.k_len == 1 ? BLOCK_N : 1;
    Out* to = dmask + ((int64_t(part) * size.batch + mask_batch) * size.heads + mask_head) * size.q_len * size.k_len;
    for (int i = int(threadIdx.x); i < rows_here * cols_here; i += E::kThreads) {
        const int row = i / cols_here, col = i % cols_here;
        Acc total = Acc(0);
        for (int y = 0; y < n_rows_summed; ++y) {
            for (int x = 0; x < n_cols_summed; ++x) {
                total += shared.sums[row + y][col + x];
            }
        }
        to[int64_t(m0 + row) * size.k_len + n0 + col] = tk::from_acc<Out>(typename tk::accumulator_t<Out>(total));
    }
}

}  // namespace attention
