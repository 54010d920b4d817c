// Attention of L queries to S keys, each a row of d numbers, with values of dv numbers.
//
//   t = scale * q k^T, changed (+ mask)    p = exp(t - max t) / sum exp(t - max t)        o = dropout(p) v
//
//   fwd         o, and of each row max t and sum exp(t - max t)
//   combine     the same of what blocks found that had some of the keys each
//
// Scores live in registers only: a block walks over the keys in tiles, and the softmax is online: the sums so far are scaled
// down when a larger score turns up (Dao et al., "FlashAttention-2", 2023). Everything has the same bits each time.
//
// Multiplications: 2 products of L * S * d. Causal: half.
// The host guarantees: kVector as tile::load has it; kD >= d, and kDv >= dv, or chunks of kDv columns are computed by a block
// each; fewer than 2^31 blocks; lengths below 2^30, limits of a window up to 2^30.
// Template: T element type; S scores::Scores; BLOCK_M queries and BLOCK_N keys a tile; E an engine of parts/tile.cuh.
#include "parts/attention.cuh"

namespace attention {

// A block: BLOCK_M queries of one head, kDv of the output's columns. kParts: and one of `parts` parts of the keys, and o is what
// combine takes.
template <class T, class S, bool kVector, bool kStats, bool kParts, int BLOCK_N, int kD, int kDv, class E>
__global__ void __launch_bounds__(E::kThreads)
fwd(typename tk::select<kParts, typename S::Acc, T>::type* o,  // (batch, heads, q_len, dv); kParts: (parts, n_rows, dv)
    typename S::Acc* stats,        // (2, batch, heads, q_len): maxima, sums; kParts: (parts, 2, n_rows)
    const T* q,                    // (batch, heads, q_len, d)
    const T* k,                    // (batch, heads / group, k_len, d)
    const T* v,                    // (batch, heads / group, k_len, dv)
    Problem all, int64_t n_rows, int chunks, int parts)
{
    using Acc = typename E::Acc;
    constexpr int BLOCK_M = E::kM;
    struct Shared {
        tile::Tile<T, BLOCK_M, kD> q;
        tile::Tile<T, BLOCK_N, kD> k;
        tile::Tile<T, BLOCK_N, kDv> v;
        MaskTile<S, BLOCK_M, BLOCK_N> mask;
    };
    Shared& shared = tk::shared<Shared>();
    const Place at(int(blockIdx.x), BLOCK_M, all.q_most, all.heads, chunks, S::kCausal, kParts ? parts : 1);
    const Problem a = all.of<S>(at.batch);
    if (S::kVarlen && at.first >= a.q_len) {
        return;
    }
    const int column = at.chunk * kDv, head_kv = at.head / a.group;
    const S scores = scores_of<S>(a, at.batch, at.head);
    const auto keys = keys_of<S>(k, a.k, a, at.batch, head_kv, a.d);
    const auto values = keys_of<S>(v, a.v, a, at.batch, head_kv, a.dv, column);

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
        if (S::kSink && at.part == 0) {
            m[i] = static_cast<const Acc*>(a.sinks)[at.head] / (S::kFold ? scores.scale : Acc(1));
            sum[i] = Acc(E::column(0) == 0);  // one lane of the row
        }
    }
    tile::load<E::kThreads, kVector>(shared.q, queries_of(q, a.q, a, at.batch, at.head, a.d), at.first);
    tile::Pages<S::kPaged, BLOCK_N> pages(keys, n_begin * BLOCK_N);
    if (n_begin < n_tiles) {
        tile::load<E::kThreads, kVector>(shared.k, keys, n_begin * BLOCK_N, pages);
    }
    tk::copy_commit();

    for (int n = n_begin; n < n_tiles; ++n) {
        tk::copy_wait<0>();
        tk::sync_block();  // the keys are there (and the queries); all have read the last values
        tile::load<E::kThreads, kVector>(shared.v, values, n * BLOCK_N, pages);
        pages = tile::Pages<S::kPaged, BLOCK_N>(keys, (n + 1) * BLOCK_N);
        shared.mask.template load<E::kThreads>(scores, at.first, n * BLOCK_N);
        tk::copy_commit();
        Acc p[E::kRows][BLOCK_N / E::kLanes];
        tile::fill(p, Acc(0));
        E::template nt<BLOCK_N, kD>(p, shared.q, shared.k);
        tk::copy_wait<0>();
        tk::sync_block();  // the values are there, and the mask; all have read the keys
        if (n + 1 < n_tiles) {
            tile::load<E::kThreads, kVector>(shared.k, keys, (n + 1) * BLOCK_N, pages);
            tk::copy_commit();
        }
        const S seen = shared.mask.over(scores, at.first, n * BLOCK_N);
        scores::see<E, S, false>(p, seen, at.first, n * BLOCK_N, n >= n_whole || n * BLOCK_N < late);
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
        T* to = o + at.batch * a.o.b + at.head * a.o.h + int64_t(a.q_start + at.first) * a.o.l + column;
        tile::store<E>(to, a.o.l, out, factor, rows, a.dv - column);
    }
}

// A block a row: the mean of the parts' outputs, weighted with their sums. 128 parts at most.
template <class T, bool kStats, int kWarps>
__global__ void __launch_bounds__(32 * kWarps)
combine(T* o,                                    // (batch, heads, q_len, dv)
        tk::accumulator_t<T>* stats,             // (2, n_rows)
        const tk::accumulator_t<T>* part,        // (parts, n_rows, dv)
        const tk::accumulator_t<T>* part_stats,  // (parts, 2, n_rows)
        Problem a, int64_t n_rows, int parts)
{
    using Acc = tk::accumulator_t<T>;
    constexpr int kMost = 4;  // parts of a lane
    const int64_t r = int64_t(blockIdx.x);
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
    for (int first = int(threadIdx.x) / 32 * 32; first < a.dv; first += 32 * kWarps) {  // all lanes, for the shuffles
        const int col = first + tk::lane();
        Acc total = Acc(0);
#pragma unroll
        for (int i = 0; i < kMost; ++i) {
#pragma unroll 16
            for (int p = 32 * i; p < tk::min(parts, 32 * i + 32); ++p) {
                const Acc weight = tk::shuffle<32>(sums[i], p % 32);
                total += col < a.dv ? weight * part[(p * n_rows + r) * a.dv + col] : Acc(0);
            }
        }
        if (col < a.dv) {
            row[col] = tk::from_acc<T>(total * factor);
        }
    }
    if (kStats && threadIdx.x == 0) {
        stats[r] = m;
        stats[n_rows + r] = sum;
    }
}

}  // namespace attention
