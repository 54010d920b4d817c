/* nvrtc_abi.h: the part of NVRTC that nvrtc_jit.c calls, CUDA 12 and 13.

   The library is opened at run time, so this file declares types and a list
   of functions, and no prototype.  After a real nvrtc.h only the list is
   added.  How it is proved equal: see cuda_abi.h. */

#ifndef TKJIT_NVRTC_ABI_H
#define TKJIT_NVRTC_ABI_H

#include <stddef.h>

/* The guard of the real header: if it is set, the types are known. */
#if !defined(__NVRTC_H__) || defined(TKJIT_ABI_PROOF)
typedef struct _nvrtcProgram *nvrtcProgram;
#endif

#ifndef __NVRTC_H__

typedef enum {
    NVRTC_SUCCESS = 0,
    NVRTC_ERROR_OUT_OF_MEMORY = 1,
    NVRTC_ERROR_PROGRAM_CREATION_FAILURE = 2,
    NVRTC_ERROR_INVALID_INPUT = 3,
    NVRTC_ERROR_INVALID_PROGRAM = 4,
    NVRTC_ERROR_INVALID_OPTION = 5,
    NVRTC_ERROR_COMPILATION = 6,
    NVRTC_ERROR_BUILTIN_OPERATION_FAILURE = 7,
    NVRTC_ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION = 8,
    NVRTC_ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION = 9,
    NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID = 10,
    NVRTC_ERROR_INTERNAL_ERROR = 11,
} nvrtcResult;

#endif /* __NVRTC_H__ */

/* X(name, exported symbol, 1 if required, result, (arguments)) */
/* clang-format off */
#define TK_NVRTC_FUNCTIONS(X)                                                  \
    X(nvrtcVersion, "nvrtcVersion", 1, nvrtcResult, (int *major, int *minor))  \
    X(nvrtcGetErrorString, "nvrtcGetErrorString", 1, const char *,             \
      (nvrtcResult result))                                                    \
    X(nvrtcGetNumSupportedArchs, "nvrtcGetNumSupportedArchs", 1, nvrtcResult,  \
      (int *count))                                                            \
    X(nvrtcGetSupportedArchs, "nvrtcGetSupportedArchs", 1, nvrtcResult,        \
      (int *archs))                                                            \
    X(nvrtcCreateProgram, "nvrtcCreateProgram", 1, nvrtcResult,                \
      (nvrtcProgram *program, const char *source, const char *name,            \
       int header_count, const char *const *headers,                           \
       const char *const *include_names))                                      \
    X(nvrtcDestroyProgram, "nvrtcDestroyProgram", 1, nvrtcResult,              \
      (nvrtcProgram *program))                                                 \
    X(nvrtcAddNameExpression, "nvrtcAddNameExpression", 1, nvrtcResult,        \
      (nvrtcProgram program, const char *expression))                          \
    X(nvrtcCompileProgram, "nvrtcCompileProgram", 1, nvrtcResult,              \
      (nvrtcProgram program, int option_count, const char *const *options))    \
    X(nvrtcGetLoweredName, "nvrtcGetLoweredName", 1, nvrtcResult,              \
      (nvrtcProgram program, const char *expression, const char **lowered))    \
    X(nvrtcGetCUBINSize, "nvrtcGetCUBINSize", 1, nvrtcResult,                  \
      (nvrtcProgram program, size_t *size))                                    \
    X(nvrtcGetCUBIN, "nvrtcGetCUBIN", 1, nvrtcResult,                          \
      (nvrtcProgram program, char *cubin))                                     \
    X(nvrtcGetPTXSize, "nvrtcGetPTXSize", 1, nvrtcResult,                      \
      (nvrtcProgram program, size_t *size))                                    \
    X(nvrtcGetPTX, "nvrtcGetPTX", 1, nvrtcResult,                              \
      (nvrtcProgram program, char *ptx))                                       \
    X(nvrtcGetProgramLogSize, "nvrtcGetProgramLogSize", 1, nvrtcResult,        \
      (nvrtcProgram program, size_t *size))                                    \
    X(nvrtcGetProgramLog, "nvrtcGetProgramLog", 1, nvrtcResult,                \
      (nvrtcProgram program, char *log))
/* clang-format on */

/* One function type each: tk_nvrtcVersion, tk_nvrtcGetErrorString, ... */
#define TK_NVRTC_TYPEDEF(name, symbol, required, result, args)                 \
    typedef result(*tk_##name) args;
TK_NVRTC_FUNCTIONS(TK_NVRTC_TYPEDEF)
#undef TK_NVRTC_TYPEDEF

#endif /* TKJIT_NVRTC_ABI_H */
