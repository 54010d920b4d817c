"""Softmax and log_softmax in Triton, the peer that a user would write after the fused-softmax tutorial.

Persistent programs walk the rows, as many as fit the GPU at once. Rows up to 65536 columns sit in registers, a
power-of-two block each; longer ones are read twice in blocks, first for an online maximum and sum, then to write.
"""

import torch
import triton
import triton.language as tl

_WHOLE_ROW = 65536  # beyond it a block's registers spill so much that reading twice is faster
_LOOP_BLOCK = 8192


@triton.jit
def _forward_row(y, x, rows, cols, BLOCK: tl.constexpr, LOG: tl.constexpr, STAGES: tl.constexpr):
    at = tl.arange(0, BLOCK)
    inside = at < cols
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
        start = row.to(tl.int64) * cols
        v = tl.load(x + start + at, mask=inside, other=-float("inf")).to(tl.float32)
        v = v - tl.max(v, axis=0)
        e = tl.exp(v)
        total = tl.sum(e, axis=0)
        out = v - tl.log(total) if LOG else e / total
        tl.store(y + start + at, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _forward_loop(y, x, rows, cols, BLOCK: tl.constexpr, LOG: tl.constexpr):
    at = tl.arange(0, BLOCK)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        start = row.to(tl.int64) * cols
        # One running maximum and sum a lane, joined at the end.
        top = tl.full((BLOCK,), -1e38, tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        for c in tl.range(0, cols, BLOCK):
            v = tl.load(x + start + c + at, mask=c + at < cols, other=-float("inf")).to(tl.float32)
            higher = tl.maximum(top, v)
            total = total * tl.exp(top - higher) + tl.exp(v - higher)
            top = higher
        peak = tl.max(top, axis=0)
        whole = tl.sum(total * tl.exp(top - peak), axis=0)
        for c in tl.range(0, cols, BLOCK):
            inside = c + at < cols
            v = tl.load(x + start + c + at, mask=inside, other=-float("inf")).to(tl.float32) - peak
            out = v - tl.log(whole) if LOG else tl.exp(v) / whole
            tl.store(y + start + c + at, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _backward_row(dx, dy, y, rows, cols, BLOCK: tl.constexpr, LOG: tl.constexpr, STAGES: tl.constexpr):
    at = tl.arange(0, BLOCK)
    inside = at < cols
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
        start = row.to(tl.int64) * cols
        g = tl.load(dy + start + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(y + start + at, mask=inside, other=0.0).to(tl.float32)
        out = g - tl.exp(v) * tl.sum(g, axis=0) if LOG else v * (g - tl.sum(g * v, axis=0))
        tl.store(dx + start + at, out.to(dx.dtype.element_ty), mask=inside)


@triton.jit
def _backward_loop(dx, dy, y, rows, cols, BLOCK: tl.constexpr, LOG: tl.constexpr):
    at = tl.arange(0, BLOCK)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        start = row.to(tl.int64) * cols
        part = tl.zeros((BLOCK,), tl.float32)
        for c in tl.range(0, cols, BLOCK):
            inside = c + at < cols
            g = tl.load(dy + start + c + at, mask=inside, other=0.0).to(tl.float32)
            if LOG:
                part += g
            else:
                part += g * tl.load(y + start + c + at, mask=inside, other=0.0).to(tl.float32)
        total = tl.sum(part, axis=0)
        for c in tl.range(0, cols, BLOCK):
            inside = c + at < cols
            g = tl.load(dy + start + c + at, mask=inside, other=0.0).to(tl.float32)
            v = tl.load(y + start + c + at, mask=inside, other=0.0).to(tl.float32)
            out = g - tl.exp(v) * total if LOG else v * (g - total)
            tl.store(dx + start + c + at, out.to(dx.dtype.element_ty), mask=inside)


def forward(x: torch.Tensor, log: bool) -> torch.Tensor:
    """softmax, or log_softmax, of contiguous rows."""
    y = torch.empty_like(x)
    _launch(_forward_row, _forward_loop, (y, x), log)
    return y


def backward(dy: torch.Tensor, y: torch.Tensor, log: bool) -> torch.Tensor:
    """The gradient from that of the output and the output."""
    dx = torch.empty_like(y)
    _launch(_backward_row, _backward_loop, (dx, dy, y), log)
    return dx


def _launch(row_kernel, loop_kernel, tensors: tuple[torch.Tensor, ...], log: bool) -> None:
    rows, cols = tensors[0].shape
    if cols <= _WHOLE_ROW:
        block = triton.next_power_of_2(cols)
        settings = {"BLOCK": block, "LOG": log, "STAGES": 2, "num_warps": min(32, max(4, block // 1024))}
        kernel = row_kernel
    else:
        settings = {"BLOCK": _LOOP_BLOCK, "LOG": log, "num_warps": 16}
        kernel = loop_kernel
    key = (kernel, tensors[0].dtype, tensors[0].device, cols, log)
    if key not in _programs:
        _programs[key] = _resident(kernel, (*tensors, rows, cols), settings)
    kernel[(min(rows, _programs[key]),)](*tensors, rows, cols, **settings)


_programs: dict[tuple, int] = {}  # how many programs the GPU holds at once, by kernel and kind of call


def _resident(kernel, args: tuple, settings: dict) -> int:
    compiled = kernel.warmup(*args, grid=(1,), **settings)
    compiled._init_handles()
    device = torch.cuda.get_device_properties(args[0].device)
    threads = 32 * settings["num_warps"]
    per_sm = min(
        device.regs_per_multiprocessor // (threads * max(1, compiled.n_regs)),
        device.shared_memory_per_multiprocessor // max(1, compiled.metadata.shared),
        device.max_threads_per_multi_processor // threads,
    )
    return device.multi_processor_count * max(1, per_sm)
