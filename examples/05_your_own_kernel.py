"""An op of your own from an expression, and a kernel of your own from CUDA text.

    python examples/05_your_own_kernel.py

On a machine without a GPU the same kernels run on the CPU, through the emulator.
"""

import torch

import tkjit

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Vector add: any shapes that broadcast, any strides, any dtypes.
add = tkjit.elementwise("T z = x + y")
x, y = torch.randn(300, 70, device=DEVICE), torch.randn(70, device=DEVICE)
print("add:", "right" if torch.equal(add(x, y), x + y) else "wrong")

# A custom GELU with its derivative: differentiable, and whole under torch.compile.
gelu = tkjit.elementwise(
    "T y = x * normcdf(x)",
    grad="T dx = dy * (normcdf(x) + x * exp(T(-0.5) * x * x) * T(0.3989422804014327))",
)
leaf = torch.randn(64, device=DEVICE, dtype=torch.float64, requires_grad=True)
print("gelu:", "right" if torch.autograd.gradcheck(gelu, leaf) else "wrong")

# The sum of each row, of CUDA text with a tile parameter. The first launch times the candidates.
ROW_SUM = """
template <int BLOCK>
struct Shared { float partial[BLOCK]; };

template <class T, int BLOCK>
__global__ void row_sum(T* out, const T* x, int n)
{
    auto& partial = tk::shared<Shared<BLOCK>>().partial;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < n; i += BLOCK) { sum += float(x[blockIdx.x * (long long)n + i]); }
    partial[threadIdx.x] = sum;
    for (int half = BLOCK / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) { partial[threadIdx.x] += partial[threadIdx.x + half]; }
    }
    if (threadIdx.x == 0) { out[blockIdx.x] = partial[0]; }
}
"""
row_sum = tkjit.Kernel(ROW_SUM, "row_sum", T=torch.float32, tune=[{"BLOCK": 64}, {"BLOCK": 128}])
sums = torch.empty(300, device=DEVICE)
row_sum.launch(grid=300, block=lambda p: p["BLOCK"], args=(sums, x, tkjit.i32(70)), smem=4 * 128)
print("row_sum:", "right" if torch.allclose(sums, x.sum(-1), atol=1e-4) else "wrong")

# The same GELU of CUDA text: with a backward it is an op, differentiable and whole under torch.compile.
GELU = """
__global__ void forward(double* y, const double* x, int n)
{
    const int i = blockIdx.x * 64 + threadIdx.x;
    if (i < n) { y[i] = x[i] * normcdf(x[i]); }
}
__global__ void backward(double* dx, const double* dy, const double* x, int n)
{
    const int i = blockIdx.x * 64 + threadIdx.x;
    if (i < n) { dx[i] = dy[i] * (normcdf(x[i]) + x[i] * exp(-0.5 * x[i] * x[i]) * 0.3989422804014327); }
}
"""


def each(*tensors):
    n = tensors[0].numel()
    return {"grid": -(-n // 64), "block": 64, "args": (*tensors, tkjit.i32(n))}


slope = tkjit.Kernel(GELU, "backward").op(lambda dy, x: torch.empty_like(x), each)
gelu = tkjit.Kernel(GELU, "forward").op(torch.empty_like, each, backward=lambda dy, x, y: slope(dy, x))
print("gelu of CUDA text:", "right" if torch.autograd.gradcheck(gelu, leaf) else "wrong")
