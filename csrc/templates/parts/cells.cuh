// Rows that are read from memory as they are needed: any strides, any length.
//
// Columns come in *cells* of kVec elements, cell_stride elements apart: kVec = 1 for any stride, or a vector of a row with
// unit stride (cell_stride = kVec; the host guarantees the alignment). Four cells a thread are in flight.
#pragma once
#include "parts/row.cuh"

namespace row {

constexpr int kAhead = 4;

template <int kTeam, class T, class Out>
using AnyGeometry = Geometry<T, Out, 1, kTeam, (kTeam < 256 ? 256 / kTeam : 1), 1, 1, 1, false, 1>;

// Calls f(cell, vector) for the cells [lo, hi) of this thread, kAhead of them loaded before the first is used.
template <int kVec, int kTeam, class T, class F>
TK_DEVICE void for_cells(const T* x, int64_t lo, int64_t hi, int64_t cell_stride, F f)
{
    for (int64_t c = lo + threadIdx.x % kTeam; c < hi; c += kTeam * kAhead) {
        tk::Vec<T, kVec> v[kAhead];
#pragma unroll
        for (int k = 0; k < kAhead; ++k) {
            if (c + k * kTeam < hi) {
                v[k].raw = tk::load_global<kVec * int(sizeof(T))>(x + (c + k * kTeam) * cell_stride);
            }
        }
#pragma unroll
        for (int k = 0; k < kAhead; ++k) {
            if (c + k * kTeam < hi) {
                f(c + k * kTeam, v[k]);
            }
        }
    }
}
// The same for two inputs.
template <int kVec, int kTeam, class T, class F>
TK_DEVICE void for_cells(const T* x, const T* y, int64_t lo, int64_t hi, int64_t x_stride, int64_t y_stride, F f)
{
    for (int64_t c = lo + threadIdx.x % kTeam; c < hi; c += kTeam * kAhead) {
        tk::Vec<T, kVec> v[kAhead], w[kAhead];
#pragma unroll
        for (int k = 0; k < kAhead; ++k) {
            if (c + k * kTeam < hi) {
                v[k].raw = tk::load_global<kVec * int(sizeof(T))>(x + (c + k * kTeam) * x_stride);
                w[k].raw = tk::load_global<kVec * int(sizeof(T))>(y + (c + k * kTeam) * y_stride);
            }
        }
#pragma unroll
        for (int k = 0; k < kAhead; ++k) {
            if (c + k * kTeam < hi) {
                f(c + k * kTeam, v[k], w[k]);
            }
        }
    }
}

// The sum of value(i) for i = first, first + step, ... below end, in this order, eight of them in flight: who sums has little
// else to wait for.
template <class A, class F>
TK_DEVICE A sum_of_every(int64_t first, int64_t end, int64_t step, F value)
{
    A s = 0;
    for (; first < end; first += 8 * step) {
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            const int64_t i = first + k * step;
            const A v = value(tk::min(i, end - 1));  // without a branch, which would wait for it
            s += i < end ? v : A(0);
        }
    }
    return s;
}

}  // namespace row
