// The copy engine's instructions.
#pragma once

namespace tk {

TK_DEVICE void prefetch(const TensorMap& map)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("prefetch.tensormap [%0];" :: "l"(&map) : "memory");
#endif
}

// An instruction for each number of dimensions: TK_OP(text of the dimension, text of the coordinates). Operands 0 to 4 are
// the instruction's own, 5 to 9 the coordinates, as far as there are any.
#define TK_EACH_RANK \
    if constexpr (kDims == 1) { \
        TK_OP("1d", "{%5}"); \
    } else if constexpr (kDims == 2) { \
        TK_OP("2d", "{%5, %6}"); \
    } else if constexpr (kDims == 3) { \
        TK_OP("3d", "{%5, %6, %7}"); \
    } else if constexpr (kDims == 4) { \
        TK_OP("4d", "{%5, %6, %7, %8}"); \
    } else { \
        static_assert(kDims == 5); \
        TK_OP("5d", "{%5, %6, %7, %8, %9}"); \
    }

namespace engine {

template <int kDims>
struct Coordinates {
    int c[5];
    TK_DEVICE explicit Coordinates(const int (&at)[kDims])
    {
#pragma unroll
        for (int i = 0; i < 5; ++i) {
            c[i] = i < kDims ? at[i] : 0;
        }
    }
};

template <L2Hint kHint>
TK_DEVICE uint64_t cache_policy()
{
    uint64_t policy = 0;
#if __CUDA_ARCH__ >= 900
    if constexpr (kHint == kL2EvictFirst) {
        asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    } else if constexpr (kHint == kL2EvictLast) {
        asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    }
#endif
    return policy;
}

}  // namespace engine

template <int kDims, L2Hint kHint>
TK_DEVICE void tensor_load(void* to, const TensorMap& map, const int (&at)[kDims], Barrier& full)
{
#if __CUDA_ARCH__ >= 900
    const engine::Coordinates<kDims> x(at);
    const uint64_t policy = engine::cache_policy<kHint>();
#define TK_LOAD(dims, coordinates, kinds, tail) \
    asm volatile("cp.async.bulk.tensor." dims ".shared::cluster.global.tile.mbarrier::complete_tx::bytes" kinds \
                 " [%0], [%1, " coordinates "], [%2]" tail ";" \
                 :: "r"(shared_address(to)), "l"(&map), "r"(shared_address(&full)), "h"(mask), "l"(policy), \
                    "r"(x.c[0]), "r"(x.c[1]), "r"(x.c[2]), "r"(x.c[3]), "r"(x.c[4]) : "memory")
    const uint16_t mask = 0;
    if constexpr (kHint == kL2Default) {
#define TK_OP(dims, coordinates) TK_LOAD(dims, coordinates, "", "")
        TK_EACH_RANK
#undef TK_OP
    } else {
#define TK_OP(dims, coordinates) TK_LOAD(dims, coordinates, ".L2::cache_hint", ", %4")
        TK_EACH_RANK
#undef TK_OP
    }
#else
    __trap();
#endif
}

template <int kDims, L2Hint kHint>
TK_DEVICE void tensor_load_multicast(void* to, const TensorMap& map, const int (&at)[kDims], Barrier& full,
                                     uint32_t blocks)
{
#if __CUDA_ARCH__ >= 900
    const engine::Coordinates<kDims> x(at);
    const uint64_t policy = engine::cache_policy<kHint>();
    const uint16_t mask = uint16_t(blocks);
    if constexpr (kHint == kL2Default) {
#define TK_OP(dims, coordinates) TK_LOAD(dims, coordinates, ".multicast::cluster", ", %3")
        TK_EACH_RANK
#undef TK_OP
    } else {
#define TK_OP(dims, coordinates) TK_LOAD(dims, coordinates, ".multicast::cluster.L2::cache_hint", ", %3, %4")
        TK_EACH_RANK
#undef TK_OP
    }
#undef TK_LOAD
#else
    __trap();
#endif
}

// Operands 2 to 4 are none of a store's.
#define TK_STORE(name, dims, kinds, coordinates) \
    asm volatile(name ".async.bulk.tensor." dims ".global.shared::cta" kinds ".tile.bulk_group [%1, " coordinates "], [%0];" \
                 :: "r"(shared_address(from)), "l"(&map), "n"(0), "n"(0), "n"(0), \
                    "r"(x.c[0]), "r"(x.c[1]), "r"(x.c[2]), "r"(x.c[3]), "r"(x.c[4]) : "memory")

template <int kDims>
TK_DEVICE void tensor_store(const TensorMap& map, const int (&at)[kDims], const void* from)
{
#if __CUDA_ARCH__ >= 900
    const engine::Coordinates<kDims> x(at);
#define TK_OP(dims, coordinates) TK_STORE("cp", dims, "", coordinates)
    TK_EACH_RANK
#undef TK_OP
#else
    __trap();
#endif
}

template <int kDims>
TK_DEVICE void tensor_reduce_add(const TensorMap& map, const int (&at)[kDims], const void* from)
{
#if __CUDA_ARCH__ >= 900
    const engine::Coordinates<kDims> x(at);
#define TK_OP(dims, coordinates) TK_STORE("cp.reduce", dims, ".add", coordinates)
    TK_EACH_RANK
#undef TK_OP
#else
    __trap();
#endif
}

#undef TK_STORE
#undef TK_EACH_RANK

TK_DEVICE void bulk_store(void* to, const void* from, int bytes)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 :: "l"(to), "r"(shared_address(from)), "r"(bytes) : "memory");
#else
    __trap();
#endif
}

template <class T>
TK_DEVICE void bulk_reduce_add(T* to, const void* from, int bytes)
{
#if __CUDA_ARCH__ >= 900
#define TK_ADD(type) \
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add." type " [%0], [%1], %2;" \
                 :: "l"(to), "r"(shared_address(from)), "r"(bytes) : "memory")
    if constexpr (is_same<T, float>::value) {
        TK_ADD("f32");
    } else if constexpr (is_same<T, f16>::value) {
        TK_ADD("noftz.f16");
    } else if constexpr (is_same<T, bf16>::value) {
        TK_ADD("noftz.bf16");
    } else if constexpr (is_same<T, int32_t>::value) {
        TK_ADD("s32");
    } else if constexpr (is_same<T, uint32_t>::value) {
        TK_ADD("u32");
    } else {
        static_assert(is_same<T, uint64_t>::value);
        TK_ADD("u64");
    }
#undef TK_ADD
#else
    __trap();
#endif
}

TK_DEVICE void bulk_commit()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#else
    __trap();
#endif
}

template <int kPending>
TK_DEVICE void bulk_wait()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.wait_group %0;" :: "n"(kPending) : "memory");
#else
    __trap();
#endif
}

template <int kPending>
TK_DEVICE void bulk_wait_read()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(kPending) : "memory");
#else
    __trap();
#endif
}

// One instruction for 4, 8 or 16 bytes; `type` is that of a word.
#if __CUDA_ARCH__ >= 900
#define TK_REDUCE(type) \
    if constexpr (kBytes == 4) { \
        asm volatile("red.relaxed.gpu.global.add." type " [%0], %1;" :: "l"(p), "r"(v.w[0]) : "memory"); \
    } else if constexpr (kBytes == 8) { \
        asm volatile("red.relaxed.gpu.global.add.v2." type " [%0], {%1, %2};" \
                     :: "l"(p), "r"(v.w[0]), "r"(v.w[1]) : "memory"); \
    } else { \
        asm volatile("red.relaxed.gpu.global.add.v4." type " [%0], {%1, %2, %3, %4};" \
                     :: "l"(p), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]), "r"(v.w[3]) : "memory"); \
    }
#else
#define TK_REDUCE(type) \
    for (int i = 0; i < kBytes / 4; ++i) { \
        asm volatile("red.global.add." type " [%0], %1;" \
                     :: "l"(reinterpret_cast<uint32_t*>(p) + i), "r"(v.w[i]) : "memory"); \
    }
#endif

template <class T, int kBytes>
TK_DEVICE void reduce_add(T* p, const Words<kBytes>& v)
{
    static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
    if constexpr (is_same<T, float>::value) {
        TK_REDUCE("f32")
    } else if constexpr (is_same<T, f16>::value) {
        TK_REDUCE("noftz.f16x2")
    } else {
        static_assert(is_same<T, bf16>::value);
#if __CUDA_ARCH__ >= 900
        TK_REDUCE("noftz.bf16x2")
#else
        __trap();
#endif
    }
}

#undef TK_REDUCE

TK_DEVICE float fetch_add(float* p, float v) { return atomicAdd(p, v); }

TK_DEVICE bool elect_one()
{
#if __CUDA_ARCH__ >= 900
    uint32_t elected;
    asm volatile(
        "{ .reg .pred p;\n"
        "elect.sync _|p, 0xffffffff;\n"
        "selp.u32 %0, 1, 0, p; }"
        : "=r"(elected) :: "memory");
    return elected != 0;
#else
    return lane() == 0;
#endif
}

TK_DEVICE void wait_previous_grids()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

TK_DEVICE void launch_next_grid()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace tk
