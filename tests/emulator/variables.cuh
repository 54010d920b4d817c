// Kernels that keep what they share in `__shared__` variables, of templates and not. With BUG defined each of the planted
// ones has its bug.
#include "tk/tk.cuh"

#ifdef BUG
#define PLANTED(with, without) with
#else
#define PLANTED(with, without) without
#endif

struct Pair { int first; double second; };
__shared__ int of_the_file[4];

// Each thread's number and its neighbour's, and 15 by what else there is: variables of several kinds.
template <class T, int N>
__global__ void kinds(T* y)
{
    __shared__ T array[N][2];
    __shared__ alignas(64) Pair pair;
    __shared__ struct { char c; int last; } unnamed;
    static __shared__ volatile int scalar;
    const int t = threadIdx.x;
    array[t][0] = T(blockIdx.x * N + t);
    array[t][1] = T(100);
    if (t == 0) {
        pair = {1, 2.0};
        scalar = reinterpret_cast<unsigned long long>(&pair) % 64 == 0 ? 4 : 0;
        unnamed.last = 8;
        of_the_file[3] = 0;
    }
    __syncthreads();
    const T* other = array[N - 1 - t];
    y[blockIdx.x * N + t] = other[0] + other[1] + T(pair.first + pair.second + scalar + unnamed.last + of_the_file[3]);
}

// Instances of a function have variables of their own.
template <int N>
TK_DEVICE int* place()
{
    __shared__ int s[N];
    return s;
}
__global__ void places(int* y)
{
    place<128>()[threadIdx.x] = 1;
    place<129>()[threadIdx.x + 1] = 2;
    __syncthreads();
    y[threadIdx.x] = place<128>()[127 - threadIdx.x] + place<129>()[128 - threadIdx.x];
}

// What is dynamic is one place, whatever its name; variables are elsewhere.
template <class T>
__global__ void dynamic(T* y)
{
    extern __shared__ __align__(16) T s[];
    extern __shared__ char bytes[];
    __shared__ T own[128];
    s[threadIdx.x] = T(threadIdx.x);
    own[threadIdx.x] = T(1000);
    __syncthreads();
    y[threadIdx.x] = reinterpret_cast<T*>(bytes)[127 - threadIdx.x] + own[127 - threadIdx.x];
}

// Two blocks that live at once; the mbarrier is a variable too.
template <int N>
__global__ void missing_wait(int* y)
{
    __shared__ int s[N];
    __shared__ tk::Barrier b;
    if (threadIdx.x == 0) {
        tk::init(b, 1);
        tk::fence_barrier_init();
    }
    tk::sync_cluster();
    if (threadIdx.x == 0) {
        tk::arrive_expect(b, 4 * N);
    }
    tk::Words<4> v;
    v.w[0] = blockIdx.x * N + threadIdx.x;
    tk::store_peer(s + threadIdx.x, v, b, tk::cluster_rank() ^ 1);
    PLANTED(, tk::wait_cluster(b, 0));
    y[blockIdx.x * N + threadIdx.x] = s[N - 1 - threadIdx.x];
    tk::sync_cluster();
}

template <int N>
__global__ void missing_barrier(int* y)
{
    __shared__ int s[N];
    s[threadIdx.x] = int(threadIdx.x);
    PLANTED(, __syncthreads());
    y[threadIdx.x] = s[N - 1 - threadIdx.x];
}

enum Way { kBlock, kNamed, kMbarrier, kCluster };

// All threads meet, for the n-th time.
template <Way kWay>
TK_DEVICE void meet(tk::Barrier& b, int n)
{
    if constexpr (kWay == kBlock) {
        __syncthreads();
    } else if constexpr (kWay == kNamed) {
        tk::sync_named(1, 128);
    } else if constexpr (kWay == kMbarrier) {
        tk::arrive_expect(b, 0);
        tk::wait(b, n % 2);
    } else {
        tk::sync_cluster();
    }
}

// Who comes late from one barrier may meet, at the variable, those who have come to the next.
template <class T, Way kWay>
__global__ void missing_second_barrier(T* y)
{
    __shared__ T chosen;
    __shared__ tk::Barrier b;
    if (threadIdx.x == 0) {
        tk::init(b, 128);
        tk::fence_barrier_init();
    }
    __syncthreads();
    int n = 0;
    for (unsigned i = 0; i < 3; ++i) {
        if (threadIdx.x == 32 * i) {
            chosen = T(i);
        }
        meet<kWay>(b, n++);
        y[threadIdx.x] = chosen;
        PLANTED(, meet<kWay>(b, n++));
    }
}

template <int N>
__global__ void forgotten_half(int* y)
{
    __shared__ int s[N];
    if (threadIdx.x < N / PLANTED(2, 1)) {
        s[threadIdx.x] = int(threadIdx.x);
    }
    __syncthreads();
    y[threadIdx.x] = s[N - 1 - threadIdx.x];
}

// What the block before has left is no value.
template <class T>
__global__ void left_by_a_block(T* y)
{
    __shared__ T s[128];
    if (blockIdx.x == 0 || PLANTED(false, true)) {
        s[threadIdx.x] = T(1);
    }
    y[threadIdx.x] = s[threadIdx.x];
}

template <int N>
__global__ void before_the_first(int* y)
{
    __shared__ int s[N];
    s[threadIdx.x] = 1;
    __syncthreads();
    y[threadIdx.x] = s[int(threadIdx.x) - PLANTED(1, 0)];
}

template <int N>
__global__ void large(int* y)
{
    __shared__ int s[N];
    s[threadIdx.x] = int(threadIdx.x);
    __syncthreads();
    y[threadIdx.x] = s[127 - threadIdx.x];
}
