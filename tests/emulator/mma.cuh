// Kernels for the tests of tk/mma.cuh: matrices come in from global memory, one primitive works on them, all that it gives
// goes out. Matrices are words of 32 bits; k is their last dimension unless something else is said. One block.
#include "tk/tk.cuh"
#include "tk/mma.cuh"

namespace probe {

// ---- rows of 16 bytes -----------------------------------------------------------------------------------------------

// The shared memory's row of a matrix's row: one apart, and in another order than the matrix has them.
TK_DEVICE int place_of(int row) { return (row * 5 + 3) % 32 * 5; }

template <int kCount, bool kTranspose>
__global__ void load_matrix(const uint32_t* in /* [32, 4] */, uint32_t* out /* [32, kCount] */)
{
    uint32_t* s = reinterpret_cast<uint32_t*>(tk::shared_memory(32 * 5 * 16));
    const int t = int(threadIdx.x);
    for (int i = 0; i < 4; ++i) {
        s[place_of(t) * 4 + i] = in[t * 4 + i];
    }
    tk::sync_block();
    const auto r = tk::ldmatrix<kCount, kTranspose>(s + place_of(t % (8 * kCount)) * 4);
    for (int i = 0; i < kCount; ++i) {
        out[t * kCount + i] = r.w[i];
    }
}

template <int kCount, bool kTranspose>
__global__ void store_matrix(const uint32_t* in /* [32, kCount] */, uint32_t* out /* [8 * kCount, 4] */)
{
    uint32_t* s = reinterpret_cast<uint32_t*>(tk::shared_memory(32 * 5 * 16));
    const int t = int(threadIdx.x);
    tk::Words<4 * kCount> v;
    for (int i = 0; i < kCount; ++i) {
        v.w[i] = in[t * kCount + i];
    }
    tk::stmatrix<kCount, kTranspose>(s + place_of(t % (8 * kCount)) * 4, v);
    tk::sync_block();
    for (int i = 0; t < 8 * kCount && i < 4; ++i) {
        out[t * 4 + i] = s[place_of(t) * 4 + i];
    }
}

// ---- products of a warp ---------------------------------------------------------------------------------------------

// Fragments of matrices in global memory, kWords words of k.
template <int kWords>
TK_DEVICE void load_fragments(tk::Words<2 * kWords>& fa, tk::Words<kWords>& fb, const uint32_t* a, const uint32_t* b)
{
    const int g = tk::lane() / 4, q = tk::lane() % 4;
    for (int i = 0; i < kWords / 4; ++i) {
        fa.w[2 * i] = a[g * kWords + 4 * i + q];
        fa.w[2 * i + 1] = a[(g + 8) * kWords + 4 * i + q];
        fb.w[i] = b[g * kWords + 4 * i + q];
    }
}

template <class TA, class TB, int kWords>
__global__ void mma(const uint32_t* a /* [16, kWords] */, const uint32_t* b /* [8, kWords] */, float* c /* [16, 8] */)
{
    const int g = tk::lane() / 4, q = tk::lane() % 4;
    tk::Words<2 * kWords> fa;
    tk::Words<kWords> fb;
    load_fragments<kWords>(fa, fb, a, b);
    float d[4];
    for (int i = 0; i < 4; ++i) {
        d[i] = c[(g + i / 2 * 8) * 8 + 2 * q + i % 2];
    }
    if constexpr (kWords == 8) {
        tk::mma<TA, TB>(d, fa, fb);
    } else {
        tk::mma<TA>(d, fa, fb);
    }
    for (int i = 0; i < 4; ++i) {
        c[(g + i / 2 * 8) * 8 + 2 * q + i % 2] = d[i];
    }
}

template <class T>
__global__ void mma_f16(const uint32_t* a /* [16, 8] */, const uint32_t* b /* [8, 8] */, uint32_t* c /* [16, 4] */)
{
    const int g = tk::lane() / 4, q = tk::lane() % 4;
    tk::Words<16> fa;
    tk::Words<8> fb;
    load_fragments<8>(fa, fb, a, b);
    tk::Words<8> d = {{c[g * 4 + q], c[(g + 8) * 4 + q]}};
    static_assert(tk::is_same<T, tk::f16>::value);
    tk::mma_f16(d, fa, fb);
    c[g * 4 + q] = d.w[0];
    c[(g + 8) * 4 + q] = d.w[1];
}

template <class T>
__global__ void mma_f64(const T* a /* [8, 4] */, const T* b /* [8, 4] */, T* c /* [8, 8] */)
{
    const int g = tk::lane() / 4, q = tk::lane() % 4;
    T d[2] = {c[g * 8 + 2 * q], c[g * 8 + 2 * q + 1]};
    tk::mma(d, a[g * 4 + q], b[g * 4 + q]);
    c[g * 8 + 2 * q] = d[0];
    c[g * 8 + 2 * q + 1] = d[1];
}

template <class T>
__global__ void rest(T* v /* [32] */)
{
    v[tk::lane()] = tk::tf32_rest(v[tk::lane()]);
}

// ---- products of a warpgroup ----------------------------------------------------------------------------------------

// An operand of kRows (of m or n) x kSteps * 32 bytes of k in shared memory, as wgmma wants it: kStart bytes behind an
// address that 1024 divides.
template <int kRows, int kSteps, tk::Major kMajor, tk::Swizzle kSwizzle, int kStart = 0>
struct Tile {
    static constexpr int kWidth = tk::row_bytes(kSwizzle), kAtom = 8 * kWidth;
    static constexpr int kPieces = kRows * kSteps * 2;  // of 16 bytes
    static constexpr int kElements = kSteps * 16;       // kMajorMN: along k
    // Bytes from one panel, as wide as an atom, to the next one; panels follow each other along what is contiguous.
    static constexpr int kPanel = (kMajor == tk::kMajorK ? kRows : kElements) * kWidth;
    static constexpr int kPanels = ((kMajor == tk::kMajorK ? kSteps * 32 : kRows * 2) + kWidth - 1) / kWidth;
    static constexpr int kBytes = (kPanels * kPanel + kStart + 1023) / 1024 * 1024;

    char* start;  // kStart behind

    TK_DEVICE explicit Tile(char* at) : start(at + kStart) {}

    // `from`: the matrix in global memory, [kRows, k] or, kMajorMN, [k, kRows].
    TK_DEVICE void fill(const uint32_t* from)
    {
        constexpr int kLine = kMajor == tk::kMajorK ? 2 * kSteps : kRows / 8;  // pieces side by side
        for (int i = int(threadIdx.x); i < kPieces; i += int(blockDim.x)) {
            const int line = i / kLine, at = i % kLine * 16;
            const uint32_t to = tk::swizzled(uint32_t(at / kWidth * kPanel + line * kWidth + at % kWidth), kSwizzle);
            for (int j = 0; j < 4; ++j) {
                reinterpret_cast<uint32_t*>(start + to)[j] = from[i * 4 + j];
            }
        }
    }

    TK_DEVICE uint64_t described(int leading, int stride) const
    {
        return tk::matrix_descriptor(start, leading, stride, kSwizzle, kStart >> 7);
    }

    // Of k's piece `step`.
    TK_DEVICE uint64_t descriptor(int step) const
    {
        if constexpr (kMajor == tk::kMajorMN) {
            // 8 elements of k are an atom; kSwizzleNone: `leading` and `stride` change places.
            constexpr bool kPlain = kSwizzle == tk::kSwizzleNone;
            return tk::advanced(described(kPlain ? kAtom : kPanel, kPlain ? kPanel : kAtom), step * 2 * kAtom);
        } else if constexpr (kSwizzle == tk::kSwizzleNone) {
            return tk::advanced(described(kPanel, kAtom), step * 2 * kPanel);
        } else {
            const int at = step * 32;
            return tk::advanced(described(16, kAtom), at / kWidth * kPanel + at % kWidth);
        }
    }
};

// c = a b, or c += a b where `add`; kFragments: A comes from registers. One warpgroup.
template <class TA, class TB, int kN, int kSteps, int kMajorA, int kMajorB, int kSwizzleA, int kSwizzleB, bool kFragments,
          int kStart>
__global__ void __launch_bounds__(128)
wgmma(const uint32_t* a /* [64, k] or [k, 64] */, const uint32_t* b /* [kN, k] or [k, kN] */, float* c /* [64, kN] */,
      int add)
{
    using TileA = Tile<64, kSteps, tk::Major(kMajorA), tk::Swizzle(kSwizzleA), kStart>;
    using TileB = Tile<kN, kSteps, tk::Major(kMajorB), tk::Swizzle(kSwizzleB), kStart>;
    char* s = tk::shared_memory(TileA::kBytes + TileB::kBytes);
    TileA tile_a{s};
    TileB tile_b{s + TileA::kBytes};
    const int g = tk::lane() / 4, q = tk::lane() % 4, row = int(threadIdx.x) / 32 * 16 + g;
    tile_a.fill(a);
    tile_b.fill(b);
    tk::fence_async();
    tk::sync_block();

    float d[kN / 2];
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) {
        d[i] = c[(row + i / 2 % 2 * 8) * kN + i / 4 * 8 + 2 * q + i % 2];
    }
    tk::Words<16> fragments[kSteps] = {};
    if constexpr (kFragments) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                fragments[step].w[i] = a[(row + i % 2 * 8) * kSteps * 8 + step * 8 + i / 2 * 4 + q];
            }
        }
    }
    tk::wgmma_fence(d, fragments);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        if constexpr (kFragments) {
            tk::wgmma<kN, TA, TB, tk::Major(kMajorB)>(d, fragments[step], tile_b.descriptor(step), add || step > 0);
        } else {
            tk::wgmma<kN, TA, TB, tk::Major(kMajorA), tk::Major(kMajorB)>(d, tile_a.descriptor(step),
                                                                          tile_b.descriptor(step), add || step > 0);
        }
    }
    tk::wgmma_commit();
    tk::wgmma_wait<0>(d);
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) {
        c[(row + i / 2 % 2 * 8) * kN + i / 4 * 8 + 2 * q + i % 2] = d[i];
    }
}

// Two accumulators, two groups: the first one's result is there while the second one is under way. Then both add to one.
template <int kN>
__global__ void __launch_bounds__(128, 1)
groups(const uint32_t* a /* [64, 16 f16] */, const uint32_t* b /* [2, kN, 16 f16] */, float* c /* [3, 64, kN] */)
{
    using TileA = Tile<64, 1, tk::kMajorK, tk::kSwizzle32>;
    using TileB = Tile<kN, 1, tk::kMajorK, tk::kSwizzle32>;
    char* s = tk::shared_memory(TileA::kBytes + 2 * TileB::kBytes);
    TileA tile_a{s};
    TileB first{s + TileA::kBytes}, second{s + TileA::kBytes + TileB::kBytes};
    tk::give_registers<64>();
    tile_a.fill(a);
    first.fill(b);
    second.fill(b + kN * 8);
    tk::fence_async();
    tk::sync_block();
    float d[2][kN / 2] = {};
    tk::wgmma_fence(d[0], d[1]);
    tk::wgmma<kN, tk::f16>(d[0], tile_a.descriptor(0), first.descriptor(0), false);
    tk::wgmma_commit();
    tk::wgmma<kN, tk::f16>(d[1], tile_a.descriptor(0), second.descriptor(0), false);
    tk::wgmma_commit();
    const int row = int(threadIdx.x) / 32 * 16 + tk::lane() / 4, column = 2 * (tk::lane() % 4);
    const auto write = [&](int which, const float (&v)[kN / 2]) {
#pragma unroll
        for (int i = 0; i < kN / 2; ++i) {
            c[which * 64 * kN + (row + i / 2 % 2 * 8) * kN + i / 4 * 8 + column + i % 2] = v[i];
        }
    };
    tk::wgmma_wait<1>(d[0]);
    write(0, d[0]);
    tk::wgmma_wait<0>(d[1]);
    write(1, d[1]);
    tk::wgmma_fence(d[0]);
    tk::wgmma<kN, tk::f16>(d[0], tile_a.descriptor(0), second.descriptor(0), true);
    tk::wgmma_commit();
    tk::wgmma<kN, tk::f16>(d[0], tile_a.descriptor(0), first.descriptor(0), true);
    tk::wgmma_commit();
    tk::wgmma_wait<0>(d[0]);
    write(2, d[0]);
}

// c = a b over kTiles pieces of k of 128 bytes, which one warp copies and a warpgroup multiplies, kStages of them on the
// way. The pieces lie in global memory as they are to lie in shared memory. kPending: groups under way when a place is given
// back; kEarly: a fault, the place of the group that is under way is given back instead. 160 threads.
template <int kN, int kTiles, int kStages, int kPending, bool kEarly>
__global__ void __launch_bounds__(160, 1)
pipeline(const char* a /* [kTiles, 64 * 128] */, const char* b /* [kTiles, kN * 128] */, float* c /* [64, kN] */)
{
    using TileA = Tile<64, 4, tk::kMajorK, tk::kSwizzle128>;
    using TileB = Tile<kN, 4, tk::kMajorK, tk::kSwizzle128>;
    struct Layout {
        char a[kStages][TileA::kBytes], b[kStages][TileB::kBytes];
        tk::Barrier full[kStages], empty[kStages];
    };
    Layout& s = tk::shared<Layout>();
    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; ++i) {
            tk::init(s.full[i], 1);
            tk::init(s.empty[i], 128);
        }
        tk::fence_barrier_init();
    }
    tk::sync_block();

    if (threadIdx.x >= 128) {
        for (int i = 0; i < kTiles && threadIdx.x == 128; ++i) {
            const int stage = i % kStages;
            tk::wait(s.empty[stage], i / kStages % 2 ^ 1);
            tk::arrive_expect(s.full[stage], TileA::kBytes + TileB::kBytes);
            tk::bulk_load(s.a[stage], a + i * TileA::kBytes, TileA::kBytes, s.full[stage]);
            tk::bulk_load(s.b[stage], b + i * TileB::kBytes, TileB::kBytes, s.full[stage]);
        }
        return;
    }
    float d[kN / 2];
#pragma unroll 1
    for (int i = 0; i < kTiles; ++i) {
        const TileA tile_a{s.a[i % kStages]};
        const TileB tile_b{s.b[i % kStages]};
        tk::wait(s.full[i % kStages], i / kStages % 2);
        tk::wgmma_fence(d);
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            tk::wgmma<kN, tk::bf16>(d, tile_a.descriptor(step), tile_b.descriptor(step), i + step > 0);
        }
        tk::wgmma_commit();
        tk::wgmma_wait<kPending>();
        const int done = kEarly ? i : i - kPending;
        if (done >= 0) {
            tk::arrive_expect(s.empty[done % kStages], 0);
        }
    }
    tk::wgmma_wait<0>(d);
    const int row = int(threadIdx.x) / 32 * 16 + tk::lane() / 4, column = 2 * (tk::lane() % 4);
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) {
        c[(row + i / 2 % 2 * 8) * kN + i / 4 * 8 + column + i % 2] = d[i];
    }
}

// ---- faults: for the emulator alone ---------------------------------------------------------------------------------

enum Fault {
    kNone, kNoFence, kTouchedAfterFence, kTouchedInFlight, kEarlyRead, kNoAsyncFence, kNoBarrier, kOverwritten, kOutside,
    kStrayBits, kLanesDiffer, kMisaligned, kWrongSwizzle, kWrongStride, kNotNamed,
};

template <int kFault>
__global__ void fault(const uint32_t* a /* [64, 16 f16] */, const uint32_t* b /* [32, 16 f16] */, float* c /* [64, 32] */)
{
    using TileA = Tile<64, 1, tk::kMajorK, tk::kSwizzle32>;
    using TileB = Tile<32, 1, tk::kMajorK, tk::kSwizzle32>;
    char* s = tk::shared_memory(TileA::kBytes + TileB::kBytes);
    TileA tile_a{s};
    TileB tile_b{s + TileA::kBytes};
    tile_a.fill(a);
    tile_b.fill(b);
    if constexpr (kFault != kNoAsyncFence) {
        tk::fence_async();
    }
    if constexpr (kFault != kNoBarrier) {
        tk::sync_block();
    }
    float d[16] = {};
    if constexpr (kFault != kNoFence) {
        tk::wgmma_fence(d);
    }
    if constexpr (kFault == kTouchedAfterFence) {
        d[3] += 1.0f;
    }
    uint64_t db = tile_b.descriptor(0);
    if constexpr (kFault == kOutside) {
        db = tk::advanced(db, 1 << 16);
    } else if constexpr (kFault == kStrayBits) {
        db |= 1ull << 46;
    } else if constexpr (kFault == kLanesDiffer) {
        db += tk::lane() == 7;
    } else if constexpr (kFault == kMisaligned) {
        db = tk::matrix_descriptor(tile_b.start + 8, 16, 256, tk::kSwizzle32);
    } else if constexpr (kFault == kWrongSwizzle) {
        db = tk::matrix_descriptor(tile_b.start, 16, 256, tk::kSwizzleNone);
    } else if constexpr (kFault == kWrongStride) {
        db = tk::matrix_descriptor(tile_b.start, 16, 128, tk::kSwizzle32);
    }
    tk::wgmma<32, tk::f16>(d, tile_a.descriptor(0), db, false);
    tk::wgmma_commit();
    if constexpr (kFault == kTouchedInFlight) {
        d[3] = 1.0f;
    } else if constexpr (kFault == kOverwritten) {
        tile_b.fill(b);
    }
    if constexpr (kFault == kNotNamed) {
        tk::wgmma_wait<0>();
    } else if constexpr (kFault != kEarlyRead) {
        tk::wgmma_wait<0>(d);
    }
    const int row = int(threadIdx.x) / 32 * 16 + tk::lane() / 4, column = 2 * (tk::lane() % 4);
    for (int i = 0; i < 16; ++i) {
        c[(row + i / 2 % 2 * 8) * 32 + i / 4 * 8 + column + i % 2] = d[i];
    }
    tk::wgmma_wait<0>();
}

enum FragmentFault { kNoFault, kVariablesOfALoop, kWrittenInFlight, kWrittenAfterAnotherGroup };

// c = a b: two products on the same accumulators, of which the second adds nothing. kVariablesOfALoop: no fault, their
// fragments may share a place.
template <int kFault>
__global__ void fragments(const uint32_t* a /* [64, 16 f16] */, const uint32_t* b /* [32, 16 f16] */, float* c /* [64, 32] */)
{
    using TileB = Tile<32, 1, tk::kMajorK, tk::kSwizzle32>;
    TileB tile_b{tk::shared_memory(TileB::kBytes)};
    const int row = int(threadIdx.x) / 32 * 16 + tk::lane() / 4, q = tk::lane() % 4;
    tile_b.fill(b);
    tk::fence_async();
    tk::sync_block();
    float d[16];
    tk::Words<16> r_a[2] = {};
    for (int i = 0; i < 4; ++i) {
        r_a[0].w[i] = a[(row + i % 2 * 8) * 8 + i / 2 * 4 + q];
    }
    tk::wgmma_fence(d, r_a);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if constexpr (kFault == kVariablesOfALoop) {
            tk::Words<16> one = r_a[i];
            tk::wgmma_fence(d, one);
            tk::wgmma<32, tk::f16>(d, one, tile_b.descriptor(0), i > 0);
        } else {
            tk::wgmma<32, tk::f16>(d, r_a[i], tile_b.descriptor(0), i > 0);
        }
        tk::wgmma_commit();
    }
    if constexpr (kFault == kWrittenInFlight) {
        r_a[0].w[2] += 1;
    }
    tk::wgmma_wait<1>(r_a);
    r_a[kFault == kWrittenAfterAnotherGroup].w[2] += 1;
    tk::wgmma_wait<0>(d, r_a);
    for (int i = 0; i < 16; ++i) {
        c[(row + i / 2 % 2 * 8) * 32 + i / 4 * 8 + 2 * q + i % 2] = d[i];
    }
}

}  // namespace probe
