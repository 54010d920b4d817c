// The copy engine: boxes of tensors to and from shared memory, bulk stores, and additions to global memory by engine or vector.
//
// One thread starts a copy. A load tells an mbarrier when its bytes are there; a store belongs to a group of its thread, which
// that thread waits for. The engine sees shared memory by another way than threads do: their ordinary writes are ordered
// before its reads (or its writes to the same place) by fence_async in each thread that wrote, then a barrier.
// Architectures before sm_90 have none of it: what says nothing else traps there.
#pragma once
#include "tk/async.cuh"

namespace tk {

// A tensor in global memory as the engine sees it: its sizes, strides and address, the box that one copy moves, swizzle and
// fill. The host makes it; a kernel takes it as `const __grid_constant__ tk::TensorMap` and passes it on by reference.
struct alignas(64) TensorMap { uint64_t opaque[16]; };

// What is known about the next use of loaded bytes: a wish to the L2 cache that changes speed, never results.
enum L2Hint {
    kL2Default,
    kL2EvictFirst,  // nobody reads them again soon
    kL2EvictLast,   // many blocks read them
};

// Brings the map itself nearer, before its first use. Any thread; one is enough.
TK_DEVICE void prefetch(const TensorMap& map);

// Starts the load of the box whose first element has the coordinates `at` (innermost dimension first; they may be negative,
// or past the end), and counts its bytes at `full`. The map has kDims dimensions. The innermost coordinate is a multiple of
// 16 bytes: else it is an illegal instruction (as seen on an H200; no manual says so).
//   Order      packed, the innermost dimension first. With an element stride e > 1 in a dimension, every e-th element
//              of the box is loaded, ceil(box / e) of them (the innermost dimension has no stride).
//   Outside    elements outside the tensor become 0, or NaN where the map says so. They count as bytes too: `full` gets
//              the whole box's in any case.
//   Swizzle    16-byte chunks move within rows of the swizzle's span: bits 4.. of a chunk's shared address ^= bits 7..,
//              of which there are 1, 2, 3 for 32, 64, 128 bytes. By address: a place aligned to 256, 512, 1024 bytes has
//              the pattern's begin at its own. A row of the box is as wide as the span.
//   Alignment  `to` to 128 bytes.
template <int kDims, L2Hint kHint = kL2Default>
TK_DEVICE void tensor_load(void* to, const TensorMap& map, const int (&at)[kDims], Barrier& full);

// The same into every block of the cluster whose bit in `blocks` is set: at the same place, and counted at the same
// barrier, of each. Those blocks have started and initialized the barrier (sync_cluster), and are still there.
template <int kDims, L2Hint kHint = kL2Default>
TK_DEVICE void tensor_load_multicast(void* to, const TensorMap& map, const int (&at)[kDims], Barrier& full,
                                     uint32_t blocks);

// Starts the store of a box in shared memory, laid out as a load lays it out; elements past the tensor's end stay away. No
// coordinate is negative (an illegal instruction on an H200, though a load takes it); what lies inside of each row is a
// multiple of 16 bytes (an H200 stored other bytes than expected where it was not).
// tensor_reduce_add adds to each element instead, atomically one by one and in any order, by the map's type: float32 (numbers
// under 2^-126 too), float16, bfloat16, int32, uint32 and uint64.
template <int kDims>
TK_DEVICE void tensor_store(const TensorMap& map, const int (&at)[kDims], const void* from);
template <int kDims>
TK_DEVICE void tensor_reduce_add(const TensorMap& map, const int (&at)[kDims], const void* from);

// The same of `bytes` (a multiple of 16, > 0) in a row, without a map; both sides are aligned to 16 bytes. T is float, f16,
// bf16, int32_t, uint32_t or uint64_t.
TK_DEVICE void bulk_store(void* to, const void* from, int bytes);
template <class T>
TK_DEVICE void bulk_reduce_add(T* to, const void* from, int bytes);

// Makes a group of this thread's stores and reductions since the last commit; it may be empty.
TK_DEVICE void bulk_commit();
// Waits until at most kPending groups of this thread, the latest ones, are not done: what they wrote is there, and visible
// to this thread. bulk_wait_read: until their shared memory has been read, and may be written again.
template <int kPending>
TK_DEVICE void bulk_wait();
template <int kPending>
TK_DEVICE void bulk_wait_read();

// ---- additions to global memory -----------------------------------------------------------------------------------

// Adds kBytes of T (float, f16, bf16) to `p`, aligned to kBytes (4, 8 or 16), each element atomically. Nothing comes back, so
// nothing waits for it; visible after the kernel. Floats under 2^-126 count as 0; halves round to nearest even.
// Before sm_90 it takes several instructions, and bf16 traps.
template <class T, int kBytes>
TK_DEVICE void reduce_add(T* p, const Words<kBytes>& v);

// Adds to a float that others add to as well, and returns what it held before. Orders nothing else.
TK_DEVICE float fetch_add(float* p, float v);

// ---- warps and grids -----------------------------------------------------------------------------------------------

// True in one lane of the warp, the same one each time. All 32 lanes call it together. On any machine.
TK_DEVICE bool elect_one();

// Waits until the grids this one was launched to overlap with are done and their writes visible: before the first access to
// what they wrote. And lets the next grid start, once all blocks have called it or ended. Both do nothing in an ordinary
// launch, and before sm_90.
TK_DEVICE void wait_previous_grids();
TK_DEVICE void launch_next_grid();

}  // namespace tk

#ifdef TK_EMULATE
#include "tk/emu/tensor.cuh"
#else
#include "tk/ptx/tensor.cuh"
#endif
