// Warps, blocks, clusters: who is where, shuffles, barriers, writes to a neighbour block's shared memory.
#pragma once
#include "tk/types.cuh"

namespace tk {

constexpr int kWarp = 32;

TK_DEVICE int lane() { return int(threadIdx.x) % kWarp; }

}  // namespace tk

#ifdef TK_EMULATE
#include "tk/emu/sync.cuh"
#else
#include "tk/ptx/sync.cuh"
#endif

