// What attention's kernels share: the call they are told of, and where in it a block works.
#pragma once
#include "parts/scores.cuh"
#include "parts/tile.cuh"

namespace attention {

// Strides in elements. A mask's dims that are broadcast have stride 0.
struct Strides {
    int64_t b, h, l, d;
};

// Tensors that a call is without are null. Of entries that lie one behind the other ("packed"), and of pages, stride b is 0 and
// of a page. Lengths of an entry are what they are at most until of() makes them its own.
struct Problem {
    Strides q, k, v, o, g, mask;  // g: the output's gradient
    const void* mask_at;          // (batch, heads, q_len, k_len)
    const uint64_t* seed;         // of dropout
    const void* sinks;            // (heads), of the accumulators' type
    const int* q_starts;          // (batch + 1): the rows where packed entries begin and end
    const int* k_starts;
    const int* k_lens;            // (batch): the keys that an entry has
    const int* pages;             // (batch, n_pages): which pages its keys lie in
    const float* slopes;          // (batch, heads)
    const void* extra[3];         // tensors of a user's change of scores
    double scale, kept, cap;
    int heads, group;  // of queries; that share a head of keys and values
    int q_len, k_len, d, dv;
    int offset, lower;  // causal: query i sees the keys up to i + offset; window: from i + lower on; kVarlen: from the corner
    int q_rows;         // of a head, in all entries if packed
    int q_most, k_most;
    int n_pages, page_len;
    uint32_t dropped;
    int q_start, k_start;  // where the entry's rows begin

    // The same of one batch entry, with its own lengths. Starts that make no sense make no access outside.
    template <class S>
    TK_DEVICE Problem of(int batch) const
    {
        Problem a = *this;
        if constexpr (S::kVarlen) {
            if (q_starts != nullptr) {
                a.q_start = inside(q_starts[batch], 0, q_rows);
                a.q_len = inside(q_starts[batch + 1], a.q_start, q_rows) - a.q_start;
            }
            if (k_starts != nullptr) {
                a.k_start = inside(k_starts[batch], 0, k_len);
                a.k_len = inside(k_starts[batch + 1], a.k_start, k_len) - a.k_start;
            }
            if (k_lens != nullptr) {
                a.k_len = inside(k_lens[batch], 0, a.k_len);
            }
            a.offset = inside(offset + a.k_len - a.q_len, -(1 << 30), 1 << 30);
            a.lower = inside(lower + a.k_len - a.q_len, -(1 << 30), 1 << 30);
        }
        return a;
    }

private:
    TK_DEVICE static int inside(int v, int low, int high) { return tk::max(low, tk::min(v, high)); }
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

// Rows from `start` on of a batch entry and a head.
template <class T>
TK_DEVICE tile::Matrix<T> matrix(const T* p, const Strides& s, int batch, int head, int start, int rows, int cols,
                                 int first_col = 0)
{
    return {p + batch * s.b + head * s.h + start * s.l + first_col * s.d, s.l, s.d, rows, cols - first_col, nullptr, 1, 0};
}
template <class T>
TK_DEVICE tile::Matrix<T> queries_of(const T* p, const Strides& s, const Problem& a, int batch, int head, int cols)
{
    return matrix(p, s, batch, head, a.q_start, a.q_len, cols);
}
template <class S, class T>
TK_DEVICE tile::Matrix<T, S::kPaged> keys_of(const T* p, const Strides& s, const Problem& a, int batch, int head, int cols,
                                             int first_col = 0)
{
    if constexpr (S::kPaged) {
        const int* pages = a.pages + int64_t(batch) * a.n_pages;
        return {p + head * s.h + first_col * s.d, s.l, s.d, a.k_len, cols - first_col, pages, a.page_len, s.b};
    } else {
        return matrix(p, s, batch, head, a.k_start, a.k_len, cols, first_col);
    }
}

// The number of a query's row among all, head by head of each batch entry; and where row r is in a tensor.
TK_DEVICE int64_t row_of(const Problem& a, int batch, int head, int query)
{
    return (int64_t(a.q_starts != nullptr ? 0 : batch) * a.heads + head) * a.q_rows + a.q_start + query;
}
template <class T>
TK_DEVICE T* row_at(T* p, const Strides& s, const Problem& a, int64_t r)
{
    return p + r / a.q_rows / a.heads * s.b + r / a.q_rows % a.heads * s.h + r % a.q_rows * s.l;
}

template <class S>
TK_DEVICE S scores_of(const Problem& a, int batch, int head)
{
    S s{};
    if constexpr (S::kMasked) {
        s.mask = static_cast<const typename S::Mask*>(a.mask_at) + batch * a.mask.b + head * a.mask.h;
        s.mask_q = a.mask.l;
        s.mask_k = a.mask.d;
    }
    s.batch = batch;
    s.head = head;
    s.heads = a.heads;
    s.q_len = a.q_len;
    s.k_len = a.k_len;
    s.offset = a.offset;
    s.lower = a.lower;
    s.scale = typename S::Acc(a.scale);
    s.cap = a.cap;
    s.slopes = a.slopes;
    s.extra = a.extra;
    if constexpr (S::kDropout) {
        s.seed = *a.seed;
        s.dropped = a.dropped;
        s.kept = typename S::Acc(a.kept);
    }
    return s;
}

// A mask's tile in shared memory, where it lies in tiles; else nothing.
template <class S, int BLOCK_M, int BLOCK_N, bool = S::kTiles>
struct MaskTile {
    TK_DEVICE S over(const S& s, int, int) const { return s; }
    template <int kThreads>
    TK_DEVICE void load(const S&, int, int) {}
};
template <class S, int BLOCK_M, int BLOCK_N>
struct MaskTile<S, BLOCK_M, BLOCK_N, true> {
    using Mask = typename S::Mask;
    tile::Tile<Mask, BLOCK_M, BLOCK_N> tile;

    // The same scores with a mask that is read from the tile.
    TK_DEVICE S over(const S& s, int query, int key) const
    {
        constexpr int kPitch = decltype(tile)::kPitch / int(sizeof(Mask));
        S t = s;
        t.mask = tile.row(0) - (int64_t(query) * kPitch + key);
        t.mask_q = kPitch;
        t.mask_k = 1;
        return t;
    }
    // Starts to load it, as tile::load does.
    template <int kThreads>
    TK_DEVICE void load(const S& s, int query, int key)
    {
        tile::load<kThreads, true>(tile, tile::Matrix<Mask>{s.mask + key, s.mask_q, 1, s.q_len, s.k_len - key, nullptr, 1, 0}, query);
    }
};

}  // namespace attention
