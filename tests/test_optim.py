"""tkjit.optim.AdamW beside torch's."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from emulate import emulating
from tkjit import optim
from tkjit.optim import AdamW

SHAPES = ((7,), (33, 41), (0,), (), (2100,), (1, 1024))
CLOSE = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 2e-2, torch.float16: 2e-3}
OPTIONS = ({}, {"amsgrad": True, "maximize": True}, {"weight_decay": 0.3, "betas": (0.8, 0.95), "eps": 1e-3})


def twins(place: str, dtype: torch.dtype, shapes: tuple = SHAPES) -> tuple[list[Tensor], list[Tensor]]:
    made = [torch.randn(shape, device=place).to(dtype) for shape in shapes]
    return [p.clone().requires_grad_() for p in made], [p.clone().requires_grad_() for p in made]


def give_gradients(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for p, q in zip(ours, theirs):
        q.grad = torch.randn_like(q)
        p.grad = q.grad.clone()


def assert_alike(ours: Any, theirs: Any, tolerance: float) -> None:
    """Parameters and states of two optimizers."""
    for p, q in zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"]):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)
        assert ours.state[p].keys() == theirs.state[q].keys()
        for name, value in theirs.state[q].items():
            torch.testing.assert_close(ours.state[p][name], value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("options", OPTIONS)
def test_twenty_steps_are_those_of_torchs_fused_step(place: str, dtype: torch.dtype, options: dict) -> None:
    ours, theirs = twins(place, dtype)
    a, b = AdamW(ours, 1e-2, fused=True, **options), torch.optim.AdamW(theirs, 1e-2, fused=True, **options)
    for _ in range(20):
        give_gradients(ours, theirs)
        a.step(), b.step()
    assert_alike(a, b, CLOSE[dtype])  # at two bytes a last place here and there


@pytest.mark.parametrize("options", OPTIONS)
def test_steps_counted_on_the_host_are_the_same(place: str, options: dict) -> None:
    ours, theirs = twins(place, torch.float32)
    a, b = AdamW(ours, 1e-2, **options), torch.optim.AdamW(theirs, 1e-2, **options)
    for step in range(20):
        give_gradients(ours, theirs)
        if step % 3 == 1:  # some have no gradient, so that their steps are fewer
            ours[1].grad = theirs[1].grad = None
        a.step(), b.step()
        assert a.state[ours[0]]["step"].device.type == "cpu"
    assert a.state[ours[1]]["step"] == 13 and ours[0]._version >= 20
    assert_alike(a, b, 2e-6)


def test_more_tensors_than_a_launch_takes(place: str) -> None:
    ours, theirs = twins(place, torch.float32, ((3,),) * (optim.STEPS + 5))
    for options in ({}, {"fused": True}):
        a, b = AdamW(ours, **options), torch.optim.AdamW(theirs, **options)
        give_gradients(ours, theirs)
        a.step(), b.step()
        assert_alike(a, b, 1e-6)


def test_dtypes_and_layouts_mix(place: str) -> None:
    base = torch.randn(1001, device=place)
    makes = (
        lambda: torch.randn(4, 5, device=place).t(),  # dense, not contiguous
        lambda: base.clone()[1:],  # aligned to 4 bytes
        lambda: torch.randn(8, 6, device=place)[:, :3],  # with gaps: torch's own
        lambda: torch.randn(9, device=place, dtype=torch.float64),
        lambda: torch.randn(9, device=place, dtype=torch.bfloat16),
        lambda: torch.randn(9, device=place, dtype=torch.complex64),
    )
    ours: list[Tensor] = [make().detach().requires_grad_() for make in makes]
    theirs = [copy.deepcopy(p) for p in ours]
    a, b = AdamW(ours), torch.optim.AdamW(theirs)
    for _ in range(3):
        for p, q in zip(ours, theirs):
            q.grad = torch.randn_like(q, memory_format=torch.contiguous_format)
            p.grad = q.grad.clone()  # in another layout than the transposed parameter
        ours[1].grad = theirs[1].grad = torch.ones((), device=place).expand(1000)
        a.step(), b.step()
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p, q, rtol=2e-2 if p.dtype == torch.bfloat16 else 2e-6, atol=1e-6)


def test_checkpoints_go_both_ways(place: str) -> None:
    for options in ({}, {"fused": True}):
        ours, theirs = twins(place, torch.float32)
        a, b = AdamW(ours, 1e-2, **options), torch.optim.AdamW(theirs, 1e-2, **options)
        give_gradients(ours, theirs)
        a.step(), b.step()
        saved = copy.deepcopy(a.state_dict()), copy.deepcopy(b.state_dict())
        assert saved[0]["param_groups"] == saved[1]["param_groups"]
        a.load_state_dict(saved[1]), b.load_state_dict(saved[0])
        give_gradients(ours, theirs)
        a.step(), b.step()
        assert_alike(a, b, 1e-6)
        assert a.state[ours[0]]["step"] == 2 and pickle.loads(pickle.dumps(a)).state_dict().keys() == saved[0].keys()


def test_states_in_another_dtype_follow_on_average(place: str) -> None:
    exact, rounded = twins(place, torch.float32, ((4096,),))
    a, b = AdamW(exact, 1e-3), AdamW(rounded, 1e-3, state_dtype=torch.bfloat16)
    for _ in range(200):
        give_gradients(exact, rounded)
        a.step(), b.step()
    v = b.state[rounded[0]]["exp_avg_sq"]
    assert v.dtype == torch.bfloat16 and b.state[rounded[0]]["exp_avg"].dtype == torch.bfloat16
    # Rounded to nearest it would have stayed far behind.
    assert abs(v.float().mean() / a.state[exact[0]]["exp_avg_sq"].mean() - 1) < 5e-3
    assert (exact[0] - rounded[0]).abs().max() < 0.02
    loaded = AdamW(rounded, state_dtype=torch.bfloat16)
    loaded.load_state_dict(copy.deepcopy(b.state_dict()))
    assert torch.equal(loaded.state[rounded[0]]["exp_avg_sq"], v)
    again = copy.deepcopy(rounded[0].detach()).requires_grad_()
    again.grad = rounded[0].grad
    twin = AdamW([again], state_dtype=torch.bfloat16)
    twin.load_state_dict(copy.deepcopy(b.state_dict()))
    b.step(), twin.step()
    assert torch.equal(again, rounded[0])  # equal runs are equal
    half, _ = twins(place, torch.bfloat16, ((40,),))
    half[0].grad = torch.randn_like(half[0])
    wide = AdamW(half, state_dtype=torch.float32)
    wide.step()
    assert wide.state[half[0]]["exp_avg"].dtype == torch.float32


def test_scaled_gradients_and_skipped_steps(place: str) -> None:
    ours, theirs = twins(place, torch.float32, ((3000,), (5,)))
    a, b = AdamW(ours, fused=True), torch.optim.AdamW(theirs, fused=True)
    assert a._step_supports_amp_scaling
    for found in (0.0, 1.0, 0.0):
        give_gradients(ours, theirs)
        before = ours[0].detach().clone()
        for each in (a, b):
            each.grad_scale = torch.full((), 8.0, device=place)
            each.found_inf = torch.full((), found, device=place)
            each.step()
        assert torch.equal(before, ours[0]) == bool(found)
        torch.testing.assert_close(ours[0].grad, theirs[0].grad)  # unscaled in its place
    assert_alike(a, b, 1e-6)
    assert a.state[ours[0]]["step"] == 2


def test_closures_groups_and_schedulers(place: str) -> None:
    p, q = (torch.ones(5, device=place).requires_grad_() for _ in range(2))
    a = AdamW([p], torch.tensor(0.1))
    a.add_param_group({"params": [q], "lr": 0.01, "weight_decay": 0.0})
    schedule = torch.optim.lr_scheduler.StepLR(a, 1, 0.5)

    def closure() -> Tensor:
        a.zero_grad()
        loss = (p * p + q * q).sum()
        loss.backward()
        return loss

    assert a.step(closure) == 10
    schedule.step()
    assert p.max() < 0.91 and 0.98 < q.max() < 0.9901 and a.param_groups[0]["lr"] == 0.05
    assert isinstance(a, torch.optim.AdamW)


def test_what_torch_refuses_is_refused(place: str) -> None:
    p = torch.ones(5, device=place).requires_grad_()
    with pytest.raises(ValueError, match="Invalid learning rate"):
        AdamW([p], -1.0)
    with pytest.raises(RuntimeError, match="cannot be `True` together"):
        AdamW([p], fused=True, foreach=True)
    with pytest.raises(ValueError, match="state_dtype must be"):
        AdamW([p], state_dtype=torch.int8)
    p.grad = torch.ones(5, device=place).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        AdamW([p]).step()


def test_a_gradient_or_state_of_another_shape_is_refused(place: str) -> None:
    (p,), _ = twins(place, torch.float32, ((6, 4),))
    a = AdamW([p])
    p.grad = torch.ones_like(p)
    p.data = torch.zeros(60, 40, device=place)
    with pytest.raises(RuntimeError, match=r"shape \(60, 40\) has gradient \(6, 4\)"):
        a.step()
    p.grad = torch.ones_like(p)
    a.state[p].clear()
    a.step()
    for name in ("exp_avg", "exp_avg_sq"):
        kept = a.state[p][name]
        a.state[p][name] = torch.zeros(3, 40, device=place)  # of the same strides
        with pytest.raises(RuntimeError, match=rf"has {name} \(3, 40\)"):
            a.step()
        a.state[p][name] = kept
    a.step()
    assert (p < 0).all()


def test_conjugated_and_negated_memory(place: str) -> None:
    made = torch.randn(5, 3, dtype=torch.complex64, device=place)
    p = made.clone().conj().detach().requires_grad_()
    p.grad = torch.ones_like(p)
    before = p.detach().clone()
    with pytest.raises(RuntimeError, match="is conjugated"):
        AdamW([p], 0.1).step()
    assert p.is_conj() and torch.equal(p, before)
    ours, theirs = (made.clone().requires_grad_() for _ in range(2))
    a, b = AdamW([ours], 0.1), torch.optim.AdamW([theirs], 0.1)
    for _ in range(3):
        g = torch.randn_like(made)
        ours.grad, theirs.grad = g.conj(), g.conj().resolve_conj()
        a.step(), b.step()
        a.state[ours]["exp_avg"] = (-a.state[ours]["exp_avg"])._neg_view()  # the same numbers
        torch.testing.assert_close(ours, theirs)


def test_checks_find_nothing() -> None:
    with emulating("sm_90a"):
        for state in (None, torch.bfloat16):
            ours, _ = twins("cpu", torch.float32, ((1030,), (3,)))
            a = AdamW(ours, fused=True, amsgrad=True, state_dtype=state)
            for p in ours:
                p.grad = torch.randn_like(p)
            a.step()


@pytest.mark.parametrize("arch", ("sm_80", "sm_90a"))
def test_kernels_spill_nothing(arch: str) -> None:
    pytest.importorskip("nvidia")
    for dtype in CLOSE:
        for state in {dtype, torch.float32, torch.bfloat16}:
            for amsgrad in (False, True):
                kernel = optim._kernel(dtype, state, amsgrad, state == torch.bfloat16)
                facts = kernel._instance(kernel.candidates[0]).compiled(arch).facts
                assert facts["spill_stores"] == facts["spill_loads"] == facts["stack_bytes"] == 0, (dtype, state, facts)


@pytest.mark.gpu
def test_a_captured_step_counts_on() -> None:
    ours, theirs = twins("cuda", torch.float32)
    lr = torch.tensor(1e-2, device="cuda")
    a, b = AdamW(ours, lr, capturable=True), torch.optim.AdamW(theirs, 1e-2)
    give_gradients(ours, theirs)
    a.step(), b.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        a.step()
    for _ in range(3):
        graph.replay()
        b.step()
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p, q, rtol=2e-6, atol=2e-6)
    assert a.state[ours[0]]["step"] == 4


@pytest.mark.gpu
def test_grad_scaler_steps_without_synchronizing() -> None:
    (p,), (q,) = twins("cuda", torch.float32, ((1000,),))
    for leaf, kind in ((p, AdamW), (q, torch.optim.AdamW)):
        scaler, each = torch.amp.GradScaler(init_scale=4.0), kind([leaf], fused=True)
        for factor in (1.0, float("inf"), 1.0):
            each.zero_grad()
            scaler.scale((leaf * leaf).sum() * factor).backward()
            scaler.step(each)
            scaler.update()
    torch.testing.assert_close(p, q)
