// The words of CUDA C++ for a C++ compiler: specifiers, built-in variables and functions, and the hooks through which the
// emulator sees every access. No system header: types.cuh has its own integers.
#pragma once
extern "C" {
#include "tk/emu/abi.cuh"
int printf(const char* format, ...);
}

#define __device__
#define __host__
#define __global__ static __attribute__((noinline))
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __restrict__ __restrict
#define __align__(n) __attribute__((aligned(n)))
// A compiler puts thread-local variables of any kind, templates' too, side by side, and asks this object's __tls_get_addr
// where they lie: in the block's shared memory. What is `extern` (by then `__thread`) has no module and is dynamic.
#if defined(__clang__) && defined(__aarch64__)
#define __shared__ _Pragma("GCC error \"the emulator's __shared__ variables need g++ on aarch64, or use tk::shared\"")
#else
#define __shared__ static thread_local
#endif
#define __constant__ static
#define __grid_constant__
#define memcpy __builtin_memcpy
#define memset __builtin_memset

namespace tkemu {

static tkemu_thread* self;
static const tkemu_machine* machine;

struct Variable { unsigned long module, offset; };

}  // namespace tkemu

extern "C" __attribute__((visibility("hidden"), no_sanitize("thread"))) void* __tls_get_addr(const tkemu::Variable* v)
{
    return v->module == 0 ? tkemu::self->shared : tkemu::self->variables + v->offset;
}

#define threadIdx (tkemu::self->thread)
#define blockIdx (tkemu::self->block)
#define blockDim (tkemu::self->block_dim)
#define gridDim (tkemu::self->grid_dim)

// ---- functions that CUDA has without a header -------------------------------------------------------------------------

#define TKEMU_INLINE static inline __attribute__((always_inline))

template <class To, class From>
TKEMU_INLINE To tkemu_bits(From v)
{
    static_assert(sizeof(To) == sizeof(From));
    To r;
    __builtin_memcpy(&r, &v, sizeof r);
    return r;
}
TKEMU_INLINE unsigned __float_as_uint(float v) { return tkemu_bits<unsigned>(v); }
TKEMU_INLINE int __float_as_int(float v) { return tkemu_bits<int>(v); }
TKEMU_INLINE float __uint_as_float(unsigned v) { return tkemu_bits<float>(v); }
TKEMU_INLINE float __int_as_float(int v) { return tkemu_bits<float>(v); }
TKEMU_INLINE double __longlong_as_double(long long v) { return tkemu_bits<double>(v); }
TKEMU_INLINE long long __double_as_longlong(double v) { return tkemu_bits<long long>(v); }
TKEMU_INLINE int __double2loint(double v) { return int(tkemu_bits<unsigned long long>(v)); }
TKEMU_INLINE int __double2hiint(double v) { return int(tkemu_bits<unsigned long long>(v) >> 32); }
TKEMU_INLINE double __hiloint2double(int hi, int lo)
{
    return tkemu_bits<double>((unsigned long long)(unsigned)hi << 32 | (unsigned)lo);
}
TKEMU_INLINE float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
TKEMU_INLINE double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }
TKEMU_INLINE float __fmul_rn(float a, float b) { return a * b; }
TKEMU_INLINE double __dmul_rn(double a, double b) { return a * b; }

extern "C" {
float fmaxf(float, float); float fminf(float, float); float fmaf(float, float, float); float fabsf(float);
float expf(float); float exp2f(float); float logf(float); float log2f(float); float log1pf(float); float sqrtf(float);
float sinf(float); float cosf(float); float tanhf(float); float erff(float); float powf(float, float); float floorf(float);
double fmax(double, double); double fmin(double, double); double fma(double, double, double); double fabs(double);
double exp(double); double exp2(double); double log(double); double log2(double); double log1p(double); double sqrt(double);
double sin(double); double cos(double); double tanh(double); double erf(double); double pow(double, double);
double floor(double);
}
TKEMU_INLINE float rsqrtf(float v) { return 1.0f / sqrtf(v); }
TKEMU_INLINE float __expf(float v) { return expf(v); }
TKEMU_INLINE float __logf(float v) { return logf(v); }

TKEMU_INLINE void __syncthreads() { tkemu::machine->barrier(0, 0, 0); }
TKEMU_INLINE void __syncwarp(unsigned mask = 0xffffffffu) { tkemu::machine->warp_sync(mask); }
// The lanes that happen to be here together, of which CUDA promises the caller alone; so that is who is here, and code that
// counts on others shows its fault.
TKEMU_INLINE unsigned __activemask() { return 1u << tkemu::self->lane; }
TKEMU_INLINE void __trap() { tkemu::machine->fault("__trap()"); }

template <class T>
TKEMU_INLINE T tkemu_shuffle(unsigned mask, T v, int from)
{
    T r;
    const void* const* all = tkemu::machine->exchange(TKEMU_SHUFFLE, mask, &v, sizeof v);
    __builtin_memcpy(&r, all[from], sizeof r);
    return r;
}
template <class T>
TKEMU_INLINE T __shfl_sync(unsigned mask, T v, int from, int width = 32)
{
    return tkemu_shuffle(mask, v, (tkemu::self->lane & ~(width - 1)) | (from & (width - 1)));
}
template <class T>
TKEMU_INLINE T __shfl_xor_sync(unsigned mask, T v, int lanes, int width = 32)
{
    const int from = tkemu::self->lane ^ lanes;
    return tkemu_shuffle(mask, v, from / width > tkemu::self->lane / width ? tkemu::self->lane : from);
}
template <class T>
TKEMU_INLINE T __shfl_down_sync(unsigned mask, T v, unsigned by, int width = 32)
{
    const int from = tkemu::self->lane + int(by);
    return tkemu_shuffle(mask, v, from / width == tkemu::self->lane / width ? from : tkemu::self->lane);
}
template <class T>
TKEMU_INLINE T __shfl_up_sync(unsigned mask, T v, unsigned by, int width = 32)
{
    const int from = tkemu::self->lane - int(by);
    return tkemu_shuffle(mask, v, from >= (tkemu::self->lane & ~(width - 1)) ? from : tkemu::self->lane);
}
TKEMU_INLINE unsigned __ballot_sync(unsigned mask, int predicate)
{
    const int mine = predicate != 0;
    const void* const* all = tkemu::machine->exchange(TKEMU_VOTE, mask, &mine, sizeof mine);
    unsigned r = 0;
    for (int i = 0; i < 32; ++i) {
        if (mask >> i & 1) {
            int theirs;
            __builtin_memcpy(&theirs, all[i], sizeof theirs);
            r |= unsigned(theirs) << i;
        }
    }
    return r;
}
TKEMU_INLINE int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
TKEMU_INLINE int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == mask; }
template <class T>
TKEMU_INLINE unsigned __match_any_sync(unsigned mask, T v)
{
    const void* const* all = tkemu::machine->exchange(TKEMU_MATCH, mask, &v, sizeof v);
    unsigned r = 0;
    for (int i = 0; i < 32; ++i) {
        r |= (mask >> i & 1) && __builtin_memcmp(all[i], &v, sizeof v) == 0 ? 1u << i : 0;
    }
    return r;
}
template <class T, class Op>
TKEMU_INLINE T tkemu_redux(unsigned mask, T v, Op op)
{
    const void* const* all = tkemu::machine->exchange(TKEMU_REDUX, mask, &v, sizeof v);
    T r{};
    bool first = true;
    for (int i = 0; i < 32; ++i) {
        if (mask >> i & 1) {
            T theirs;
            __builtin_memcpy(&theirs, all[i], sizeof theirs);
            r = first ? theirs : op(r, theirs);
            first = false;
        }
    }
    return r;
}
TKEMU_INLINE int __reduce_add_sync(unsigned mask, int v)
{
    return tkemu_redux(mask, v, [](int a, int b) { return int(unsigned(a) + unsigned(b)); });
}
TKEMU_INLINE int __reduce_max_sync(unsigned mask, int v)
{
    return tkemu_redux(mask, v, [](int a, int b) { return a > b ? a : b; });
}
TKEMU_INLINE int __reduce_min_sync(unsigned mask, int v)
{
    return tkemu_redux(mask, v, [](int a, int b) { return a < b ? a : b; });
}

// One thread runs at a time, so an atomic operation is one that no hook takes for a plain access.
template <class T, class Op>
TKEMU_INLINE T tkemu_atomic(T* p, Op op)
{
    T old, now;
    tkemu::machine->aligned(p, sizeof(T));
    tkemu::machine->atomic(p, sizeof(T));
    tkemu::machine->copy(&old, p, sizeof old);
    now = op(old);
    tkemu::machine->copy(p, &now, sizeof now);
    return old;
}
template <class T> TKEMU_INLINE T atomicAdd(T* p, T v) { return tkemu_atomic(p, [&](T old) { return T(old + v); }); }
template <class T> TKEMU_INLINE T atomicMax(T* p, T v) { return tkemu_atomic(p, [&](T old) { return old > v ? old : v; }); }
template <class T> TKEMU_INLINE T atomicMin(T* p, T v) { return tkemu_atomic(p, [&](T old) { return old < v ? old : v; }); }
template <class T> TKEMU_INLINE T atomicExch(T* p, T v) { return tkemu_atomic(p, [&](T) { return v; }); }
template <class T>
TKEMU_INLINE T atomicCAS(T* p, T expected, T v)
{
    return tkemu_atomic(p, [&](T old) { return old == expected ? v : old; });
}

// ---- the compiler's hooks ---------------------------------------------------------------------------------------------

// The object is compiled with -fsanitize=thread and linked without its runtime: these stand in for it.
#ifdef TKEMU_CHECK
#define TKEMU_HOOK(name, bytes, how) \
    extern "C" __attribute__((no_sanitize("thread"), visibility("hidden"))) void name(const void* p) \
    { \
        tkemu::machine->access(p, bytes, how, __builtin_return_address(0)); \
    }
#define TKEMU_HOOKS(bytes) \
    TKEMU_HOOK(__tsan_read##bytes, bytes, TKEMU_READ) \
    TKEMU_HOOK(__tsan_write##bytes, bytes, TKEMU_WRITE) \
    TKEMU_HOOK(__tsan_unaligned_read##bytes, bytes, TKEMU_READ) \
    TKEMU_HOOK(__tsan_unaligned_write##bytes, bytes, TKEMU_WRITE) \
    TKEMU_HOOK(__tsan_volatile_read##bytes, bytes, TKEMU_READ) \
    TKEMU_HOOK(__tsan_volatile_write##bytes, bytes, TKEMU_WRITE)
TKEMU_HOOKS(1)
TKEMU_HOOKS(2)
TKEMU_HOOKS(4)
TKEMU_HOOKS(8)
TKEMU_HOOKS(16)
extern "C" {
#define TKEMU_HIDDEN __attribute__((no_sanitize("thread"), visibility("hidden")))
TKEMU_HIDDEN void __tsan_read_range(const void* p, unsigned long n)
{
    tkemu::machine->access(p, unsigned(n), TKEMU_READ, __builtin_return_address(0));
}
TKEMU_HIDDEN void __tsan_write_range(const void* p, unsigned long n)
{
    tkemu::machine->access(p, unsigned(n), TKEMU_WRITE, __builtin_return_address(0));
}
// What clang puts in the place of memcpy and memset.
TKEMU_HIDDEN void* __tsan_memcpy(void* to, const void* from, unsigned long n)
{
    tkemu::machine->access(from, unsigned(n), TKEMU_READ, __builtin_return_address(0));
    tkemu::machine->access(to, unsigned(n), TKEMU_WRITE, __builtin_return_address(0));
    tkemu::machine->copy(to, from, unsigned(n));
    return to;
}
TKEMU_HIDDEN void* __tsan_memset(void* to, int value, unsigned long n)
{
    tkemu::machine->access(to, unsigned(n), TKEMU_WRITE, __builtin_return_address(0));
    return __builtin_memset(to, value, n);
}
TKEMU_HIDDEN void __tsan_init() {}
TKEMU_HIDDEN void __tsan_func_entry(void*) {}
TKEMU_HIDDEN void __tsan_func_exit() {}
}
#endif

// ---- the entry --------------------------------------------------------------------------------------------------------

namespace tkemu {

template <class> struct Entry;
template <class... P>
struct Entry<void (*)(P...)> {
    static constexpr int kCount = sizeof...(P);
    static constexpr unsigned kSizes[sizeof...(P) + 1] = {unsigned(sizeof(P))..., 0};

    template <int... i> struct Places {};
    template <int n, int... i> struct Count : Count<n - 1, n - 1, i...> {};
    template <int... i> struct Count<0, i...> { using type = Places<i...>; };

    template <int... i>
    static void call(void (*kernel)(P...), void* const* parameters, Places<i...>)
    {
        kernel(*static_cast<P*>(parameters[i])...);
    }
};

}  // namespace tkemu

// The last line of a kernel's text: TKEMU_ENTRY((softmax::fwd<float, ...>)).
#define TKEMU_ENTRY(kernel) \
    extern "C" __attribute__((visibility("default"), no_sanitize("thread"))) int tkemu_describe(tkemu_kernel* tkemu_out) \
    { \
        using tkemu_entry = tkemu::Entry<decltype(&TKEMU_NAME kernel)>; \
        tkemu_out->abi = TKEMU_ABI; \
        tkemu_out->arch = __CUDA_ARCH__; \
        tkemu_out->run = [](void* const* tkemu_parameters) { \
            tkemu_entry::call(&TKEMU_NAME kernel, tkemu_parameters, \
                              typename tkemu_entry::template Count<tkemu_entry::kCount>::type{}); \
        }; \
        tkemu_out->n_parameters = tkemu_entry::kCount; \
        tkemu_out->parameter_sizes = tkemu_entry::kSizes; \
        tkemu_out->self = &tkemu::self; \
        tkemu_out->machine = &tkemu::machine; \
        return 0; \
    }
#define TKEMU_NAME(...) __VA_ARGS__
