// Shuffles and barriers of warps, blocks and clusters.
#pragma once

namespace tk {

TK_DEVICE float shuffle_xor(float v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
TK_DEVICE double shuffle_xor(double v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
TK_DEVICE uint32_t shuffle_xor(uint32_t v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }

template <int kWidth>
TK_DEVICE uint32_t shuffle(uint32_t v, int from) { return __shfl_sync(0xffffffffu, v, from, kWidth); }

template <int kWidth>
TK_DEVICE float shuffle(float v, int from) { return __shfl_sync(0xffffffffu, v, from, kWidth); }
template <int kWidth>
TK_DEVICE double shuffle(double v, int from) { return __shfl_sync(0xffffffffu, v, from, kWidth); }

TK_DEVICE int sum_lanes(int v) { return __reduce_add_sync(0xffffffffu, v); }

TK_DEVICE void sync_warp() { __syncwarp(); }
TK_DEVICE void sync_block() { __syncthreads(); }
TK_DEVICE void sync_named(int id, int threads) { tkemu::machine->barrier(id, threads, 0); }

TK_DEVICE int cluster_rank() { return tkemu::self->cluster_rank; }
TK_DEVICE void sync_cluster()
{
    tkemu::machine->cluster_arrive();
    tkemu::machine->cluster_wait();
}

}  // namespace tk
