// What linear_cross_entropy does besides matrix products and the kernels of cross_entropy.cuh.
//
//   scale       y = x * g                            for a g that only the device knows, read by each thread
//   add_rows    y[key] += sum(by[i] * x[i])          over the rows i of each key, rounded once
//
// Bytes: scale reads x and writes y once; over x itself, with a g of 1, nothing. add_rows reads x once and, of y, reads and writes
// the rows that are added to.
// The host guarantees: scale's x and y are n_cells * kVec elements that lie side by side, each cell on its own alignment; rows of
// add_rows are whole vectors of kVec elements, on their alignment. Keys are sorted; from n_keys on they have no row.
// Template: Out, In, T element types; L of g; kOver: y is x, so where g is 1 nothing is done; kVec elements a cell or load.
#include "parts/cells.cuh"

namespace linear_cross_entropy {

constexpr int kThreads = 256;
constexpr int64_t kSpan = kThreads * row::kAhead;  // cells of a block at a time

template <class Out, class In, class L, bool kOver, int kVec>
__global__ void __launch_bounds__(kThreads)
scale(Out* y,       // (n_cells, kVec)
      const In* x,  // (n_cells, kVec)
      const L* g,   // (1,)
      int64_t n_cells)
{
    using A = tk::accumulator_t<In>;
    const A by = A(tk::to_acc(*g));
    if (kOver && by == A(1)) {
        return;
    }
    for (int64_t lo = blockIdx.x * kSpan; lo < n_cells; lo += gridDim.x * kSpan) {
        row::for_cells<kVec, kThreads>(x, lo, tk::min(lo + kSpan, n_cells), kVec,
                                       [&](int64_t c, const tk::Vec<In, kVec>& v) {
            A a[kVec];
            v.unpack(a);
#pragma unroll
            for (int i = 0; i < kVec; ++i) {
                a[i] *= by;
            }
            tk::store_global<kVec * int(sizeof(Out))>(y + c * kVec, tk::Vec<Out, kVec>::pack(a).raw);
        });
    }
}

// A block: a key's rows, kThreads vectors of them. A block whose place isn't its key's first has nothing to do.
template <class T, int kVec>
__global__ void __launch_bounds__(kThreads)
add_rows(T* y,                  // (n_keys, n)
         const T* x,            // (n_rows, n)
         const T* by,           // (n_rows,)
         const int64_t* keys,   // (n_rows,)
         const int64_t* order,  // (n_rows,): the row of each key
         int64_t n_rows, int64_t n_keys, int64_t n, int64_t row_stride, int64_t col_stride, int64_t blocks)
{
    using V = tk::Vec<T, kVec>;
    const int64_t first = blockIdx.x / blocks, col = (blockIdx.x % blocks * kThreads + threadIdx.x) * kVec;
    const int64_t key = keys[first];
    if (key >= n_keys || (first > 0 && keys[first - 1] == key) || col >= n) {
        return;
    }
    T* to = y + key * n + col;
    typename V::Acc sum[kVec] = {};
    for (int64_t i = first; i < n_rows && keys[i] == key; ++i) {
        const typename V::Acc factor = tk::to_acc(by[order[i]]);
        typename V::Acc a[kVec];
        V{tk::load_global<V::kBytes>(x + order[i] * row_stride + col * col_stride)}.unpack(a);
#pragma unroll
        for (int k = 0; k < kVec; ++k) {
            sum[k] += factor * a[k];
        }
    }
    typename V::Acc a[kVec];
    V{tk::load_global<V::kBytes>(to)}.unpack(a);
#pragma unroll
    for (int k = 0; k < kVec; ++k) {
        a[k] += sum[k];
    }
    tk::store_global<V::kBytes>(to, V::pack(a).raw);
}

}  // namespace linear_cross_entropy
