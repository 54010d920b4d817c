// Matrix products on the tensor cores.
#pragma once

namespace tk {

TK_DEVICE uint32_t tf32_rest(uint32_t v)
{
    // inf - inf is the NaN 0x7fffffff (PTX's only one), and that and 0x1000 a negative number so small that it counts as 0.
    return bits_of(float_of(v) - float_of(v & 0xffffe000u)) + 0x1000u;
}

// ---- fragments and shared memory ------------------------------------------------------------------------------------

// Loads kCount (1, 2 or 4) matrices of 8 rows x 16 bytes from shared memory. Lane 8i + j gives the address of row j of
// matrix i, aligned to 16 bytes; what other lanes give is not used. w[i] is matrix i's word q of row g; kTranspose: its
// elements, of two bytes, at column g of rows 2q and 2q + 1. All lanes of the warp call it; their loads are ordered like
// other loads of shared memory.
template <int kCount, bool kTranspose = false>
TK_DEVICE Words<4 * kCount> ldmatrix(const void* row)
{
    static_assert(kCount == 1 || kCount == 2 || kCount == 4);
    Words<4 * kCount> r;
    const uint32_t a = shared_address(row);
    if constexpr (kCount == 1 && !kTranspose) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r.w[0]) : "r"(a) : "memory");
    } else if constexpr (kCount == 1) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];" : "=r"(r.w[0]) : "r"(a) : "memory");
    } else if constexpr (kCount == 2 && !kTranspose) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                     : "=r"(r.w[0]), "=r"(r.w[1]) : "r"(a) : "memory");
    } else if constexpr (kCount == 2) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                     : "=r"(r.w[0]), "=r"(r.w[1]) : "r"(a) : "memory");
    } else if constexpr (!kTranspose) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r.w[0]), "=r"(r.w[1]), "=r"(r.w[2]), "=r"(r.w[3]) : "r"(a) : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r.w[0]), "=r"(r.w[1]), "=r"(r.w[2]), "=r"(r.w[3]) : "r"(a) : "memory");
    }
    return r;
}

// The opposite of ldmatrix, with the same addresses and words. Other lanes see the rows after sync_warp or a barrier.
template <int kCount, bool kTranspose = false>
TK_DEVICE void stmatrix(void* row, const Words<4 * kCount>& v)
{
    static_assert(kCount == 1 || kCount == 2 || kCount == 4);
#if __CUDA_ARCH__ >= 900
    const uint32_t a = shared_address(row);
    if constexpr (kCount == 1 && !kTranspose) {
        asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" :: "r"(a), "r"(v.w[0]) : "memory");
    } else if constexpr (kCount == 1) {
        asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" :: "r"(a), "r"(v.w[0]) : "memory");
    } else if constexpr (kCount == 2 && !kTranspose) {
        asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};"
                     :: "r"(a), "r"(v.w[0]), "r"(v.w[1]) : "memory");
    } else if constexpr (kCount == 2) {
        asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
                     :: "r"(a), "r"(v.w[0]), "r"(v.w[1]) : "memory");
    } else if constexpr (!kTranspose) {
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                     :: "r"(a), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]), "r"(v.w[3]) : "memory");
    } else {
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                     :: "r"(a), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]), "r"(v.w[3]) : "memory");
    }
#else
    __trap();
#endif
}

// ---- products of a warp ---------------------------------------------------------------------------------------------

// d += a b. TA and TB: both f16, both bf16, both tf32 (sm_80), or each of e4m3 and e5m2 (sm_89). All lanes of the warp call
// it. Products are exact; the machine says little of how it sums.
#define TK_MMA32(shape) \
    asm volatile("mma.sync.aligned." shape " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) \
                 : "r"(a.w[0]), "r"(a.w[1]), "r"(a.w[2]), "r"(a.w[3]), "r"(b.w[0]), "r"(b.w[1]))
template <class TA, class TB = TA>
TK_DEVICE void mma(float (&d)[4], const Words<16>& a, const Words<8>& b)
{
    constexpr int kTypes = product_types<TA, TB>();
    static_assert(kTypes >= 0, "the tensor cores have no such product");
#if __CUDA_ARCH__ >= 800
    if constexpr (kTypes == 0) { TK_MMA32("m16n8k16.row.col.f32.f16.f16.f32"); }
    if constexpr (kTypes == 1) { TK_MMA32("m16n8k16.row.col.f32.bf16.bf16.f32"); }
    if constexpr (kTypes == 2) { TK_MMA32("m16n8k8.row.col.f32.tf32.tf32.f32"); }
#endif
#if __CUDA_ARCH__ >= 890
    if constexpr (kTypes == 3) { TK_MMA32("m16n8k32.row.col.f32.e4m3.e4m3.f32"); }
    if constexpr (kTypes == 4) { TK_MMA32("m16n8k32.row.col.f32.e4m3.e5m2.f32"); }
    if constexpr (kTypes == 5) { TK_MMA32("m16n8k32.row.col.f32.e5m2.e4m3.f32"); }
    if constexpr (kTypes == 6) { TK_MMA32("m16n8k32.row.col.f32.e5m2.e5m2.f32"); }
#endif
    if constexpr (__CUDA_ARCH__ < (kTypes < 3 ? 800 : 890)) {
        __trap();
    }
}
#undef TK_MMA32

// The same over half the k. T: f16 (sm_75), bf16 (sm_80).
#define TK_MMA16(types) \
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32." types ".f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};" \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a.w[0]), "r"(a.w[1]), "r"(b.w[0]))
template <class T>
TK_DEVICE void mma(float (&d)[4], const Words<8>& a, const Words<4>& b)
{
    static_assert(is_two_bytes<T>, "the tensor cores have no such product");
    constexpr bool kHalf = is_same<T, f16>::value;
#if __CUDA_ARCH__ >= 750
    if constexpr (kHalf) { TK_MMA16("f16.f16"); }
#endif
#if __CUDA_ARCH__ >= 800
    if constexpr (!kHalf) { TK_MMA16("bf16.bf16"); }
#endif
    if constexpr (__CUDA_ARCH__ < (kHalf ? 750 : 800)) {
        __trap();
    }
}
#undef TK_MMA16

// The same for f16 with sums of f16: d.w[0] is row g, columns 2q and 2q + 1, d.w[1] those of row g + 8.
TK_DEVICE void mma_f16(Words<8>& d, const Words<16>& a, const Words<8>& b)
{
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, %1};"
                 : "+r"(d.w[0]), "+r"(d.w[1])
                 : "r"(a.w[0]), "r"(a.w[1]), "r"(a.w[2]), "r"(a.w[3]), "r"(b.w[0]), "r"(b.w[1]));
#else
    __trap();
#endif
}

// d += a b, 8 rows x 8 columns, k of 4: a is row g, k q; b is column g, k q; d[0] and d[1] are row g, columns 2q and 2q + 1.
TK_DEVICE void mma(double (&d)[2], double a, double b)
{
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
                 : "+d"(d[0]), "+d"(d[1]) : "d"(a), "d"(b));
#else
    __trap();
#endif
}

// ---- products of a warpgroup (sm_90a) -------------------------------------------------------------------------------

TK_DEVICE uint32_t matrix_address(const void* p) { return shared_address(p); }

// Keeps what the program does to these registers before what follows, and what it does afterwards behind.
TK_DEVICE void hold(float& r) { asm volatile("" : "+f"(r) :: "memory"); }
template <int kBytes>
TK_DEVICE void hold(Words<kBytes>& r)
{
#pragma unroll
    for (int i = 0; i < Words<kBytes>::kCount; ++i) {
        asm volatile("" : "+r"(r.w[i]) :: "memory");
    }
}
template <class T, int kN>
TK_DEVICE void hold(T (&r)[kN])
{
#pragma unroll
    for (int i = 0; i < kN; ++i) {
        hold(r[i]);
    }
}

// Before a warpgroup's first wgmma, and before each one whose accumulators or fragments A were touched by anything but
// wgmma since: name those registers (float[], Words, arrays of those). A loop that issues some has one in each pass, or the
// compiler lets each product wait for the one before (its log says so: C7510, C7520). All threads of the warpgroup call it.
template <class... R>
TK_DEVICE void wgmma_fence(R&... registers)
{
    (hold(registers), ...);
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#else
    __trap();
#endif
}
// Makes a group of the warpgroup's wgmma since the last commit; it may be empty.
TK_DEVICE void wgmma_commit()
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// Waits until at most kPending groups, the latest ones, are not done. Until then neither accumulators nor fragments A may
// be touched, nor shared memory written that is read. Name the accumulators that are used next and the fragments that are
// written next, lest the compiler move that up. Other warps' groups are another matter: before a place they read is written, there is a barrier too.
template <int kPending, class... R>
TK_DEVICE void wgmma_wait(R&... registers)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(kPending) : "memory");
#endif
    (hold(registers), ...);
}

// The text of an instruction for kN columns, written out since asm takes nothing else: the accumulators' names, and the
// accumulators.
#define TK_FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define TK_TEXT_8 "%0, %1, %2, %3"
#define TK_TEXT_16 TK_TEXT_8 ", %4, %5, %6, %7"
#define TK_TEXT_32 TK_TEXT_16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define TK_TEXT_48 TK_TEXT_32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define TK_TEXT_64 TK_TEXT_48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define TK_TEXT_80 TK_TEXT_64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define TK_TEXT_96 TK_TEXT_80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define TK_TEXT_112 TK_TEXT_96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define TK_TEXT_128 TK_TEXT_112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define TK_TEXT_144 TK_TEXT_128 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define TK_TEXT_160 TK_TEXT_144 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define TK_TEXT_176 TK_TEXT_160 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define TK_TEXT_192 TK_TEXT_176 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define TK_TEXT_208 TK_TEXT_192 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define TK_TEXT_224 TK_TEXT_208 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define TK_TEXT_240 TK_TEXT_224 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define TK_TEXT_256 TK_TEXT_240 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define TK_LIST_8 TK_FOUR(0)
#define TK_LIST_16 TK_LIST_8, TK_FOUR(4)
#define TK_LIST_32 TK_LIST_16, TK_FOUR(8), TK_FOUR(12)
#define TK_LIST_48 TK_LIST_32, TK_FOUR(16), TK_FOUR(20)
#define TK_LIST_64 TK_LIST_48, TK_FOUR(24), TK_FOUR(28)
#define TK_LIST_80 TK_LIST_64, TK_FOUR(32), TK_FOUR(36)
#define TK_LIST_96 TK_LIST_80, TK_FOUR(40), TK_FOUR(44)
#define TK_LIST_112 TK_LIST_96, TK_FOUR(48), TK_FOUR(52)
#define TK_LIST_128 TK_LIST_112, TK_FOUR(56), TK_FOUR(60)
#define TK_LIST_144 TK_LIST_128, TK_FOUR(64), TK_FOUR(68)
#define TK_LIST_160 TK_LIST_144, TK_FOUR(72), TK_FOUR(76)
#define TK_LIST_176 TK_LIST_160, TK_FOUR(80), TK_FOUR(84)
#define TK_LIST_192 TK_LIST_176, TK_FOUR(88), TK_FOUR(92)
#define TK_LIST_208 TK_LIST_192, TK_FOUR(96), TK_FOUR(100)
#define TK_LIST_224 TK_LIST_208, TK_FOUR(104), TK_FOUR(108)
#define TK_LIST_240 TK_LIST_224, TK_FOUR(112), TK_FOUR(116)
#define TK_LIST_256 TK_LIST_240, TK_FOUR(120), TK_FOUR(124)
// a and b are descriptors, or a is a fragment; p: whether d is added to. ta, tb: kMajorMN. The numbers are those of the
// operands behind the accumulators.
#define TK_SHARED_16(n, shape, i0, i1, i2, i3, i4) \
    asm volatile("{ .reg .pred p;\n setp.ne.b32 p, %" #i2 ", 0;\n wgmma.mma_async.sync.aligned.m64n" #n shape \
                 " {" TK_TEXT_##n "}, %" #i0 ", %" #i1 ", p, 1, 1, %" #i3 ", %" #i4 "; }" \
                 : TK_LIST_##n : "l"(a), "l"(b), "r"(p), "n"(int(kA)), "n"(int(kB)) : "memory")
#define TK_SHARED(n, shape, i0, i1, i2) \
    asm volatile("{ .reg .pred p;\n setp.ne.b32 p, %" #i2 ", 0;\n wgmma.mma_async.sync.aligned.m64n" #n shape \
                 " {" TK_TEXT_##n "}, %" #i0 ", %" #i1 ", p, 1, 1; }" \
                 : TK_LIST_##n : "l"(a), "l"(b), "r"(p) : "memory")
#define TK_FRAGMENT_16(n, shape, i0, i1, i2, i3, i4, i5, i6) \
    asm volatile("{ .reg .pred p;\n setp.ne.b32 p, %" #i5 ", 0;\n wgmma.mma_async.sync.aligned.m64n" #n shape \
                 " {" TK_TEXT_##n "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4 ", p, 1, 1, %" #i6 "; }" \
                 : TK_LIST_##n \
                 : "r"(a.w[0]), "r"(a.w[1]), "r"(a.w[2]), "r"(a.w[3]), "l"(b), "r"(p), "n"(int(kB)) : "memory")
#define TK_FRAGMENT(n, shape, i0, i1, i2, i3, i4, i5) \
    asm volatile("{ .reg .pred p;\n setp.ne.b32 p, %" #i5 ", 0;\n wgmma.mma_async.sync.aligned.m64n" #n shape \
                 " {" TK_TEXT_##n "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4 ", p, 1, 1; }" \
                 : TK_LIST_##n \
                 : "r"(a.w[0]), "r"(a.w[1]), "r"(a.w[2]), "r"(a.w[3]), "l"(b), "r"(p) : "memory")
#define TK_WGMMA(n, i0, i1, i2, i3, i4, i5, i6) \
    template <class TA, class TB, Major kA, Major kB> \
    TK_DEVICE void wgmma_issue(float (&d)[n / 2], uint64_t a, uint64_t b, int p) \
    { \
        constexpr int kWhich = product_types<TA, TB>(); \
        if constexpr (kWhich == 0) { TK_SHARED_16(n, "k16.f32.f16.f16", i0, i1, i2, i3, i4); } \
        if constexpr (kWhich == 1) { TK_SHARED_16(n, "k16.f32.bf16.bf16", i0, i1, i2, i3, i4); } \
        if constexpr (kWhich == 2) { TK_SHARED(n, "k8.f32.tf32.tf32", i0, i1, i2); } \
        if constexpr (kWhich == 3) { TK_SHARED(n, "k32.f32.e4m3.e4m3", i0, i1, i2); } \
        if constexpr (kWhich == 4) { TK_SHARED(n, "k32.f32.e4m3.e5m2", i0, i1, i2); } \
        if constexpr (kWhich == 5) { TK_SHARED(n, "k32.f32.e5m2.e4m3", i0, i1, i2); } \
        if constexpr (kWhich == 6) { TK_SHARED(n, "k32.f32.e5m2.e5m2", i0, i1, i2); } \
    } \
    template <class TA, class TB, Major kB> \
    TK_DEVICE void wgmma_issue(float (&d)[n / 2], const Words<16>& a, uint64_t b, int p) \
    { \
        constexpr int kWhich = product_types<TA, TB>(); \
        if constexpr (kWhich == 0) { TK_FRAGMENT_16(n, "k16.f32.f16.f16", i0, i1, i2, i3, i4, i5, i6); } \
        if constexpr (kWhich == 1) { TK_FRAGMENT_16(n, "k16.f32.bf16.bf16", i0, i1, i2, i3, i4, i5, i6); } \
        if constexpr (kWhich == 2) { TK_FRAGMENT(n, "k8.f32.tf32.tf32", i0, i1, i2, i3, i4, i5); } \
        if constexpr (kWhich == 3) { TK_FRAGMENT(n, "k32.f32.e4m3.e4m3", i0, i1, i2, i3, i4, i5); } \
        if constexpr (kWhich == 4) { TK_FRAGMENT(n, "k32.f32.e4m3.e5m2", i0, i1, i2, i3, i4, i5); } \
        if constexpr (kWhich == 5) { TK_FRAGMENT(n, "k32.f32.e5m2.e4m3", i0, i1, i2, i3, i4, i5); } \
        if constexpr (kWhich == 6) { TK_FRAGMENT(n, "k32.f32.e5m2.e5m2", i0, i1, i2, i3, i4, i5); } \
    }
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
TK_WGMMA(8, 4, 5, 6, 7, 8, 9, 10)
TK_WGMMA(16, 8, 9, 10, 11, 12, 13, 14)
TK_WGMMA(32, 16, 17, 18, 19, 20, 21, 22)
TK_WGMMA(48, 24, 25, 26, 27, 28, 29, 30)
TK_WGMMA(64, 32, 33, 34, 35, 36, 37, 38)
TK_WGMMA(80, 40, 41, 42, 43, 44, 45, 46)
TK_WGMMA(96, 48, 49, 50, 51, 52, 53, 54)
TK_WGMMA(112, 56, 57, 58, 59, 60, 61, 62)
TK_WGMMA(128, 64, 65, 66, 67, 68, 69, 70)
TK_WGMMA(144, 72, 73, 74, 75, 76, 77, 78)
TK_WGMMA(160, 80, 81, 82, 83, 84, 85, 86)
TK_WGMMA(176, 88, 89, 90, 91, 92, 93, 94)
TK_WGMMA(192, 96, 97, 98, 99, 100, 101, 102)
TK_WGMMA(208, 104, 105, 106, 107, 108, 109, 110)
TK_WGMMA(224, 112, 113, 114, 115, 116, 117, 118)
TK_WGMMA(240, 120, 121, 122, 123, 124, 125, 126)
TK_WGMMA(256, 128, 129, 130, 131, 132, 133, 134)
#endif
#undef TK_WGMMA
#undef TK_SHARED_16
#undef TK_SHARED
#undef TK_FRAGMENT_16
#undef TK_FRAGMENT
#undef TK_FOUR

// Starts d = a b, or d += a b where `accumulate`: 64 rows x kN columns over 32 bytes of k. Types as in mma (f16, bf16, tf32,
// e4m3, e5m2). The threads of four warps, the first one's number a multiple of 4, call it with the same descriptors and the
// same `accumulate`. Warp w of the four has rows 16w to 16w + 15: d[4j] to d[4j + 3] are its fragment C of columns 8j to
// 8j + 7, and a, where it is not a descriptor, its fragment A. Ordinary writes to what is read need fence_async by their
// thread, and a barrier. Products of one width on the same accumulators follow each other without a fence.
template <int kN, class TA, class TB = TA, Major kA = kMajorK, Major kB = kMajorK>
TK_DEVICE void wgmma(float (&d)[kN / 2], uint64_t a, uint64_t b, bool accumulate)
{
    static_assert(is_wgmma<kN, TA, TB, kA, kB>());
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    wgmma_issue<TA, TB, kA, kB>(d, a, b, int(accumulate));
#else
    __trap();
#endif
}
template <int kN, class TA, class TB = TA, Major kB = kMajorK>
TK_DEVICE void wgmma(float (&d)[kN / 2], const Words<16>& a, uint64_t b, bool accumulate)
{
    static_assert(is_wgmma<kN, TA, TB, kMajorK, kB>());
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    wgmma_issue<TA, TB, kB>(d, a, b, int(accumulate));
#else
    __trap();
#endif
}

// ---- registers of a warpgroup (sm_90a and later) --------------------------------------------------------------------

// From here on each thread of the warpgroup has kCount registers: no more than it had, or (take) no fewer, for which it
// waits until others of the block have given them. kCount: a multiple of 8 from 24 to 256. All threads of the warpgroup
// call it. The kernel has launch bounds of threads and blocks; else the compiler leaves it out.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM103_ALL) || \
    defined(__CUDA_ARCH_FEAT_SM120_ALL)
#define TK_SETMAXNREG(how) asm volatile("setmaxnreg." how ".sync.aligned.u32 %0;" :: "n"(kCount))
#else
#define TK_SETMAXNREG(how) __trap()
#endif
template <int kCount>
TK_DEVICE void give_registers()
{
    static_assert(kCount % 8 == 0 && kCount >= 24 && kCount <= 256);
    TK_SETMAXNREG("dec");
}
template <int kCount>
TK_DEVICE void take_registers()
{
    static_assert(kCount % 8 == 0 && kCount >= 24 && kCount <= 256);
    TK_SETMAXNREG("inc");
}
#undef TK_SETMAXNREG

}  // namespace tk
