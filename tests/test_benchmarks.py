"""The benchmark harness and tkjit.testing, without a GPU: time comes from a clock that the test sets."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import re
import sys
import types
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import adamw  # noqa: E402
import peers  # noqa: E402
import plot  # noqa: E402
import report  # noqa: E402
import run  # noqa: E402
import timing  # noqa: E402
from tkjit import testing  # noqa: E402

META = {
    "schema": report.SCHEMA,
    "op": "softmax",
    "gpu": "NVIDIA H200",
    "driver": "1.2.3",
    "date": "2026-12-01T10:00:00+00:00",
    "commit": "abc",
    "versions": {"torch": "2.11.0"},
    "command": "python benchmarks/run.py softmax",
}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def softmax(x: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.softmax(x, dim)


def an_op(public=softmax, **settings) -> testing.OpCases:
    bench = testing.row_bench((16, 37), data=64 * 37 * 4)
    given = {"public": public, "reference": torch.softmax, "inputs": testing.row_inputs(), "bench": bench}
    return testing.op_cases(**(given | {"name": "softmax"} | settings))


class SetClock:
    """A clock whose calls take what the test says, by the name of the thunk's peer; it notes the order of the calls."""

    def __init__(self, took: dict[object, float] | None = None) -> None:
        self.took, self.order = took or {}, []

    def host_us(self, call) -> float:
        return 1.0

    def start(self, call, host_us):
        self.order.append(call)
        call()
        return call

    def synchronize(self) -> None:
        pass

    def read(self, started) -> float:
        return self.took.get(started, 1.0)


def an_entry(x=1024, direction="forward", dtype="bf16", **gbps: float) -> dict:
    case = {"case": f"last dim {x}", "group": "last dim", "x": x, "dtype": dtype, "direction": direction}
    entry = case | {"bytes": 10**9}
    entry["peers"] = {
        name.replace("_", "."): {"status": "ok"} | timing.summary([1000 / rate]) | {"gbps": rate}
        for name, rate in gbps.items()
    }
    run.compare(entry)
    return entry


# --- Cases --------------------------------------------------------------------


def test_bytes_are_those_of_the_tensor_made():
    for case in [
        *testing.row_bench((256, 781), data=10**6),
        *testing.row_bench((64,), data=10**4, offset=1),
        *testing.inner_bench((4, 6, 5), dim=1),
    ]:
        x, dim = case.make("cpu")
        moved = x.numel() * x.element_size()
        assert (case.forward_bytes, case.backward_bytes) == (2 * moved, 3 * moved)
        assert x.shape[dim] == case.x
        assert x.shape[0] == case.batch
        assert x.dtype == case.dtype


def test_default_cases_hold_512_megabytes_and_every_promised_width():
    for case in testing.row_bench():
        assert case.forward_bytes / 2 == pytest.approx(512e6, rel=0.002)
    powers = {2**k for k in (8, *range(10, 19))}
    assert {case.x for case in testing.row_bench()} == powers | {781, 1023, 50257}


def test_offset_case_is_off_its_alignment():
    (case,) = testing.row_bench((4096,), (torch.float32,), data=10**5, offset=1)
    x, _ = case.make("cpu")
    assert x.storage_offset() == 1 and x.is_contiguous()


def test_inner_bench_refuses_an_outer_dimension():
    with pytest.raises(ValueError, match="inner dimension"):
        testing.inner_bench((4, 6, 5), dim=2)


def test_two_cases_of_one_label_are_refused():
    with pytest.raises(ValueError, match="two bench cases"):
        an_op(bench=[*testing.row_bench((16,)), *testing.row_bench((16,))])


def test_samples_give_the_public_function_what_it_takes():
    op = an_op()
    for dtype in op.dtypes:
        samples = op.samples("cpu", dtype)
        assert samples[0].args[0].shape == (4, 8)
        for sample in samples:
            assert sample.args[0].dtype == dtype
            assert op.public(*sample.args, **sample.kwargs).shape == sample.args[0].shape


def test_cases_are_found_in_the_modules_of_ops(monkeypatch, tmp_path):
    for name, cases in (("one", an_op(name="a")), ("two", (an_op(name="b"), an_op(name="c"))), ("three", ())):
        (tmp_path / f"{name}.py").write_text("")
        module = types.ModuleType(f"tkjit.ops.{name}")
        module.CASES = cases
        monkeypatch.setitem(sys.modules, f"tkjit.ops.{name}", module)
    package = types.ModuleType("tkjit.ops")
    package.__path__ = [str(tmp_path)]
    monkeypatch.setitem(sys.modules, "tkjit.ops", package)
    assert sorted(testing.all_cases()) == ["a", "b", "c"]
    sys.modules["tkjit.ops.three"].TIMED = an_op(name="d")
    assert sorted(testing.all_timed()) == ["a", "b", "c", "d"]
    assert sorted(testing.all_cases()) == ["a", "b", "c"]


# --- Peers --------------------------------------------------------------------


def test_a_peer_that_is_not_installed_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "quack.softmax", None)
    monkeypatch.setitem(sys.modules, "quack", types.ModuleType("quack"))
    found = {p.name: p for p in peers.peers_of(an_op())}
    assert found["quack"].missing.startswith("not installed (")
    entry = run.time_case(an_op(), an_op().bench[0], "forward", [found["quack"]], 2, SetClock(), "cpu")
    assert entry["peers"]["quack"]["status"].startswith("not installed")
    assert "quack: not installed" in report.device_table("softmax", [entry])


def test_every_op_has_torch_compile_and_copy_without_a_line():
    names = [p.name for p in peers.peers_of(an_op(name="new_op"))]
    assert names == ["tkjit", "copy", "torch", "torch.compile"]


@pytest.mark.parametrize("direction", run.DIRECTIONS)
@pytest.mark.parametrize("key", ["softmax", "log_softmax"])
def test_torch_peers_agree_with_float64(key, direction):
    reference = getattr(torch, key)
    op = an_op(public=lambda x, dim: reference(x, dim), reference=reference, name=key)
    chosen = [p for p in peers.peers_of(op) if p.name in ("tkjit", "torch", "copy")]
    for case in op.bench:
        entry = run.time_case(op, case, direction, chosen, 2, SetClock(), "cpu")
        assert {name: p["status"] for name, p in entry["peers"].items()} == dict.fromkeys(entry["peers"], "ok")


class LigerSoftmax(torch.autograd.Function):
    """A stand-in that, as the real one, takes no dim."""

    @staticmethod
    def forward(ctx, x):
        y = torch.softmax(x, -1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        return torch.ops.aten._softmax_backward_data(dy, ctx.saved_tensors[0], -1, dy.dtype)


@pytest.mark.parametrize("direction", run.DIRECTIONS)
@pytest.mark.parametrize("inner", [False, True])
def test_quack_and_liger_are_called_as_they_take_it(monkeypatch, inner, direction):
    quack, liger = types.ModuleType("quack.softmax"), types.ModuleType("liger_kernel.ops")
    quack.softmax_fwd = lambda x: torch.softmax(x, -1)
    quack.softmax_bwd = lambda dy, y: torch.ops.aten._softmax_backward_data(dy, y, -1, dy.dtype)
    liger.LigerSoftmaxFunction = LigerSoftmax
    for module in (quack, liger):
        monkeypatch.setitem(sys.modules, module.__name__.split(".")[0], types.ModuleType("parent"))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    op = an_op(bench=testing.inner_bench((2, 3, 4), dim=1)) if inner else an_op()
    chosen = [p for p in peers.peers_of(op) if p.name in ("quack", "liger")]
    entry = run.time_case(op, op.bench[0], direction, chosen, 2, SetClock(), "cpu")
    expected = "n/a: contiguous rows only" if inner else "ok"
    assert {name: p["status"] for name, p in entry["peers"].items()} == {"quack": expected, "liger": expected}


def installed(monkeypatch, **modules: dict[str, object]) -> None:
    """Stand-ins: ``a__b`` is the module ``a.b``."""
    for name, holds in modules.items():
        name = name.replace("__", ".")
        monkeypatch.setitem(sys.modules, name.split(".")[0], types.ModuleType("parent"))
        module = types.ModuleType(name)
        vars(module).update(holds)
        monkeypatch.setitem(sys.modules, name, module)


def statuses(op, case, names, direction="forward", rounds=3):
    chosen = [p for p in peers.peers_of(op) if p.name in names]
    entry = run.time_case(op, case, direction, chosen, rounds, SetClock(), "cpu")
    return {name: peer["status"] for name, peer in entry["peers"].items()}


def a_case(make, grad_of, dtype=torch.float32, **kwargs):
    return testing.BenchCase("a", "a", 1, dtype, lambda device: make(), 64, 64, kwargs, grad_of=grad_of)


class OverGateAndUp(torch.autograd.Function):
    """A stand-in whose backward, as liger's, leaves the gradients in place of what it was given."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return torch.nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx, dy):
        gate, up = ctx.saved_tensors
        s = gate.sigmoid()
        d_gate, d_up = dy * up * s * (1 + gate * (1 - s)), dy * gate * s
        return gate.data.copy_(d_gate), up.data.copy_(d_up)


@pytest.mark.parametrize("direction", run.DIRECTIONS)
def test_a_peer_that_writes_over_its_arguments_has_its_own_and_finds_them_filled_again(monkeypatch, direction):
    installed(monkeypatch, liger_kernel__ops={"LigerSiLUMulFunction": OverGateAndUp})
    op = testing.all_cases()["swiglu"]
    gate, up = torch.randn(3, 8), torch.randn(3, 8)
    kept, seen = (gate.clone(), up.clone()), []
    case = a_case(lambda: (gate, up), (0, 1))

    class Clock(SetClock):
        def start(self, call, host_us):
            seen.append(torch.stack([t.detach().clone() for t in call()]) if direction == "backward" else call())
            return call

    chosen = [p for p in peers.peers_of(op) if p.name == "liger"]
    entry = run.time_case(op, case, direction, chosen, 3, Clock(), "cpu")
    assert entry["peers"]["liger"]["status"] == "ok"
    assert torch.equal(gate, kept[0]) and torch.equal(up, kept[1])
    assert len(seen) == 3 and all(torch.equal(one, seen[0]) for one in seen)


def test_only_the_gate_has_a_peer_among_the_pointwise_ops():
    named = {name: [p.name for p in peers.peers_of(op)] for name, op in testing.all_cases().items()}
    assert "liger" in named["swiglu"] and "liger" not in named["silu"] and "liger" not in named["add"]


@pytest.mark.parametrize("direction", run.DIRECTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_quacks_layer_norm_gets_float32_parameters_where_it_wants_them(monkeypatch, direction, dtype):
    def layernorm_fwd(x, weight, bias, eps, return_rstd=False, return_mean=False):
        assert weight.dtype == bias.dtype == torch.float32
        y, mean, rstd = torch.native_layer_norm(x.float(), (x.shape[-1],), weight, bias, eps)
        return (y.to(x.dtype), rstd, mean) if return_rstd else y.to(x.dtype)

    def layernorm_bwd(x, weight, dy, rstd, mean):
        given = (dy.float(), x.float(), (x.shape[-1],), mean, rstd, weight.float(), weight.float(), (True,) * 3)
        return tuple(t.to(dtype) for t in torch.ops.aten.native_layer_norm_backward(*given))

    installed(monkeypatch, quack__rmsnorm={"layernorm_fwd": layernorm_fwd, "layernorm_bwd": layernorm_bwd})
    case = a_case(
        lambda: (torch.randn(5, 24).to(dtype), (24,), torch.randn(24).to(dtype), torch.randn(24).to(dtype)),
        (0, 2, 3), dtype,
    )  # fmt: skip
    assert statuses(testing.all_cases()["layer_norm"], case, ["torch", "quack"], direction) == {
        "torch": "ok",
        "quack": "ok",
    }


class InPlaceRope(torch.autograd.Function):
    """A stand-in that, as liger's, works in place where tokens lie first in memory and copies others."""

    @staticmethod
    def turn(x, cos, sin):
        x = x.transpose(1, 2).contiguous()
        cos, sin = (t[0, :, None, : t.shape[-1] // 2] for t in (cos, sin))
        turned = x[..., : 2 * cos.shape[-1]]
        a, b = turned.float().chunk(2, -1)
        turned.copy_(torch.cat((a * cos - b * sin, b * cos + a * sin), -1))
        return x.transpose(1, 2)

    @staticmethod
    def forward(ctx, q, k, cos, sin):
        ctx.save_for_backward(cos, sin)
        return tuple(InPlaceRope.turn(x.data, cos, sin) for x in (q, k))

    @staticmethod
    def backward(ctx, *grads):
        cos, sin = ctx.saved_tensors
        return *(InPlaceRope.turn(dy.data, cos, -sin) for dy in grads), None, None


@pytest.mark.parametrize("direction", run.DIRECTIONS)
@pytest.mark.parametrize("seq_dim, width, turned", [(-2, 16, 16), (-3, 16, 16), (-3, 24, 16)])
def test_rotary_peers_take_either_order_of_heads_and_tokens(monkeypatch, seq_dim, width, turned, direction):
    from tkjit.ops.rotary import tables

    def apply_rotary_emb(x, cos, sin, interleaved):
        part, (cos, sin) = x[..., : 2 * cos.shape[-1]], (t[:, None] for t in (cos, sin))
        a, b = (part[..., 0::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
        y = (a * cos - b * sin, b * cos + a * sin)
        y = torch.stack(y, -1).flatten(-2) if interleaved else torch.cat(y, -1)
        return torch.cat((y, x[..., 2 * cos.shape[-1] :]), -1)

    installed(
        monkeypatch,
        quack__rotary={"apply_rotary_emb": apply_rotary_emb},
        liger_kernel__ops={"LigerRopeFunction": InPlaceRope},
    )

    def make(heads=(4, 2), ids=None, interleaved=False):
        shapes = [(2, 5, n, width) if seq_dim == -3 else (2, n, 5, width) for n in heads]
        query, keys = torch.randn(shapes[0]), torch.randn(shapes[1]) if heads[1] else None
        return query, *tables(5, turned), ids, interleaved, keys

    op = testing.all_cases()["rotary_embedding"]

    def of(grad_of=(0, 5), **kwargs):
        case = a_case(lambda: make(**kwargs), grad_of, seq_dim=seq_dim)
        return statuses(op, case, ["torch", "quack", "liger"], direction)

    lacks = "n/a: halves, queries and keys, no position ids"
    assert of() == {"torch": "ok", "quack": "ok", "liger": "ok"}
    assert of(interleaved=True) == {"torch": "ok", "quack": "ok", "liger": lacks}
    assert of((0,), heads=(4, 0)) == {"torch": "ok", "quack": "ok", "liger": lacks}
    if seq_dim == -2:
        assert of(ids=torch.randint(5, (2, 5))) == {"torch": "ok", "quack": "n/a: no position ids", "liger": lacks}


def test_a_loss_in_float32_is_as_good_as_torchs_rounded_one():
    def loss(x, target):
        return torch.nn.functional.cross_entropy(x.float(), target)

    op = testing.op_cases(
        public=loss, reference=torch.nn.functional.cross_entropy, inputs=lambda device, dtype: (), name="a_loss"
    )
    case = a_case(lambda: (torch.randn(6, 9).bfloat16(), torch.randint(9, (6,))), (0,), torch.bfloat16)
    assert statuses(op, case, ["tkjit"]) == {"tkjit": "ok"}
    wrong = dataclasses.replace(op, public=lambda x, target: 1.1 * loss(x, target))
    assert statuses(wrong, case, ["tkjit"])["tkjit"].startswith("wrong: error")


def test_a_peer_that_dies_while_it_is_imported_is_reported_without_its_paths(monkeypatch):
    class Dies:
        def find_spec(self, name, path=None, target=None):
            if name == "quack.softmax":
                raise TypeError("bad thing in /opt/somewhere/quack.py")

    installed(monkeypatch, quack={})
    sys.modules["quack"].__path__ = []
    monkeypatch.delitem(sys.modules, "quack.softmax", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Dies(), *sys.meta_path])
    missing = {p.name: p.missing for p in peers.peers_of(an_op())}
    assert missing["quack"] == "import failed: TypeError: bad thing in quack.py"


def test_adamws_peers_agree_with_float64(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    for dtype, states in ((torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.float32, torch.bfloat16)):
        case = adamw.case("some", ((5, 7), (3,), (64,)), dtype, states)
        found = statuses(adamw.CASES, case, ["tkjit", "copy", "torch", "torch.compile"])
        of_torch = "ok" if states == dtype else "n/a: states have the parameters' type"
        assert found == {"tkjit": "ok", "copy": "ok", "torch": of_torch, "torch.compile": of_torch}


def test_cases_of_adamw_count_what_a_step_moves():
    for case in adamw.CASES.bench:
        p, g, m, v = (sum(t.nbytes for t in of_role) for of_role in adamw.by_role(case.make("meta")))
        assert case.forward_bytes == 2 * p + g + 2 * m + 2 * v
    assert sum(map(math.prod, adamw.GPT2_MEDIUM)) == 354_823_168
    many = next(case for case in adamw.CASES.bench if case.x == 1024)
    call = peers.Call(adamw.CASES, many, "forward", many.make("meta"))
    peer = next(p for p in peers.peers_of(adamw.CASES) if p.name == "torch.compile")
    with pytest.raises(peers.NotApplicable, match="takes minutes"):
        dataclasses.replace(peer).build(dataclasses.replace(call, args=tuple(torch.zeros(1) for _ in call.args)))


def test_an_optimizer_has_device_times_alone(monkeypatch):
    monkeypatch.setattr(run, "on_device", lambda op, options, clock: [])
    monkeypatch.setattr(run.timing, "CudaClock", SetClock)
    results: dict = {}
    run.measure(adamw.CASES, run.parse(["--all"]), results)
    assert results == {"device": []}


def attention_calls():
    """Of attention and of what is timed beside it; which arguments have gradients."""
    qkv = [torch.randn(2, 2, 9, 16) for _ in range(3)]
    bias, seen = torch.randn(2, 1, 9, 9), torch.rand(2, 1, 9, 9) > 0.3
    yield "scaled_dot_product_attention", testing.Sample("causal", tuple(qkv), {"is_causal": True}), 3
    yield "scaled_dot_product_attention", testing.Sample("bias", (*qkv, bias)), 4
    yield "scaled_dot_product_attention", testing.Sample("bool mask", (*qkv, seen)), 3
    for name, many in (("attend", 3), ("varlen", 3), ("multi_head_attention", 5)):
        yield name, testing.all_timed()[name].samples("cpu", torch.float32)[0], many


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name, sample, many", [*attention_calls()], ids=lambda v: getattr(v, "label", None))
def test_peers_of_attention_agree_with_float64(monkeypatch, name, sample, many):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    case = testing.BenchCase(
        "a", "a", 1, torch.float32, lambda device: sample.args, 64, 64, sample.kwargs, grad_of=tuple(range(many))
    )
    op = dataclasses.replace(testing.all_timed()[name], bench=(case,))
    chosen = [p for p in peers.peers_of(op) if p.name in ("tkjit", "torch", "math", "flex")]
    assert len(chosen) >= 3
    lacking = {("flex", "backward")} | {("torch", d) for d in run.DIRECTIONS if name == "varlen"}  # on the CPU
    for direction in run.DIRECTIONS:
        some = [p for p in chosen if (p.name, direction) not in lacking]
        entry = run.time_case(op, case, direction, some, 2, SetClock(), "cpu")
        assert {n: p["status"] for n, p in entry["peers"].items()} == dict.fromkeys(entry["peers"], "ok")


def test_cases_of_attention_count_the_bytes_of_their_tensors():
    for name in ("scaled_dot_product_attention", "attend", "varlen", "multi_head_attention"):
        op = testing.all_timed()[name]
        for case in op.bench:
            shapes = [t for t in case.make("meta") if t.dtype != torch.int32]
            read, out = sum(t.nbytes for t in shapes), shapes[0].nbytes
            assert case.forward_bytes == read + out, case.label
            assert case.backward_bytes == read + 2 * out + sum(shapes[i].nbytes for i in case.grad_of), case.label
            assert case.batch in (None, shapes[0].shape[0]) and case.dtype == shapes[0].dtype
            for t in shapes if case.batch else ():
                assert t.shape[0] == case.batch, case.label


def test_a_case_without_gradients_has_no_backward(capsys):
    op = an_op(bench=[dataclasses.replace(an_op().bench[0], grad_of=())])
    options = run.parse(["softmax", "--peer", "torch"])
    options.deadline = -math.inf
    assert [entry["direction"] for entry in run.on_device(op, options, SetClock())] == ["forward"]


def test_the_copy_moves_the_bytes_that_are_counted():
    op = an_op()
    copy = next(p for p in peers.peers_of(op) if p.name == "copy")
    for direction in run.DIRECTIONS:
        call = run.make_call(op, op.bench[0], direction, "cpu")
        target = copy.build(call)()
        assert 2 * target.numel() * target.element_size() == pytest.approx(call.bytes, abs=8)


def test_row_peers_refuse_what_they_cannot_read():
    op = an_op(bench=testing.inner_bench((2, 3, 4), dim=1))
    call = run.make_call(op, op.bench[0], "forward", "cpu")
    with pytest.raises(peers.NotApplicable, match="contiguous rows"):
        peers._rows(call)


# --- What the harness does with them ------------------------------------------


def last_row_wrong(x, dim):
    y = torch.softmax(x, dim).clone()
    y[-1] *= 1.1
    return y


@pytest.mark.parametrize(
    "public, says",
    [
        (last_row_wrong, "wrong: error"),
        (lambda x, dim: torch.empty_like(x), "wrong: error"),
        (lambda x, dim: torch.softmax(x, dim).double(), "wrong: dtype"),
        (lambda x, dim: torch.softmax(x, dim)[:-1], "wrong: shape"),
        (lambda x, dim: (softmax(x, dim), softmax(x, dim)), "wrong: 2 results"),
        (lambda x, dim: None, "wrong: NoneType"),
        (lambda x, dim: 1 / 0, "failed: ZeroDivisionError"),
    ],
)
def test_a_wrong_peer_is_marked_and_not_timed(monkeypatch, public, says):
    # A result that nobody writes holds what was there before; here that is NaN, as after spoil().
    monkeypatch.setattr(torch, "empty_like", lambda t: torch.full_like(t, math.nan))
    op, clock = an_op(public=public), SetClock()
    case = testing.row_bench((16,), (torch.float32,), data=100 * 16 * 4)[0]
    chosen = [p for p in peers.peers_of(op) if p.name in ("tkjit", "torch")]
    entry = run.time_case(op, case, "forward", chosen, 3, clock, "cpu")
    assert entry["peers"]["tkjit"]["status"].startswith(says)
    assert "median" not in entry["peers"]["tkjit"] and "ahead" not in entry
    assert entry["peers"]["torch"]["status"] == "ok"
    assert len(clock.order) == 3


@pytest.mark.parametrize("direction", run.DIRECTIONS)
def test_memory_is_spoilt_between_building_a_peer_and_its_first_call(monkeypatch, direction):
    op, order, filled = an_op(), [], []

    def build(call):
        order.append("build")
        return lambda: order.append("call")

    spoil, full = run.spoil, torch.full
    monkeypatch.setattr(run, "spoil", lambda call: (order.append("spoil"), spoil(call)))
    monkeypatch.setattr(torch, "full", lambda shape, value, **kw: filled.append(shape) or full(shape, value, **kw))
    call = run.make_call(op, op.bench[0], direction, "cpu")
    run.prepare(peers.Peer("a", build, build), call, run.Expected(call), SetClock(), {})
    assert order == ["build", "spoil", "call"]
    assert set(filled) == {call.args[0].shape}


def test_a_case_that_cannot_be_made_is_a_failure_of_all_and_ends_nothing():
    case = testing.row_bench((16,), data=10**4)[0]

    def make(device):
        raise torch.OutOfMemoryError("out of memory in /home/someone/secret.py")

    broken = testing.BenchCase(**{**vars(case), "make": make})
    op = an_op()
    entry = run.time_case(op, broken, "forward", peers.peers_of(op)[:2], 3, SetClock(), "cpu")
    for peer in entry["peers"].values():
        assert peer["status"] == "failed: OutOfMemoryError: out of memory in secret.py"


def test_numbers_come_from_the_clock():
    op = an_op()
    case = op.bench[0]
    thunks = {}

    def named(name):
        def forward(call):
            thunks[name] = lambda: torch.softmax(*call.args)
            return thunks[name]

        return peers.Peer(name, forward, checked=name != "copy")

    class Clock(SetClock):
        def read(self, started):
            return {"tkjit": 2.0, "copy": 1.9, "a": 3.0, "b": 1.0}[
                next(name for name, thunk in thunks.items() if thunk is started)
            ]

    entry = run.time_case(op, case, "forward", [named(n) for n in ("tkjit", "copy", "a", "b")], 4, Clock(), "cpu")
    assert entry["peers"]["tkjit"]["gbps"] == pytest.approx(case.forward_bytes / 2e-3 / 1e9)
    assert entry["peers"]["tkjit"]["of_copy"] == pytest.approx(0.95)
    assert entry["peers"]["tkjit"]["n"] == 4
    assert entry["ahead"] == {"a": True, "b": False}


def test_over_the_budget_is_reported_not_dropped(capsys):
    op = an_op()
    options = run.parse(["softmax", "--peer", "torch"])
    options.deadline = -math.inf
    entries = run.on_device(op, options, SetClock())
    assert len(entries) == 2 * len(op.bench)
    assert all(p["status"] == "not run: over the budget" for e in entries for p in e["peers"].values())
    assert "not run: over the budget" in capsys.readouterr().out
    report.check(META | {"device": entries})


def test_a_peer_that_compiles_too_long_is_left_out_of_further_cases(monkeypatch, capsys):
    op, clock = an_op(), iter(range(0, 10**6, 7))
    monkeypatch.setattr(run.time, "monotonic", lambda: next(clock))
    options = run.parse(["softmax", "--peer", "torch", "--patience", "10"])
    options.deadline = math.inf
    monkeypatch.setattr(run, "time_case", functools.partial(run.time_case, device="cpu"))
    entries = run.on_device(op, options, SetClock())
    took = [e["peers"]["torch"]["status"] for e in entries]
    assert took == ["ok", "ok"] + ["not run: its first calls took 10 s"] * (len(entries) - 2)
    assert all(e["peers"]["tkjit"]["status"] == "ok" for e in entries)
    report.check(META | {"device": entries})


def test_selection_by_group_dtype_and_place():
    op = an_op(bench=[*testing.row_bench((16, 37)), *testing.row_bench((16,), group="offset view", offset=1)])
    chosen = run.selected(op, run.parse(["--group", "last dim", "--dtype", "bf16", "--x", "37"]))
    assert [(c.group, c.dtype, c.x) for c in chosen] == [("last dim", torch.bfloat16, 37)]
    assert len(run.selected(op, run.parse([]))) == 6
    assert len(run.selected(op, run.parse(["--quick"]))) == 2


def test_without_a_device_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run.main(["softmax"]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_what_was_measured_before_a_failure_is_written(monkeypatch, tmp_path):
    op = an_op()

    def measure(op, options, results):
        results["device"] = [an_entry(copy=4000, tkjit=3900)]
        raise RuntimeError("lost")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(run, "all_timed", lambda: {"softmax": op})
    monkeypatch.setattr(run.report, "provenance", lambda name, argv: dict(META))
    monkeypatch.setattr(run, "measure", measure)
    with pytest.raises(RuntimeError, match="lost"):
        run.main(["softmax", "--out", str(tmp_path)])
    (path,) = tmp_path.iterdir()
    assert report.read(path)["device"][0]["peers"]["tkjit"]["gbps"] == 3900
    assert run.main(["sofmax", "--out", str(tmp_path)]) == 2


def test_sections_to_run():
    assert run.parse([]).device and not run.parse([]).host
    assert run.parse(["--host"]).host and not run.parse(["--host"]).device
    everything = run.parse(["--all"])
    assert everything.device and everything.host and everything.first_call


def test_host_time_counts_the_calls_of_each_batch():
    ticks = iter(range(0, 10**9, 5000))
    took = timing.host_time({"a": lambda: None, "b": lambda: None}, 4, 10, lambda: None, lambda: next(ticks))
    assert took == {"a": [0.5] * 4, "b": [0.5] * 4}


def test_host_section_compares_with_and_without_gradients():
    entries = run.on_host(an_op(), run.parse(["--host", "--quick", "--dtype", "fp32"]), "cpu", lambda: None)
    assert [e["mode"] for e in entries] == ["no grad", "grad, forward", "grad, forward and backward"]
    for entry in entries:
        assert entry["ratio"] == pytest.approx(entry["peers"]["tkjit"]["median"] / entry["peers"]["torch"]["median"])
    report.check(META | {"host": entries})
    assert "grad, forward and backward" in report.host_table("softmax", entries)


def test_peers_take_turns_in_changing_order():
    orders = timing.orders(["a", "b", "c"], 12)
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert orders[0] == orders[1][::-1]
    for place in range(3):
        assert sorted(order[place] for order in orders) == sorted(["a", "b", "c"] * 4)
    clock = SetClock()
    calls = {name: (lambda name=name: name) for name in "abc"}
    timing.interleave(calls, 12, clock)
    assert [call() for call in clock.order] == [name for order in orders for name in order]


def test_summary_has_median_and_quartiles():
    assert timing.summary([3.0, 1.0, 2.0, 5.0, 4.0]) == {"median": 3.0, "q1": 2.0, "q3": 4.0, "min": 1.0, "n": 5}
    assert timing.summary([7.0])["median"] == 7.0
    with pytest.raises(ValueError):
        timing.summary([])


# --- First calls and the import -----------------------------------------------


def test_first_calls_are_medians_of_fresh_caches(monkeypatch):
    seen = []

    def child(words, cache):
        seen.append((words[2:], cache))
        return {"ms": 80.0 if words[-1] == "cold" else 4.0}

    monkeypatch.setattr(run, "child", child)
    options = run.parse(["--first-call"])
    options.deadline = math.inf
    entries = run.first_calls(an_op(), options)
    assert {(e["start"], e["ms"]) for e in entries} == {("cold", 80.0), ("warm", 4.0)}
    assert len({cache for _, cache in seen}) == len(seen) / 2
    results = META | {"first_call": entries, "import": []}
    report.check(results)
    run.show_first_calls("softmax", results)


def test_a_child_that_dies_is_reported_without_its_paths(monkeypatch):
    with pytest.raises(run.ChildFailed, match=r"^RuntimeError: no such file x\.py$"):
        run.child(["-c", "raise RuntimeError('no such file /opt/x.py')"], "unused")
    options = run.parse(["--first-call", "--quick"])
    options.deadline = math.inf

    def child(words, cache):
        raise run.ChildFailed("boom")

    monkeypatch.setattr(run, "child", child)
    entries = run.first_calls(an_op(), options)
    assert all(e["ms"] is None and e["status"] == "failed: boom" for e in entries)


# --- Files --------------------------------------------------------------------


def test_results_are_written_read_and_never_replaced(tmp_path):
    results = META | {"device": [an_entry(copy=4000, tkjit=3900)]}
    first, second = report.write(results, tmp_path), report.write(results, tmp_path)
    assert first.name == "softmax-nvidia-h200-2026-12-01.json"
    assert second.name == "softmax-nvidia-h200-2026-12-01-2.json"
    assert report.read(first) == results


@pytest.mark.parametrize(
    "damage, says",
    [
        (lambda r: r.pop("commit"), "lacks commit"),
        (lambda r: r.update(schema=0), "schema 0"),
        (lambda r: r["device"][0].pop("bytes"), "device.0. lacks bytes"),
        (lambda r: r["device"][0]["peers"]["tkjit"].pop("median"), "tkjit"),
        (lambda r: r["device"][0]["peers"]["tkjit"].update(status="wrong: all of it"), "tkjit"),
    ],
)
def test_damaged_results_are_refused(tmp_path, damage, says):
    results = META | {"device": [an_entry(copy=4000, tkjit=3900)]}
    damage(results)
    path = tmp_path / "r.json"
    path.write_text(json.dumps(results))
    with pytest.raises(ValueError, match=says):
        report.read(path)
    with pytest.raises(ValueError, match=says):
        report.write(results, tmp_path)


def test_published_text_names_no_folder_of_the_machine(monkeypatch):
    assert report.command(["softmax", "--out", "/tmp/x", "--quick"]) == "python benchmarks/run.py softmax --quick"
    assert report.command(["--out=/tmp/x", "--group", "last dim"]) == "python benchmarks/run.py --group 'last dim'"
    assert report.without_paths("\n at /opt/a/b/c.py: GB/s 1/2 ~/x/y.py\nmore") == "at c.py: GB/s 1/2 y.py"
    assert len(report.without_paths("x" * 500)) == 120
    monkeypatch.setenv("TKJIT_COMMIT", "cafe")
    assert report.commit() == "cafe"


# --- Tables and plots ---------------------------------------------------------


def test_table_lines_columns_up():
    assert report.table(["a", "bb"], [["xyz", "1"], ["", "100"]]) == "a     bb\nxyz    1\n     100"


def test_device_table_marks_who_is_faster_and_why_a_number_is_missing():
    one, two = an_entry(1024, copy=4000, tkjit=3900, torch=2000), an_entry(2048, copy=4000, tkjit=3800, torch=3900)
    two["peers"]["triton"] = {"status": "wrong: error 1"}
    one["peers"]["triton"] = {"status": "ok"} | timing.summary([0.5]) | {"gbps": 2000.0}
    text = report.device_table("softmax", [one, two])
    lines = text.splitlines()
    assert lines[1].split() == ["last", "dim", "1024", "4000", "3900", "0.975", "2000", "2000"]
    assert lines[2].split() == ["last", "dim", "2048", "4000", "3800", "0.950", ">3900", "-"]
    assert lines[3] == "  triton: wrong: error 1 [2048]"


def test_verdict_has_geometric_mean_least_ratio_and_who_is_ahead():
    entries = [an_entry(1024, copy=4000, tkjit=4000, torch=2000), an_entry(2048, copy=4000, tkjit=3240, torch=3900)]
    line = report.verdicts(entries).splitlines()[1]
    assert "0.900" in line and "0.810 at 2048" in line and line.endswith("torch at 2048")


def test_plot_is_drawn_from_a_file(tmp_path):
    pytest.importorskip("matplotlib")
    entries = [
        an_entry(x, direction, dtype, copy=4150, tkjit=4000 - k, torch=2000 + k, torch_compile=1800, mine=900)
        for dtype in ("bf16", "fp32")
        for direction in run.DIRECTIONS
        for k, x in enumerate(testing.ROW_WIDTHS)
    ]
    entries[3]["peers"]["torch"] = {"status": "failed: x"}
    path = report.write(META | {"device": entries}, tmp_path)
    assert plot.main([str(path)]) == 0
    image = path.with_suffix(".png").read_bytes()
    assert image.startswith(b"\x89PNG") and 10_000 < len(image) < 200_000


def test_cases_off_an_axis_are_drawn_beside_each_other(tmp_path):
    pytest.importorskip("matplotlib")

    def results(op, **rates):
        entries = [
            an_entry(x, direction, dtype, copy=4150, **rates) | {"group": "whole"}
            for dtype in ("bf16", "fp32")
            for direction in run.DIRECTIONS
            for x in (64, 512)
        ]
        entries[1]["peers"]["torch"] = {"status": "failed: x"}
        return META | {"op": op, "device": entries}

    several = results("add", tkjit=4000, torch=3000), results("swiglu", tkjit=4000, torch=2000, liger=3000)
    paths = [report.write(one, tmp_path) for one in several]
    assert not plot.lies_on_an_axis(several[0])
    together = tmp_path / "pointwise.png"
    assert plot.main(["--into", str(together), *map(str, paths)]) == 0
    assert plot.main(list(map(str, paths))) == 0
    for image in (together, *(path.with_suffix(".png") for path in paths)):
        assert image.read_bytes().startswith(b"\x89PNG")
    assert plot._place("add", several[0]["device"][0], True) == "add 64 MB"
    assert plot._place("a", an_entry(8) | {"case": "tokens first 32+8x64 bf16"}, False) == "tokens first 32+8x64"
    with pytest.raises(ValueError, match="beside a copy"):
        plot.draw_cases([META | {"device": [an_entry(tkjit=4000)]}], together)


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "cross_entropy", "linear_cross_entropy"])
def test_cases_of_an_op_with_sizes_lie_on_an_axis(name, tmp_path):
    pytest.importorskip("matplotlib")
    entries = []
    for case in testing.all_cases()[name].bench:
        for direction in run.DIRECTIONS:
            entry = run.entry_of(case, direction)
            rates = {"tkjit": 4000.0, "copy": 4200.0, "quack": 3000.0}
            entry["peers"] = {
                peer: {"status": "ok", "gbps": gbps} | timing.summary([entry["bytes"] / gbps / 1e6])
                for peer, gbps in rates.items()
            }
            run.compare(entry)
            entries.append(entry)
    results = META | {"op": name, "device": entries}
    assert plot.lies_on_an_axis(results)
    assert plot.draw(results, tmp_path / "x.png").stat().st_size > 10_000


def test_a_plot_of_nothing_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no device timings"):
        plot.draw(META, tmp_path / "x.png")


def test_labels_keep_their_distance_and_order():
    moved = plot.spread([100.0, 101.0, 50.0, 99.0, 0.0], 10.0)
    ordered = sorted(moved)
    assert all(b - a >= 10 - 1e-9 for a, b in itertools.pairwise(ordered))
    assert moved[4] < moved[2] < moved[3] < moved[0] < moved[1]
    assert plot.spread([10.0, 50.0], 10.0) == [10.0, 50.0]


# --- tkjit.testing: closeness -------------------------------------------------


@pytest.mark.parametrize("dtype", list(testing.FLOOR))
@pytest.mark.parametrize("kind", testing.ROW_VALUES)
@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax])
def test_torch_is_close_to_float64(function, kind, dtype):
    x = testing.row_values(kind, (8, 300), dtype, "cpu")
    want = testing.in_float64(function, (x, -1))
    got = function(x, -1)
    testing.assert_close(got, want, got, dim=-1)
    nudged, row = got.clone(), got[2].double()
    at = int(row.abs().where(row.isfinite(), torch.zeros(())).argmax())
    nudged[2, at] = row[at] * (1 + 40 * testing.FLOOR[dtype])
    with pytest.raises(AssertionError, match=rf"worst at \(2, {at}\)"):
        testing.assert_close(nudged, want, got, dim=-1)


def test_a_bound_grows_with_torchs_error_but_not_without_end():
    want = torch.ones(100, dtype=torch.float64)
    off = want.float() + 1e-3
    twice, thrice = want.float() + 2e-3, want.float() + 3e-3
    assert testing.closeness(twice * (1 - 1e-5), want, off).ok
    assert not testing.closeness(thrice, want, off).ok
    assert not testing.closeness(off, want).ok
    assert not testing.closeness(twice, want, off, at_most=1e-4).ok
    # torch all wrong is no licence.
    assert not testing.closeness(thrice, want, torch.full_like(off, math.nan)).ok


@pytest.mark.parametrize(
    "got, want",
    [
        (math.nan, 1.0),
        (1.0, math.nan),
        (math.inf, 1.0),
        (1.0, math.inf),
        (-math.inf, math.inf),
        (math.nan, math.inf),
    ],
)
def test_nan_and_infinity_must_be_where_they_belong(got, want):
    rest = torch.ones(3)
    a, b = torch.cat([rest, torch.tensor([got])]), torch.cat([rest, torch.tensor([want])])
    assert testing.error(a, b.double()) == math.inf
    assert testing.error(b, b.double()) == 0.0


def test_overflow_of_the_type_is_what_float64_rounds_to():
    want = torch.tensor([1e6, 1.0], dtype=torch.float64)
    assert testing.error(torch.tensor([math.inf, 1.0], dtype=torch.float16), want) == 0.0
    assert testing.error(torch.tensor([65504.0, 1.0], dtype=torch.float16), want) == math.inf


def test_small_entries_count_by_their_own_row():
    want = torch.tensor([[1e6, 1e6], [1.0, 1.0]], dtype=torch.float64)
    got = want.float()
    got[1, 0] = 1.5
    assert testing.error(got, want) < 1e-6
    assert testing.error(got, want, dim=-1) > 0.1
    assert testing.error(got, want, scale=0.0) == pytest.approx(0.5)


def test_a_row_of_zeros_counts_by_the_others():
    want = torch.tensor([[0.0, 0.0], [1.0, -1.0]], dtype=torch.float64)
    got = want.float()
    got[0, 0] = 1e-3
    assert testing.error(got, want, dim=-1) == pytest.approx(1e-3 / 0.5**0.5)
    assert testing.error(got[:1], want[:1], dim=-1) == math.inf


def test_shape_and_dtype_must_be_torchs():
    want = torch.ones(2, 3, dtype=torch.float64)
    with pytest.raises(AssertionError, match=r"shape \(3, 2\), should be \(2, 3\)"):
        testing.assert_close(torch.ones(3, 2), want)
    with pytest.raises(AssertionError, match=r"case: dtype torch.float32, should be torch.float16"):
        testing.assert_close(torch.ones(2, 3), want, torch.ones(2, 3, dtype=torch.float16), label="case")
    testing.assert_close(torch.ones(0, 3), torch.ones(0, 3).double())


def test_float64_reference_ignores_a_dtype_that_would_round():
    x = torch.randn(3, 5, dtype=torch.bfloat16)
    wide = testing.in_float64(torch.softmax, (x, -1), {"dtype": torch.float32})
    assert wide.dtype == torch.float64
    assert torch.equal(wide, torch.softmax(x.double(), -1))


# --- tkjit.testing: memory and layouts ----------------------------------------


@pytest.mark.parametrize("offset", [0, 1])
def test_fence_is_nan_and_notices_a_write(offset):
    x = testing.fenced((3, 5), torch.float16, "cpu", offset=offset)
    assert x.isfinite().all() and testing.fence_intact(x)
    for outside in (x.storage_offset() - 1, x.storage_offset() + 15):
        whole = x._base
        assert whole[outside].isnan()
        whole[outside] = 1.0
        assert not testing.fence_intact(x)
        whole[outside] = math.nan
    assert x.storage_offset() % 256 == offset


def test_poison_is_nan_in_every_type():
    ones = torch.full((64,), 255, dtype=torch.uint8)
    assert all(ones.view(dtype).isnan().all() for dtype in testing.FLOOR)
    testing.poison("cpu", largest=1 << 16)


@pytest.mark.parametrize("shape", [(4, 6), (4, 3, 6), (2, 3, 4, 6), (6,), ()])
@pytest.mark.parametrize("layout", testing.LAYOUTS)
def test_layout_changes_no_value(layout, shape):
    x = torch.randn(shape)
    y = testing.as_layout(layout, x)
    assert y.shape == x.shape
    if layout == "expanded" and shape:
        assert y.stride(0) == 0 and torch.equal(y, x[:1].expand(shape))
    else:
        assert torch.equal(x, y)
    if len(shape) > 1:
        assert y.is_contiguous() == (
            layout in ("contiguous", "offset") or (layout == "channels_last" and len(shape) == 2)
        )
    if shape:
        assert (y.storage_offset() == 1) == (layout == "offset")


def test_unknown_layout_is_an_error():
    with pytest.raises(ValueError, match="diagonal"):
        testing.as_layout("diagonal", torch.ones(2))


def test_readme_shows_the_newest_results_of_an_op(root: Path):
    found = re.findall(r"<!-- results (\w+) -->\n(.*?)\n<!-- /results -->", (root / "README.md").read_text(), re.DOTALL)
    assert found
    read = {path.name: report.read(path) for path in (BENCHMARKS / "results").glob("*.json")}
    for op, shown in found:
        newest = max((name for name in read if read[name]["op"] == op), key=lambda name: read[name]["date"])
        want = f"`python benchmarks/report.py benchmarks/results/{newest}`"
        assert shown.strip() == report.markdown(read[newest]), f"write the output of {want} there"


def test_readmes_table_is_bold_where_ahead_of_all():
    def entry(direction: str, tkjit: float, **others: float) -> dict:
        timed = {n: {"status": "ok", "gbps": g} for n, g in {"tkjit": tkjit, "copy": 4000.0, **others}.items()}
        ahead = {name: tkjit >= gbps for name, gbps in others.items()}
        place = {"group": "last dim", "x": 256.0, "dtype": "bf16", "direction": direction}
        return place | {"peers": timed | {"liger": {"status": "failed: no"}}, "ahead": ahead}

    found = report.markdown(
        META | {"device": [entry("forward", 3500, a=3400, b=3000), entry("backward", 3500, a=3000, b=3600)]}
    )
    assert "| last dim 256 | **3500** / 3400 a | 3500 / 3600 b |" in found.splitlines()
    assert "(peers: a, b, liger)" in found and "2026-12-01, commit abc" in found
