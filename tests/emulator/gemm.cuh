// A complete GEMM of the kind that large ones are made of: C = A B^T, a tile of BLOCK_M x BLOCK_N a block. One warp fetches
// through tensor maps into a ring, two warpgroups multiply from shared memory and store through a tensor map.
//
// A is (M, K), B is (N, K), C is (M, N), all bf16 with the last dimension contiguous; sizes are multiples of the tile's.
// Launch: (N / BLOCK_N, M / BLOCK_M) blocks of 384 threads, sizeof(Tiles) + 1024 bytes of shared memory.
#include "tk/tk.cuh"
#include "tk/mma.cuh"
#include "tk/tensor.cuh"

namespace gemm {

constexpr int BLOCK_M = 128, BLOCK_N = 128, BLOCK_K = 64;
constexpr int kThreads = 384;

template <int kStages>
struct Tiles {
    alignas(1024) tk::bf16 a[kStages][BLOCK_M][BLOCK_K];  // swizzled, 128 bytes a row
    alignas(1024) tk::bf16 b[kStages][BLOCK_N][BLOCK_K];
    alignas(1024) tk::bf16 c[2][BLOCK_M / 2][BLOCK_N];
    tk::Barrier full[kStages], empty[kStages];
};

template <int kStages>
__global__ void __launch_bounds__(kThreads, 1)
warp_specialized(tk::bf16*, const __grid_constant__ tk::TensorMap a_map, const __grid_constant__ tk::TensorMap b_map,
                 const __grid_constant__ tk::TensorMap c_map, int k_steps)
{
    // Swizzled tiles begin at multiples of 1024 bytes.
    char* memory = tk::shared_memory(int(sizeof(Tiles<kStages>)) + 1024);
    auto& s = *reinterpret_cast<Tiles<kStages>*>((reinterpret_cast<uintptr_t>(memory) + 1023) & ~uintptr_t(1023));
    const int group = int(threadIdx.x) / 128;
    const int row = int(blockIdx.y) * BLOCK_M, col = int(blockIdx.x) * BLOCK_N;

    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; ++i) {
            tk::init(s.full[i], 1);
            tk::init(s.empty[i], 8);
        }
        tk::fence_barrier_init();
    }
    tk::sync_block();  // the barriers are initialized

    if (group == 0) {
        tk::give_registers<40>();
        if (threadIdx.x == 0) {
            for (int i = 0; i < k_steps; ++i) {
                const int stage = i % kStages, phase = i / kStages % 2;
                tk::wait(s.empty[stage], phase ^ 1);  // all warps are done with what lies there
                tk::arrive_expect(s.full[stage], int(sizeof s.a[0] + sizeof s.b[0]));
                tk::tensor_load(s.a[stage], a_map, {i * BLOCK_K, row}, s.full[stage]);
                tk::tensor_load(s.b[stage], b_map, {i * BLOCK_K, col}, s.full[stage]);
            }
        }
        return;
    }
    tk::take_registers<232>();
    const int half = group - 1, thread = int(threadIdx.x) % 128;
    float acc[BLOCK_N / 2] = {};
    for (int i = 0; i < k_steps; ++i) {
        const int stage = i % kStages, phase = i / kStages % 2;
        tk::wait(s.full[stage], phase);
        const uint64_t a = tk::matrix_descriptor(s.a[stage][64 * half], 0, 1024, tk::kSwizzle128);
        const uint64_t b = tk::matrix_descriptor(s.b[stage], 0, 1024, tk::kSwizzle128);
        tk::wgmma_fence(acc);
#pragma unroll
        for (int k = 0; k < BLOCK_K / 16; ++k) {
            tk::wgmma<BLOCK_N, tk::bf16>(acc, tk::advanced(a, 32 * k), tk::advanced(b, 32 * k), true);
        }
        tk::wgmma_commit();
        tk::wgmma_wait<0>(acc);
        if (tk::lane() == 0) {
            tk::arrive_expect(s.empty[stage], 0);  // each warp for itself: a wait is for its own products
        }
    }

    // Fragment C: rows 16 * warp + lane / 4 and 8 more, columns 8 * j + 2 * (lane % 4) and the next.
    const int r = thread / 32 * 16 + tk::lane() / 4;
#pragma unroll
    for (int j = 0; j < BLOCK_N / 8; ++j) {
        const int c = 8 * j + 2 * (tk::lane() % 4);
        *reinterpret_cast<uint32_t*>(&s.c[half][r][c]) = tk::pack2(acc[4 * j], acc[4 * j + 1], tk::bf16{});
        *reinterpret_cast<uint32_t*>(&s.c[half][r + 8][c]) = tk::pack2(acc[4 * j + 2], acc[4 * j + 3], tk::bf16{});
    }
    tk::fence_async();
    tk::sync_named(1 + half, 128);  // the half tile is written
    if (thread == 0) {
        tk::tensor_store(c_map, {col, row + 64 * half}, s.c[half]);
        tk::bulk_commit();
        tk::bulk_wait<0>();
    }
}

}  // namespace gemm
