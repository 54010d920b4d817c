"""Reductions of your own from expressions: what an element becomes, how two of them are combined, what is made of the rest.

    python examples/06_your_own_reduction.py

On a machine without a GPU the same kernels run on the CPU, through the emulator.
"""

import torch

import tkjit

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.randn(30, 700, device=DEVICE)

# The length of each row, with its derivative: differentiable, and whole under torch.compile.
norm = tkjit.reduction("A(x) * x", "a + b", identity="0", finish="sqrt(a)", grad="T dx = y == T(0) ? T(0) : dy * x / y")
print("norm:", "right" if torch.allclose(norm(x, dim=-1), torch.linalg.vector_norm(x, dim=-1)) else "wrong")
leaf = torch.randn(3, 4, 5, device=DEVICE, dtype=torch.float64, requires_grad=True)
print("its gradient:", "right" if torch.autograd.gradcheck(lambda t: norm(t, dim=(0, 2)), leaf) else "wrong")

# The largest element and its place: two accumulators, two outputs.
largest = tkjit.reduction(
    "x, index",
    "b.value > a.value || (b.value == a.value && b.place < a.place) ? b : a",
    accumulators="T value, i64 place",
    finish="value, place",
    outputs="T y, i64 argmax",
    grad="T dx = index == argmax ? dy : T(0)",
)
y, argmax = largest(x, dim=0)
print("largest:", "right" if torch.equal(y, x.amax(0)) and torch.equal(argmax, x.argmax(0)) else "wrong")

# The variance in one pass (Welford's, and Chan's of two sets): statements where an expression won't do.
variance = tkjit.reduction(
    "x, 0, 1",
    """
    if (a.n == A(0)) return b;
    if (b.n == A(0)) return a;
    const A n = a.n + b.n, d = b.mean - a.mean;
    return {a.mean + d * b.n / n, a.m2 + b.m2 + d * d * a.n * b.n / n, n};
    """,
    identity="0, 0, 0",
    accumulators="A mean, A m2, A n",
    finish="m2 / (n - 1)",
    grad="T dx = dy * T(2) * (x - T(mean)) / T(n - 1)",
)
print("variance:", "right" if torch.allclose(variance(x + 1000), (x + 1000).double().var().float()) else "wrong")
