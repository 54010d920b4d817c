// Kernels with one bug each, and their clean twins: the macro BUG is defined in the broken one.
#include "tk/tk.cuh"
#include "tk/tensor.cuh"

using namespace tk;

#ifdef BUG
constexpr bool kBug = true;
#else
constexpr bool kBug = false;
#endif

// y[i] = x[n - 1 - i] through shared memory; n is the block's count of threads.
__global__ void missing_barrier(float* y, const float* x)
{
    float* s = reinterpret_cast<float*>(shared_memory(int(blockDim.x * 4)));
    s[threadIdx.x] = x[threadIdx.x];
    s[threadIdx.x] += 0.0f;
    if (!kBug) {
        sync_block();
    }
    y[threadIdx.x] = s[blockDim.x - 1 - threadIdx.x];
}

// A sum over the block by a tree. Broken: no barrier between the levels.
__global__ void tree_without_barriers(float* y, const float* x)
{
    float* s = reinterpret_cast<float*>(shared_memory(int(blockDim.x * 4)));
    s[threadIdx.x] = x[threadIdx.x];
    sync_block();
    for (int half = int(blockDim.x) / 2; half > 0; half /= 2) {
        if (int(threadIdx.x) < half) {
            s[threadIdx.x] += s[threadIdx.x + half];
        }
        if (!kBug) {
            sync_block();
        }
    }
    if (threadIdx.x == 0) {
        y[0] = s[0];
    }
}

// Lanes of a warp hand on values through shared memory. Broken: shuffles order no memory, sync_warp does.
__global__ void missing_warp_barrier(float* y, const float* x)
{
    float* s = reinterpret_cast<float*>(shared_memory(int(blockDim.x * 4)));
    s[threadIdx.x] = x[threadIdx.x];
    if (!kBug) {
        sync_warp();
    } else {
        shuffle_xor(1.0f, 1);
    }
    y[threadIdx.x] = s[threadIdx.x ^ 1];
}

// Broken: a barrier of half the block's threads stands between what all of them do.
__global__ void barrier_of_too_few(float* y, const float* x)
{
    float* s = reinterpret_cast<float*>(shared_memory(int(blockDim.x * 4)));
    s[threadIdx.x] = x[threadIdx.x];
    sync_named(1 + (kBug ? int(threadIdx.x) / 64 : 0), kBug ? 64 : int(blockDim.x));
    y[threadIdx.x] = s[blockDim.x - 1 - threadIdx.x];
}

// Broken: the last element is never written before it is read.
__global__ void read_of_the_unwritten(float* y, const float* x)
{
    float* s = reinterpret_cast<float*>(shared_memory(int(blockDim.x * 4)));
    if (!kBug || threadIdx.x + 1 < blockDim.x) {
        s[threadIdx.x] = x[threadIdx.x];
    }
    sync_block();
    y[threadIdx.x] = s[blockDim.x - 1 - threadIdx.x];
}

// Broken: a tile whose last row was forgotten.
__global__ void forgotten_row(float* y, const float* x)
{
    float* s = reinterpret_cast<float*>(shared_memory(int(blockDim.x * 8)));
    const int rows = kBug ? 1 : 2;
    for (int r = 0; r < rows; ++r) {
        s[r * blockDim.x + threadIdx.x] = x[threadIdx.x];
    }
    sync_block();
    y[threadIdx.x] = s[blockDim.x + (threadIdx.x + 1) % blockDim.x];
}

// Broken: one element past the tensor's end, and one before its beginning.
__global__ void read_past_the_end(float* y, const float* x) { y[threadIdx.x] = x[threadIdx.x + (kBug ? 1 : 0)]; }
__global__ void write_before_the_beginning(float* y, const float* x) { *(y + threadIdx.x - (kBug ? 1 : 0)) = x[threadIdx.x]; }

// Broken: 16 bytes at a time from an address off 16 bytes; and the same of shared memory.
__global__ void misaligned_load(float* y, const float* x)
{
    if (threadIdx.x < blockDim.x / 8) {
        store_global<16>(y + 4 * threadIdx.x, load_global<16>(x + 4 * threadIdx.x + (kBug ? 1 : 4)));
    }
}
__global__ void misaligned_shared_load(float* y, const float* x)
{
    float* s = reinterpret_cast<float*>(shared_memory(int(blockDim.x * 4)));
    s[threadIdx.x] = x[threadIdx.x];
    sync_block();
    if (threadIdx.x < blockDim.x / 8) {
        store_global<16>(y + 4 * threadIdx.x, load_shared<16>(s + 4 * threadIdx.x + (kBug ? 2 : 4)));
    }
}

// Broken: some lanes do not come to the shuffle; or to another one.
__global__ void divergent_shuffle(float* y, const float* x)
{
    float v = x[threadIdx.x];
    if (!kBug || threadIdx.x % 32 < 16) {
        v = shuffle_xor(v, 1);
    }
    y[threadIdx.x] = v;
}
__global__ void mixed_collectives(float* y, const float* x)
{
    float v = x[threadIdx.x];
    if (!kBug || threadIdx.x % 32 < 16) {
        v += shuffle_xor(v, 1);
    } else {
        v += float(__ballot_sync(0xffffffffu, v > 0.0f));
    }
    y[threadIdx.x] = v;
}

// Broken: a part of the block never comes to the barrier; two halves wait for each other.
__global__ void barrier_in_a_branch(float* y, const float* x)
{
    if (!kBug || threadIdx.x < 64) {
        sync_named(1, int(blockDim.x));
    } else {
        sync_named(2, int(blockDim.x));
    }
    y[threadIdx.x] = x[threadIdx.x];
}
__global__ void crossed_barriers(float* y, const float* x)
{
    const int first = kBug ? 1 + int(threadIdx.x) / 64 : 1;
    sync_named(first, int(blockDim.x));
    sync_named(3 - first, int(blockDim.x));
    y[threadIdx.x] = x[threadIdx.x];
}

struct Ring {
    Barrier full[2], empty[2];
    alignas(128) float data[2][64];
};

// A producer warp fetches rows of 64 floats through a ring of two, a consumer warp writes them. One of several bugs:
template <int kWhich>
__device__ void ring(float* y, const float* x, int rows)
{
    Ring& s = shared<Ring>();
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; ++i) {
            init(s.full[i], 1);
            init(s.empty[i], 32);
        }
        if (!(kBug && kWhich == 6)) {
            fence_barrier_init();
        }
    }
    if (!(kBug && kWhich == 7)) {
        sync_block();
    }
    const bool producer = threadIdx.x < 32;
    for (int r = 0; r < rows; ++r) {
        const int stage = r % 2, phase = r / 2 % 2;
        if (producer) {
            // One lane alone: another could miss a phase that comes and goes.
            if (lane() == 0) {
                if (r >= 2) {
                    // 1: the wrong parity: the stage is refilled at once
                    wait(s.empty[stage], kBug && kWhich == 1 ? phase : phase ^ 1);
                }
                const int bytes = 64 * 4;
                // 2: too many bytes expected; 3: too few
                arrive_expect(s.full[stage], bytes + (kBug && kWhich == 2 ? 16 : 0) - (kBug && kWhich == 3 ? 16 : 0));
                bulk_load(s.data[stage], x + 64 * r, bytes, s.full[stage]);
            }
        } else {
            if (!(kBug && kWhich == 4)) {  // 4: nobody waits for the bytes
                wait(s.full[stage], phase);
            }
            if (kBug && kWhich == 5) {  // 5: the stage is given back before it is read
                arrive_expect(s.empty[stage], 0);
            }
            for (int i = lane(); i < 64; i += 32) {
                y[64 * r + i] = s.data[stage][i];
            }
            if (!(kBug && kWhich == 5)) {
                arrive_expect(s.empty[stage], 0);
            }
        }
    }
}
__global__ void swapped_phase(float* y, const float* x) { ring<1>(y, x, 6); }
__global__ void too_many_bytes_expected(float* y, const float* x) { ring<2>(y, x, 6); }
__global__ void too_few_bytes_expected(float* y, const float* x) { ring<3>(y, x, 6); }
__global__ void bytes_not_waited_for(float* y, const float* x) { ring<4>(y, x, 6); }
__global__ void stage_released_early(float* y, const float* x) { ring<5>(y, x, 6); }
__global__ void missing_init_fence(float* y, const float* x) { ring<6>(y, x, 6); }
__global__ void barriers_used_too_soon(float* y, const float* x) { ring<7>(y, x, 6); }

// Broken: ordinary writes to a place that a bulk copy then writes, without the fence between.
__global__ void missing_proxy_fence(float* y, const float* x)
{
    Ring& s = shared<Ring>();
    s.data[0][threadIdx.x % 64] = 0.0f;
    if (!kBug) {
        fence_async();
    }
    if (threadIdx.x == 0) {
        init(s.full[0], 1);
        fence_barrier_init();
    }
    sync_block();
    if (threadIdx.x == 0) {
        arrive_expect(s.full[0], 256);
        bulk_load(s.data[0], x, 256, s.full[0]);
    }
    wait(s.full[0], 0);
    y[threadIdx.x] = s.data[0][threadIdx.x];
}

// Broken: asynchronous copies are read without a wait; or after a wait that lets the last group be.
__global__ void copies_not_waited_for(float* y, const float* x)
{
    float* s = reinterpret_cast<float*>(shared_memory(int(blockDim.x * 4)));
    copy_async<4>(s + threadIdx.x, x + threadIdx.x);
    copy_commit();
    if (!kBug) {
        copy_wait<0>();
    }
    y[threadIdx.x] = s[threadIdx.x];
}
__global__ void wrong_group_waited_for(float* y, const float* x)
{
    float* s = reinterpret_cast<float*>(shared_memory(int(blockDim.x * 8)));
    copy_async<4>(s + threadIdx.x, x + threadIdx.x);
    copy_commit();
    copy_async<4>(s + blockDim.x + threadIdx.x, x + threadIdx.x);
    copy_commit();
    copy_wait<kBug ? 1 : 0>();
    y[threadIdx.x] = s[blockDim.x + threadIdx.x];
}

// Broken: initialized again while in use; used without being initialized.
__global__ void barrier_initialized_twice(float* y, const float* x)
{
    Ring& s = shared<Ring>();
    if (threadIdx.x == 0) {
        init(s.full[0], int(blockDim.x));
        init(kBug ? s.full[0] : s.full[1], int(blockDim.x));
    }
    sync_block();
    arrive_expect(s.full[0], 0);
    wait(s.full[0], 0);
    y[threadIdx.x] = x[threadIdx.x];
}
__global__ void barrier_never_initialized(float* y, const float* x)
{
    Ring& s = shared<Ring>();
    if (threadIdx.x == 0) {
        init(s.full[0], int(blockDim.x));
    }
    sync_block();
    arrive_expect(kBug ? s.full[1] : s.full[0], 0);
    wait(kBug ? s.full[1] : s.full[0], 0);
    y[threadIdx.x] = x[threadIdx.x];
}

// Broken: bytes are expected that nobody sends, and nobody waits for them.
__global__ void bytes_left_pending(float* y, const float* x)
{
    Ring& s = shared<Ring>();
    if (threadIdx.x == 0) {
        init(s.full[0], 1);
        arrive_expect(s.full[0], kBug ? 64 : 0);
    }
    y[threadIdx.x] = x[threadIdx.x];
}

// Broken: more arrivals than the barrier counts.
__global__ void too_many_arrivals(float* y, const float* x)
{
    Ring& s = shared<Ring>();
    if (threadIdx.x == 0) {
        init(s.full[0], kBug ? 1 : 3);
        for (int i = 0; i < 3; ++i) {
            arrive_expect(s.full[0], i == 0 ? 16 : 0);
        }
        fence_barrier_init();
        bulk_load(s.data[0], x, 16, s.full[0]);
        wait(s.full[0], 0);
    }
    y[threadIdx.x] = x[threadIdx.x];
}

// A cluster of two: each block writes to its neighbour. Broken: no barrier before the neighbour reads; and a block that ends
// while its neighbour still reads from it is found as a race of the last barrier's absence.
__global__ void missing_cluster_barrier(float* y, const float* x)
{
    float* s = reinterpret_cast<float*>(shared_memory(int(blockDim.x * 4)));
    Barrier& b = *reinterpret_cast<Barrier*>(s + blockDim.x);
    if (threadIdx.x == 0) {
        init(b, 1);
        fence_barrier_init();
    }
    sync_cluster();
    const int n = int(blockDim.x), peer = cluster_rank() ^ 1;
    if (threadIdx.x == 0) {
        arrive_expect(b, n * 4);
    }
    Words<4> v;
    v.w[0] = __float_as_uint(x[cluster_rank() * n + threadIdx.x]);
    store_peer(s + threadIdx.x, v, b, peer);
    if (!kBug) {
        wait_cluster(b, 0);
    }
    y[cluster_rank() * n + threadIdx.x] = s[n - 1 - threadIdx.x];
    sync_cluster();
}

// Broken: a launch that gives less shared memory than the kernel uses.
__global__ void too_little_shared_memory(float* y, const float* x)
{
    float* s = reinterpret_cast<float*>(shared_memory(4));
    s[threadIdx.x * (kBug ? 64 : 1)] = x[threadIdx.x];
    sync_block();
    y[threadIdx.x] = s[threadIdx.x * (kBug ? 64 : 1)];
}

// Broken: the spin that nothing ends is a deadlock of one thread and what waits for it.
__global__ void arrival_that_never_comes(float* y, const float* x)
{
    Ring& s = shared<Ring>();
    if (threadIdx.x == 0) {
        init(s.full[0], kBug ? 2 : 1);
    }
    sync_block();
    if (threadIdx.x == 0) {
        arrive_expect(s.full[0], 0);
    }
    wait(s.full[0], 0);
    y[threadIdx.x] = x[threadIdx.x];
}

// Broken: the block's shared memory may be gone before the engine has read it.
__global__ void store_not_waited_for(float* y, const float* x)
{
    float* s = reinterpret_cast<float*>(shared_memory(int(blockDim.x * 4)));
    s[threadIdx.x] = x[threadIdx.x];
    fence_async();
    sync_block();
    if (threadIdx.x == 0) {
        bulk_store(y, s, int(blockDim.x * 4));
        bulk_commit();
        if (!kBug) {
            bulk_wait<0>();
        }
    }
}

// Broken: the engine reads what a thread wrote, without the fence between; or without the barrier.
__global__ void store_without_fence(float* y, const float* x)
{
    float* s = reinterpret_cast<float*>(shared_memory(int(blockDim.x * 4)));
    s[threadIdx.x] = x[threadIdx.x];
    if (!kBug) {
        fence_async();
    }
    sync_block();
    if (threadIdx.x == 0) {
        bulk_store(y, s, int(blockDim.x * 4));
        bulk_commit();
        bulk_wait<0>();
    }
}
