// Accesses whose cost is known by arithmetic. Each kernel is one warp that loads one element a lane.
#include "tk/tk.cuh"

namespace patterns {

// kBytes a lane from shared memory, lane i's at byte i * pitch.
template <int kBytes>
__global__ void from_shared(float* y, int pitch)
{
    char* s = tk::shared_memory(32 * 1024);
    for (int i = int(threadIdx.x); i < 8192; i += 32) {
        reinterpret_cast<float*>(s)[i] = 1.0f;
    }
    tk::sync_warp();
    const auto v = tk::load_shared<kBytes>(s + int(threadIdx.x) * pitch);  // counted
    y[threadIdx.x] = tk::float_of(v.w[0]);
}

// kBytes a lane from global memory, lane i's at byte offset + i * pitch.
template <int kBytes>
__global__ void from_global(float* y, const char* x, int pitch, int offset)
{
    const auto v = tk::load_global<kBytes>(x + offset + int(threadIdx.x) * pitch);  // counted
    y[threadIdx.x] = tk::float_of(v.w[0]);
}

}  // namespace patterns
