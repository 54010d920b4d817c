// Tiles of matrices: from global to shared memory, and their products with sums in registers.
//
// Two products are all that attention is made of, and in both each thread keeps its rows of the sums:
//     nt   c[m, n] += sum over k of a[m, k] * b[n, k]      both operands in shared memory, k their last dimension
//     rn   c[m, n] += sum over k of p[m, k] * b[k, n]      p is what nt left in registers, b's last dimension is n
// An engine computes them: Tensor on the tensor cores (f16, bf16, float), Scalar by multiply-adds (float, double). Of the sums
// of kM rows and kN columns a thread holds c[i][j], i < kRows, j < kN / kLanes: row(i), column(j) of the block's tile. A row
// lies in kLanes neighbouring lanes. Both products are called by all threads of the block.
#pragma once
#include "tk/mma.cuh"

namespace tile {

// Rows in shared memory, 16 bytes further apart than they are long: so 8 rows' pieces of 16 bytes lie in different banks.
template <class T, int kTheRows, int kTheCols>
struct Tile {
    static constexpr int kRows = kTheRows, kCols = kTheCols, kPitch = kCols * int(sizeof(T)) + 16;
    static_assert(kCols * sizeof(T) % 32 == 0, "an odd number of pieces a row");
    alignas(16) char bytes[kRows * kPitch];

    TK_DEVICE T* row(int r) { return reinterpret_cast<T*>(bytes + r * kPitch); }
    TK_DEVICE const T* row(int r) const { return reinterpret_cast<const T*>(bytes + r * kPitch); }
};

// A matrix in global memory. kPaged: its rows lie page by page, and `pages` says which page comes when.
template <class T, bool kIsPaged = false>
struct Matrix {
    static constexpr bool kPaged = kIsPaged;
    const T* p;
    int64_t row_stride, col_stride;
    int rows, cols;
    const int* pages;
    int page_len;  // rows of a page
    int64_t page_stride;
};

// Which pages kRows rows from `first` on lie in: a lane looks up every 32nd row's. Without pages nothing.
template <bool kPaged, int kRows>
struct Pages {
    static constexpr int kEach = kPaged ? (kRows + 31) / 32 : 1;
    int page[kEach], in_page[kEach];

    template <class M>
    TK_DEVICE Pages(const M& m, int first)
    {
        if constexpr (kPaged) {
#pragma unroll
            for (int i = 0; i < kEach; ++i) {
                const int r = first + 32 * i + tk::lane();
                page[i] = r < m.rows ? m.pages[r / m.page_len] : 0;
                in_page[i] = r % m.page_len;
            }
        }
    }
    // Where row first + i begins; all lanes ask for one together.
    template <class M>
    TK_DEVICE auto row(const M& m, int first, int i) const
    {
        if constexpr (kPaged) {
            int64_t n = 0, k = 0;
#pragma unroll
            for (int j = 0; j < kEach; ++j) {
                const int a = int(tk::shuffle<32>(uint32_t(page[j]), i % 32)), b = int(tk::shuffle<32>(uint32_t(in_page[j]), i % 32));
                n = i / 32 == j ? a : n;
                k = i / 32 == j ? b : k;
            }
            return m.p + n * m.page_stride + k * m.row_stride;
        } else {
            return m.p + int64_t(first + i) * m.row_stride;
        }
    }
};

// Whether a tile of kRows is of whole pages, or a page of whole tiles, and kStep divides the smaller one.
template <int kRows, int kStep, class M>
TK_DEVICE bool is_whole_pages(const M& m)
{
    return (kRows % m.page_len == 0 && m.page_len % kStep == 0) || (m.page_len % kRows == 0 && kRows % kStep == 0);
}

// Starts to fill a tile with rows first, first + 1, ... of a matrix, and zeros where it has none; done after the copy_wait that
// covers it and a barrier; `first` is a multiple of kRows. kVector: rows and their strides are multiples of 16 bytes, and the columns lie side by side.
template <int kThreads, bool kVector, class T, int kRows, int kCols, class M>
TK_DEVICE void load(Tile<T, kRows, kCols>& t, const M& m, int first, const Pages<M::kPaged, kRows>& pages)
{
    constexpr int kVec = kVector ? 16 / int(sizeof(T)) : 1, kPieces = kCols / kVec;
    auto piece = [&](int row, int col, const T* from) {
        const bool there = first + row < m.rows && col < m.cols;
        if constexpr (kVector) {
            tk::copy_async_or_zero<16>(t.row(row) + col, there ? from : m.p, there);
        } else {
            t.row(row)[col] = there ? *from : T{};
        }
    };
    if constexpr (!M::kPaged && kThreads % kPieces == 0) {
        // A thread stays in its column, so that the next address is one addition.
        constexpr int kStep = kThreads / kPieces;
        const int col = int(threadIdx.x) % kPieces * kVec;
        int row = int(threadIdx.x) / kPieces;
        const T* from = m.p + int64_t(first + row) * m.row_stride + col * m.col_stride;
        for (; row < kRows; row += kStep, from += kStep * m.row_stride) {
            piece(row, col, from);
        }
    } else if (M::kPaged && kThreads % kPieces == 0 && is_whole_pages<kRows, kThreads / kPieces>(m)) {
        constexpr int kStep = kThreads / kPieces;
        const int col = int(threadIdx.x) % kPieces * kVec, each = m.page_len < kRows ? m.page_len : kRows;
        for (int begin = 0; begin < kRows; begin += each) {
            int row = begin + int(threadIdx.x) / kPieces;
            const T* from = pages.row(m, first, begin) + (row - begin) * m.row_stride + col * m.col_stride;
            for (; row < begin + each; row += kStep, from += kStep * m.row_stride) {
                piece(row, col, from);
            }
        }
    } else {
        for (int begin = 0; begin < kRows * kPieces; begin += kThreads) {
            const int i = begin + int(threadIdx.x), row = i / kPieces, col = i % kPieces * kVec;
            const T* from = pages.row(m, first, row < kRows ? row : 0) + col * m.col_stride;
            if (row < kRows) {
                piece(row, col, from);
            }
        }
    }
}
template <int kThreads, bool kVector, class T, int kRows, int kCols, class M>
TK_DEVICE void load(Tile<T, kRows, kCols>& t, const M& m, int first)
{
    load<kThreads, kVector>(t, m, first, Pages<M::kPaged, kRows>(m, first));
}

// ---- the tensor cores --------------------------------------------------------------------------------------------------
//
// A warp's part: kTiles tiles of 16 rows, kN columns. Of its sums a lane holds c[2t + h][j]: row 16t + 8h + lane / 4, column
// 8 (j / 2) + 2 (lane % 4) + j % 2.

// Fragments as the tensor cores take them. kSplit, of float: they ignore the low bits, so there is a fragment of these too: three
// products, all but the two rests', are nearly float's.
template <int kBytes, bool kSplit>
struct Fragment {
    tk::Words<kBytes> high, rest;

    TK_DEVICE Fragment() = default;
    TK_DEVICE explicit Fragment(const tk::Words<kBytes>& w) : high(w)
    {
#pragma unroll
        for (int i = 0; kSplit && i < kBytes / 4; ++i) {
            rest.w[i] = tk::tf32_rest(w.w[i]);
        }
    }
};

template <class T, int kTiles, int kN, bool kIsSplit = (sizeof(T) == 4)>
struct Warp {
    static_assert(kTiles > 0 && kN > 0 && kN % 16 == 0);
    static constexpr int kRows = 2 * kTiles, kCols = kN / 4;
    static constexpr bool kPairs = true;  // a lane's columns are neighbours two by two
    static constexpr bool kSplit = kIsSplit;
    using Sums = float[kRows][kCols];
    using A = Fragment<16, kSplit>;
    using B = Fragment<8, kSplit>;

    TK_DEVICE static int row(int i) { return i / 2 * 16 + i % 2 * 8 + tk::lane() / 4; }
    TK_DEVICE static int column(int j) { return j / 2 * 8 + tk::lane() % 4 * 2 + j % 2; }

    // c[m, n] += sum over k of a[first_row + m, k] * b[first_col + n, k]
    template <int kK, class TileA, class TileB>
    TK_DEVICE static void nt(Sums& c, const TileA& a, int first_row, const TileB& b, int first_col)
    {
        const int lane = tk::lane();
        const char* a_row = reinterpret_cast<const char*>(a.row(first_row + lane % 16)) + lane / 16 * 16;
        const char* b_row = reinterpret_cast<const char*>(b.row(first_col + lane / 16 * 8 + lane % 8)) + lane / 8 % 2 * 16;
        Rests<kCols> rests;
#pragma unroll (sizeof(T) == 4 ? 4 : kK)
        for (int k = 0; k < kK * int(sizeof(T)) / 32; ++k) {
            A fa[kTiles];
#pragma unroll
            for (int m = 0; m < kTiles; ++m) {
                fa[m] = A(tk::ldmatrix<4>(a_row + m * 16 * TileA::kPitch + k * 32));
            }
#pragma unroll
            for (int n = 0; n < kN / 16; ++n) {
                multiply(c, rests, fa, tk::ldmatrix<4>(b_row + n * 16 * TileB::kPitch + k * 32), n);
            }
        }
        rests.add_to(c);
    }

    // c[m, n] += sum over k of p[m, k] * b[k, first_col + n], p sums of an earlier product
    template <int kK, class TileB>
    TK_DEVICE static void rn(Sums& c, const float (&p)[kRows][kK / 4], const TileB& b, int first_col)
    {
        if constexpr (sizeof(T) == 4) {
            return rn_of_words<kK>(c, p, b, first_col);
        } else {
            const char* b_row = transposed(b, first_col);
            Rests<kCols> rests;
#pragma unroll
            for (int k = 0; k < kK / 16; ++k) {
                A fa[kTiles];
#pragma unroll
                for (int m = 0; m < kTiles; ++m) {
                    // Two neighbours of the sums, packed, are a fragment A.
#pragma unroll
                    for (int w = 0; w < 4; ++w) {
                        const auto& pr = p[2 * m + w % 2];
                        fa[m].high.w[w] = tk::pack2(pr[4 * k + w / 2 * 2], pr[4 * k + w / 2 * 2 + 1], T{});
                    }
                }
#pragma unroll
                for (int n = 0; n < kN / 16; ++n) {
                    multiply(c, rests, fa, tk::ldmatrix<4, true>(b_row + k * 16 * TileB::kPitch + n * 32), n);
                }
            }
        }
    }

    // c[m, n] += sum over k of a[first_row + m, k] * b[k, first_col + n]; kTransposed: of a[k, first_row + m]. Two-byte types.
    template <int kK, bool kTransposed, class TileA, class TileB>
    TK_DEVICE static void nn(Sums& c, const TileA& a, int first_row, const TileB& b, int first_col)
    {
        static_assert(sizeof(T) == 2);
        const int lane = tk::lane();
        const char* b_row = transposed(b, first_col);
        const char* a_row = kTransposed
            ? reinterpret_cast<const char*>(a.row(lane / 16 * 8 + lane % 8) + first_row) + lane / 8 % 2 * 16
            : reinterpret_cast<const char*>(a.row(first_row + lane % 16)) + lane / 16 * 16;
        Rests<kCols> rests;
#pragma unroll
        for (int k = 0; k < kK / 16; ++k) {
            A fa[kTiles];
#pragma unroll
            for (int m = 0; m < kTiles; ++m) {
                fa[m] = A(kTransposed ? tk::ldmatrix<4, true>(a_row + k * 16 * TileA::kPitch + m * 32)
                                      : tk::ldmatrix<4>(a_row + m * 16 * TileA::kPitch + k * 32));
            }
#pragma unroll
            for (int n = 0; n < kN / 16; ++n) {
                multiply(c, rests, fa, tk::ldmatrix<4, true>(b_row + k * 16 * TileB::kPitch + n * 32), n);
            }
        }
    }

private:
    // The sums of products with a rest, by themselves: they are small, and each addition to the large sums would cost these
    // a rounding.
    template <int kWidth>
    struct Rests {
        float c[kSplit ? kRows : 1][kSplit ? kWidth : 1] = {};

        TK_DEVICE void add_to(float (&sums)[kRows][kWidth]) const
        {
#pragma unroll
            for (int i = 0; kSplit && i < kRows; ++i) {
#pragma unroll
                for (int j = 0; j < kWidth; ++j) {
                    sums[i][j] += c[kSplit ? i : 0][kSplit ? j : 0];
                }
            }
        }
    };

    // Of four-byte types. Of each 8 k the sums' layout has 2q and 2q + 1 in a lane, q = lane % 4, where a fragment has q and
    // q + 4; the order of k is free, so b's rows are read in that one.
    template <int kK, class TileB>
    TK_DEVICE static void rn_of_words(Sums& c, const float (&p)[kRows][kK / 4], const TileB& b, int first_col)
    {
        // Summed by themselves first, some columns at a time: one after the other onto c, thousands of terms would lose digits.
        constexpr int kChunk = kTiles > 1 || kN % 64 != 0 ? (kN % 32 == 0 ? 32 : 16) : 64;
        const T* b_row = b.row(tk::lane() % 4 * 2) + first_col + tk::lane() / 4;
#pragma unroll
        for (int n0 = 0; n0 < kN; n0 += kChunk) {
            float t[kRows][kChunk / 4] = {};
            Rests<kChunk / 4> rests;
#pragma unroll
            for (int k = 0; k < kK / 8; ++k) {
                A fa[kTiles];
#pragma unroll
                for (int m = 0; m < kTiles; ++m) {
                    tk::Words<16> w;
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        w.w[i] = tk::bits_of(p[2 * m + i % 2][2 * k + i / 2]);
                    }
                    fa[m] = A(w);
                }
#pragma unroll
                for (int n = 0; n < kChunk / 8; n += 2) {
                    B fb[2];
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        tk::Words<8> w;
#pragma unroll
                        for (int i = 0; i < 2; ++i) {
                            const char* at = reinterpret_cast<const char*>(b_row + n0 + 8 * (n + half)) + (8 * k + i) * TileB::kPitch;
                            w.w[i] = tk::load_shared<4>(at).w[0];
                        }
                        fb[half] = B(w);
                    }
                    multiply(t, rests, fa, fb, n / 2);
                }
            }
            rests.add_to(t);
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
#pragma unroll
                for (int j = 0; j < kChunk / 4; ++j) {
                    c[i][n0 / 4 + j] += t[i][j];
                }
            }
        }
    }

    // Where a lane reads fragments B of b's columns from first_col on, of which k are the rows.
    template <class TileB>
    TK_DEVICE static const char* transposed(const TileB& b, int first_col)
    {
        const int lane = tk::lane();
        return reinterpret_cast<const char*>(b.row(lane / 8 % 2 * 8 + lane % 8) + first_col) + lane / 16 * 16;
    }

    // Columns 16n to 16n + 15 of all rows.
    template <int kWidth>
    TK_DEVICE static void multiply(float (&c)[kRows][kWidth], Rests<kWidth>& rests, const A (&fa)[kTiles],
                                   const tk::Words<16>& fb, int n)
    {
        const B b[2] = {B(tk::Words<8>{{fb.w[0], fb.w[1]}}), B(tk::Words<8>{{fb.w[2], fb.w[3]}})};
        multiply(c, rests, fa, b, n);
    }
    template <int kWidth>
    TK_DEVICE static void multiply(float (&c)[kRows][kWidth], Rests<kWidth>& rests, const A (&fa)[kTiles], const B (&fb)[2], int n)
    {
#pragma unroll
        for (int term = kSplit ? 0 : 2; term < 3; ++term) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int m = 0; m < kTiles; ++m) {
                    const auto& a = term == 0 ? fa[m].rest : fa[m].high;
                    const auto& b = term == 1 ? fb[half].rest : fb[half].high;
                    if constexpr (kSplit) {
                        term < 2 ? add(rests.c, a, b, m, 4 * n + 2 * half) : add(c, a, b, m, 4 * n + 2 * half);
                    } else {
                        add(c, a, b, m, 4 * n + 2 * half);
                    }
                }
            }
        }
    }
    // To the sums of tile m's rows and the columns of j to j + 1 and their neighbours' in other lanes.
    template <int kWidth>
    TK_DEVICE static void add(float (&c)[kRows][kWidth], const tk::Words<16>& a, const tk::Words<8>& b, int m, int j)
    {
        using Type = typename tk::select<sizeof(T) == 4, tk::tf32, T>::type;
        float d[4] = {c[2 * m][j], c[2 * m][j + 1], c[2 * m + 1][j], c[2 * m + 1][j + 1]};
        tk::mma<Type>(d, a, b);
        c[2 * m][j] = d[0];
        c[2 * m][j + 1] = d[1];
        c[2 * m + 1][j] = d[2];
        c[2 * m + 1][j + 1] = d[3];
    }
};

// Each warp has 16 * kTiles of the block's rows, and all its columns. kSplit: see Fragment.
template <class T_, int kWarps, int kTiles, bool kSplit = (sizeof(T_) == 4)>
struct Tensor {
    using T = T_;
    using Acc = float;
    static constexpr int kThreads = 32 * kWarps, kM = 16 * kTiles * kWarps, kRows = 2 * kTiles, kLanes = 4;
    static constexpr bool kPairs = true;

    TK_DEVICE static int first_row() { return int(threadIdx.x) / 32 * 16 * kTiles; }
    TK_DEVICE static int row(int i) { return first_row() + Warp<T, kTiles, 16>::row(i); }
    TK_DEVICE static int column(int j) { return Warp<T, kTiles, 16>::column(j); }

    template <int kN, int kK, class A, class B>
    TK_DEVICE static void nt(Acc (&c)[kRows][kN / kLanes], const A& a, const B& b)
    {
        Warp<T, kTiles, kN, kSplit>::template nt<kK>(c, a, first_row(), b, 0);
    }
    // Of b's columns those from `first` on.
    template <int kN, int kK, class B>
    TK_DEVICE static void rn(Acc (&c)[kRows][kN / kLanes], const Acc (&p)[kRows][kK / kLanes], const B& b, int first = 0)
    {
        Warp<T, kTiles, kN, kSplit>::template rn<kK>(c, p, b, first);
    }
};

// ---- multiply-adds, of float and double ----------------------------------------------------------------------------

// Half a warp a row; each thread has kTheRows rows and every 16th column.
template <class T_, int kWarps, int kTheRows>
struct Scalar {
    using T = T_;
    using Acc = T_;
    static constexpr int kThreads = 32 * kWarps, kRows = kTheRows, kM = 2 * kWarps * kRows, kLanes = 16;
    static constexpr bool kPairs = false;

    TK_DEVICE static int row(int i) { return int(threadIdx.x) / 16 * kRows + i; }
    TK_DEVICE static int column(int j) { return tk::lane() % 16 + 16 * j; }

    template <int kN, int kK, class A, class B>
    TK_DEVICE static void nt(Acc (&c)[kRows][kN / kLanes], const A& a, const B& b)
    {
        constexpr int kVec = 16 / int(sizeof(T));
        using V = tk::Vec<T, kVec>;
#pragma unroll 2
        for (int k = 0; k < kK; k += kVec) {
            Acc x[kRows][kVec];
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                V{tk::load_shared<16>(a.row(row(i)) + k)}.unpack(x[i]);
            }
#pragma unroll
            for (int j = 0; j < kN / kLanes; ++j) {
                Acc y[kVec];
                V{tk::load_shared<16>(b.row(column(j)) + k)}.unpack(y);
#pragma unroll
                for (int i = 0; i < kRows; ++i) {
#pragma unroll
                    for (int v = 0; v < kVec; ++v) {
                        c[i][j] += x[i][v] * y[v];
                    }
                }
            }
        }
    }

    template <int kN, int kK, class B>
    TK_DEVICE static void rn(Acc (&c)[kRows][kN / kLanes], const Acc (&p)[kRows][kK / kLanes], const B& b, int first = 0)
    {
        // Summed by themselves first: one after the other onto c, thousands of terms would lose digits.
        Acc t[kRows][kN / kLanes] = {};
#pragma unroll
        for (int k0 = 0; k0 < kK / kLanes; ++k0) {
#pragma unroll 2
            for (int k1 = 0; k1 < kLanes; ++k1) {
                Acc x[kRows];
#pragma unroll
                for (int i = 0; i < kRows; ++i) {
                    x[i] = tk::shuffle<kLanes>(p[i][k0], k1);
                }
#pragma unroll
                for (int j = 0; j < kN / kLanes; ++j) {
                    const Acc y = tk::to_acc(b.row(k0 * kLanes + k1)[first + column(j)]);
#pragma unroll
                    for (int i = 0; i < kRows; ++i) {
                        t[i][j] += x[i] * y;
                    }
                }
            }
        }
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
#pragma unroll
            for (int j = 0; j < kN / kLanes; ++j) {
                c[i][j] += t[i][j];
            }
        }
    }
};

// ---- rows of sums --------------------------------------------------------------------------------------------------

template <int kLanes, class Acc, class Op>
TK_DEVICE Acc across(Acc v, Op op)
{
#pragma unroll
    for (int mask = 1; mask < kLanes; mask *= 2) {
        v = op(v, tk::shuffle_xor(v, mask));
    }
    return v;
}

template <class Acc, int kRows, int kCols>
TK_DEVICE void fill(Acc (&c)[kRows][kCols], Acc value)
{
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int j = 0; j < kCols; ++j) {
            c[i][j] = value;
        }
    }
}

template <class Acc, int kRows, int kCols>
TK_DEVICE void copy(Acc (&to)[kRows][kCols], const Acc (&from)[kRows][kCols])
{
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int j = 0; j < kCols; ++j) {
            to[i][j] = from[i][j];
        }
    }
}

// Stores the sums that lie within rows x cols, times the factor of their row.
template <class W, class T, class Acc, int kRows, int kCols, class Factor>
TK_DEVICE void store_rows(T* to, int64_t row_stride, const Acc (&c)[kRows][kCols], Factor factor, int rows, int cols)
{
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        if (W::row(i) >= rows) {
            continue;
        }
        T* row = to + W::row(i) * row_stride;
        const Acc f = factor(i);
        if constexpr (sizeof(T) == 2 && W::kPairs) {
            if (cols % 2 == 0 && (reinterpret_cast<uint64_t>(row) & 3) == 0) {  // an even column and its neighbour in a word
#pragma unroll
                for (int j = 0; j < kCols; j += 2) {
                    if (W::column(j) < cols) {
                        tk::store_global<4>(row + W::column(j), tk::Words<4>{{tk::pack2(c[i][j] * f, c[i][j + 1] * f, T{})}});
                    }
                }
                continue;
            }
        }
#pragma unroll
        for (int j = 0; j < kCols; ++j) {
            if (W::column(j) < cols) {
                row[W::column(j)] = tk::from_acc<T>(c[i][j] * f);
            }
        }
    }
}

// The same with a factor for each row, and with one for all.
template <class W, class T, class Acc, int kRows, int kCols>
TK_DEVICE void store(T* to, int64_t row_stride, const Acc (&c)[kRows][kCols], const Acc (&factor)[kRows], int rows, int cols)
{
    store_rows<W>(to, row_stride, c, [&](int i) { return factor[i]; }, rows, cols);
}
template <class W, class T, class Acc, int kRows, int kCols>
TK_DEVICE void store_scaled(T* to, int64_t row_stride, const Acc (&c)[kRows][kCols], Acc factor, int rows, int cols)
{
    store_rows<W>(to, row_stride, c, [&](int) { return factor; }, rows, cols);
}

}  // namespace tile
