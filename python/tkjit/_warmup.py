"""warmup: have kernels compiled before they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from . import cache


def warmup(
    op: Callable[..., Any], calls: Iterable[Tensor | tuple], *, backward: bool = True, threads: int = 4, **kwargs: Any
) -> int:
    """Run an op on tensors like the given ones, so that later calls of the same kind compile nothing.

    Call it before capturing a CUDA graph, before serving, or to fill a cache that is then shipped. NVRTC compiles without the
    GIL, so kernels are made in parallel.

    Args:
        op: Such as ``tkjit.softmax``.
        calls: For each kind of call its tensor, or the tuple of its arguments. Values are not used; dtype, shape, strides,
            alignment and device are.
        backward: Also run the backward, for floating-point tensors.
        threads: How many kernels are compiled at a time.
        **kwargs: Passed to every call.

    Returns:
        How many kernels were compiled.

    Example:
        >>> tkjit.warmup(tkjit.softmax, [torch.empty(8, n, device="cuda") for n in (128, 4096)])
    """
    if isinstance(calls, Tensor):
        raise TypeError("warmup(): 'calls' must be a list of tensors or of tuples of arguments, not one Tensor")
    before = cache.stats()["compiles"]
    low = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None

    def run(call: Tensor | tuple) -> None:
        if low is None:
            return run_once(call)
        with torch.autocast("cuda", low):  # the pool's threads don't inherit it
            return run_once(call)

    def run_once(call: Tensor | tuple) -> None:
        args = (call,) if isinstance(call, Tensor) else tuple(call)
        grad = backward and any(isinstance(arg, Tensor) and arg.is_floating_point() for arg in args)
        leaves = [
            arg.detach().requires_grad_(grad and arg.is_floating_point()) if isinstance(arg, Tensor) else arg
            for arg in args
        ]
        result = op(*leaves, **kwargs)
        if grad and isinstance(result, Tensor) and result.requires_grad:
            wanted = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
            torch.autograd.grad(result, wanted, torch.ones_like(result), allow_unused=True)

    with ThreadPoolExecutor(max_workers=threads) as pool:
        for outcome in [pool.submit(run, call) for call in calls]:
            outcome.result()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return cache.stats()["compiles"] - before
