"""softmax and log_softmax, forward and backward: tkjit beside torch, in value and in time.

    make demo

On a machine without a GPU the same kernels run on the CPU, through the emulator, without times.
"""

import sys
import time

import torch

import tkjit

SHAPES = ((8192, 1024), (4096, 16384), (512, 131072), (4096, 50257))


def milliseconds(run, rounds=30):
    """Median device time of a call, the L2 cache overwritten before each."""
    flush = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(rounds):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[rounds // 2]


def compare(name, ours, torchs, shape, dtype):
    x = torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)
    dy = torch.randn(shape, device="cuda", dtype=dtype)

    started = time.perf_counter()
    y = ours(x, -1)
    torch.cuda.synchronize()
    first = (time.perf_counter() - started) * 1e3
    (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)

    rows = slice(0, 64)  # float64 of the whole would take long
    wide = x[rows].detach().double().requires_grad_()
    want = torchs(wide, -1)
    (want_dx,) = torch.autograd.grad(want, wide, dy[rows].double())
    error, error_dx = ((got[rows].double() - right).abs().max().item() for got, right in ((y, want), (dx, want_dx)))

    z = torchs(x, -1)
    with torch.no_grad():
        forward, forward_torch = milliseconds(lambda: ours(x, -1)), milliseconds(lambda: torchs(x, -1))
    backward = milliseconds(lambda: torch.autograd.grad(y, x, dy, retain_graph=True))
    backward_torch = milliseconds(lambda: torch.autograd.grad(z, x, dy, retain_graph=True))
    gb = x.numel() * x.element_size() / 1e6  # GB/s = gb / ms
    print(
        f"{name:12} {shape!s:15} {str(dtype)[6:]:9} first call {first:6.1f} ms | error {error:.1e} {error_dx:.1e} | "
        f"forward {2 * gb / forward:5.0f} GB/s, torch {2 * gb / forward_torch:5.0f} | "
        f"backward {3 * gb / backward:5.0f} GB/s, torch {3 * gb / backward_torch:5.0f}"
    )


def on_the_cpu():
    """The same kernels through the emulator: exact, not fast, so on small shapes and without times."""
    print("torch sees no GPU: the kernels of an H200 (sm_90a) run on the CPU, through the emulator")
    for name, ours, torchs in (
        ("softmax", tkjit.softmax, torch.softmax),
        ("log_softmax", tkjit.log_softmax, torch.log_softmax),
    ):
        for dtype in (torch.bfloat16, torch.float32):
            for shape in ((64, 1000), (4, 40000)):
                x = torch.randn(shape, dtype=dtype, requires_grad=True)
                dy = torch.randn(shape, dtype=dtype)
                started = time.perf_counter()
                y = ours(x, -1)
                (dx,) = torch.autograd.grad(y, x, dy)
                took = time.perf_counter() - started
                wide = x.detach().double().requires_grad_()
                want = torchs(wide, -1)
                (want_dx,) = torch.autograd.grad(want, wide, dy.double())
                error, error_dx = (
                    (got.double() - right).abs().max().item() for got, right in ((y, want), (dx, want_dx))
                )
                print(
                    f"{name:12} {shape!s:12} {str(dtype)[6:]:9} error {error:.1e} {error_dx:.1e} | {took:.2f} s with compiling"
                )


def main():
    print(f"tkjit {tkjit.__version__}, torch {torch.__version__}")
    if not torch.cuda.is_available():
        return on_the_cpu()
    print(f"on {torch.cuda.get_device_name()}; errors: the largest against float64, of the result and of the gradient")
    for dtype in (torch.bfloat16, torch.float32):
        for shape in SHAPES:
            compare("softmax", tkjit.softmax, torch.softmax, shape, dtype)
        compare("log_softmax", tkjit.log_softmax, torch.log_softmax, SHAPES[1], dtype)
    print(tkjit.cache.stats())


if __name__ == "__main__":
    sys.exit(main())
