// Random numbers by counter: Philox 4x32, of 10 rounds or fewer (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
// 2011). No state: any number of any sequence at once, and the backward pass gets the forward pass's again.
#pragma once
#include "tk/types.cuh"

namespace tk {

struct Quad { uint32_t w[4]; };

// The four words that a key makes of each counter (both with their least significant word first), as Random123 has them. In
// their place, and side by side: the rounds' keys are computed once for all.
template <int kRounds, int kN>
TK_DEVICE void philox(uint64_t key, Quad (&counters)[kN])
{
    uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
#pragma unroll
        for (int i = 0; i < kN; ++i) {
            const Quad c = counters[i];
            const uint64_t a = uint64_t(0xd2511f53u) * c.w[0], b = uint64_t(0xcd9e8d57u) * c.w[2];
            const uint32_t x = uint32_t(b >> 32) ^ c.w[1] ^ k0, z = uint32_t(a >> 32) ^ c.w[3] ^ k1;
            counters[i] = Quad{{x, uint32_t(b), z, uint32_t(a)}};
        }
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
}

template <int kRounds = 10>
TK_DEVICE Quad philox(uint64_t key, Quad counter)
{
    Quad one[1] = {counter};
    philox<kRounds>(key, one);
    return one[0];
}

// Words 4 * quad .. 4 * quad + 3 of a seed's subsequence: of 10 rounds the same bits as curand4 after curand_init(seed,
// subsequence, 4 * quad), which torch's kernels call with subsequence = the thread's number in the grid and with an offset,
// counted in words, that is a multiple of 4; and as at::philox_engine(seed, subsequence, quad).
template <int kRounds = 10>
TK_DEVICE Quad philox(uint64_t seed, uint64_t subsequence, uint64_t quad)
{
    const Quad counter{{uint32_t(quad), uint32_t(quad >> 32), uint32_t(subsequence), uint32_t(subsequence >> 32)}};
    return philox<kRounds>(seed, counter);
}

// A word as a float in (0, 1], as curand_uniform has it: word * 2^-32 + 2^-33, rounded.
TK_DEVICE float uniform(uint32_t word) { return __fmaf_rn(float(word), 2.3283064365386963e-10f, 1.1641532182693481e-10f); }

// The same in [0, 1), as torch.rand has it: the upper 24 bits. Less than p with probability p, up to 2^-24.
TK_DEVICE float below_one(uint32_t word) { return float(word >> 8) * 5.9604644775390625e-8f; }

}  // namespace tk
