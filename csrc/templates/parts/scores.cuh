// What attention does to a score between its two products: scale, masks, exponential, dropout.
//
// A score belongs to a query and a key; in which registers and which order scores lie is the mainloop's affair.
#pragma once
#include "tk/philox.cuh"
#include "tk/tk.cuh"

namespace scores {

struct None {};  // no mask

// Mask: None, bool (true: the key is seen), or a float type (added to the scaled score). kMaskPairs: two neighbours of one
// query's row begin on a multiple of both's size, and k_len is even. kCausal: query i sees the keys up to i + offset. kWindow:
// and those from i + lower on. kRagged: some tile has a query or a key outside. kFold: scores stay as the product left them, and
// the scale, > 0, is folded into the exponent: for two-byte types without a float mask or a cap. kSoftcap: a scaled score s
// becomes cap * tanh(s / cap).
template <class T, class TheMask, bool kHasMaskPairs, bool kIsCausal, bool kIsWindow, bool kIsRagged, bool kHasDropout, bool kIsFold,
          bool kHasSoftcap = false>
struct Scores {
    using Acc = tk::accumulator_t<T>;
    using Mask = TheMask;
    static constexpr bool kCausal = kIsCausal, kWindow = kIsWindow, kRagged = kIsRagged, kDropout = kHasDropout, kFold = kIsFold;
    static constexpr bool kSoftcap = kHasSoftcap;
    static_assert(!kSoftcap || !kFold);
    static constexpr bool kBool = tk::is_same<Mask, bool>::value, kBias = !kBool && !tk::is_same<Mask, None>::value;
    static constexpr bool kMasked = kBool || kBias, kMaskPairs = kMasked && kHasMaskPairs;
    // Whether the softmax sees something else than the product.
    static constexpr bool kChanged = kMasked || !kFold;
    // Whether some tiles have scores that are hidden for another reason than the mask.
    static constexpr bool kEdges = kCausal || kWindow || kRagged;

    const Mask* mask;  // of the batch entry and the head, (q_len, k_len)
    int64_t mask_q, mask_k;
    int q_len, k_len, offset, lower;
    Acc scale, cap;
    uint64_t seed, sequence;  // of dropout; sequence: which batch entry and head
    uint32_t dropped;         // of 2^32 random words
    Acc kept;                 // the factor of what is not dropped

    // The score with scale and mask; where query or key lies outside, any number.
    TK_DEVICE Acc changed(Acc s, int query, int key) const
    {
        if constexpr (kMasked) {
            return changed(s, mask[at(query, key, 1)]);
        } else {
            return scaled(s);
        }
    }
    // The same of two neighbouring keys, the first one even.
    TK_DEVICE void changed(Acc& s, Acc& next, int query, int key) const
    {
        if constexpr (kMaskPairs) {
            struct alignas(2 * sizeof(Mask)) Two { Mask m[2]; };
            const Two two = *reinterpret_cast<const Two*>(mask + at(query, key, 2));
            s = changed(s, two.m[0]);
            next = changed(next, two.m[1]);
        } else {
            s = changed(s, query, key);
            next = changed(next, query, key + 1);
        }
    }
    // Of a scaled and capped score, how fast it changes with the scaled one: cap * tanh(s / cap) has the slope 1 - tanh^2.
    TK_DEVICE Acc slope(Acc s) const
    {
        const Acc t = tk::tanh(s * scale / cap);
        return Acc(1) - t * t;
    }
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
    // Where the mask has `count` keys' entries: its last ones, for what lies outside.
    TK_DEVICE int64_t at(int query, int key, int count) const
    {
        if constexpr (kRagged) {
            query = tk::min(query, q_len - 1);
            key = tk::min(key, k_len - count);
        }
        return query * mask_q + (kMaskPairs ? int64_t(key) : key * mask_k);
    }
    TK_DEVICE Acc scaled(Acc s) const
    {
        s = kFold ? s : s * scale;
        return kSoftcap ? cap * tk::tanh(s / cap) : s;
    }
    TK_DEVICE Acc changed(Acc s, Mask m) const
    {
        s = scaled(s);
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

// Of products, before they are scores: what their gradients are multiplied by. Without a cap nothing.
template <class S, int kRows, int kCols>
struct Slopes {
    using Acc = typename S::Acc;
    Acc of[S::kSoftcap ? kRows : 1][S::kSoftcap ? kCols : 1];

    TK_DEVICE Slopes(const Acc (&p)[kRows][kCols], const S& scores)
    {
#pragma unroll
        for (int i = 0; S::kSoftcap && i < kRows; ++i) {
#pragma unroll
            for (int j = 0; j < kCols; ++j) {
                of[i][j] = scores.slope(p[i][j]);
            }
        }
    }
    TK_DEVICE Acc times(Acc v, int i, int j) const { return S::kSoftcap ? v * of[S::kSoftcap ? i : 0][S::kSoftcap ? j : 0] : v; }
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
