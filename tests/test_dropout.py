"""tkjit.dropout, dropout_add, and random numbers in a user's expression."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tkjit
from judge import assert_spills_nothing
from tkjit import _elementwise
from tkjit._device import ARCHS
from tkjit._plan import Spec
from tkjit._torch import drawn_seed
from tkjit.ops.dropout import _chosen
from tkjit.testing import LAYOUTS, as_layout

every_type = pytest.mark.parametrize(
    "dtype", (torch.float16, torch.bfloat16, torch.float32, torch.float64), ids=["fp16", "bf16", "fp32", "fp64"]
)


def philox_words(seed: int, n: int) -> list[int]:
    """The first n words of a seed's subsequence 0, by the text of the paper."""
    words: list[int] = []
    for quad in range(-(-n // 4)):
        c = [quad & 0xFFFFFFFF, quad >> 32, 0, 0]
        k = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
        for _ in range(7):
            a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
            c = [b >> 32 ^ c[1] ^ k[0], b & 0xFFFFFFFF, a >> 32 ^ c[3] ^ k[1], a & 0xFFFFFFFF]
            k = [k[0] + 0x9E3779B9 & 0xFFFFFFFF, k[1] + 0xBB67AE85 & 0xFFFFFFFF]
        words += c
    return words[:n]


def expected_mask(shape: tuple[int, ...], p: float, place: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """What the next call keeps; the generator stays where it is. Two elements of two bytes share a word."""
    device = torch.device(place)
    state = torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state()
    seed = int(drawn_seed(torch.empty(0, device=place)))
    torch.set_rng_state(state) if device.type == "cpu" else torch.cuda.set_rng_state(state)
    n = math.prod(shape)
    if dtype.itemsize > 2:
        return (torch.tensor(philox_words(seed, n), dtype=torch.int64) >= round(p * 2**32)).view(shape).to(place)
    words = torch.tensor(philox_words(seed, (n + 1) // 2), dtype=torch.int64)
    halves = torch.stack([words, (words << 16 | words >> 16) & 0xFFFFFFFF], 1).flatten()[:n]
    return (halves >= round(p * 2**32)).view(shape).to(place)


@every_type
@pytest.mark.parametrize("p", [0.1, 0.5, 0.97])
def test_what_is_dropped_is_what_philox_says_forward_and_backward(p: float, dtype: torch.dtype, place: str) -> None:
    for shape in ((3, 37), (4, 64), (2, 3, 5), (), (1,), (6,)):
        x = torch.randn(shape).to(place, dtype).requires_grad_()
        kept = expected_mask(shape, p, place, dtype)
        y = tkjit.dropout(x, p)
        g = torch.randn(shape).to(place, dtype)
        (dx,) = torch.autograd.grad(y, x, g)
        for got, of in ((y, x), (dx, g)):
            want = torch.where(kept, of.double() / (1 - p), 0.0)
            torch.testing.assert_close(got.double(), want, rtol=2 * torch.finfo(dtype).eps, atol=0)


@every_type
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_does_not_matter(layout: str, dtype: torch.dtype, place: str) -> None:
    for shape in ((4, 6, 16), (3, 5, 7), (2, 8, 4, 8), (8, 32)):
        x = as_layout(layout, torch.randn(shape).to(place, dtype))
        torch.manual_seed(3)
        got = tkjit.dropout(x, 0.4)
        torch.manual_seed(3)
        want = tkjit.dropout(x.contiguous(), 0.4)
        assert torch.equal(got, want), shape
        assert got.stride() == torch.empty_like(x).stride()
        leaf = torch.randn(shape).to(place, dtype).requires_grad_()
        torch.manual_seed(3)
        (dx,) = torch.autograd.grad(tkjit.dropout(leaf, 0.4), leaf, x)
        assert torch.equal(dx, want), "of the gradient"


def test_rate_neighbours_and_calls_are_as_if_independent(place: str) -> None:
    n = 1 << 18 if place == "cuda" else 1 << 14
    for p in (0.5, 0.1, 0.93):
        torch.manual_seed(11)
        x = torch.ones(n, device=place)
        first, second = ((tkjit.dropout(x, p).ne(0).double() - (1 - p)) / math.sqrt(p * (1 - p)) for _ in range(2))
        limit = 5 / math.sqrt(n)
        assert abs(first.mean()) < limit
        assert abs(first.square().mean() - 1) < limit * abs(1 - 2 * p) / math.sqrt(p * (1 - p)) + 1e-9
        assert abs((first * second).mean()) < limit
        for lag in (1, 2, 3, 4, 5, 8, 32, 256, 1024):
            assert abs((first[:-lag] * first[lag:]).mean()) < limit, lag
        assert abs(first.view(-1, 64).sum(1).var() / 64 - 1) < 5 * math.sqrt(2 / (n // 64)) + 0.05


def test_the_generator_decides_and_moves_only_where_something_is_drawn(place: str) -> None:
    x = torch.randn(100, device=place)
    read = torch.cuda.get_rng_state if place == "cuda" else torch.get_rng_state
    torch.manual_seed(5)
    a, b = tkjit.dropout(x), tkjit.dropout(x)
    torch.manual_seed(5)
    assert torch.equal(tkjit.dropout(x), a) and not torch.equal(a, b)
    before = read()
    for more in ({"p": 0.0}, {"p": 1.0}, {"training": False}):
        tkjit.dropout(x, **more)
        tkjit.dropout_add(x, x, **more)
    tkjit.dropout(x[:0])
    assert torch.equal(before, read())


def test_edges_of_p(place: str) -> None:
    x = torch.tensor([1.0, -2.0, math.inf, math.nan], device=place, requires_grad=True)
    assert tkjit.dropout(x, 0.0) is x and tkjit.dropout(x, training=False) is x
    y = tkjit.dropout(x, 1.0)
    (dx,) = torch.autograd.grad(y, x, torch.full_like(y, math.inf))
    assert torch.equal(y, torch.zeros_like(y)) and torch.equal(dx, torch.zeros_like(y))
    assert torch.equal(tkjit.dropout_add(x, torch.ones_like(x), p=1.0), torch.ones_like(x))
    bad = torch.full((4096,), math.nan, device=place)
    assert tkjit.dropout(bad, 0.5).eq(0).any(), "what is dropped is 0, whatever it was"
    for p in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="dropout probability has to be between 0 and 1"):
            tkjit.dropout(x, p)


def test_empty_tensors_are_their_own_result(place: str) -> None:
    for shape in ((0,), (0, 8), (4, 0)):
        x = torch.empty(shape, device=place, requires_grad=True)
        assert tkjit.dropout(x).shape == x.shape
        y = tkjit.dropout_add(x, torch.empty(shape, device=place))
        assert y.shape == x.shape and torch.autograd.grad(y.sum(), x)[0].shape == x.shape


def test_in_place_bumps_the_version_and_has_a_gradient(place: str) -> None:
    x = torch.randn(5, 8, device=place)
    kept = expected_mask((5, 8), 0.5, place)
    want, version = torch.where(kept, 2 * x, 0.0), x._version
    assert tkjit.dropout(x, inplace=True) is x and x._version > version and torch.equal(x, want)
    leaf = torch.randn(5, 8, device=place, requires_grad=True)
    kept = expected_mask((5, 8), 0.5, place)
    y = leaf * 3
    assert tkjit.dropout(y, inplace=True) is y
    y.sum().backward()
    assert torch.equal(leaf.grad, torch.where(kept, 6.0, 0.0))
    with pytest.raises(RuntimeError):
        tkjit.dropout(torch.randn(1, 8, device=place).expand(4, 8), inplace=True)
    assert tkjit.dropout(y.detach(), 1.0, inplace=True).eq(0).all()


def test_only_the_seed_is_kept(place: str) -> None:
    kept: list[Tensor] = []
    x, residual, bias = (torch.randn(s, device=place, requires_grad=True) for s in ((6, 64), (6, 64), (64,)))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        tkjit.dropout(x, 0.3)
        tkjit.dropout_add(x, residual, bias, 0.3)
    assert [t.nbytes for t in kept] == [8, 8]


@every_type
def test_dropout_add_adds_after_dropping(dtype: torch.dtype, place: str) -> None:
    x, residual = (torch.randn(6, 24).to(place, dtype).requires_grad_() for _ in range(2))
    row = torch.randn(24).to(place, dtype).requires_grad_()
    for bias, p in ((None, 0.3), (row, 0.3), (row, 0.0), (row, 1.0)):
        kept = expected_mask((6, 24), p, place, dtype) if 0 < p < 1 else torch.full((6, 24), p == 0, device=place)
        y = tkjit.dropout_add(x, residual, bias, p)
        scale = 1 / (1 - p) if p < 1 else 1.0
        before = x.double() if bias is None else x.double() + bias.double()
        want = torch.where(kept, before * scale, 0.0) + residual.double()
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(y.double(), want, rtol=eps, atol=4 * torch.finfo(torch.float32).eps)
        g = torch.randn(6, 24).to(place, dtype)
        leaves = [t for t in (x, residual, bias) if t is not None]
        dx, dresidual, *dbias = torch.autograd.grad(y, leaves, g)
        torch.testing.assert_close(dx.double(), torch.where(kept, g.double() * scale, 0.0), rtol=2 * eps, atol=0)
        assert torch.equal(dresidual, g)
        for d in dbias:
            torch.testing.assert_close(d, dx.sum(0))
    torch.manual_seed(4)
    wide = tkjit.dropout_add(torch.ones(8, device=place), torch.zeros(3, 8, device=place))
    assert torch.equal(wide[0], wide[1]), "one number for each element that is dropped"
    for needs in ((row,), (residual,)):
        torch.autograd.grad(tkjit.dropout_add(x, residual, row, 0.3).sum(), needs)


def test_second_derivatives(place: str) -> None:
    x, residual, bias = (
        torch.randn(s, device=place, dtype=torch.float64, requires_grad=True) for s in ((3, 5), (3, 5), (5,))
    )

    def seeded(function):
        def run(*args):
            torch.manual_seed(9)
            return function(*args)

        return run

    for function, args in (
        (seeded(lambda x: tkjit.dropout(x, 0.4)), (x,)),
        (seeded(lambda *a: tkjit.dropout_add(*a, 0.4)), (x, residual, bias)),
    ):
        assert torch.autograd.gradcheck(function, args) and torch.autograd.gradgradcheck(function, args)
    g = torch.randn(3, 5, device=place, dtype=torch.float64, requires_grad=True)
    y = tkjit.dropout(x, 0.4)
    (dx,) = torch.autograd.grad(y, x, g, create_graph=True)
    (dg,) = torch.autograd.grad(dx, g, torch.ones_like(dx))
    assert torch.equal(dg.ne(0), y.ne(0)), "the same mask"


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_draws_the_same_again(reentrant: bool, place: str) -> None:
    x = torch.randn(7, 33, device=place, requires_grad=True)

    def layer(t: Tensor) -> Tensor:
        return tkjit.dropout(torch.tanh(t), 0.5)

    torch.manual_seed(2)
    y = layer(x)
    (want,) = torch.autograd.grad(y.sum(), x)
    torch.manual_seed(2)
    again = checkpoint(layer, x, use_reentrant=reentrant)
    again.sum().backward()
    assert torch.equal(y, again) and torch.equal(x.grad, want)


def test_compiles_whole_and_draws_anew_each_time(place: str) -> None:
    torch._dynamo.reset()

    def model(x: Tensor, residual: Tensor) -> Tensor:
        return tkjit.dropout_add(tkjit.dropout(x * 2, 0.5), residual, p=0.3)

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x, residual = (torch.randn(6, 32, device=place, requires_grad=True) for _ in range(2))
    torch.manual_seed(1)
    y = compiled(x, residual)
    got = torch.autograd.grad(y.sum(), (x, residual))
    other = compiled(x, residual)
    torch.manual_seed(1)
    want = model(x, residual)
    assert torch.equal(y, want) and not torch.equal(y, other)
    assert all(map(torch.equal, got, torch.autograd.grad(want.sum(), (x, residual))))


def test_library_op_passes_opcheck(place: str) -> None:
    op, numbers = _chosen(0.3, "x", "residual")
    x, residual = (torch.randn(4, 6, device=place, requires_grad=True) for _ in range(2))
    given = (op.key, "ttnnt", [x, residual, drawn_seed(x)], list(numbers))
    torch.library.opcheck(torch.ops.tkjit.elementwise.default, given)


def test_transforms_are_torchs(place: str) -> None:
    x = torch.ones(5, 8, device=place)
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(tkjit.dropout)(x)
    same = torch.vmap(tkjit.dropout, randomness="same")(x)
    assert all(torch.equal(row, same[0]) for row in same)
    torch.vmap(tkjit.dropout, randomness="different")(x)
    y, tangent = torch.func.jvp(lambda t: tkjit.dropout(t, 0.5), (x,), (x,))
    assert torch.equal(y, tangent)
    torch.func.jvp(lambda t: tkjit.dropout_add(t, t, p=0.5), (x,), (x,))


def test_dtypes_without_kernels_are_torchs(place: str) -> None:
    for dtype in (torch.int64, torch.bool, torch.int32):
        x = torch.ones(4, device=place, dtype=dtype)
        for inplace in (False, True):
            with pytest.raises(Exception) as theirs:
                F.dropout(x, inplace=inplace)
            with pytest.raises(type(theirs.value)):
                tkjit.dropout(x, inplace=inplace)
        assert tkjit.dropout(x, training=False) is x


def test_autocast_leaves_the_dtype(place: str) -> None:
    x = torch.randn(4, 8, device=place)
    with torch.autocast(place, torch.bfloat16):
        assert tkjit.dropout(x).dtype is torch.float32 and tkjit.dropout(x.bfloat16()).dtype is torch.bfloat16
        assert tkjit.dropout_add(x.bfloat16(), x).dtype is torch.float32


# --- random numbers in an expression -----------------------------------------------------------------------------------


def test_an_expression_may_name_random_numbers(place: str) -> None:
    noisy = tkjit.elementwise(
        "T y = x + sigma * T(random)", inputs="T x, T sigma", grad="T dx = dy; T dsigma = dy * T(random);"
    )
    x, sigma = torch.zeros(40, device=place), torch.ones(40, device=place, requires_grad=True)
    y = noisy(x, sigma)
    assert y.min() >= 0 and y.max() < 1 and y.unique().numel() > 30
    (d,) = torch.autograd.grad(y.sum(), sigma)
    assert torch.equal(d, y)
    seed = torch.tensor(77, device=place)
    bits = tkjit.elementwise("y = random_bits", inputs="T x", outputs="i64 y")
    assert bits(x, seed).tolist() == philox_words(77, 40)
    upper = torch.tensor([w >> 8 for w in philox_words(77, 40)], device=place) / 2**24
    assert torch.equal(noisy(x, 1.0, seed), upper)
    with pytest.raises(TypeError, match="the seed must be a tensor of one int64"):
        bits(x, x)
    named = tkjit.elementwise("T y = random * 2", inputs="T random")
    assert torch.equal(named(sigma.detach()), 2 * sigma.detach())


# --- kernels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_compile_for_every_architecture_and_spill_nothing(arch: str) -> None:
    for names in (("x",), ("x", "residual", "bias")):
        op, numbers = _chosen(0.3, *names)
        for dtype in ("bfloat16", "float32", "float64"):
            for strides in ((64, 1), (1, 64)):
                x = Spec(dtype, (64, 64), strides, 0, 16)
                seed = Spec("int64", (), (), 0, 16)
                (launch,) = _elementwise.planner_of(op.text)(*[x] * len(names), *numbers, seed).launches
                assert_spills_nothing(launch, arch)


# --- of a GPU alone ----------------------------------------------------------------------------------------------------


def test_replays_of_a_graph_differ_and_follow_the_seed(device: str) -> None:
    x = torch.ones(1000, device=device, requires_grad=True)

    def step() -> tuple[Tensor, Tensor]:
        y = tkjit.dropout(x)
        return y, torch.autograd.grad(y, x, torch.ones_like(y))[0]

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, dx = step()
    seen = []
    for seed in (1, None, 1):
        if seed is not None:
            torch.manual_seed(seed)
        graph.replay()
        assert torch.equal(y, dx)
        seen.append(y.detach().clone())
    assert not torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])


def test_peak_memory_of_a_layer_is_below_torchs(device: str) -> None:
    def peak(function) -> int:
        x = torch.randn(1 << 24, device=device, dtype=torch.bfloat16, requires_grad=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = x
        for _ in range(4):
            y = function(y, 0.1)
        return torch.cuda.max_memory_allocated() - before

    assert peak(tkjit.dropout) <= 0.7 * peak(F.dropout)


def test_more_than_32_bits_of_elements(much_memory) -> None:
    much_memory(20)
    x = torch.ones(2**32 + 4096, device="cuda", dtype=torch.float16)
    y = tkjit.dropout(x, 0.5)
    for period in (2**31, 2**32):
        assert not torch.equal(y[:4096], y[period : period + 4096])
    rate = y[-(1 << 20) :].ne(0).double().mean().item()
    assert abs(rate - 0.5) < 5 * 0.5 / 1024
