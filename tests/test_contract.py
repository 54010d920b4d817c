"""What every op must hold, once, over the cases that the ops bring. No op is named here."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import importlib
import inspect
import pkgutil
import sys
import threading
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, jacrev, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import tkjit
from judge import answer, as_leaves, assert_same, check, is_float, mapped, upstream
from memory import resident_kib
from tkjit import testing
from tkjit.kernel import registered
from tkjit.testing import LAYOUTS, OpCases, Sample, as_layout, as_tuple, assert_close, fence_intact, fenced, poison

OPS = testing.all_cases()
MODULES = [info.name for info in pkgutil.iter_modules(importlib.import_module("tkjit.ops").__path__)]
MODULES = [name for name in MODULES if not name.startswith("_")]

every_op = pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
every_dtype = pytest.mark.parametrize(
    ("op", "dtype"),
    [
        pytest.param(op, dtype, id=f"{op.name}-{testing.DTYPE_NAMES[dtype]}")
        for op in OPS.values()
        for dtype in op.dtypes
    ],
)


def tensors_of(sample: Sample) -> list[Tensor]:
    return [arg for arg in sample.args if isinstance(arg, Tensor)]


def moved(sample: Sample, function: Callable[[Tensor], Any]) -> list[Any]:
    """The sample's arguments, the function applied to every tensor."""
    return [function(arg) if isinstance(arg, Tensor) else arg for arg in sample.args]


def is_tame(sample: Sample) -> bool:
    """Few values and none of them hard: what a test by finite differences, or of every entry of a Jacobian, can do."""
    values = [t for t in tensors_of(sample) if is_float(t)]
    return all(0 < t.numel() <= 128 and t.isfinite().all() and t.abs().max() < 10 for t in values)


def tame_samples(op: OpCases, device: str, dtype: torch.dtype) -> list[Sample]:
    found = [sample for sample in op.samples(device, dtype) if is_tame(sample)]
    assert found, f"{op.name} brings no small sample"
    return found


def of_first(function: Callable[..., Any], sample: Sample) -> Callable[[Tensor], Any]:
    """The function of its first argument alone; the others take its precision."""

    def as_first(x: Tensor, other: Any) -> Any:
        return other.to(x.dtype) if is_float(other) else other

    return lambda x: function(x, *(as_first(x, other) for other in sample.args[1:]), **sample.kwargs)


# --- The files of an op, and what its function says --------------------------------------------------------------------


def test_every_op_has_a_template_a_python_file_and_a_test(root: Path):
    assert MODULES, "there are no ops"
    templates = {path.stem for path in (root / "csrc" / "templates").glob("*.cuh")}
    own = {name: {t for t in templates if t == name or t.startswith(f"{name}_")} for name in MODULES}
    assert templates == set().union(*own.values()), "a file of csrc/templates/*.cuh has no op in python/tkjit/ops/*.py"
    for name in MODULES:
        assert name in own[name], f"csrc/templates/{name}.cuh is missing"
        assert (root / "tests" / f"test_{name}.py").is_file(), f"tests/test_{name}.py is missing"
        assert importlib.import_module(f"tkjit.ops.{name}").CASES, f"tkjit.ops.{name} brings no cases"


@every_op
def test_function_is_public_and_says_what_it_takes_returns_and_raises(op: OpCases):
    assert op.name in tkjit.__all__ and op.name in dir(tkjit) and getattr(tkjit, op.name) is op.public
    signature = inspect.signature(op.public)
    hints = typing.get_type_hints(op.public)
    assert set(hints) == {*signature.parameters, "return"}, f"{op.name} lacks a type hint"
    doc = inspect.getdoc(op.public) or ""
    whole = doc
    for other in OPS:  # a twin may refer to the other's docstring
        if f":func:`{other}`" in doc:
            whole += inspect.getdoc(OPS[other].public) or ""
    for section in ("Args:\n", "Returns:\n", "Raises:\n"):
        assert section in whole, f"{op.name}'s docstring has no {section.strip()}"
    for parameter in signature.parameters:
        assert f"\n    {parameter}: " in whole, f"{op.name}'s docstring doesn't explain {parameter}"


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_op"):
        _ = tkjit.no_such_op


# --- Wrong arguments, without a GPU ------------------------------------------------------------------------------------


@every_op
def test_what_is_no_tensor_is_a_type_error(op: OpCases):
    sample = op.samples("cpu", torch.float32)[0]
    for value in (None, 1.0, [1.0, 2.0], "x", sample.args[0].numpy()):
        with pytest.raises(TypeError, match=op.name):
            op.public(value, *sample.args[1:], **sample.kwargs)


@every_op
def test_tensor_of_the_cpu_without_a_compiler_is_a_device_error_that_says_what_to_install(op: OpCases, monkeypatch):
    monkeypatch.setenv("TKJIT_CXX", "no-such-compiler")
    tkjit.cache.clear_plans()
    for sample in op.samples("cpu", torch.float32):
        if sample.args[0].numel() > 0:
            for args in (sample.args, as_leaves(sample.args)):
                with pytest.raises(tkjit.DeviceError, match=r"no-such-compiler.*install|Install"):
                    op.public(*args, **sample.kwargs)


@every_op
def test_dtype_that_torch_refuses_is_refused_with_torchs_type(op: OpCases):
    sample = op.samples("cpu", torch.float32)[0]
    wrong = torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn
    for dtype in wrong:
        args = moved(sample, lambda t, dtype=dtype: t.to(dtype))
        try:
            want = op.reference(*args, **sample.kwargs)
        except Exception as error:
            theirs = error
        else:  # then there are kernels, or torch's own ops, or a clear no
            try:
                assert all(map(torch.equal, as_tuple(op.public(*args, **sample.kwargs)), as_tuple(want))), dtype
                continue
            except NotImplementedError:
                theirs = NotImplementedError("no kernel takes it")
        with pytest.raises(type(theirs), match=op.name) as ours:
            op.public(*args, **sample.kwargs)
        assert type(ours.value) is type(theirs), f"{dtype}: {ours.value!r}, torch: {theirs!r}"


@every_op
def test_sparse_tensor_goes_to_torch(op: OpCases):
    sample = op.samples("cpu", torch.float32)[0]
    args = moved(sample, lambda t: t.to_sparse_csr() if t.ndim == 2 else t.to_sparse())
    try:
        want = op.reference(*args, **sample.kwargs)
    except Exception as error:
        with pytest.raises(type(error)):
            op.public(*args, **sample.kwargs)
    else:
        assert torch.equal(op.public(*args, **sample.kwargs).to_dense(), want.to_dense())


# --- Tracing, without a GPU --------------------------------------------------------------------------------------------


def described(value: Any) -> list[tuple]:
    return [(t.shape, t.stride(), t.dtype, t.device.type, t.requires_grad) for t in as_tuple(value)]


@every_dtype
def test_meta_tensors_give_torchs_shape_strides_and_dtype(op: OpCases, dtype: torch.dtype):
    for sample in op.samples("cpu", dtype):
        for layout in ("contiguous", "transposed", "sliced"):
            args = moved(sample, lambda t, layout=layout: as_layout(layout, t).to("meta"))
            for given in (args, as_leaves(args)):
                ours, theirs = op.public(*given, **sample.kwargs), op.reference(*given, **sample.kwargs)
                assert described(ours) == described(theirs), f"{sample.label}, {layout}"


def faked(sample: Sample, device: str = "cuda") -> list[Any]:
    """The sample's arguments as fake tensors of a GPU, which needn't be there; inside a FakeTensorMode."""
    return moved(sample, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device))


@every_dtype
def test_fake_tensors_give_torchs_shape_strides_and_dtype(op: OpCases, dtype: torch.dtype):
    for sample in op.samples("cpu", dtype):
        with FakeTensorMode():
            args = faked(sample)
            assert described(op.public(*args, **sample.kwargs)) == described(op.reference(*args, **sample.kwargs))


@every_dtype
def test_fake_tensors_have_gradients(op: OpCases, dtype: torch.dtype, device: str):
    """A torch without CUDA ends the process here, in its own autograd."""
    for sample in op.samples("cpu", dtype):
        with FakeTensorMode():
            args = faked(sample)
            ours, theirs = (answer(f, args, sample.kwargs, like(f, args, sample)) for f in (op.public, op.reference))
            assert described(ours.outputs) == described(theirs.outputs), sample.label
            shapes = ([(t.shape, t.dtype, t.device) for t in found.gradients] for found in (ours, theirs))
            assert next(shapes) == next(shapes), sample.label


def like(function: Callable, args: list[Any], sample: Sample) -> list[Tensor]:
    return [torch.empty_like(out) for out in as_tuple(function(*args, **sample.kwargs))]


def names_in(graph: torch.fx.Graph) -> set[str]:
    """Of the ops, and of which, where one stands for many."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    return {" ".join([str(node.target), *(arg for arg in node.args[:1] if isinstance(arg, str))]) for node in calls}


@every_op
def test_make_fx_traces_our_ops_forward_and_backward(op: OpCases):
    sample = op.samples("cpu", torch.float32)[0]

    def step(*args: Any) -> Any:
        return answer(op.public, args, sample.kwargs, like(op.public, args, sample)).tensors

    for mode in ("real", "fake", "symbolic"):
        names = names_in(make_fx(step, tracing_mode=mode)(*moved(sample, lambda t: t.to("meta"))).graph)
        assert len({name for name in names if name.startswith("tkjit.")}) >= 2, f"{mode}: traced {names}"
    with FakeTensorMode():
        names = names_in(make_fx(lambda *args: op.public(*args, **sample.kwargs))(*faked(sample)).graph)
    assert {name for name in names if name.startswith("tkjit.")}, f"traced {names}"


@every_op
@pytest.mark.parametrize("strict", [False, True])
def test_export_keeps_our_op_as_one_node(op: OpCases, strict: bool):
    sample = op.samples("cpu", torch.float32)[0]

    class Model(torch.nn.Module):
        def forward(self, *given: Tensor) -> Any:
            tensors = iter(given)
            args = [next(tensors) if isinstance(arg, Tensor) else arg for arg in sample.args]
            return op.public(*args, **sample.kwargs)

    with FakeTensorMode():
        args = [arg for arg in faked(sample) if isinstance(arg, Tensor)]
    exported = torch.export.export(Model(), tuple(args), strict=strict)
    assert {name for name in names_in(exported.graph) if name.startswith("tkjit")}, exported.graph


@every_op
def test_transforms_of_cpu_tensors_are_torchs(op: OpCases):
    check_transforms(op, "cpu", torch.float32)


def check_transforms(op: OpCases, device: str, dtype: torch.dtype) -> None:
    """Every transform of torch.func, and forward-mode AD, gives what torch's op gives under it."""
    torch.manual_seed(0)
    for sample in tame_samples(op, device, dtype)[:4]:
        x = sample.args[0]
        batch, tangent = torch.randn(3, *x.shape, device=device).to(dtype), torch.randn_like(x)
        ours, theirs = (transforms(of_first(f, sample), x, batch, tangent) for f in (op.public, op.reference))
        for name, got in ours.items():
            for a, b in zip(as_tuple(got), as_tuple(theirs[name]), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=f"{name} of {sample.label}")


def transforms(function: Callable, x: Tensor, batch: Tensor, tangent: Tensor) -> dict[str, Any]:
    def total(x: Tensor) -> Tensor:
        return sum((t * tangent).sum() for t in as_tuple(function(x)))

    with torch.autograd.forward_ad.dual_level():
        both = torch.autograd.forward_ad.make_dual(x, tangent)
        forward_mode = torch.autograd.forward_ad.unpack_dual(function(both)).tangent
    return {
        "vmap": vmap(function)(batch),
        "vmap over the last dim": vmap(function, in_dims=-1, out_dims=-1)(batch.movedim(0, -1)),
        "grad": grad(total)(x),
        "vmap of grad": vmap(grad(total))(batch),
        "jvp": jvp(function, (x,), (tangent,))[1],
        "jacrev": jacrev(function)(x),
        "forward-mode AD": forward_mode,
    }


@every_op
def test_jit_trace_is_torchs(op: OpCases):
    sample = op.samples("cpu", torch.float32)[0]
    traced = torch.jit.trace(of_first(op.public, sample), (sample.args[0],), check_trace=False)
    torch.testing.assert_close(
        traced(sample.args[0]), op.reference(*sample.args, **sample.kwargs), rtol=1e-5, atol=1e-6
    )


@every_op
def test_torch_function_sees_the_public_function(op: OpCases):
    seen = []

    class Watcher(Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen.append(function)
            return "watched"

    sample = op.samples("cpu", torch.float32)[0]
    args = [sample.args[0].as_subclass(Watcher), *sample.args[1:]]
    seen.clear()
    assert op.public(*args, **sample.kwargs) == "watched"
    assert seen == [op.public]


# --- Values ------------------------------------------------------------------------------------------------------------


@every_dtype
def test_values_and_gradients_are_as_close_to_float64_as_torchs(op: OpCases, dtype: torch.dtype, device: str):
    for sample in op.samples(device, dtype):
        before = [t.clone() for t in tensors_of(sample)]
        got = check(op.public, op.reference, sample.args, sample.kwargs, slack=op.slack, label=sample.label)
        assert_same(tensors_of(sample), before, f"{sample.label}: an input was changed")
        torchs = as_tuple(op.reference(*sample.args, **sample.kwargs))
        for ours, theirs in zip(got.outputs, torchs, strict=True):
            assert ours.is_contiguous() and (ours.device, ours.dtype) == (theirs.device, theirs.dtype), sample.label


@every_dtype
def test_layout_of_inputs_and_gradients_does_not_matter(op: OpCases, dtype: torch.dtype, device: str):
    for sample in op.samples(device, dtype):
        if not all(t.numel() for t in tensors_of(sample)):
            continue
        for layout in LAYOUTS:
            args = moved(sample, lambda t, layout=layout: as_layout(layout, t))
            label = f"{sample.label}, {layout} input"
            got = check(op.public, op.reference, args, sample.kwargs, slack=op.slack, label=label)
            assert all(torch.empty_like(out).stride() == out.stride() for out in got.outputs), f"{label}: holes"
        outputs = answer(op.reference, sample.args, sample.kwargs).outputs
        for layout in LAYOUTS:
            grads = [as_layout(layout, g) for g in upstream(outputs)]
            check(
                op.public,
                op.reference,
                sample.args,
                sample.kwargs,
                grads,
                slack=op.slack,
                label=f"{sample.label}, {layout} gradient",
            )
        constant = [torch.full((), 0.5, dtype=out.dtype, device=device).expand(out.shape) for out in outputs]
        label = f"{sample.label}, gradient of sum()"
        check(op.public, op.reference, sample.args, sample.kwargs, constant, slack=op.slack, label=label)


@every_dtype
def test_nothing_outside_the_inputs_is_read_or_written(op: OpCases, dtype: torch.dtype, device: str):
    for sample in op.samples(device, dtype):
        for offset in (0, 1, 3):
            walls = moved(sample, lambda t, offset=offset: _behind_walls(t, offset))
            plain = moved(sample, lambda t, offset=offset: _off_alignment(t, offset))
            grads = upstream(answer(op.reference, plain, sample.kwargs).outputs)
            got = answer(op.public, walls, sample.kwargs, [_behind_walls(g, offset) for g in grads])
            want = answer(op.public, plain, sample.kwargs, [_off_alignment(g, offset) for g in grads])
            assert_same(got.tensors, want.tensors, f"{sample.label}, offset {offset}")
            assert all(map(fence_intact, (t for t in walls if is_float(t)))), f"{sample.label}: a fence was overwritten"


def _behind_walls(tensor: Tensor, offset: int) -> Tensor:
    if not is_float(tensor):
        return tensor
    return fenced(tensor.shape, tensor.dtype, str(tensor.device), offset=offset).copy_(tensor)


def _off_alignment(tensor: Tensor, offset: int) -> Tensor:
    return tensor.new_zeros(tensor.numel() + offset)[offset:].view(tensor.shape).copy_(tensor)


@every_dtype
def test_every_element_is_written(op: OpCases, dtype: torch.dtype, device: str):
    for sample in op.samples(device, dtype):
        want = answer(op.public, sample.args, sample.kwargs)
        grads = upstream(want.outputs)
        poison(device, 1 << 20)
        got = answer(op.public, sample.args, sample.kwargs, grads)
        assert_same(got.tensors, want.tensors, sample.label)


@every_op
def test_thirty_runs_give_the_same_bits(op: OpCases, device: str):
    for case in _some_bench_cases(op):
        args = _smaller(case.make(device), case.batch, 1 << 26)
        with deterministic():
            first = answer(op.public, args, case.kwargs)
            for _ in range(29):
                assert_same(answer(op.public, args, case.kwargs).tensors, first.tensors, case.label)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _some_bench_cases(op: OpCases) -> list[testing.BenchCase]:
    """One of each group and dtype and every third of the others."""
    seen, some = set(), []
    for i, case in enumerate(op.bench):
        if (case.group, case.dtype) not in seen or i % 3 == 0:
            some.append(case)
        seen.add((case.group, case.dtype))
    return some


def _smaller(args: tuple, batch: int | None, bytes_: int) -> list[Any]:
    """The first slices of a bench case, about so many bytes of them; the whole where it can't be cut."""
    if batch is None:
        return list(args)
    size = max(t.nbytes for t in args if isinstance(t, Tensor))
    return _rows(args, batch, slice(0, max(1, batch * bytes_ // max(size, 1))))


def _rows(args: Any, batch: int, rows: slice) -> list[Any]:
    return [t[rows] if isinstance(t, Tensor) and t.ndim and t.shape[0] == batch else t for t in args]


@every_op
def test_bits_of_a_row_depend_on_no_other_row(op: OpCases, device: str):
    """At the size of the benchmarks and alone, first or last of few: the same bits."""
    with deterministic():
        _bits_of_a_row(op, device)


def _bits_of_a_row(op: OpCases, device: str) -> None:
    for case in op.bench:
        if case.batch is None:
            continue
        args = case.make(device)
        whole = answer(op.public, args, case.kwargs)
        grads = upstream(whole.outputs)
        for few in (1, 2, 3, 7, 33):
            for rows in (slice(0, few), slice(case.batch - few, case.batch)):
                if few >= case.batch:
                    continue
                part = answer(op.public, _rows(args, case.batch, rows), case.kwargs, _rows(grads, case.batch, rows))
                for a, b in zip(part.tensors, whole.tensors, strict=True):
                    if b.shape[0] == case.batch:  # not the gradient of a weight, to which all rows add
                        assert_same([a], [b[rows]], f"{case.label}, rows {rows}")


# --- autograd ----------------------------------------------------------------------------------------------------------


@every_op
def test_gradient_is_asked_for_as_torch_asks(op: OpCases, device: str):
    sample = op.samples(device, torch.float32)[0]
    out = as_tuple(op.public(*as_leaves(sample.args), **sample.kwargs))[0]
    assert out.requires_grad and out.grad_fn is not None
    assert not as_tuple(op.public(*sample.args, **sample.kwargs))[0].requires_grad
    with torch.no_grad():
        assert not as_tuple(op.public(*as_leaves(sample.args), **sample.kwargs))[0].requires_grad
    with torch.inference_mode():
        inside = as_tuple(op.public(*as_leaves(sample.args), **sample.kwargs))[0]
        assert inside.is_inference() and not inside.requires_grad
        made = moved(sample, torch.clone)
    assert_same(as_tuple(op.public(*made, **sample.kwargs)), as_tuple(op.public(*sample.args, **sample.kwargs)))
    assert_same([inside], [out])


@every_op
def test_parameters_hooks_and_retained_graphs(op: OpCases, device: str):
    sample = op.samples(device, torch.float32)[0]
    want = answer(op.public, sample.args, sample.kwargs)
    x = torch.nn.Parameter(sample.args[0].clone())
    seen: list[Tensor] = []
    x.register_hook(seen.append)
    out = as_tuple(of_first(op.public, sample)(x))
    out[0].register_hook(seen.append)
    out[0].retain_grad()
    torch.autograd.backward(out, upstream(out), retain_graph=True)
    once = x.grad.clone()
    torch.autograd.backward(out, upstream(out))
    assert_same([once, x.grad, seen[0], seen[1]], [want.gradients[0], 2 * once, upstream(out)[0], once])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.backward(out, upstream(out))


@every_op
def test_derivatives_agree_with_finite_differences(op: OpCases, device: str):
    for sample in tame_samples(op, device, torch.float64):
        x = sample.args[0].detach().requires_grad_()
        function = of_first(op.public, sample)
        assert torch.autograd.gradcheck(function, (x,), fast_mode=True), sample.label
        assert torch.autograd.gradgradcheck(function, (x,), fast_mode=True), sample.label


@every_dtype
def test_second_derivative_is_torchs(op: OpCases, dtype: torch.dtype, device: str):
    def twice(function: Callable, args: Any, convert: Callable[[Tensor], Tensor] = lambda t: t) -> list[Tensor]:
        leaves = as_leaves(mapped(lambda t: convert(t.detach()), args))
        floats = [leaf for leaf in leaves if is_float(leaf)]
        outputs = as_tuple(function(*leaves, **sample.kwargs))
        grads = [g.detach().requires_grad_() for g in map(convert, upstream(own))]
        first = torch.autograd.grad(outputs, floats, grads, create_graph=True)
        again = [convert(g) for g in upstream([t.to(dtype) for t in first], seed=2)]
        # Of a sum the gradient doesn't depend on its terms.
        return list(torch.autograd.grad(first, [*floats, *grads], again, allow_unused=True, materialize_grads=True))

    for sample in op.samples(device, dtype):
        if any(t.isinf().any() or t.abs().amax() > 1e3 for t in tensors_of(sample) if is_float(t) and t.numel()):
            continue
        own = as_tuple(op.reference(*sample.args, **sample.kwargs))
        ours, theirs = twice(op.public, sample.args), twice(op.reference, sample.args)
        for got, want, torchs in zip(ours, twice(op.reference, sample.args, Tensor.double), theirs, strict=True):
            # Differences of products of three: a half has few digits left, in torch's as in ours.
            scale = want.abs().amax() + 1e-3 if want.numel() else None
            assert_close(got, want, torchs, scale=scale, fudge=4, label=sample.label)


@every_op
def test_checkpointing_and_saved_tensor_hooks_change_nothing(op: OpCases, device: str):
    from torch.utils.checkpoint import checkpoint

    def strided_anew(t: Tensor) -> Tensor:
        return as_layout("sliced", t)

    for sample in op.samples(device, torch.float32):
        want = answer(op.public, sample.args, sample.kwargs)
        for reentrant in (False, True):
            leaves = as_leaves(sample.args)
            function = functools.partial(op.public, **sample.kwargs)
            out = as_tuple(checkpoint(function, *leaves, use_reentrant=reentrant))
            torch.autograd.backward(out, upstream(out))
            got = [t.detach() for t in out] + [leaf.grad for leaf in leaves if is_float(leaf)]
            assert_same(got, want.tensors, f"{sample.label}, reentrant {reentrant}")
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            assert_same(
                answer(op.public, sample.args, sample.kwargs).tensors, want.tensors, f"{sample.label} on the CPU"
            )
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, strided_anew):
            got = answer(op.public, sample.args, sample.kwargs)
        for a, b in zip(got.tensors, want.tensors, strict=True):
            # Sums of a thousand terms in another order.
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-5, equal_nan=True), (
                f"{sample.label}: saved with other strides"
            )


@every_op
def test_transforms_are_torchs(op: OpCases, device: str):
    check_transforms(op, device, torch.float32)


@every_op
def test_autocast_gives_torchs_dtypes(op: OpCases, device: str):
    for low in (torch.float16, torch.bfloat16):
        for given in (torch.float32, low):
            for cached in (True, False):

                def inside(function: Callable, low: torch.dtype = low, cached: bool = cached) -> Callable:
                    def run(*args: Any, **kwargs: Any) -> Any:
                        wide = args[0].dtype == torch.float64
                        with torch.autocast(device, low, enabled=not wide, cache_enabled=cached):
                            return function(*args, **kwargs)  # the backward runs outside

                    return run

                for sample in op.samples(device, given)[:6]:
                    what = f"{sample.label}, autocast to {low}, {given} given, cache {cached}"
                    rounded_to = low if low in _dtypes_made(inside(op.reference), sample) else None
                    check(
                        inside(op.public), inside(op.reference), sample.args, sample.kwargs, slack=op.slack, label=what,
                        rounded_to=rounded_to,
                    )  # fmt: skip


def _dtypes_made(function: Callable, sample: Sample) -> set[torch.dtype]:
    """Of all the tensors that torch's ops return on the way to the result."""
    made = set()

    class Watcher(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            found = function(*args, **(kwargs or {}))
            made.update(t.dtype for t in tree_leaves(found) if isinstance(t, Tensor))
            return found

    with Watcher():
        function(*sample.args, **sample.kwargs)
    return made


# --- What is not a plain tensor ------------------------------------------------------------------------------------------


@every_op
def test_tensors_that_are_not_plain_memory(op: OpCases, device: str):
    """Each of these unpacks as if it were plain, and would give a wrong answer without a word."""
    sample = op.samples(device, torch.float32)[0]
    x, ours, theirs = sample.args[0], of_first(op.public, sample), of_first(op.reference, sample)

    negative = torch.complex(torch.zeros_like(x), x).conj().imag
    assert negative.is_neg()
    assert_same([ours(negative)], [ours(-x)], "a lazily negated view")

    zeros = torch._efficientzerotensor(x.shape, device=device)
    assert torch.equal(ours(zeros), theirs(torch.zeros_like(x))), "zeros without memory"

    class Plain(Tensor):
        pass

    out = ours(x.as_subclass(Plain))
    assert type(out) is Plain and type(theirs(x.as_subclass(Plain))) is Plain
    assert_same([out.as_subclass(Tensor)], [ours(x)], "a subclass")

    buffer = torch.nn.Buffer(x)
    assert_same([ours(buffer).as_subclass(Tensor)], [ours(x)], "a buffer")

    with FakeTensorMode(allow_non_fake_inputs=True):
        assert described(ours(x)) == described(theirs(x)), "under a fake mode"


@every_op
def test_dispatch_modes_see_our_ops(op: OpCases, device: str):
    sample = op.samples(device, torch.float32)[0]
    names = {
        " ".join([str(f), *(arg for arg in args[:1] if isinstance(arg, str))]) for f, args in _recorded(op, sample)
    }
    assert len({name for name in names if name.startswith("tkjit.")}) >= 2, names


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls.append((function, tuple(a.detach() if isinstance(a, Tensor) else a for a in args)))
        return function(*args, **(kwargs or {}))


def _recorded(op: OpCases, sample: Sample) -> list[tuple[Any, tuple]]:
    """Every call of a library op that a forward and a backward make."""
    with _Recorder() as recorder:
        answer(op.public, sample.args, sample.kwargs)
    return [call for call in recorder.calls if call[0].namespace == "tkjit"]


def test_library_ops_pass_opcheck(device: str):
    """Schema, autograd registration, fake kernel, and tracing with dynamic shapes; no library op is left out but those that run
    what users write, which the registration brings whether an op here is made of them or not: their own tests check them."""
    users = {f.name() for f in vars(tkjit.kernel).values() if isinstance(f, torch._ops.OpOverload)}
    checked = set()
    for op in OPS.values():
        for dtype in (torch.float32, torch.float16):
            for sample in tame_samples(op, device, dtype)[:2]:
                for function, args in _recorded(op, sample):
                    # The gradient of an expression may be an op that has none.
                    once = isinstance(args[0], str) and registered[args[0]].grad is None
                    given = (
                        tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, tuple(args))
                        if once
                        else tuple(args)
                    )
                    torch.library.opcheck(function, given)
                    if not once:
                        torch.library.opcheck(function, tuple(as_leaves(args)))
                    checked.add(function.name())
    known = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("tkjit::")}
    assert known - users <= checked <= known


# --- torch.compile and CUDA graphs -------------------------------------------------------------------------------------


def _backend() -> str:
    from torch.utils._triton import has_triton

    return "inductor" if has_triton() else "aot_eager"


@every_op
def test_compiles_without_a_break_forward_and_backward(op: OpCases, device: str):
    torch._dynamo.reset()
    for sample in op.samples(device, torch.float32)[:2]:

        def model(x: Tensor, function: Callable = op.public, sample: Sample = sample) -> Any:
            return as_tuple(of_first(function, sample)(x * 2))[0] + 1

        compiled = torch.compile(model, fullgraph=True, backend=_backend())
        x = sample.args[0]
        check(compiled, lambda x, model=model: model(x, op.reference), (x,), slack=op.slack, label=sample.label)
        assert_same(answer(compiled, (x,)).gradients, answer(model, (x,)).gradients, sample.label)


@every_op
def test_compiles_with_dynamic_shapes(op: OpCases, device: str):
    for sample in op.samples(device, torch.float32):
        torch._dynamo.reset()
        compiled = torch.compile(of_first(op.public, sample), fullgraph=True, dynamic=True, backend="aot_eager")
        check(compiled, of_first(op.reference, sample), sample.args[:1], slack=op.slack, label=sample.label)


@every_op
def test_compiles_under_autocast(op: OpCases, device: str):
    torch._dynamo.reset()
    for low in (torch.float16, torch.bfloat16):
        sample = op.samples(device, low)[0]
        compiled = torch.compile(of_first(op.public, sample), fullgraph=True, backend="aot_eager")
        with torch.autocast(device, low):
            assert described(compiled(sample.args[0])) == described(op.reference(*sample.args, **sample.kwargs)), low


@every_op
def test_graph_of_forward_and_backward_replays_on_new_input(op: OpCases, device: str):
    for sample in op.samples(device, torch.float32):
        leaves = as_leaves(moved(sample, torch.clone))
        floats = [leaf for leaf in leaves if is_float(leaf)]
        with torch.no_grad():  # a graph that lives on would tie the leaves to the stream it was made on
            grads = upstream(as_tuple(op.public(*leaves, **sample.kwargs)))

        def step(
            leaves: list = leaves, floats: list = floats, grads: list = grads, sample: Sample = sample
        ) -> list[Tensor]:
            outputs = as_tuple(op.public(*leaves, **sample.kwargs))
            return [*(out.detach() for out in outputs), *torch.autograd.grad(outputs, floats, grads)]

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
            gc.collect()
        for seed in range(3):
            torch.manual_seed(seed)
            with torch.no_grad():
                for leaf in floats:
                    leaf.copy_(torch.randn(leaf.shape, device=device))
            graph.replay()
            assert_same(captured, step(), f"{sample.label}, replay {seed}")


COLD_CAPTURE = """
import torch
from judge import answer
from tkjit import testing
for op in testing.all_cases().values():
    sample = op.samples("cuda", torch.float32)[1]
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            out = testing.as_tuple(op.public(*sample.args, **sample.kwargs))[0]
    except RuntimeError as error:
        assert "warm" in str(error).lower(), f"does not speak of warming up: {error}"
        print(op.name, "refused in words")
    else:
        graph.replay()
        want = testing.in_float64(op.reference, sample.args, sample.kwargs)
        testing.assert_close(out, testing.as_tuple(want)[0], label="replay")
    want = testing.in_float64(op.reference, sample.args, sample.kwargs)
    out = testing.as_tuple(op.public(*sample.args, **sample.kwargs))[0]
    testing.assert_close(out, testing.as_tuple(want)[0], label="afterwards")
    torch.cuda.synchronize()
print("right")
"""


@pytest.mark.gpu
def test_first_call_inside_a_capture_works_or_speaks_of_warming_up(fresh):
    assert "right" in fresh(COLD_CAPTURE)


@every_op
def test_shape_never_seen_may_be_captured_when_its_kernel_is_known(op: OpCases, device: str):
    tkjit.cache.clear_plans()
    sample = op.samples(device, torch.float32)[0]
    want = as_tuple(op.public(*sample.args, **sample.kwargs))
    tkjit.cache.clear_plans()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = as_tuple(op.public(*sample.args, **sample.kwargs))
    graph.replay()
    assert_same(out, want)


# --- Streams, threads, processes, devices ------------------------------------------------------------------------------


@every_op
def test_runs_on_the_current_stream(op: OpCases, device: str):
    """The input is written late on a side stream: a launch on another stream would see the NaN that was there before."""
    sample = op.samples(device, torch.float32)[0]
    want = answer(op.public, sample.args, sample.kwargs)
    grads = upstream(want.outputs)
    leaves = as_leaves(mapped(lambda t: torch.full_like(t, float("nan")), sample.args))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        with torch.no_grad():
            for leaf, given in zip(leaves, sample.args, strict=True):
                if is_float(leaf):
                    leaf.copy_(given)
        out = as_tuple(op.public(*leaves, **sample.kwargs))
    # The backward runs on the forward's stream, whatever the current one is.
    found = torch.autograd.grad(out, [leaf for leaf in leaves if is_float(leaf)], grads)
    torch.cuda.current_stream().wait_stream(side)
    for tensor in (*out, *found):
        tensor.record_stream(torch.cuda.current_stream())
    assert_same([*(t.detach() for t in out), *found], want.tensors)


@every_op
def test_second_call_of_a_kind_plans_and_compiles_nothing(op: OpCases, device: str):
    for sample in op.samples(device, torch.bfloat16):
        answer(op.public, sample.args, sample.kwargs)
        before = tkjit.cache.stats()
        answer(op.public, moved(sample, copy.deepcopy), sample.kwargs)  # a clone of what is expanded has other strides
        after = tkjit.cache.stats()
        for counter in ("plan_misses", "compiles", "disk_hits"):
            assert after[counter] == before[counter], f"{sample.label}: {counter} rose; {tkjit.cache.explain()[-2:]}"
        assert after["plan_hits"] - before["plan_hits"] >= 2, sample.label


@every_op
def test_many_calls_lose_no_memory_and_no_reference(op: OpCases, device: str):
    sample = op.samples(device, torch.float32)[0]
    x, rest = sample.args[0], sample.args[1:]
    leaf = x.clone().requires_grad_()

    def spin(many: int) -> Any:
        for _ in range(many):
            out = op.public(x, *rest, **sample.kwargs)
        for _ in range(many // 10):
            (g,) = torch.autograd.grad(as_tuple(op.public(leaf, *rest, **sample.kwargs))[0].sum(), leaf)
        return out, g

    spin(5_000)
    torch.cuda.synchronize()
    references, memory, used = sys.getrefcount(x), resident_kib(), torch.cuda.memory_allocated()
    blocks = sys.getallocatedblocks()
    out, g = spin(100_000)
    torch.cuda.synchronize()
    assert sys.getrefcount(x) == references and sys.getrefcount(as_tuple(out)[0]) <= 3 and sys.getrefcount(g) <= 3
    del out, g
    gc.collect()
    assert sys.getallocatedblocks() - blocks < 1000, "Python objects were lost"
    grown = resident_kib() - memory
    assert grown < 4096, f"{grown} KiB were lost in 110000 calls"
    assert torch.cuda.memory_allocated() <= used


@every_op
def test_threads_share_the_plans(op: OpCases, device: str):
    samples = op.samples(device, torch.float32)
    wants = [answer(op.public, sample.args, sample.kwargs) for sample in samples]
    tkjit.cache.clear_plans()
    faults: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for i in range(3 * len(samples)):
                sample, want = samples[(first + i) % len(samples)], wants[(first + i) % len(samples)]
                with torch.cuda.stream(torch.cuda.Stream()) if i % 2 else contextlib.nullcontext():
                    got = answer(op.public, sample.args, sample.kwargs)
                    torch.cuda.current_stream().synchronize()
                assert_same(got.tensors, want.tensors, sample.label)
        except BaseException as error:
            faults.append(error)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults, faults[0]


COLD_THREADS = """
import threading, torch, tkjit
from judge import answer, assert_same
from tkjit import testing
work = [(op, op.samples("cuda", dtype)) for op in testing.all_cases().values() for dtype in (torch.float32, torch.bfloat16)]
torch.cuda.synchronize()
faults, results = [], {{}}
gate = threading.Barrier({many})
def run(me):
    try:
        gate.wait()
        for op, samples in work:
            results[me] = results.get(me, []) + [answer(op.public, s.args, s.kwargs).tensors for s in samples]
    except BaseException as error:
        faults.append(repr(error))
threads = [threading.Thread(target=run, args=(i,)) for i in range({many})]
[t.start() for t in threads]; [t.join() for t in threads]
assert not faults, faults[0]
torch.cuda.synchronize()
for one in results.values():
    for a, b in zip(one, results[0]):
        assert_same(a, b, "between threads")
print("compiles", tkjit.cache.stats()["compiles"])
"""


@pytest.mark.gpu
def test_sixteen_threads_that_begin_cold_compile_what_one_compiles(fresh, tmp_path: Path):
    counts = [
        fresh(COLD_THREADS.format(many=many), TKJIT_CACHE_DIR=str(tmp_path / f"of{many}")).split()[-1]
        for many in (1, 16)
    ]
    assert counts[0] == counts[1] and int(counts[0]) > 0


FIRST_CALL = """
import threading, torch
from tkjit import testing
op = testing.all_cases()[{name!r}]
sample = op.samples("cuda", torch.float32)[0]
x = sample.args[0].requires_grad_()
seen = []
thread = threading.Thread(target=lambda: seen.append(op.public(*sample.args, **sample.kwargs)))
thread.start(); thread.join()
y = testing.as_tuple(seen[0])[0]
g = torch.randn(y.shape, device="cuda")
torch.autograd.backward(y, g)  # autograd's own thread has made no CUDA call either
wide = x.detach().double().requires_grad_()
others = [t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in sample.args[1:]]
want = testing.as_tuple(op.reference(wide, *others, **sample.kwargs))[0]
torch.autograd.backward(want, g.double())
testing.assert_close(y.detach(), want.detach(), label="forward")
testing.assert_close(x.grad, wide.grad, scale=wide.grad.abs().max(), label="backward")
print("right")
"""


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(OPS))
def test_first_cuda_call_of_a_thread_may_be_ours(fresh, name: str):
    for _ in ("cold", "warm"):
        assert "right" in fresh(FIRST_CALL.format(name=name))


FORK_FIRST = """
import multiprocessing, torch
from tkjit import testing
ops = testing.all_cases()
def child():
    for op in ops.values():
        sample = op.samples("cuda", torch.float32)[0]
        got = testing.as_tuple(op.public(*sample.args, **sample.kwargs))[0]
        testing.assert_close(got, testing.as_tuple(testing.in_float64(op.reference, sample.args, sample.kwargs))[0])
process = multiprocessing.get_context("fork").Process(target=child)
process.start(); process.join(120)
print("child", process.exitcode)
"""

FORK_LATE = """
import os, time, torch
from tkjit import testing
op = next(iter(testing.all_cases().values()))
sample = op.samples("cuda", torch.float32)[0]
op.public(*sample.args, **sample.kwargs)
torch.cuda.synchronize()
pid = os.fork()
if pid == 0:
    try:
        op.public(*sample.args, **sample.kwargs)
    except RuntimeError as error:
        os._exit(7 if "fork" in str(error).lower() else 8)
    os._exit(9)
for _ in range(600):
    done, status = os.waitpid(pid, os.WNOHANG)
    if done:
        break
    time.sleep(0.1)
else:
    os.kill(pid, 9)
    raise SystemExit("the child hangs")
print("child", os.waitstatus_to_exitcode(status))
"""


@pytest.mark.gpu
def test_fork_before_the_first_use_works(fresh):
    assert "child 0" in fresh(FORK_FIRST)


@pytest.mark.gpu
def test_use_after_a_fork_is_an_error_that_says_fork(fresh):
    assert "child 7" in fresh(FORK_LATE)


@pytest.fixture
def second_device(device: str) -> Iterator[str]:
    if torch.cuda.device_count() < 2:
        pytest.skip("this machine has one GPU")
    yield "cuda:1"


@every_op
def test_tensor_of_another_device_than_the_current_one(op: OpCases, second_device: str):
    torch.cuda.set_device(0)
    for sample in op.samples(second_device, torch.float32):
        got = check(op.public, op.reference, sample.args, sample.kwargs, slack=op.slack, label=sample.label)
        assert all(str(t.device) == second_device for t in got.tensors) and torch.cuda.current_device() == 0


@every_op
def test_launches_leave_the_current_device_alone(op: OpCases, device: str):
    sample = op.samples(device, torch.float32)[0]
    for _ in range(2):
        op.public(*sample.args, **sample.kwargs)
        with contextlib.suppress(TypeError, RuntimeError):  # not every op refuses these
            op.public(moved(sample, Tensor.long)[0], *sample.args[1:], **sample.kwargs)
        assert torch.cuda.current_device() == 0
    got, want = op.public(*sample.args, **sample.kwargs), testing.in_float64(op.reference, sample.args, sample.kwargs)
    assert_close(as_tuple(got)[0], as_tuple(want)[0])


@every_op
def test_warmup_compiles_what_the_calls_need(op: OpCases, device: str):
    sample = op.samples(device, torch.float64)[0]
    tkjit.warmup(op.public, [sample.args], **sample.kwargs)
    before = tkjit.cache.stats()["compiles"]
    answer(op.public, sample.args, sample.kwargs)
    assert tkjit.cache.stats()["compiles"] == before
