"""The first call of an op in a fresh process; run by run.py, prints one line of JSON.

    python benchmarks/first_call.py OP CASE DIRECTION cold|warm

CASE is a bench case's label, or "small/<dtype>" for the op's first sample. ``cold``: nothing compiled yet, but NVRTC
loaded by compiling another kernel first. ``warm``: a new process with the disk cache that a cold one left. torch's CUDA
context and the inputs are there in both.
"""

import json
import sys
import time

import torch

from tkjit.testing import DTYPE_NAMES, OpCases, all_timed, as_tuple


def arguments(op: OpCases, label: str) -> tuple[tuple, dict, tuple[int, ...], torch.dtype]:
    """Arguments, keywords, which need gradients, and the dtype of a case."""
    if label.startswith("small/"):
        dtype = next(dtype for dtype, name in DTYPE_NAMES.items() if name == label.removeprefix("small/"))
        sample = op.samples("cuda", dtype)[0]
        return sample.args, dict(sample.kwargs), (0,), dtype
    case = next(case for case in op.bench if case.label == label)
    return case.make("cuda"), dict(case.kwargs), case.grad_of, case.dtype


def milliseconds(call) -> tuple[float, object]:
    torch.cuda.synchronize()
    before = time.perf_counter_ns()
    result = call()
    torch.cuda.synchronize()
    return (time.perf_counter_ns() - before) / 1e6, result


def main(name: str, label: str, direction: str, start: str) -> None:
    op = all_timed()[name]
    args, kwargs, grad_of, dtype = arguments(op, label)
    # Not tkjit's time: the allocator's first blocks of this size, and autograd's thread.
    held = [torch.empty_like(args[0]) for _ in range(3)]
    del held
    one = torch.ones(1, device="cuda", requires_grad=True)
    torch.autograd.grad(one * 2, one, torch.ones_like(one))  # imports sympy, which takes a second
    if start == "cold":
        other = next(d for d in op.dtypes if d != dtype)
        sample = op.samples("cuda", other)[0]
        op.public(*sample.args, **sample.kwargs)
    if direction == "forward":
        ms, _ = milliseconds(lambda: op.public(*args, **kwargs))
    else:
        args = tuple(a.detach().requires_grad_() if i in grad_of else a for i, a in enumerate(args))
        outputs = as_tuple(op.public(*args, **kwargs))
        grads = tuple(map(torch.randn_like, outputs))
        ms, _ = milliseconds(lambda: torch.autograd.grad(outputs, [args[i] for i in grad_of], grads))
    print(json.dumps({"ms": ms}))


if __name__ == "__main__":
    main(*sys.argv[1:])
