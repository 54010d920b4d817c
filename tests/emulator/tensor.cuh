// Kernels for the tests of tk/tensor.cuh and tk/philox.cuh: a box or a run of bytes goes through shared memory and is copied on
// plainly. Blocks of one dimension; `tensor` is what the map was made of, and not used.
#include "tk/tk.cuh"
#include "tk/tensor.cuh"
#include "tk/philox.cuh"

namespace probe {

template <int kDims>
struct At { int x[kDims]; };

// The box lies at byte `offset` of shared memory, its barrier behind it.
__device__ inline tk::Barrier& barrier_behind(char* tile, int bytes)
{
    tk::Barrier& full = *reinterpret_cast<tk::Barrier*>(tile + bytes);
    if (threadIdx.x == 0) {
        tk::init(full, 1);
        tk::fence_barrier_init();
    }
    return full;
}

template <int kDims, int kHint>
__global__ void load(const void* tensor, const __grid_constant__ tk::TensorMap map, At<kDims> at,
                     unsigned char* out /* [bytes] */, int bytes, int offset)
{
    char* tile = tk::shared_memory(offset + bytes + 8) + offset;
    tk::Barrier& full = barrier_behind(tile, bytes);
    tk::sync_block();
    if (threadIdx.x < 32 && tk::elect_one()) {
        tk::prefetch(map);
        tk::arrive_expect(full, bytes);
        tk::tensor_load<kDims, tk::L2Hint(kHint)>(tile, map, at.x, full);
    }
    tk::wait(full, 0);
    for (int i = int(threadIdx.x); i < bytes; i += int(blockDim.x)) {
        out[i] = (unsigned char)tile[i];
    }
}

// Block `from` loads for those of the mask.
template <int kDims>
__global__ void multicast(const void* tensor, const __grid_constant__ tk::TensorMap map, At<kDims> at,
                          unsigned char* out /* [blocks, bytes] */, int bytes, int from, uint32_t blocks)
{
    char* tile = tk::shared_memory(bytes + 8);
    tk::Barrier& full = barrier_behind(tile, bytes);
    const int rank = tk::cluster_rank();
    tk::sync_cluster();
    if (threadIdx.x == 0 && rank == from) {
        tk::tensor_load_multicast<kDims>(tile, map, at.x, full, blocks);
    }
    if (blocks >> rank & 1) {
        if (threadIdx.x == 0) {
            tk::arrive_expect(full, bytes);
        }
        tk::wait_cluster(full, 0);
        for (int i = int(threadIdx.x); i < bytes; i += int(blockDim.x)) {
            out[rank * bytes + i] = (unsigned char)tile[i];
        }
    }
    tk::sync_cluster();  // nobody leaves while others write into its memory
}

// kFenced: as it has to be. kAdd: tensor_reduce_add.
template <int kDims, bool kAdd, bool kFenced>
__global__ void store(void* tensor, const __grid_constant__ tk::TensorMap map, At<kDims> at,
                      const unsigned char* in /* [bytes] */, int bytes, int offset)
{
    char* tile = tk::shared_memory(offset + bytes) + offset;
    for (int i = int(threadIdx.x); i < bytes; i += int(blockDim.x)) {
        tile[i] = char(in[i]);
    }
    if constexpr (kFenced) {
        tk::fence_async();
    }
    tk::sync_block();
    if (threadIdx.x == 0) {
        if constexpr (kAdd) {
            tk::tensor_reduce_add<kDims>(map, at.x, tile);
        } else {
            tk::tensor_store<kDims>(map, at.x, tile);
        }
        tk::bulk_commit();
        tk::bulk_wait<0>();
    }
}

// Each block stores, or adds, the same bytes; twice, from one place, which waits in between if kWaits.
template <class T, bool kAdd, bool kWaits>
__global__ void bulk(T* out /* [bytes] */, const unsigned char* in /* [2, bytes] */, int bytes)
{
    char* tile = tk::shared_memory(bytes);
    for (int half = 0; half < 2; ++half) {
        for (int i = int(threadIdx.x); i < bytes; i += int(blockDim.x)) {
            tile[i] = char(in[half * bytes + i]);
        }
        tk::fence_async();
        tk::sync_block();
        if (threadIdx.x == 0) {
            if constexpr (kAdd) {
                tk::bulk_reduce_add(out, tile, bytes);
            } else {
                tk::bulk_store(out, tile, bytes);
            }
            tk::bulk_commit();
            if constexpr (kWaits) {
                tk::bulk_wait_read<0>();
            }
        }
        tk::sync_block();
    }
    if (threadIdx.x == 0) {
        tk::bulk_wait<0>();
    }
}

// Every thread adds its kBytes of `in` to `out`, the threads of a warp to the same place.
template <class T, int kBytes>
__global__ void vectors(T* out /* [warps, kBytes] */, const char* in /* [threads, kBytes] */)
{
    const int thread = int(blockIdx.x * blockDim.x + threadIdx.x);
    const auto v = tk::load_global<kBytes>(in + thread * kBytes);
    tk::reduce_add(out + int(threadIdx.x) / 32 * (kBytes / int(sizeof(T))), v);
}

// What the threads find are 0, 1, ... in some order, and one lane of each warp is elected, the same each time.
__global__ void tickets(float* counter, float* seen /* [threads] */, int* elected /* [warps, 2] */)
{
    tk::wait_previous_grids();
    const int thread = int(blockIdx.x * blockDim.x + threadIdx.x);
    seen[thread] = tk::fetch_add(counter, 1.0f);
    for (int i = 0; i < 2; ++i) {
        if (tk::elect_one()) {
            elected[thread / 32 * 2 + i] = tk::lane();
        }
    }
    tk::launch_next_grid();
}

__global__ void random(const unsigned* keys /* [n, 2] */, const unsigned* counters /* [n, 4] */, unsigned* words /* [n, 4] */,
                       unsigned* sequence /* [n, 4] */, float* numbers /* [n, 4] */, int n)
{
    for (int i = int(threadIdx.x); i < n; i += int(blockDim.x)) {
        const uint64_t key = uint64_t(keys[2 * i + 1]) << 32 | keys[2 * i];
        const unsigned* c = counters + 4 * i;
        const tk::Quad r = tk::philox(key, tk::Quad{{c[0], c[1], c[2], c[3]}});
        const tk::Quad s = tk::philox(key, uint64_t(c[3]) << 32 | c[2], uint64_t(c[1]) << 32 | c[0]);
        for (int j = 0; j < 4; ++j) {
            words[4 * i + j] = r.w[j];
            sequence[4 * i + j] = s.w[j];
            numbers[4 * i + j] = tk::uniform(r.w[j]);
        }
    }
}

// Takes a map, and does nothing with it.
__global__ void takes(const void* tensor, const __grid_constant__ tk::TensorMap map) {}

}  // namespace probe
