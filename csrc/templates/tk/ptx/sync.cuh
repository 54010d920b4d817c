// Shuffles and barriers of warps, blocks and clusters.
#pragma once

namespace tk {

// The value of the lane whose number differs in the bits of `mask`. All 32 lanes call it together.
TK_DEVICE float shuffle_xor(float v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
TK_DEVICE double shuffle_xor(double v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
TK_DEVICE uint32_t shuffle_xor(uint32_t v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }

// The value of lane `from` of each group of kWidth lanes. All 32 lanes call it together.
template <int kWidth>
TK_DEVICE uint32_t shuffle(uint32_t v, int from) { return __shfl_sync(0xffffffffu, v, from, kWidth); }

template <int kWidth>
TK_DEVICE float shuffle(float v, int from) { return __shfl_sync(0xffffffffu, v, from, kWidth); }
template <int kWidth>
TK_DEVICE double shuffle(double v, int from) { return __shfl_sync(0xffffffffu, v, from, kWidth); }

// The sum over the warp's lanes. All 32 lanes call it together.
TK_DEVICE int sum_lanes(int v)
{
#if __CUDA_ARCH__ >= 800
    return __reduce_add_sync(0xffffffffu, v);
#else
    for (int o = 16; o > 0; o /= 2) {
        v += __shfl_xor_sync(0xffffffffu, v, o);
    }
    return v;
#endif
}

// All lanes of the warp arrive; their earlier shared and global accesses are ordered before the later ones of each.
TK_DEVICE void sync_warp() { __syncwarp(); }

// All threads of the block arrive; accesses before it are visible to the block after it.
TK_DEVICE void sync_block() { __syncthreads(); }

// The same among `threads` threads (whole warps) that name barrier `id` (1 to 15; 0 is sync_block's).
TK_DEVICE void sync_named(int id, int threads) { asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory"); }

// This block's place in its cluster. 0 where the machine has no clusters.
TK_DEVICE int cluster_rank()
{
#if __CUDA_ARCH__ >= 900
    uint32_t r;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return int(r);
#else
    return 0;
#endif
}

// Every thread of every block in the cluster arrives, then waits for all. Shared memory (the neighbours' too) written
// before it is visible after it. Called by all threads of the cluster; nothing on machines without clusters.
TK_DEVICE void sync_cluster()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.aligned;\n barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// The cluster-wide address of the same place in block `rank`'s shared memory.
TK_DEVICE uint32_t peer_address(const void* p, int rank)
{
    uint32_t a = uint32_t(__cvta_generic_to_shared(p));
#if __CUDA_ARCH__ >= 900
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(a) : "r"(a), "r"(rank));
#endif
    return a;
}

}  // namespace tk
