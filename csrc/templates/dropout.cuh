// Dropout, of what an expression computes.
//
//   y = bits(i) >= threshold ? x * scale : 0      bits(i): 32 random bits of element i, see elementwise::Random
//
// Dropped with probability threshold / 2^32. What is dropped is 0, whatever it was: infinities and NaN too.
// Bytes: parts/elementwise.cuh; nothing else is kept or read but the seed: the gradient draws the same bits again.
// The host guarantees: 0 <= threshold < 2^32.
// Template: F float or double.
#include "parts/elementwise.cuh"

namespace dropout {

template <class F>
TK_DEVICE F kept(uint32_t bits, int64_t threshold, F x, F scale)
{
    return bits >= uint32_t(threshold) ? x * scale : F(0);
}

}  // namespace dropout
