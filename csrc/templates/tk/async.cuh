// Copies that run beside the threads, and the barriers that tell when they are done.
//
// On machines without the instruction a primitive here traps: the host passes no kernel that reaches it.
#pragma once
#include "tk/memory.cuh"
#include "tk/sync.cuh"

namespace tk {

// ---- mbarrier: a barrier in shared memory that counts arrivals and bytes, in phases 0, 1, 0, 1, ... ----------------
struct alignas(8) Barrier { uint64_t state; };

}  // namespace tk

#ifdef TK_EMULATE
#include "tk/emu/async.cuh"
#else
#include "tk/ptx/async.cuh"
#endif
