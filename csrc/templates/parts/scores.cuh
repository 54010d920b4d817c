// What attention does to a score between its two products: scale, masks, exponential, dropout.
//
// A score belongs to a query and a key; in which registers and which order scores lie is the mainloop's affair.
#pragma once
#include "tk/philox.cuh"
#include "tk/tk.cuh"

namespace scores {

struct None {};  // no mask

// Which keys count, and how scores lie. See Scores.
enum : unsigned {
    kHasPairs = 1, kHasTiles = 2, kIsCausal = 4, kIsWindow = 8, kIsRagged = 16, kHasDropout = 32, kIsFold = 64, kHasSink = 128,
    kIsVarlen = 256, kIsPaged = 512,
};

// Where a score is, for what changes it.
struct At {
    int batch, head, query, key, heads, q_len, k_len;
    double cap;
    const float* slopes;       // (batch, heads)
    const void* const* extra;  // tensors of a user's change

    // Between the key and the one that lies as far from the last key as the query from the last query.
    TK_DEVICE int distance() const { return key - query - (k_len - q_len); }
};

// ---- changes of a scaled score: what becomes of it, and how fast it changes with it -----------------------------------

struct Plain {
    static constexpr bool kChanges = false;
};

// cap * tanh(s / cap)
struct Softcap {
    static constexpr bool kChanges = true;
    template <class Acc>
    TK_DEVICE static Acc score(Acc s, const At& at) { return Acc(at.cap) * tk::tanh(s / Acc(at.cap)); }
    template <class Acc>
    TK_DEVICE static Acc slope(Acc s, const At& at)
    {
        const Acc t = tk::tanh(s / Acc(at.cap));
        return Acc(1) - t * t;
    }
};

// s - slope * |distance|: Press et al., "Train short, test long", 2022.
struct Alibi {
    static constexpr bool kChanges = true;
    template <class Acc>
    TK_DEVICE static Acc score(Acc s, const At& at)
    {
        const int d = at.distance();
        return s - Acc(at.slopes[at.batch * at.heads + at.head]) * Acc(d < 0 ? -d : d);
    }
    template <class Acc>
    TK_DEVICE static Acc slope(Acc, const At&) { return Acc(1); }
};

// First, then Second.
template <class First, class Second>
struct Then {
    static constexpr bool kChanges = true;
    template <class Acc>
    TK_DEVICE static Acc score(Acc s, const At& at) { return Second::score(First::score(s, at), at); }
    template <class Acc>
    TK_DEVICE static Acc slope(Acc s, const At& at) { return First::slope(s, at) * Second::slope(First::score(s, at), at); }
};

// ---- scores ----------------------------------------------------------------------------------------------------------

// Mask: None, bool (true: the key is seen), or a float type (added to the changed score). Mod: a change, as above. Flags:
//   kHasPairs    two neighbours of one query's row of the mask begin on a multiple of both's size, and k_len is even
//   kHasTiles    pairs, and its rows can be loaded as tile::load's vectors: `mask` then leads to a tile in shared memory
//   kIsCausal    query i sees the keys up to i + offset
//   kIsWindow    and those from i + lower on
//   kIsRagged    some tile has a query or a key outside
//   kIsFold      scores stay as the product left them, and the scale, > 0, is folded into the exponent: for two-byte types
//                without a float mask or a change
//   kHasSink     a further score of each head counts in the sum, whose value is 0
//   kIsVarlen    lengths are the batch entry's own
//   kIsPaged     keys and values lie in pages
template <class T, class TheMask, class TheMod, unsigned kFlags>
struct Scores {
    using Acc = tk::accumulator_t<T>;
    using Mask = TheMask;
    using Mod = TheMod;
    static constexpr bool kCausal = kFlags & kIsCausal, kWindow = kFlags & kIsWindow, kRagged = kFlags & kIsRagged;
    static constexpr bool kDropout = kFlags & kHasDropout, kFold = kFlags & kIsFold, kSink = kFlags & kHasSink;
    static constexpr bool kVarlen = kFlags & kIsVarlen, kPaged = kFlags & kIsPaged;
    static constexpr bool kBool = tk::is_same<Mask, bool>::value, kBias = !kBool && !tk::is_same<Mask, None>::value;
    static constexpr bool kMasked = kBool || kBias, kTiles = kMasked && kFlags & kHasTiles;
    static constexpr bool kPairs = kTiles || (kMasked && kFlags & kHasPairs);
    static_assert(!kFold || !(Mod::kChanges || kBias));
    // Whether the softmax sees something else than the product.
    static constexpr bool kChanged = kMasked || !kFold;
    // Whether some tiles have scores that are hidden for another reason than the mask.
    static constexpr bool kEdges = kCausal || kWindow || kRagged;

    const Mask* mask;  // of the batch entry and the head, (q_len, k_len)
    int64_t mask_q, mask_k;
    int batch, head, heads, q_len, k_len, offset, lower;
    Acc scale;
    double cap;
    const float* slopes;
    const void* const* extra;
    uint64_t seed;     // of dropout
    uint32_t dropped;  // of 2^32 random words
    Acc kept;          // the factor of what is not dropped

    // The score with scale and mask; where query or key lies outside, any number.
    TK_DEVICE Acc changed(Acc s, int query, int key) const
    {
        if constexpr (kMasked) {
            return masked(scaled(s, query, key), mask[place(query, key, 1)]);
        } else {
            return scaled(s, query, key);
        }
    }
    // The same of two neighbouring keys, the first one even.
    TK_DEVICE void changed(Acc& s, Acc& next, int query, int key) const
    {
        if constexpr (kPairs) {
            struct alignas(2 * sizeof(Mask)) Two { Mask m[2]; };
            const Two two = *reinterpret_cast<const Two*>(mask + place(query, key, 2));
            s = masked(scaled(s, query, key), two.m[0]);
            next = masked(scaled(next, query, key + 1), two.m[1]);
        } else {
            s = changed(s, query, key);
            next = changed(next, query, key + 1);
        }
    }
    // Of a product, how fast its scaled score's change goes.
    TK_DEVICE Acc slope(Acc s, int query, int key) const { return Mod::slope(s * scale, at(query, key)); }
    // Whether query or key lies outside, or the one comes too early or too late for the other.
    TK_DEVICE bool hidden(int query, int key) const
    {
        return key >= k_len || query >= q_len || (kCausal && key > query + offset) || (kWindow && key < query + lower);
    }

    // e to the power of a score less the row's maximum, and what the maximum's scale is for it.
    TK_DEVICE Acc power(Acc s, Acc less) const
    {
        if constexpr (kFold) {
            return tk::exp2(__fmaf_rn(s, scale * Acc(kLog2e), -less));
        } else {
            return tk::exp<sizeof(T) >= 4>(s - less);
        }
    }
    // `less` of a row whose largest score is m; -inf: it sees no key.
    TK_DEVICE Acc less(Acc m) const
    {
        return m == -tk::limits<Acc>::inf() ? Acc(0) : kFold ? m * (scale * Acc(kLog2e)) : m;
    }

    // What dropout multiplies the weights of query and key, and of query and key + 1, by. key is even.
    TK_DEVICE void keep(int query, int key, Acc& first, Acc& second) const
    {
        const uint64_t sequence = uint64_t(batch) * uint64_t(heads) + uint64_t(head);
        const uint32_t low = uint32_t(sequence), high = uint32_t(sequence >> 32);
        const tk::Quad r = tk::philox(seed, tk::Quad{{uint32_t(key) / 2, uint32_t(query) / 2, low, high}});
        first = (query % 2 ? r.w[2] : r.w[0]) < dropped ? Acc(0) : kept;
        second = (query % 2 ? r.w[3] : r.w[1]) < dropped ? Acc(0) : kept;
    }
    // The same of one query and one key.
    TK_DEVICE Acc keep(int query, int key) const
    {
        Acc w[2];
        keep(query, key & ~1, w[0], w[1]);
        return key % 2 ? w[1] : w[0];
    }

    static constexpr double kLog2e = 1.4426950408889634;

private:
    TK_DEVICE At at(int query, int key) const
    {
        if constexpr (kRagged) {
            query = tk::min(query, q_len - 1);
            key = tk::min(key, k_len - 1);
        }
        return {batch, head, query, key, heads, q_len, k_len, cap, slopes, extra};
    }
    // Where the mask has `count` keys' entries: its last ones, for what lies outside.
    TK_DEVICE int64_t place(int query, int key, int count) const
    {
        if constexpr (kRagged) {
            query = tk::min(query, q_len - 1);
            key = tk::min(key, k_len - count);
        }
        return query * mask_q + (kPairs ? int64_t(key) : key * mask_k);
    }
    TK_DEVICE Acc scaled(Acc s, int query, int key) const
    {
        s = kFold ? s : s * scale;
        if constexpr (Mod::kChanges) {
            s = Mod::score(s, at(query, key));
        }
        return s;
    }
    TK_DEVICE static Acc masked(Acc s, Mask m)
    {
        if constexpr (kBool) {
            return m ? s : -tk::limits<Acc>::inf();
        } else {
            return s + Acc(tk::to_acc(m));
        }
    }
};

// ---- scores in registers -------------------------------------------------------------------------------------------
//
// W says where they lie, as tile::Warp and the engines of parts/tile.cuh do.

// Makes of products the scores that the softmax sees: -inf where a query doesn't see a key. edge: there may be such keys, or
// ones outside, for another reason than the mask. kTransposed: rows are keys, columns queries.
template <class W, class S, bool kTransposed, int kRows, int kCols>
TK_DEVICE void see(typename S::Acc (&p)[kRows][kCols], const S& scores, int first_row, int first_col, bool edge)
{
#pragma unroll
    for (int i = 0; S::kChanged && i < kRows; ++i) {
#pragma unroll
        for (int j = 0; j < kCols; ++j) {
            const int row = first_row + W::row(i), col = first_col + W::column(j);
            if constexpr (kTransposed || !W::kPairs) {
                p[i][j] = scores.changed(p[i][j], kTransposed ? col : row, kTransposed ? row : col);
            } else if (j % 2 == 0) {
                scores.changed(p[i][j], p[i][j + 1], row, col);
            }
        }
    }
    if (!S::kEdges || !edge) {
        return;
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int j = 0; j < kCols; ++j) {
            const int row = first_row + W::row(i), col = first_col + W::column(j);
            if (scores.hidden(kTransposed ? col : row, kTransposed ? row : col)) {
                p[i][j] = -tk::limits<typename S::Acc>::inf();
            }
        }
    }
}

// Of products, before they are scores: what their gradients are multiplied by. Without a change nothing.
template <class S, int kRows, int kCols>
struct Slopes {
    using Acc = typename S::Acc;
    static constexpr bool kIs = S::Mod::kChanges;
    Acc of[kIs ? kRows : 1][kIs ? kCols : 1];

    template <class W, bool kTransposed>
    TK_DEVICE void set(const Acc (&p)[kRows][kCols], const S& scores, int first_row, int first_col)
    {
        if constexpr (kIs) {
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
#pragma unroll
                for (int j = 0; j < kCols; ++j) {
                    const int row = first_row + W::row(i), col = first_col + W::column(j);
                    of[i][j] = scores.slope(p[i][j], kTransposed ? col : row, kTransposed ? row : col);
                }
            }
        }
    }
    // A hidden key's 0 stays 0, whatever its slope.
    TK_DEVICE Acc times(Acc v, int i, int j) const
    {
        if constexpr (kIs) {
            return v == Acc(0) ? v : v * of[i][j];
        } else {
            return v;
        }
    }
};

// Multiplies p by dropout's factors. kTransposed: rows are keys, columns queries.
template <class W, class S, bool kTransposed, int kRows, int kCols>
TK_DEVICE void drop(typename S::Acc (&p)[kRows][kCols], const S& scores, int first_row, int first_col)
{
    using Acc = typename S::Acc;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int j = 0; j < kCols; ++j) {
            const int row = first_row + W::row(i), col = first_col + W::column(j);
            if constexpr (!kTransposed && W::kPairs) {
                if (j % 2 == 0) {
                    Acc w[2];
                    scores.keep(row, col, w[0], w[1]);
                    p[i][j] *= w[0];
                    p[i][j + 1] *= w[1];
                }
            } else {
                p[i][j] *= kTransposed ? scores.keep(col, row) : scores.keep(row, col);
            }
        }
    }
}

// p of a score.
template <class S>
TK_DEVICE typename S::Acc weight(const S& scores, typename S::Acc s, typename S::Acc less, typename S::Acc factor)
{
    const auto p = scores.power(s, less);
    return S::kFold ? p : p * factor;
}

}  // namespace scores
