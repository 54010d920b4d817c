// What linear_cross_entropy does besides matrix products and the kernels of cross_entropy.cuh.
//
//   scale    y = x * g        for a g that only the device knows, read by each thread
//
// Bytes: reads x and writes y once; over x itself, with a g of 1, nothing.
// The host guarantees: x and y are n_cells * kVec elements that lie side by side, each cell on its own alignment.
// Template: Out, In element types; L of g; kOver: y is x, so where g is 1 nothing is done; kVec elements a cell.
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

}  // namespace linear_cross_entropy
