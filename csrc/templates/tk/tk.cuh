// Layer 1, the machine: everything a kernel may use that isn't plain C++.
#pragma once
#include "tk/types.cuh"
#include "tk/math.cuh"
#include "tk/memory.cuh"
#include "tk/sync.cuh"
#include "tk/async.cuh"
