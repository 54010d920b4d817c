// CUDA's mathematical functions, for what users write: a GPU's compiler has them built in, in float and in double by one name
// (erf, sin, expm1, lgamma, ...), in fast forms (__expf, __sinf, __fdividef, ...), and without constants.
#pragma once
#include "tk/types.cuh"

#ifndef INFINITY
#define INFINITY tk::float_of(0x7f800000u)
#endif
#ifndef NAN
#define NAN tk::float_of(0x7fffffffu)
#endif
#define M_E 2.7182818284590452354
#define M_LOG2E 1.4426950408889634074
#define M_LN2 0.69314718055994530942
#define M_PI 3.14159265358979323846
#define M_1_PI 0.31830988618379067154
#define M_2_SQRTPI 1.12837916709551257390
#define M_SQRT2 1.41421356237309504880
#define M_SQRT1_2 0.70710678118654752440

#ifdef TK_EMULATE
#include "tk/emu/cuda_math.cuh"
#endif
