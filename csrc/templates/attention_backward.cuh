// The gradients of attention: see attention.cuh, whose maxima and sums of the rows they begin with.
//
//   bwd_rows    of each row what the kernels below take p from, and delta = sum(do * o)
//   bwd_delta   delta = sum(p * dropout(do v^T)) instead: without the output's rounding, for two products more
//   bwd         dv, dk and dq as below, at once; bwd_round rounds dq
//   bwd_dkv     dv = dropout(p)^T do,  dk = scale * ds^T q      where ds = p * (dropout(do v^T) - delta)
//   bwd_dq      dq = scale * ds k
//   bwd_dmask   the mask's gradient: ds, summed over the dims in which the mask is broadcast; bwd_sum adds its parts
//   bwd_sink    the sinks' gradient: -p delta of what they count in a row
//
// With a change of scores dk and dq have ds times its slope. The scores are computed again from q and k. Nothing but bwd's dq is
// added to by two blocks, so every other result has the same bits each time; and the heads that share a key's head are summed
// in the block that has the key.
//
// Multiplications, in products of L * S * d: bwd 5, bwd_dkv 4, bwd_dq 3, bwd_dmask and bwd_delta 2. Causal: half.
// The host guarantees what it does for attention.cuh; pages have no gradients.
#include "parts/attention.cuh"
#include "tk/tensor.cuh"

namespace attention_backward {

using namespace attention;

// Whether every query of a tile sees every key of it, but for a mask, and none lies outside.
template <class S, int BLOCK_M, int BLOCK_N>
TK_DEVICE bool is_whole(const Problem& a, int query, int key)
{
    return key + BLOCK_N <= a.k_len && query + BLOCK_M <= a.q_len && (!S::kCausal || key + BLOCK_N - 1 <= query + a.offset) &&
           (!S::kWindow || key >= query + BLOCK_M - 1 + a.lower);
}

// What p is computed from again: p = power(t, less) * factor. A warp a row. kDelta: else it is left at 0, for bwd_delta.
// Where the rows' logarithms of the sums have a gradient too, it comes off delta.
template <class T, class S, bool kDelta>
__global__ void __launch_bounds__(256)
bwd_rows(typename S::Acc* rows,         // (3, n_rows): less, factor, delta
         const typename S::Acc* stats,  // (2, n_rows)
         const T* o,                    // (batch, heads, q_len, dv)
         const T* g,                    // (batch, heads, q_len, dv)
         const typename S::Acc* g_lse,  // (n_rows), or null
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
        rows[2 * n_rows + r] = kDelta && g_lse != nullptr ? delta - g_lse[r] : delta;
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
template <class T, class S, bool kVector, bool kDK, bool kDV, int BLOCK_M, int kD, int kDv, int kOut, class E>
__global__ void __launch_bounds__(E::kThreads)
bwd_dkv(T* dk,                          // (batch, heads / group, k_len, d)
        T* dv,                          // (batch, heads / group, k_len, dv)
        const typename S::Acc* rows,    // (3, n_rows)
        const T* q,                     // (batch, heads, q_len, d)
        const T* k,                     // (batch, heads / group, k_len, d)
        const T* v,                     // (batch, heads / group, k_len, dv)
        const T* g,                     // (batch, heads, q_len, dv)
        Problem all, Strides to_k, Strides to_v, int64_t n_rows, int chunks)
{
    using Acc = typename E::Acc;
    constexpr int BLOCK_N = E::kM;
    constexpr int kOutK = kDK && kDV ? kD : kDK ? kOut : E::kLanes, kOutV = kDK && kDV ? kDv : kDV ? kOut : E::kLanes;
    struct Shared {
        tile::Tile<T, BLOCK_N, kD> k;
        tile::Tile<T, kDK ? BLOCK_N : 1, kDv> v;
        tile::Tile<T, BLOCK_M, kD> q;
        tile::Tile<T, BLOCK_M, kDv> g;
        Rows<Acc, BLOCK_M> rows;
        MaskTile<S, BLOCK_M, BLOCK_N> mask;
    };
    Shared& shared = tk::shared<Shared>();
    const int heads_kv = all.heads / all.group;
    // Causal: the first keys have the most queries.
    const Place at(int(blockIdx.x), BLOCK_N, all.k_most, heads_kv, chunks, false);
    const Problem a = all.of<S>(at.batch);
    if (S::kVarlen && at.first >= a.k_len) {
        return;
    }
    const int column = at.chunk * kOut;

    tile::load<E::kThreads, kVector>(shared.k, keys_of<S>(k, a.k, a, at.batch, at.head, a.d), at.first);
    if constexpr (kDK) {
        tile::load<E::kThreads, kVector>(shared.v, keys_of<S>(v, a.v, a, at.batch, at.head, a.dv), at.first);
    }
    tk::copy_commit();
    Acc dk_sum[E::kRows][kOutK / E::kLanes], dv_sum[E::kRows][kOutV / E::kLanes];
    tile::fill(dk_sum, Acc(0));
    tile::fill(dv_sum, Acc(0));

    const int begin = S::kCausal ? tk::max(0, at.first - a.offset) / BLOCK_M * BLOCK_M : 0;
    const int end = S::kWindow ? tk::min(a.q_len, at.first + BLOCK_N - a.lower) : a.q_len;
    for (int head = at.head * a.group; head < (at.head + 1) * a.group; ++head) {
        const S scores = scores_of<S>(a, at.batch, head);
        const auto queries = queries_of(q, a.q, a, at.batch, head, a.d);
        const auto gradients = queries_of(g, a.g, a, at.batch, head, a.dv);
        for (int first = begin; first < end; first += BLOCK_M) {
            const bool whole = is_whole<S, BLOCK_M, BLOCK_N>(a, first, at.first);
            tk::sync_block();  // all have read the last queries
            tile::load<E::kThreads, kVector>(shared.q, queries, first);
            tile::load<E::kThreads, kVector>(shared.g, gradients, first);
            shared.rows.template load<E::kThreads>(rows, n_rows, row_of(a, at.batch, head, first), a.q_len - first);
            shared.mask.template load<E::kThreads>(scores, first, at.first);
            tk::copy_commit();
            tk::copy_wait<0>();
            tk::sync_block();  // the queries are there
            Acc p[E::kRows][BLOCK_M / E::kLanes];
            tile::fill(p, Acc(0));
            E::template nt<BLOCK_M, kD>(p, shared.k, shared.q);
            scores::Slopes<S, E::kRows, BLOCK_M / E::kLanes> slopes;
            slopes.template set<E, true>(p, scores, at.first, first);
            scores::see<E, S, true>(p, shared.mask.over(scores, first, at.first), at.first, first, !whole);
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
        T* to = dv + at.batch * to_v.b + at.head * to_v.h + int64_t(a.k_start + at.first) * to_v.l;
        tile::store_scaled<E>(to + (kDK ? 0 : column), to_v.l, dv_sum, Acc(1), n_keys, a.dv - (kDK ? 0 : column));
    }
    if constexpr (kDK) {
        T* to = dk + at.batch * to_k.b + at.head * to_k.h + int64_t(a.k_start + at.first) * to_k.l;
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
// in the group. kAcross warps side by side share the rows of dk and dv. Out: of dmask, of a mask that isn't broadcast over its
// lengths; None: it isn't wanted; float where batch entries or heads share it and add to it, with stride 0.
template <class T, class S, class Out, bool kShared, bool kVector, int BLOCK_M, int BLOCK_N, int kD, int kDv, int kWarps, int kAcross,
          int kStages>
__global__ void __launch_bounds__(32 * kWarps)
bwd(T* dk,                          // (batch, heads / group, k_len, d)
    T* dv,                          // (batch, heads / group, k_len, dv)
    float* dq,                      // (batch, heads, q_len, kD), zeros: ds k is added
    Out* dmask,                     // (batch, heads, q_len, k_len)
    const float* rows,              // (3, n_rows)
    const T* q,                     // (batch, heads, q_len, d)
    const T* k,                     // (batch, heads / group, k_len, d)
    const T* v,                     // (batch, heads / group, k_len, dv)
    const T* g,                     // (batch, heads, q_len, dv)
    Problem all, Strides to_k, Strides to_v, Strides to_mask, int64_t n_rows)
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
        MaskTile<S, BLOCK_M, BLOCK_N> mask;
    };
    struct Shared {
        tile::Tile<T, BLOCK_N, kD> k;
        tile::Tile<T, BLOCK_N, kDv> v;
        tile::Tile<T, BLOCK_N, BLOCK_M> p, ds;
        Stage stage[kStages];
    };
    constexpr bool kDMask = !tk::is_same<Out, scores::None>::value;
    Shared& shared = tk::shared<Shared>();
    const int heads_kv = all.heads / all.group;
    const Place at(int(blockIdx.x), BLOCK_N, all.k_most, heads_kv, 1, false);
    const Problem a = all.of<S>(at.batch);
    if (S::kVarlen && at.first >= a.k_len) {
        return;
    }
    tile::load<kThreads, kVector>(shared.k, keys_of<S>(k, a.k, a, at.batch, at.head, a.d), at.first);
    tile::load<kThreads, kVector>(shared.v, keys_of<S>(v, a.v, a, at.batch, at.head, a.dv), at.first);

    // Steps: of each head in the group the tiles of queries that see a key.
    const int begin = S::kCausal ? tk::max(0, at.first - a.offset) / BLOCK_M : 0;
    const int end = S::kWindow ? tk::max(0, tk::min(a.q_len, at.first + BLOCK_N - a.lower)) : a.q_len;
    const int tiles = tk::max(0, (end + BLOCK_M - 1) / BLOCK_M - begin), steps = tiles * a.group;
    auto fetch = [&](int step) {
        const int head = at.head * a.group + step / tiles, first = (begin + step % tiles) * BLOCK_M;
        Stage& s = shared.stage[step % kStages];
        tile::load<kThreads, kVector>(s.q, queries_of(q, a.q, a, at.batch, head, a.d), first);
        tile::load<kThreads, kVector>(s.g, queries_of(g, a.g, a, at.batch, head, a.dv), first);
        s.rows.template load<kThreads>(rows, n_rows, row_of(a, at.batch, head, first), a.q_len - first);
        s.mask.template load<kThreads>(scores_of<S>(a, at.batch, head), first, at.first);
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
        const S scores = scores_of<S>(a, at.batch, head);
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
        scores::Slopes<S, Scored::kRows, Scored::kCols> slopes;
        slopes.template set<Scored, true>(p, scores, at.first + scored.row, first + scored.col);
        scores::see<Scored, S, true>(p, s.mask.over(scores, first, at.first), at.first + scored.row, first + scored.col, !whole);
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
                ds[i][j] = p[i][j] * (ds[i][j] - delta);
                if constexpr (kDMask) {
                    const int query = first + c, key = at.first + scored.row + Scored::row(i);
                    if (whole || (query < a.q_len && key < a.k_len)) {
                        Out* to = dmask + at.batch * to_mask.b + head * to_mask.h + query * to_mask.l + key;
                        if constexpr (kShared) {
                            tk::reduce_add<float, 4>(to, tk::Words<4>{{tk::bits_of(ds[i][j])}});
                        } else {
                            *to = tk::from_acc<Out>(ds[i][j]);
                        }
                    }
                }
                ds[i][j] = slopes.times(ds[i][j], i, j);
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

    T* to = dv + at.batch * to_v.b + at.head * to_v.h + int64_t(a.k_start + at.first + of_dv.row) * to_v.l + of_dv.col;
    tile::store_scaled<Values>(to, to_v.l, dv_sum, 1.0f, a.k_len - at.first - of_dv.row, a.dv - of_dv.col);
    to = dk + at.batch * to_k.b + at.head * to_k.h + int64_t(a.k_start + at.first + of_dk.row) * to_k.l + of_dk.col;
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
// of the scores, which a change tells apart.
template <class E, class S, bool kOfProducts, int BLOCK_N, class Shared>
TK_DEVICE void score_gradients(typename E::Acc (&ds)[E::kRows][BLOCK_N / E::kLanes], const S& scores, const Shared& shared,
                               int first_query, int first_key, bool edge)
{
    using Acc = typename E::Acc;
    Acc p[E::kRows][BLOCK_N / E::kLanes];
    tile::fill(p, Acc(0));
    E::template nt<BLOCK_N, decltype(shared.q)::kCols>(p, shared.q, shared.k);
    scores::Slopes<S, E::kRows, BLOCK_N / E::kLanes> slopes;
    if constexpr (kOfProducts) {
        slopes.template set<E, false>(p, scores, first_query, first_key);
    }
    scores::see<E, S, false>(p, shared.mask.over(scores, first_query, first_key), first_query, first_key, edge);
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

template <class T, class S, int BLOCK_M, int BLOCK_N, int kD, int kDv>
struct QueryShared {
    tile::Tile<T, BLOCK_M, kD> q;
    tile::Tile<T, BLOCK_M, kDv> g;
    tile::Tile<T, BLOCK_N, kD> k;
    tile::Tile<T, BLOCK_N, kDv> v;
    Rows<typename S::Acc, BLOCK_M> rows;
    MaskTile<S, BLOCK_M, BLOCK_N> mask;
};

// Loads a block's queries, and from `begin` to `end` the tiles of keys; use(ds) of each: see score_gradients.
template <class E, class S, bool kVector, bool kOfProducts, int BLOCK_N, class Shared, class Use>
TK_DEVICE void walk_keys(Shared& shared, const S& scores, const Problem& a, const Place& at, const typename E::Acc* rows,
                         int64_t n_rows, const typename E::T* q, const typename E::T* k, const typename E::T* v,
                         const typename E::T* g, int begin, int end, Use use)
{
    const auto keys = keys_of<S>(k, a.k, a, at.batch, at.head / a.group, a.d);
    const auto values = keys_of<S>(v, a.v, a, at.batch, at.head / a.group, a.dv);
    tile::load<E::kThreads, kVector>(shared.q, queries_of(q, a.q, a, at.batch, at.head, a.d), at.first);
    tile::load<E::kThreads, kVector>(shared.g, queries_of(g, a.g, a, at.batch, at.head, a.dv), at.first);
    const int64_t r = row_of(a, at.batch, at.head, at.first);
    shared.rows.template load<E::kThreads>(rows, n_rows, r, a.q_len - at.first);
    tk::copy_commit();
    for (int first = begin; first < end; first += BLOCK_N) {
        tk::sync_block();  // all have read the last keys
        tile::load<E::kThreads, kVector>(shared.k, keys, first);
        tile::load<E::kThreads, kVector>(shared.v, values, first);
        shared.mask.template load<E::kThreads>(scores, at.first, first);
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
template <class T, class S, bool kVector, int BLOCK_N, int kD, int kDv, class E>
__global__ void __launch_bounds__(E::kThreads)
bwd_delta(typename S::Acc* rows,         // (3, n_rows): less, factor, delta, which is 0 and is written
          const T* q,                    // (batch, heads, q_len, d)
          const T* k,                    // (batch, heads / group, k_len, d)
          const T* v,                    // (batch, heads / group, k_len, dv)
          const T* g,                    // (batch, heads, q_len, dv)
          Problem all, const typename S::Acc* g_lse, int64_t n_rows)
{
    using Acc = typename E::Acc;
    constexpr int BLOCK_M = E::kM;
    auto& shared = tk::shared<QueryShared<T, S, BLOCK_M, BLOCK_N, kD, kDv>>();
    const Place at(int(blockIdx.x), BLOCK_M, all.q_most, all.heads, 1, S::kCausal);
    const Problem a = all.of<S>(at.batch);
    if (S::kVarlen && at.first >= a.q_len) {
        return;
    }
    const S scores = scores_of<S>(a, at.batch, at.head);
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
            rows[2 * n_rows + r + E::row(i)] = g_lse != nullptr ? delta[i] - g_lse[r + E::row(i)] : delta[i];
        }
    }
}

// A block: BLOCK_M queries of one head, kOut of the gradient's columns.
template <class T, class S, bool kVector, int BLOCK_N, int kD, int kDv, int kOut, class E>
__global__ void __launch_bounds__(E::kThreads)
bwd_dq(T* dq,                         // (batch, heads, q_len, d)
       const typename S::Acc* rows,   // (3, n_rows)
       const T* q,                    // (batch, heads, q_len, d)
       const T* k,                    // (batch, heads / group, k_len, d)
       const T* v,                    // (batch, heads / group, k_len, dv)
       const T* g,                    // (batch, heads, q_len, dv)
       Problem all, Strides to, int64_t n_rows, int chunks)
{
    using Acc = typename E::Acc;
    constexpr int BLOCK_M = E::kM;
    auto& shared = tk::shared<QueryShared<T, S, BLOCK_M, BLOCK_N, kD, kDv>>();
    const Place at(int(blockIdx.x), BLOCK_M, all.q_most, all.heads, chunks, S::kCausal);
    const Problem a = all.of<S>(at.batch);
    if (S::kVarlen && at.first >= a.q_len) {
        return;
    }
    const int column = at.chunk * kOut;
    const S scores = scores_of<S>(a, at.batch, at.head);
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
    T* p = dq + at.batch * to.b + at.head * to.h + int64_t(a.q_start + at.first) * to.l + column;
    tile::store_scaled<E>(p, to.l, sum, Acc(a.scale), a.q_len - at.first, a.d - column);
}

// The mask's sizes; 1 where it is broadcast (or the dim is 1).
struct MaskSizes {
    int batch, heads, q_len, k_len;
};

// A block: a tile of the mask. What is summed for it, batch entries and heads that share it and all tiles along a broadcast
// length, is summed in `parts`, and these one after the other. each: a block has one of the parts, and bwd_sum adds them up to
// the same bits. Without, there is one, or the mask isn't broadcast along a length.
template <class T, class S, class Out, bool kVector, int BLOCK_N, int kD, int kDv, class E>
__global__ void __launch_bounds__(E::kThreads)
bwd_dmask(Out* dmask,                    // (each ? parts : 1, size.batch, size.heads, size.q_len, size.k_len)
          const typename S::Acc* rows,   // (3, n_rows)
          const T* q,                    // (batch, heads, q_len, d)
          const T* k,                    // (batch, heads / group, k_len, d)
          const T* v,                    // (batch, heads / group, k_len, dv)
          const T* g,                    // (batch, heads, q_len, dv)
          Problem all, MaskSizes size, int batch, int64_t n_rows, int parts, bool each)
{
    using Acc = typename E::Acc;
    constexpr int BLOCK_M = E::kM;
    struct Shared : QueryShared<T, S, BLOCK_M, BLOCK_N, kD, kDv> {
        Acc sums[BLOCK_M][BLOCK_N + 1];
    };
    Shared& shared = tk::shared<Shared>();
    const int m_tiles = (size.q_len + BLOCK_M - 1) / BLOCK_M, n_tiles = (size.k_len + BLOCK_N - 1) / BLOCK_N;
    int block = int(blockIdx.x);
    const int n0 = block % n_tiles * BLOCK_N;
    block /= n_tiles;
    const int m0 = block % m_tiles * BLOCK_M;
    block /= m_tiles;
    const int part = each ? block % parts : 0;
    block /= each ? parts : 1;
    const int mask_head = block % size.heads, mask_batch = block / size.heads;

    // All that share the tile: batch entry, head, and where in a broadcast length.
    const int n_batch = size.batch == 1 ? batch : 1, n_heads = size.heads == 1 ? all.heads : 1;
    const int n_m = size.q_len == 1 ? (all.q_len + BLOCK_M - 1) / BLOCK_M : 1;
    const int n_n = size.k_len == 1 ? (all.k_len + BLOCK_N - 1) / BLOCK_N : 1;
    const int64_t count = int64_t(n_batch) * n_heads * n_m;
    for (int p = part; p < (each ? part + 1 : parts); ++p) {
        Acc sum[E::kRows][BLOCK_N / E::kLanes];
        tile::fill(sum, Acc(0));
        for (int64_t i = p; i < count; i += parts) {
            const int m = m0 + int(i % n_m) * BLOCK_M;
            const int head = mask_head + int(i / n_m % n_heads), b = mask_batch + int(i / n_m / n_heads);
            const Problem a = all.of<S>(b);
            const S scores = scores_of<S>(a, b, head);
            tk::sync_block();  // all have read the last tiles
            tile::load<E::kThreads, kVector>(shared.q, queries_of(q, a.q, a, b, head, a.d), m);
            tile::load<E::kThreads, kVector>(shared.g, queries_of(g, a.g, a, b, head, a.dv), m);
            shared.rows.template load<E::kThreads>(rows, n_rows, row_of(a, b, head, m), a.q_len - m);
            for (int n = n0; n < n0 + n_n * BLOCK_N; n += BLOCK_N) {
                tk::sync_block();  // all have read the last keys
                tile::load<E::kThreads, kVector>(shared.k, keys_of<S>(k, a.k, a, b, head / a.group, a.d), n);
                tile::load<E::kThreads, kVector>(shared.v, keys_of<S>(v, a.v, a, b, head / a.group, a.dv), n);
                shared.mask.template load<E::kThreads>(scores, m, n);
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
                Acc& total = shared.sums[E::row(i)][E::column(j)];
                total = p == part ? sum[i][j] : total + sum[i][j];
            }
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

// Adds up the parts of a mask's gradient in their order.
template <class T, class Out>
__global__ void __launch_bounds__(256)
bwd_sum(Out* dmask,                          // (n)
        const tk::accumulator_t<T>* from,    // (parts, n)
        int64_t n, int parts)
{
    using Acc = tk::accumulator_t<T>;
    const int64_t i = int64_t(blockIdx.x) * 256 + int(threadIdx.x);
    if (i >= n) {
        return;
    }
    Acc total = from[i];
#pragma unroll 4
    for (int p = 1; p < parts; ++p) {
        total += from[p * n + i];
    }
    dmask[i] = tk::from_acc<Out>(typename tk::accumulator_t<Out>(total));
}

// A block: the rows of one head, of all entries.
template <class T, int kWarps>
__global__ void __launch_bounds__(32 * kWarps)
bwd_sink(tk::accumulator_t<T>* dsinks,         // (heads)
         const tk::accumulator_t<T>* stats,    // (2, n_rows)
         const tk::accumulator_t<T>* rows,     // (3, n_rows), of which the last is delta
         Problem a, int64_t n_rows)
{
    using Acc = tk::accumulator_t<T>;
    Acc(&sums)[kWarps] = tk::shared<Acc[kWarps]>();
    const int head = int(blockIdx.x);
    const Acc sink = static_cast<const Acc*>(a.sinks)[head];
    Acc total = Acc(0);
    for (int64_t i = int(threadIdx.x); i < n_rows / a.heads; i += 32 * kWarps) {
        const int64_t r = (i / a.q_rows * a.heads + head) * a.q_rows + i % a.q_rows;
        const Acc sum = stats[n_rows + r];
        // Rows of no entry have a sum of 0.
        total -= sum == Acc(0) ? Acc(0) : tk::exp<true>(sink - stats[r]) / sum * rows[2 * n_rows + r];
    }
    total = tile::across<32>(total, [](Acc x, Acc y) { return x + y; });
    if (tk::lane() == 0) {
        sums[int(threadIdx.x) / 32] = total;
    }
    tk::sync_block();
    if (threadIdx.x == 0) {
        total = Acc(0);
        for (int i = 0; i < kWarps; ++i) {
            total += sums[i];
        }
        dsinks[head] = total;
    }
}

}  // namespace attention_backward
