"""layer_norm and rms_norm: widths, layouts, hard rows, parameters, residual. What every op must hold is in test_contract.py.

What takes a ``device`` needs a GPU; the rest runs on the emulator with all checks.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tkjit
from emulate import emulating
from judge import answer, assert_same, check
from test_kernels import compile_together
from tkjit import _rows
from tkjit._device import ARCHS, Device
from tkjit.ops import layer_norm as module
from tkjit.testing import FLOOR, as_layout, assert_close, fenced, poison

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
OPS = {"layer_norm": tkjit.layer_norm, "rms_norm": tkjit.rms_norm}

both = pytest.mark.parametrize("name", list(OPS))
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["fp16", "bf16", "fp32", "fp64"])


@pytest.fixture
def emulated() -> Iterator[str]:
    """The CPU, its kernels run with all checks."""
    tkjit.cache.clear_plans()
    torch.manual_seed(0)
    with emulating("sm_90a"):
        yield "cpu"
    tkjit.cache.clear_plans()


def normal(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def reference(name: str, x: Tensor, dims: int, weight=None, bias=None, eps=None, zero_centered=False, residual=None):
    """In the dtype that it is given."""
    h = x if residual is None else x + residual
    shape = x.shape[x.dim() - dims :]
    weight = weight + 1 if zero_centered and weight is not None else weight
    y = F.rms_norm(h, shape, weight, eps) if name == "rms_norm" else F.layer_norm(h, shape, weight, bias, eps or 1e-5)
    return y if residual is None else (y, h)


def judged(name: str, x: Tensor, *parameters: Any, dims: int = 1, grads=None, label: str = "", **extras: Any) -> Any:
    """Outputs and gradients of all tensors are close to float64's."""
    shape = x.shape[x.dim() - dims :]
    if name == "rms_norm":  # it has no bias
        parameters = parameters[:1]

    def ours(x: Tensor, *rest: Tensor) -> Any:
        return OPS[name](x, shape, *rest, **extras)

    def theirs(x: Tensor, *rest: Tensor) -> Any:
        return reference(name, x, dims, *rest, **extras)

    # A gradient is the difference of larger terms; of a single column of all of them.
    slack = (1, 2 if math.prod(shape) > 1 else 20)
    return check(ours, theirs, (x, *parameters), grads=grads, label=f"{name} {label or tuple(x.shape)}", slack=slack)


def affine(n: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor]:
    return normal(n, dtype=dtype, device=device), normal(n, dtype=dtype, device=device)


# --- Paths, on the emulator --------------------------------------------------------------------------------------------

# Rows of a part of a warp, of a warp, several, whole vectors and not.
ROWS = [(70, 1), (33, 5), (40, 24), (40, 31), (12, 256), (5, 781), (4, 2050), (3, 4096), (2, 4095)]


@both
@every_dtype
def test_rows_of_every_kind_are_close_to_float64(name: str, dtype: torch.dtype, emulated: str):
    for rows, n in ROWS:
        judged(name, normal(rows, n, dtype=dtype), *affine(n, dtype))


@both
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_blocks_that_take_row_after_row_through_rings(name: str, dtype: torch.dtype, emulated, few_multiprocessors):
    for rows, n in ((300, 24), (150, 31), (50, 781), (45, 1024), (40, 2050)):
        judged(name, normal(rows, n, dtype=dtype), *affine(n, dtype))


@both
@pytest.mark.parametrize("dtype", DTYPES[1:3], ids=str)
def test_rows_of_a_cluster(name: str, dtype: torch.dtype, emulated, few_multiprocessors):
    for rows, n in ((3, 33_024), (2, 20_001)):
        judged(name, normal(rows, n, dtype=dtype), *affine(n, dtype))


@both
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_rows_that_no_block_holds(name: str, dtype: torch.dtype):
    tkjit.cache.clear_plans()
    with emulating("sm_80"):
        for n in (40_000, 70_001):
            judged(name, normal(3, n, dtype=dtype), *affine(n, dtype))
            x, other = normal(2, n, dtype=dtype), normal(2, n, dtype=dtype)
            judged_with_residual(name, x, other, *affine(n, dtype))
    tkjit.cache.clear_plans()


@both
def test_every_schedule_gives_the_same_bits(name: str, few_multiprocessors):
    first = None
    torch.manual_seed(0)
    given = [
        (normal(r, n, dtype=t), *affine(n, t)) for r, n, t in ((90, 24, torch.bfloat16), (40, 2050, torch.float32))
    ]
    for seed in range(int(os.environ.get("TKJIT_TEST_SEEDS", "3"))):
        tkjit.cache.clear_plans()
        with emulating("sm_90a", seed=seed):
            found = [t for args in given for t in judged(name, *args).tensors]
        first = first or found
        assert_same(found, first, f"seed {seed}")


# --- Values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)  # float64 can't be judged by itself
def test_mean_far_from_zero_costs_no_digit_of_the_variance(dtype: torch.dtype, emulated: str):
    """At a mean of 1e6 a float32 has four bits behind the point: values and gradients are those of what is left of x."""
    for n, mean in itertools.product((37, 1000, 4096), (1e6, -3e4) if dtype != torch.float16 else (3e4,)):
        x = (torch.randn(4, n, dtype=torch.float64) + mean).to(dtype)
        want = F.layer_norm(x.double(), (n,))
        assert_close(tkjit.layer_norm(x, (n,)), want, at_most=2 * FLOOR[dtype], label=f"{n} columns at {mean:g}")
        g = normal(4, n, dtype=dtype)
        got = answer(lambda x: tkjit.layer_norm(x, x.shape[1:]), (x,), grads=[g]).gradients[0]
        want = answer(lambda x: F.layer_norm(x, x.shape[1:]), (x.double(),), grads=[g.double()]).gradients[0]
        assert_close(got, want, at_most=4 * FLOOR[dtype], label=f"gradient, {n} columns at {mean:g}")


@both
def test_squares_that_overflow_float32_are_no_matter(name: str, emulated: str):
    for n, size in itertools.product((5, 300), (1e15, 1e25, 1e30, 1e36)):
        x = normal(3, n) * size
        want = reference(name, x.double(), 1, eps=1e-5)
        assert_close(OPS[name](x, (n,), eps=1e-5), want, label=f"{n} columns at {size:g}")
    flat = torch.full((2, 64), 2.0**45)
    assert (tkjit.layer_norm(flat, (64,)) == 0).all()


@both
@every_dtype
def test_nan_and_infinity_stay_in_their_row(name: str, dtype: torch.dtype, emulated: str):
    for n, value in itertools.product((5, 100, 2050), (math.nan, math.inf, -math.inf)):
        x = normal(9, n, dtype=dtype)
        g = torch.ones_like(x)
        want = answer(lambda x: OPS[name](x, x.shape[1:]), (x,), grads=[g])
        x[4, n // 2] = value
        got = answer(lambda x: OPS[name](x, x.shape[1:]), (x,), grads=[g])
        others = [i for i in range(9) if i != 4]
        assert_same([t[others] for t in got.tensors], [t[others] for t in want.tensors], f"{value} among {n}")
        theirs = reference(name, x, 1)
        assert torch.equal(got.outputs[0][4].isnan(), theirs[4].isnan()), f"{value} among {n}"


def test_row_of_one_value_is_the_bias(emulated: str):
    for n in (1, 7, 513):
        x, (w, b) = torch.full((3, n), 7.25), affine(n, torch.float32)
        assert_same([tkjit.layer_norm(x, (n,), w, b)], [b.expand(3, n)], f"{n} columns")


def test_eps_of_none_is_that_of_what_is_computed_in(emulated: str):
    for dtype in DTYPES:
        x = torch.full((2, 8), 3e-4, dtype=dtype)
        eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
        assert_close(tkjit.rms_norm(x, (8,)), F.rms_norm(x.double(), (8,), None, eps))


# --- Parameters --------------------------------------------------------------------------------------------------------


def test_either_parameter_may_be_missing_and_be_of_any_dtype(emulated: str):
    for dtype, w_dtype, b_dtype in itertools.product(DTYPES, DTYPES, (None, torch.float32)):
        for n in (31, 64):
            x, w = normal(9, n, dtype=dtype), normal(n, dtype=w_dtype)
            given = (x, w) if b_dtype is None else (x, w, normal(n, dtype=b_dtype))
            mixed_is_right("layer_norm", given, f"{dtype}, {w_dtype}, {b_dtype}, {n} columns")
            if b_dtype is None:
                mixed_is_right("rms_norm", given, f"{dtype}, {w_dtype}, {n} columns")


def mixed_is_right(name: str, given: tuple[Tensor, ...], label: str) -> None:
    """Held to the coarser of a tensor's own precision and that which all is computed in, not to torch, which takes fewer."""
    x, _, *b = given
    if name == "layer_norm":
        absent = answer(lambda x, *b: tkjit.layer_norm(x, x.shape[1:], None, *b), (x, *b)) if b else None
        assert absent is None or len(absent.gradients) == 2
    g = normal(*x.shape, dtype=x.dtype)
    got = answer(lambda x, *rest: OPS[name](x, x.shape[1:], *rest), given, grads=[g])
    want = answer(lambda x, *rest: reference(name, x, 1, *rest), [t.double() for t in given], grads=[g.double()])
    computed = FLOOR[torch.float64 if x.dtype == torch.float64 else torch.float32]
    for i, (a, c, source) in enumerate(zip(got.tensors, want.tensors, (x, *given), strict=True)):
        assert a.dtype == source.dtype, label
        off = ((a.double() - c).abs() / (c.abs() + c.square().mean().sqrt())).max()
        eps = module._EPS64 if name == "rms_norm" and x.dtype == torch.float64 else module._EPS32
        assert off <= 8 * max(FLOOR[a.dtype], computed) + (eps if name == "rms_norm" else 0), (
            f"{label}, tensor {i}: {off}"
        )


@both
def test_zero_centered_weight_counts_as_one_more(name: str, emulated: str):
    for dtype, n in itertools.product(DTYPES, (37, 64)):
        judged(name, normal(6, n, dtype=dtype), *affine(n, dtype), zero_centered=True)
    judged(name, normal(6, 64), zero_centered=True)


def test_parameters_of_any_layout(emulated: str):
    x = normal(7, 64, dtype=torch.bfloat16)
    for layout in ("offset", "sliced", "expanded"):
        judged("layer_norm", x, *(as_layout(layout, t) for t in affine(64, torch.bfloat16)), label=layout)
    w = normal(8, 4).t()
    judged("layer_norm", normal(5, 4, 8), w, w, dims=2, label="transposed")


# --- Layouts -----------------------------------------------------------------------------------------------------------


def views(device: str, dtype: torch.dtype) -> dict[str, tuple[Tensor, int]]:
    """Tensors, and how many dimensions are normalized."""

    def made(*shape: int) -> Tensor:
        return normal(*shape, dtype=dtype, device=device)

    return {
        "padded rows": (made(9, 80)[:, :64], 1),
        "padded, off alignment": (made(9, 81)[:, 3:67], 1),
        "every third row": (made(30, 64)[::3], 1),
        "rows permuted": (made(4, 5, 6, 32).permute(2, 0, 1, 3), 1),
        "expanded outside": (made(1, 70).expand(6, 70), 1),
        "transposed": (made(40, 6).t(), 1),
        "every second column": (made(9, 140)[:, ::2], 1),
        "one value": (made(1).expand(5, 6), 1),
        "expanded along the rows": (made(6, 1).expand(6, 50), 1),
        "two dims": (made(5, 4, 8), 2),
        "two dims, padded": (made(5, 4, 10)[..., :8], 2),
        "two dims, swapped": (made(5, 8, 4).transpose(1, 2), 2),
        "channels last": (made(2, 8, 4, 5).to(memory_format=torch.channels_last), 3),
        "all dims": (made(3, 4, 5).permute(2, 0, 1), 3),
        "a row alone": (made(64), 1),
    }  # fmt: skip


@both
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_views_of_every_kind(name: str, dtype: torch.dtype, emulated: str):
    for what, (x, dims) in views("cpu", dtype).items():
        shape = x.shape[x.dim() - dims :]
        parameters = [normal(*shape, dtype=dtype) for _ in range(2)]
        judged(name, x, *parameters, dims=dims, label=what)
        judged(name, normal(*x.shape, dtype=dtype), *parameters, dims=dims, grads=[x], label=f"gradient {what}")


@both
def test_outputs_are_contiguous_and_nothing_is_read_beside_the_input(name: str, emulated: str):
    for n, offset in itertools.product((7, 64, 781), (0, 1, 3)):
        x = fenced((4, n), torch.bfloat16, "cpu", offset=offset)
        judged(name, x, *affine(n, torch.bfloat16), label=f"{n} columns, {offset} off")
    assert OPS[name](normal(6, 5, 4).permute(2, 1, 0), (6,)).is_contiguous()


@both
def test_empty_tensors_have_empty_results_and_gradients_of_zero(name: str, emulated: str):
    for shape, over in (((0, 8), (8,)), ((4, 0), (0,)), ((4, 0, 3), (3,)), ((4, 0, 3), (0, 3)), ((0,), (0,))):
        poison("cpu", 4096)
        x, w = torch.empty(shape).requires_grad_(), torch.ones(over).requires_grad_()
        y = OPS[name](x, over, w)
        assert y.shape == shape and y.stride() == torch.empty(shape).stride()
        dx, dw = torch.autograd.grad(y.sum(), (x, w))
        assert dx.shape == shape and (dw == 0).all() and dw.shape == over


# --- Residual ----------------------------------------------------------------------------------------------------------


def judged_with_residual(
    name: str, x: Tensor, other: Tensor, *parameters: Tensor, grads=None, label="", eps=None
) -> None:
    eps = eps or (1e-5 if name == "layer_norm" else None)

    def call(x: Tensor, other: Tensor, *rest: Tensor) -> Any:
        return OPS[name](x, x.shape[-1:], *rest, residual=other, eps=eps)

    def theirs(x: Tensor, other: Tensor, *rest: Tensor) -> Any:
        return reference(name, x, 1, *rest, residual=other, eps=eps)

    parameters = parameters if name == "layer_norm" else parameters[:1]
    check(call, theirs, (x, other, *parameters), grads=grads, label=f"{name} {label or tuple(x.shape)}", slack=(2, 3))


@both
@every_dtype
def test_residual_is_added_and_the_sum_returned(name: str, dtype: torch.dtype, emulated: str):
    for rows, n in ((40, 24), (12, 256), (5, 781), (3, 4095)):
        x, other = normal(rows, n, dtype=dtype), normal(rows, n, dtype=dtype)
        judged_with_residual(name, x, other, *affine(n, dtype))
        _, h = OPS[name](x, (n,), residual=other)
        assert_same([h], [x + other], "the sum is rounded as torch's")
    judged_with_residual(name, normal(64, 9, dtype=dtype).t(), normal(9, 70, dtype=dtype)[:, :64], label="strided")


@both
def test_either_output_of_a_residual_alone_has_gradients(name: str, emulated: str):
    for used in (0, 1):
        x, other = (normal(5, 37).requires_grad_() for _ in range(2))
        got = torch.autograd.grad(OPS[name](x, (37,), residual=other)[used].square().sum(), (x, other))
        wide = [t.detach().double().requires_grad_() for t in (x, other)]
        want = torch.autograd.grad(reference(name, wide[0], 1, residual=wide[1])[used].square().sum(), wide)
        for a, b in zip(got, want, strict=True):
            assert_close(a, b, scale=1.0, slack=4, label=f"output {used}")


@both
def test_residual_of_another_kind_is_refused(name: str):
    x = torch.ones(3, 8)
    for other in (torch.ones(3, 8).half(), torch.ones(8), torch.ones(3, 1)):
        with pytest.raises(RuntimeError, match="residual"):
            OPS[name](x, (8,), residual=other)
    with pytest.raises(TypeError, match="'residual'"):
        OPS[name](x, (8,), residual=1.0)


# --- Gradients ---------------------------------------------------------------------------------------------------------


@both
def test_second_and_third_derivatives_are_right(name: str, emulated: str):
    def call(x: Tensor, w: Tensor, *rest: Tensor) -> Any:
        bias = rest[:1] if name == "layer_norm" else ()
        return OPS[name](x, (5,), w, *bias, eps=1e-3, residual=rest[-1], zero_centered=True)

    args = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 5), (5,), (5,), (3, 5))]
    assert torch.autograd.gradcheck(call, args, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, args, fast_mode=True)

    def plain(x: Tensor) -> Tensor:  # the third derivative of torch 2.13's own layer_norm is wrong
        x = x if name == "rms_norm" else x - x.mean(-1, keepdim=True)
        return x * (x.square().mean(-1, keepdim=True) + 1e-3).rsqrt()

    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    found = []
    for function in (lambda x: OPS[name](x, (5,), eps=1e-3), plain):
        value = function(x).pow(3).sum()
        for _ in range(3):
            (grad,) = torch.autograd.grad(value, x, create_graph=True)
            value = grad.pow(2).sum()
        found.append(grad)
    torch.testing.assert_close(*found)


@both
def test_gradient_of_what_asks_for_none_is_not_made(name: str, emulated: str):
    x, (w, b) = normal(4, 16), affine(16, torch.float32)
    parameters = (w, b) if name == "layer_norm" else (w,)
    for wanted in itertools.product((False, True), repeat=1 + len(parameters)):
        leaves = [t.clone().requires_grad_(need) for t, need in zip((x, *parameters), wanted, strict=True)]
        y = OPS[name](leaves[0], (16,), *leaves[1:])
        assert y.requires_grad == any(wanted)
        if any(wanted):
            y.backward(torch.ones_like(y))
        assert [t.grad is not None for t in leaves] == list(wanted)


# --- Errors ------------------------------------------------------------------------------------------------------------


@both
def test_wrong_arguments_raise_what_torch_raises(name: str):
    ours, theirs = OPS[name], getattr(F, name)
    x = torch.ones(3, 8)
    calls = [
        (x, [7]), (x, []), (x, 8), (x, [8.0]), (x, "a"), (x, [2, 3, 8]), (x, [8], torch.ones(7)), (x, [8], [1.0] * 8),
        ([1.0], [8]), (torch.tensor(1.0), []), (torch.tensor(1.0), [1]), (x, None),
        (x, [8], None, "a"), (x.long(), [8]), (x.bool(), [8]),
    ]  # fmt: skip
    for args in calls:
        with pytest.raises(Exception) as want:
            theirs(*args)
        with pytest.raises(type(want.value), match=name):
            ours(*args)
    if name == "layer_norm":
        with pytest.raises(RuntimeError, match="bias"):
            ours(x, [8], None, torch.ones(7))
        with pytest.raises(TypeError, match="'eps'"):
            ours(x, [8], eps=None)


def test_autocast_of_a_cpu_leaves_norms_alone_as_torchs(emulated: str):
    x = normal(4, 16, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        for name, ours in OPS.items():
            assert ours(x, (16,)).dtype == getattr(F, name)(x, (16,)).dtype == torch.bfloat16


@both
def test_autocast_of_a_gpu_gives_torchs_dtype(name: str, device: str):
    x, w, other = (
        normal(4, 16, dtype=torch.bfloat16, device=device),
        normal(16, device=device),
        normal(4, 16, device=device),
    )
    with torch.autocast("cuda", torch.bfloat16):
        theirs = getattr(F, name)(x, (16,), w).dtype  # of rms_norm bfloat16 in torch 2.11, float32 in 2.13
        assert OPS[name](x, (16,), w).dtype == theirs and theirs in (torch.float32, torch.bfloat16)
        y, h = OPS[name](x, (16,), w, residual=other.bfloat16())
        assert y.dtype == h.dtype == theirs


# --- Compiled kernels --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_compile_without_a_spill(arch: str, tmp_path, monkeypatch, request: pytest.FixtureRequest):
    """A selection, another one for each architecture; ``--all-kernels`` takes them all."""
    monkeypatch.setenv("TKJIT_CACHE_DIR", str(tmp_path / "cache"))
    kernels = list(module.all_kernels(Device.of_arch(arch), dims=(1, 2)))
    if not request.config.getoption("--all-kernels"):

        def full(kernel: tuple[str, dict[str, Any]]) -> bool:
            return kernel[1].get("kTeam") == _rows.THREADS

        start = 7 * ARCHS.index(arch)
        chosen = []
        for some, count in (([k for k in kernels if full(k)], 24), ([k for k in kernels if not full(k)], 16)):
            step = max(1, len(some) // count)
            chosen += some[start % step :: step]
        kernels = chosen
    work = [kernels[i : i + 10] for i in range(0, len(kernels), 10)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(lambda some: compile_together(arch, some, "layer_norm"), work)
        facts = [fact for some in found for fact in some]
    faults = [f"{name}: {spill} bytes spilled, {stack} of stack" for name, stack, spill, _ in facts if stack or spill]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("arch", ARCHS)
def test_no_kernel_is_listed_twice(arch: str):
    kernels = [
        module.template("layer_norm").kernel(name, **p).expression
        for name, p in module.all_kernels(Device.of_arch(arch))
    ]
    assert len(set(kernels)) == len(kernels)


# --- On a GPU ----------------------------------------------------------------------------------------------------------

EDGES = [n + d for n in (256, 768, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144) for d in (-1, 0, 1)]
EDGES += [1, 2, 15, 16, 17, 63, 64, 65, 781, 5000, 12289, 50257, 200_003, 1_000_001]


def eps_of(n: int) -> float:
    """Of one column, and of two of a layer norm, a gradient is eps / (x^2 + eps) of its terms: an eps that leaves something."""
    return 1e-5 if n > 2 else 0.5


@both
@every_dtype
def test_widths_on_both_sides_of_every_path(name: str, dtype: torch.dtype, device: str):
    for n in EDGES:
        judged(name, normal(3, n, dtype=dtype, device=device), *affine(n, dtype, device), eps=eps_of(n))


@both
@every_dtype
def test_many_rows_on_every_path(name: str, dtype: torch.dtype, device: str):
    for n in (1, 5, 33, 100, 256, 768, 781, 1024, 4096, 5001, 8192, 16_384, 65_536, 140_000, 300_000):
        rows = max(3, min(300_003, (48 << 20) // (n * dtype.itemsize)))
        judged(name, normal(rows, n, dtype=dtype, device=device), *affine(n, dtype, device), eps=eps_of(n))
        if n <= 16_384:
            few = max(1, rows // 16)
            x, other = (normal(few, n, dtype=dtype, device=device) for _ in range(2))
            judged_with_residual(name, x, other, *affine(n, dtype, device), eps=eps_of(n))


@both
@every_dtype
def test_views_of_every_kind_on_a_gpu(name: str, dtype: torch.dtype, device: str):
    for what, (x, dims) in views(device, dtype).items():
        parameters = [normal(*x.shape[x.dim() - dims :], dtype=dtype, device=device) for _ in range(2)]
        judged(name, x, *parameters, dims=dims, label=what)
        given = normal(*x.shape, dtype=dtype, device=device)
        judged(name, given, *parameters, dims=dims, grads=[x], label=f"gradient {what}")


@both
def test_gradients_have_the_same_bits_every_time(name: str, device: str):
    for n in (64, 1000, 8192, 300_000):
        args = (normal((16 << 20) // n, n, dtype=torch.bfloat16, device=device), *affine(n, torch.bfloat16, device))
        args = args if name == "layer_norm" else args[:2]
        first = answer(lambda x, *rest: OPS[name](x, x.shape[1:], *rest), args)
        for _ in range(10):
            assert_same(answer(lambda x, *rest: OPS[name](x, x.shape[1:], *rest), args).tensors, first.tensors, f"{n}")


@both
def test_more_elements_than_32_bits_count(name: str, device: str, much_memory: Callable[[float], None]):
    much_memory(45)
    rows, n = 1_048_583, 4096
    x = normal(1, n, dtype=torch.bfloat16, device=device).expand(rows, n).contiguous().requires_grad_()
    with torch.no_grad():
        x[-1] = normal(n, device=device)
    y = OPS[name](x, (n,))
    g = normal(1, n, dtype=torch.bfloat16, device=device).expand(rows, n)
    (dx,) = torch.autograd.grad(y, x, g)
    for rows_ in (slice(0, 8), slice(rows // 2, rows // 2 + 8), slice(-8, None)):
        part = x.detach()[rows_].double().requires_grad_()
        want = reference(name, part, 1)
        assert_close(y.detach()[rows_], want.detach(), label=f"rows {rows_}")
        assert_close(
            dx[rows_], torch.autograd.grad(want, part, g[rows_].double())[0], slack=2, label=f"gradient {rows_}"
        )
