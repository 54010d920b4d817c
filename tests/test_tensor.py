"""Tensors as the core sees them, and the way a call takes.

Without a GPU every call goes to ``slow``, since no tensor is a CUDA one. What makes a CUDA tensor go there (modes, lazy views,
subclasses), and that a plain one does not, is checked on a GPU in test_torch.py. Here: what a description says of each kind of
tensor, which kinds have none, and that ``call`` hands on just what it was given.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from tkjit import _core, _plan

CPU = (1, 0)  # DLPack's device type, and index


def described(x: torch.Tensor) -> tuple:
    """(dtype's name, shape, strides), the rest checked."""
    code, bits, lanes, device, index, shape, strides, align = _core.describe(x)
    assert (device, index) == CPU
    assert align in (1, 2, 4, 8, 16)
    assert x.numel() == 0 or x.data_ptr() % align == 0
    assert x.numel() == 0 or align == 16 or x.data_ptr() % (2 * align) != 0
    return _plan._DTYPES[code, bits * lanes], shape, strides


X = torch.arange(24.0).view(2, 3, 4)

TENSORS: dict[str, torch.Tensor] = {
    "plain": X,
    "that needs a gradient": X.clone().requires_grad_(),
    "that is a Parameter": torch.nn.Parameter(X.clone()),
    "that is a result": X.clone().requires_grad_() * 2,
    "transposed": X.transpose(0, 2),
    "expanded": X[:1].expand(5, 3, 4),
    "sliced": X[:, 1:, ::2],
    "flipped by its strides": torch.as_strided(X, (4, 3), (0, 4), 2),
    "0-d": torch.tensor(1.0),
    "empty": torch.zeros(0, 3),
    "empty inside": torch.zeros(3, 0, 2),
    "deep": torch.zeros((1,) * 20),
    "large by stride": torch.zeros(1).expand(2**40),
    "bool": X > 3,
    "fp8": X.to(torch.float8_e4m3fn),
    "other fp8": X.to(torch.float8_e5m2),
    "bfloat16": X.to(torch.bfloat16),
    "int64": X.long(),
    "complex": torch.complex(X, X),
    "of a storage's middle": X.view(-1)[5:],
    "aligned to one byte": torch.zeros(9, dtype=torch.uint8)[1:],
    "channels last": torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("x", TENSORS.values(), ids=TENSORS)
def test_a_description_is_torchs_own_of_a_tensor(x: torch.Tensor) -> None:
    assert described(x) == (str(x.dtype).removeprefix("torch."), tuple(x.shape), x.stride())


def test_an_inference_tensor_has_a_description() -> None:
    with torch.inference_mode():
        x = torch.zeros(2, 3)
        assert described(x) == ("float32", (2, 3), (3, 1))
    assert described(x) == ("float32", (2, 3), (3, 1))


def test_a_description_needs_no_version_and_leaves_none() -> None:
    x = X.clone().requires_grad_()
    y = x * 1
    before = y._version
    _core.describe(y)
    assert y._version == before and y.requires_grad and y.grad_fn is not None


def test_no_gradient_mode_changes_nothing() -> None:
    with torch.no_grad():
        assert described(X.clone().requires_grad_()) == described(X)


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])


WITHOUT = {
    "meta": lambda: torch.zeros(2, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse rows": lambda: torch.eye(3).to_sparse_csr(),
    "nested": nested,
    "quantized": lambda: torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.qint8),
    "of another kind": lambda: torch.zeros(2).to_mkldnn(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", WITHOUT.values(), ids=WITHOUT)
def test_what_is_no_strided_memory_has_no_description(make: Any) -> None:
    x = make()
    with pytest.raises((RuntimeError, TypeError, ValueError, BufferError, NotImplementedError)):
        _core.describe(x)
    with pytest.raises((RuntimeError, TypeError, ValueError, BufferError, NotImplementedError)):
        _core.Planned(lambda scalars, tensors: (0, (0,), (), ())).raw(x)


def test_a_tensor_inside_a_transform_has_no_description() -> None:
    seen = []

    def f(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(RuntimeError):
            _core.describe(x)
        seen.append(type(x))
        return x.sum()

    torch.vmap(f)(X)
    torch.func.grad(f)(X)
    assert len(seen) == 2


@pytest.mark.parametrize(
    "thing", [None, 5, "text", [1.0], torch.float32, torch.Tensor, object()], ids=lambda t: type(t).__name__
)
def test_what_is_no_tensor_has_no_description(thing: Any) -> None:
    with pytest.raises((RuntimeError, TypeError)):
        _core.describe(thing)


# --- The way of a call ------------------------------------------------------------------------------------------------


class Recorder:
    """An op whose three ways say that they were taken."""

    def __init__(self) -> None:
        self.core = _core.Planned(self.plan)
        self.core.autograd = self.autograd
        self.core.slow = self.slow
        self.taken: list[tuple[str, tuple]] = []

    def plan(self, scalars: tuple, tensors: tuple) -> tuple:
        self.taken.append(("raw", scalars))
        return (0, (0,), (), ())

    def autograd(self, *scalars: Any) -> Any:
        def apply(*tensors: Any) -> str:
            self.taken.append(("autograd", (*tensors, *scalars)))
            return "autograd"

        return apply

    def slow(self, *args: Any) -> str:
        self.taken.append(("slow", args))
        return "slow"


def way(*args: Any) -> str:
    op = Recorder()
    op.core.call(*args)
    (taken,) = op.taken
    assert taken[0] == "raw" or all(a is b for a, b in zip(taken[1], args, strict=True))
    return taken[0]


class Sub(torch.Tensor):
    pass


def zero_tensor() -> torch.Tensor:
    return torch._efficientzerotensor((3,))


SLOW = {
    "CPU": lambda: X,
    "that needs a gradient": lambda: X.clone().requires_grad_(),
    "that is a Parameter": lambda: torch.nn.Parameter(X.clone()),
    "subclass": lambda: X.as_subclass(Sub),
    "meta": lambda: torch.zeros(2, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "nested": nested,
    "lazily negated": lambda: torch.complex(X, X).conj().imag,
    "lazily conjugated": lambda: torch.complex(X, X).conj(),
    "efficient zero": zero_tensor,
    "no tensor": lambda: 5,
    "no tensor but None": lambda: None,
    "empty": lambda: torch.zeros(0),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", SLOW.values(), ids=SLOW)
def test_a_call_with_what_is_no_plain_cuda_tensor_goes_slow(make: Any) -> None:
    thing = make()
    assert way(thing) == way(thing, 1, None) == "slow"


@pytest.mark.filterwarnings("ignore")
def test_a_call_without_tensors_after_the_first_goes_slow_too() -> None:
    assert way(5, X) == "slow"


def test_lazy_views_look_plain_to_dlpack_and_only_the_route_tells_them() -> None:
    lazy = torch.complex(X, X).conj().imag
    assert lazy.is_neg() and described(lazy)[1] == (2, 3, 4)
    assert zero_tensor()._is_zerotensor() and described(zero_tensor())[1] == (3,)


def test_calls_inside_modes_go_slow() -> None:
    with torch.autocast("cpu"):
        assert way(X) == "slow"
    with torch.inference_mode():
        assert way(torch.zeros(2)) == "slow"
    with forward_ad.dual_level():
        assert way(forward_ad.make_dual(X.clone(), X.clone())) == "slow"
    taken = []
    torch.vmap(lambda x: taken.append(way(x)) or x.sum())(X)
    torch.jit.trace(lambda x: taken.append(way(x)) or x * 2, (X,), check_trace=False)
    assert taken == ["slow", "slow"]


def test_fake_tensors_go_slow() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = mode.from_tensor(X)
        assert way(fake) == "slow"
    assert way(fake) == "slow"


def test_a_call_hands_back_what_the_slow_way_returns_or_raises() -> None:
    op = Recorder()
    assert op.core.call(X, 1) == "slow"

    def fail(*args: Any) -> None:
        raise KeyError("from slow")

    op.core.slow = fail
    with pytest.raises(KeyError, match="from slow"):
        op.core.call(X)


def test_the_slow_way_may_put_another_in_its_place() -> None:
    op = Recorder()

    def replace(*args: Any) -> str:
        op.core.slow = None
        return "replaced"

    op.core.slow = replace
    del replace
    assert op.core.call(X) == "replaced"


@pytest.mark.parametrize("missing", ["autograd", "slow"])
def test_a_call_without_its_ways_is_an_error(missing: str) -> None:
    op = Recorder()
    delattr(op.core, missing)
    with pytest.raises(AttributeError, match="autograd and slow"):
        op.core.call(X)
    with pytest.raises(AttributeError, match="autograd and slow"):
        _core.Planned(print).call(X)


def test_a_call_of_too_many_arguments_is_an_error() -> None:
    with pytest.raises(TypeError, match="at most 32 arguments"):
        Recorder().core.call(*[X] * 33)


def test_torchs_dunder_is_what_tkjit_asks_for() -> None:
    assert hasattr(torch.Tensor, "__dlpack_c_exchange_api__")


def test_a_tensor_without_memory_is_refused() -> None:
    """As sharded training leaves it between two uses: with elements, but no storage."""
    x = torch.randn(4)
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="argument 0 has elements, but its memory is not allocated"):
        _core.Planned(print).raw(x)


def test_scalars_that_are_equal_but_not_alike_have_a_function_each() -> None:
    made = []

    def autograd(*arguments: object):
        made.append(arguments)
        return lambda tensor: arguments

    op = _core.Planned(print)
    op.autograd, op.slow = autograd, print
    x = torch.randn(2, requires_grad=True)
    for scalar in (1, True, 1.0, 0.0, -0.0, None, 1, True, 1.0):
        place, got = op.direct(x, scalar)
        assert place is ...
        assert type(got) is type(scalar) and str(got) == str(scalar)
    assert len(made) == 6
