"""tkjit.nn beside torch.nn: the modules, and models whose modules are replaced."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.testing import assert_close

import tkjit
from tkjit import nn as ours

CLASSES = [cls for cls in map(ours.__dict__.get, ours.__all__) if isinstance(cls, type) and hasattr(nn, cls.__name__)]

# Class, arguments, and the shape of the input.
CASES: tuple[tuple[str, dict[str, Any], tuple[int, ...]], ...] = (
    ("LayerNorm", {"normalized_shape": 8}, (4, 8)),
    ("LayerNorm", {"normalized_shape": (4, 8), "bias": False, "eps": 0.1}, (1, 4, 8)),
    ("LayerNorm", {"normalized_shape": 8, "elementwise_affine": False}, (4, 8)),
    ("RMSNorm", {"normalized_shape": 8}, (4, 8)),
    ("RMSNorm", {"normalized_shape": 8, "eps": 0.1, "elementwise_affine": False}, (4, 8)),
    ("Softmax", {"dim": -1}, (4, 8)),
    ("Softmax", {"dim": -3}, (2, 4, 1)),
    ("LogSoftmax", {"dim": 1}, (4, 8)),
    ("ReLU", {}, (4, 8)),
    ("LeakyReLU", {"negative_slope": 0.3}, (4, 8)),
    ("GELU", {}, (4, 8)),
    ("GELU", {"approximate": "tanh"}, (4, 8)),
    ("SiLU", {}, (4, 8)),
    ("Mish", {}, (4, 8)),
    ("Softplus", {"beta": 2.0, "threshold": 1.0}, (4, 8)),
    ("Sigmoid", {}, (4, 8)),
    ("Tanh", {}, (4, 8)),
    ("Dropout", {"p": 0.0}, (4, 8)),
    ("Dropout", {"p": 1.0}, (4, 8)),
)


def pair(name: str, place: str, **kwargs: Any) -> tuple[nn.Module, nn.Module]:
    """Our module and torch's, with the same random parameters."""
    mine, theirs = getattr(ours, name)(**kwargs).to(place), getattr(nn, name)(**kwargs).to(place)
    for p in theirs.parameters():
        nn.init.normal_(p, std=0.3)
    mine.load_state_dict(theirs.state_dict())
    return mine, theirs


def assert_alike(mine: Callable[..., Any], theirs: Callable[..., Any], *inputs: Tensor, **kwargs: Any) -> None:
    """Outputs, and gradients of the inputs and of the parameters."""
    found = []
    for function in (mine, theirs):
        leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in inputs]
        out = function(*leaves, **kwargs)
        out = out[0] if isinstance(out, tuple) else out
        wanted = [t for t in leaves if t.requires_grad]
        if isinstance(function, nn.Module):
            wanted += [p for p in function.parameters() if p.requires_grad]
        upstream = torch.linspace(-1, 1, out.numel(), device=out.device).to(out.dtype).view(out.shape)
        found.append((out, torch.autograd.grad(out, wanted, upstream, allow_unused=True)))
    assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


def encoder(place: str, **more: Any) -> nn.TransformerEncoder:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of nested tensors
        layer = nn.TransformerEncoderLayer(8, 2, 8, **{"dropout": 0.0, "batch_first": True, **more}, device=place)
        return nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8, device=place))


@pytest.fixture
def attentions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the calls that modules make of tkjit's attention."""
    calls: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(1)
        return tkjit.scaled_dot_product_attention(*args, **kwargs)

    monkeypatch.setitem(ours._attention.__globals__, "scaled_dot_product_attention", counted)
    return calls


# --- modules -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_module_is_torchs_but_for_its_forward(cls: type) -> None:
    theirs = getattr(nn, cls.__name__)
    assert cls.__bases__ == (theirs,) and theirs in ours._OURS and cls.__doc__
    more = {"__init__"} if cls is ours.TransformerEncoderLayer else set()
    assert {name for name, value in vars(cls).items() if callable(value)} == {"forward"} | more
    assert inspect.signature(cls) == inspect.signature(theirs)
    assert list(inspect.signature(cls.forward).parameters) == list(inspect.signature(theirs.forward).parameters)


@pytest.mark.parametrize("name, kwargs, shape", CASES)
def test_values_and_gradients_are_torchs(place: str, name: str, kwargs: dict, shape: tuple[int, ...]) -> None:
    mine, theirs = pair(name, place, **kwargs)
    assert_alike(mine, theirs, torch.randn(shape, device=place))
    for one in (mine, pickle.loads(pickle.dumps(mine)), copy.deepcopy(mine)):
        assert type(one) is getattr(ours, name) and repr(one) == repr(theirs)
        assert one.state_dict().keys() == theirs.state_dict().keys()
        theirs.load_state_dict(one.state_dict())


@pytest.mark.filterwarnings("ignore:size_average")
@pytest.mark.parametrize(
    "kwargs",
    [
        {"weight": torch.rand(8), "ignore_index": 2},
        {"label_smoothing": 0.2, "reduction": "sum"},
        {"reduce": False},
        {"size_average": False},
    ],
    ids=" ".join,
)
def test_cross_entropy_loss_is_torchs(place: str, kwargs: dict) -> None:
    mine, theirs = ours.CrossEntropyLoss(**kwargs).to(place), nn.CrossEntropyLoss(**kwargs).to(place)
    assert repr(mine) == repr(theirs) and list(mine.state_dict()) == list(theirs.state_dict())
    assert pickle.loads(pickle.dumps(mine)).reduction == theirs.reduction
    logits, target = torch.randn(4, 8, device=place), torch.tensor([0, 2, 7, 7], device=place)
    assert_alike(mine, theirs, logits, target)
    if "ignore_index" not in kwargs:
        assert_alike(mine, theirs, logits, torch.rand(4, 8, device=place))  # probabilities
    else:
        with pytest.raises(RuntimeError, match="ignore_index is not supported"):
            mine(logits, torch.rand(4, 8, device=place))


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 2, 3), (2, 2, 2, 2)])
def test_softmax_without_a_dim_warns_the_caller_and_takes_torchs(place: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, device=place)
    for name in ("Softmax", "LogSoftmax"):
        with pytest.warns(UserWarning, match="Implicit dimension choice") as caught:
            y = getattr(ours, name)()(x)
        assert caught[0].filename == __file__ and len(caught) == 1
        with pytest.warns(UserWarning, match="Implicit dimension choice"):
            assert_close(y, getattr(nn, name)()(x))


@pytest.mark.parametrize("name", ["ReLU", "LeakyReLU", "SiLU", "Mish", "Dropout"])
def test_in_place_is_in_place(place: str, name: str) -> None:
    mine, theirs = pair(name, place, inplace=True)
    assert repr(mine) == repr(theirs)
    x = torch.randn(4, 8, device=place)
    y = x.clone()
    assert mine(y) is y and y._version > 0 and not torch.equal(x, y)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used in an in-place operation"):
        mine(x.clone().requires_grad_())
    if name != "Dropout":
        assert torch.allclose(y, theirs(x.clone()), rtol=1e-5)
        assert_alike(lambda x: mine(x * 2), lambda x: theirs(x * 2), x)


def test_integers_in_place(place: str) -> None:
    x = torch.tensor([-1, 2], device=place)
    assert ours.ReLU(inplace=True)(x) is x and x.tolist() == [0, 2] and x._version == 1
    with pytest.raises(NotImplementedError, match="not implemented for 'Long'"):
        ours.SiLU(inplace=True)(x)


def test_dropout_drops_in_training_only(place: str) -> None:
    x, module = torch.ones(4, 8, device=place), ours.Dropout(0.5)
    y = module(x)
    assert set(y.unique().tolist()) == {0.0, 2.0} and module.eval()(x) is x
    for cls in (ours.Dropout, nn.Dropout):
        with pytest.raises(ValueError, match="dropout probability has to be between 0 and 1"):
            cls(1.5)


def test_wrong_arguments_are_refused_as_torch_refuses_them() -> None:
    x = torch.ones(2, 3)
    for module, error in (
        (ours.LayerNorm(4), RuntimeError), (ours.GELU("fast"), RuntimeError), (ours.Softmax(2), IndexError)
    ):  # fmt: skip
        with pytest.raises(error) as mine:
            module(x)
        ours.restore(module)
        with pytest.raises(error) as theirs:
            module(x)
        assert str(theirs.value) in str(mine.value)


def test_gates_halve_what_comes_alone(place: str) -> None:
    x = torch.randn(4, 16, device=place)
    gate, up = x.chunk(2, -1)
    for module, function in ((ours.SwiGLU(), F.silu), (ours.GEGLU(), F.gelu), (ours.ReGLU(), F.relu)):
        assert_close(module(x), function(gate) * up)
        assert_close(module(gate, up), function(gate) * up)


def test_autocast_gives_torchs_types(place: str) -> None:
    x = torch.randn(2, 4, 8, device=place)
    with torch.autocast(place, torch.bfloat16):
        for name, kwargs in (("LayerNorm", {"normalized_shape": 8}), ("GELU", {})):
            mine, theirs = pair(name, place, **kwargs)
            for given in (x, x.bfloat16()):
                assert_close(mine(given), theirs(given), rtol=2e-2, atol=2e-2)
        assert ours.Softmax(-1)(x.bfloat16()).dtype == torch.float32
        mine, theirs = pair("MultiheadAttention", place, embed_dim=8, num_heads=2)
        got, want = (module(x, x, x, need_weights=False)[0] for module in (mine, theirs))
        assert got.dtype == torch.bfloat16
        assert_close(got, want, rtol=2e-2, atol=2e-2)


# --- attention ---------------------------------------------------------------------------------------------------------

CAUSAL = nn.Transformer.generate_square_subsequent_mask(5)
PADDING = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]]).bool()


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    "make, call",
    [
        ({}, {}),
        ({"dropout": 0.0, "bias": False}, {"attn_mask": CAUSAL, "is_causal": True}),
        ({}, {"attn_mask": CAUSAL < 0, "key_padding_mask": PADDING, "is_causal": True}),
        ({}, {"key_padding_mask": PADDING | True}),  # no key is seen
        ({"add_bias_kv": True, "add_zero_attn": True}, {"key_padding_mask": PADDING}),
        ({"kdim": 6, "vdim": 6}, {"attn_mask": torch.linspace(-1, 1, 100).view(4, 5, 5)}),
    ],
    ids="plain causal padded blind extra other-widths".split(),
)
def test_multihead_attention_is_torchs(
    place: str, batch_first: bool, make: dict, call: dict, attentions: list[int]
) -> None:
    mine, theirs = pair("MultiheadAttention", place, embed_dim=8, num_heads=2, batch_first=batch_first, **make)
    call = {name: t.to(place) if isinstance(t, Tensor) else t for name, t in call.items()} | {"need_weights": False}
    x = torch.randn((2, 5, 8) if batch_first else (5, 2, 8), device=place)
    if "kdim" in make:
        other = torch.randn(*x.shape[:2], 6, device=place)
        assert_alike(mine, theirs, x, other, other * 2, **call)
    else:
        assert_alike(lambda x: mine(x, x, x, **call), lambda x: theirs(x, x, x, **call), x)
        assert_alike(lambda x, y: mine(x, y, y, **call), lambda x, y: theirs(x, y, y, **call), x, x * 2)
    assert attentions
    with torch.no_grad():
        assert mine.eval()(x, *(x, x) if "kdim" not in make else (other, other), **call)[1] is None


def test_multihead_attention_without_a_batch_and_with_weights(place: str, attentions: list[int]) -> None:
    mine, theirs = pair("MultiheadAttention", place, embed_dim=8, num_heads=2, batch_first=True)
    x = torch.randn(5, 8, device=place)
    call = {"key_padding_mask": PADDING[0].to(place), "need_weights": False}
    assert_alike(lambda x: mine(x, x, x, **call), lambda x: theirs(x, x, x, **call), x)
    assert len(attentions) == 1
    got, want = mine(x, x, x, average_attn_weights=False), theirs(x, x, x, average_attn_weights=False)
    assert_close(got, want)
    assert got[1].shape == (2, 5, 5) and len(attentions) == 1
    for module in (mine, theirs):
        with pytest.raises(RuntimeError, match="Need attn_mask if specifying the is_causal hint"):
            module(x, x, x, need_weights=False, is_causal=True)


@pytest.mark.parametrize("norm_first", [True, False])
def test_an_encoder_layer_uses_its_parts_in_inference_too(place: str, norm_first: bool, attentions: list[int]) -> None:
    make = {"dropout": 0.0, "batch_first": True, "norm_first": norm_first, "activation": F.gelu, "device": place}
    theirs, mine = nn.TransformerEncoderLayer(8, 2, 8, **make), ours.TransformerEncoderLayer(8, 2, 8, **make)
    assert type(mine.norm1) is ours.LayerNorm and type(mine.self_attn) is ours.MultiheadAttention
    assert repr(mine) == repr(theirs)
    mine.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 5, 8, device=place)
    masks: tuple[dict[str, Any], ...] = ({}, {"src_mask": CAUSAL, "is_causal": True}, {"src_key_padding_mask": PADDING})
    for given in masks:
        call = {name: t.to(place) if isinstance(t, Tensor) else t for name, t in given.items()}
        with torch.no_grad():
            # On a GPU torch's fused call of inference rounds what its own parts don't.
            tolerance = dict(rtol=1e-4, atol=1e-5) if place == "cpu" else dict(rtol=2e-3, atol=5e-4)
            assert_close(mine.eval()(x, **call), theirs.eval()(x, **call), **tolerance)
    assert len(attentions) == len(masks)
    assert_alike(pickle.loads(pickle.dumps(mine.train())), theirs.train(), x)


def test_padded_batches_that_torchs_encoder_nests(place: str) -> None:
    theirs = encoder(place).eval()
    mine = copy.deepcopy(theirs)
    ours.replace(mine)
    x, padding = torch.randn(2, 5, 8, device=place), PADDING.to(place)
    for padded in (padding, padding.flip(1)):  # the second is not left aligned, and not nested
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the prototype of nested tensors
            got, want = (model(x, src_key_padding_mask=padded) for model in (mine, theirs))
        assert_close(got, want, rtol=1e-4, atol=1e-5)


# --- replace and restore -----------------------------------------------------------------------------------------------


def test_a_model_keeps_all_but_its_classes(place: str) -> None:
    theirs = encoder(place)
    mine = copy.deepcopy(theirs)
    mine.layers[1].eval()
    next(mine.parameters()).requires_grad_(False)
    heard: list[str] = []
    mine.layers[0].norm1.register_forward_hook(lambda *_: heard.append("forward"))
    mine.layers[0].norm1.register_full_backward_hook(lambda *_: heard.append("backward"))
    before = list(mine.named_modules()), list(mine.named_parameters()), [m.training for m in mine.modules()]

    changed = ours.replace(mine)
    of_a_layer = {
        "": "TransformerEncoderLayer", ".self_attn": "MultiheadAttention", ".norm1": "LayerNorm", ".norm2": "LayerNorm",
        ".dropout": "Dropout", ".dropout1": "Dropout", ".dropout2": "Dropout",
    }  # fmt: skip
    assert changed == {"norm": "LayerNorm"} | {f"layers.{i}{k}": v for i in (0, 1) for k, v in of_a_layer.items()}
    after = list(mine.named_modules()), list(mine.named_parameters()), [m.training for m in mine.modules()]
    for one, other in zip(before[0] + before[1], after[0] + after[1], strict=True):
        assert one[0] == other[0] and one[1] is other[1]
    assert before[2] == after[2] and repr(mine) == repr(theirs)
    assert ours.replace(mine) == {}

    x = torch.randn(2, 5, 8, device=place)
    theirs.layers[1].eval()
    assert_close(mine(x), theirs(x), rtol=1e-4, atol=1e-5)
    mine(x).sum().backward()
    assert heard == ["forward"] * 2 + ["backward"]
    theirs.load_state_dict(mine.state_dict())
    assert ours.restore(mine) == changed and ours.restore(mine) == {}
    assert [type(m) for m in mine.modules()] == [type(m) for m in theirs.modules()]


def test_the_model_itself_and_shared_modules_change_once() -> None:
    norm = nn.LayerNorm(8)
    assert ours.replace(norm) == {"": "LayerNorm"} and type(norm) is ours.LayerNorm
    shared = nn.ReLU()
    model = nn.Sequential(shared, nn.Sequential(nn.Linear(2, 2), shared))
    assert ours.replace(model) == {"0": "ReLU"} and model[1][1] is shared and type(shared) is ours.ReLU
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, not dict"):
        ours.replace({})  # type: ignore[arg-type]


class Doubled(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_only_what_is_exactly_torchs_changes() -> None:
    patched = nn.GELU()
    patched.forward = lambda x: x + 1  # type: ignore[method-assign]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Sequential(nn.Sigmoid()))
    quantized = torch.ao.nn.quantized.LayerNorm(8, nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8)), 1.0, 0)
    model = nn.Sequential(Doubled(8), patched, scripted, quantized, nn.Linear(8, 8), ours.SwiGLU())
    assert ours.replace(model) == {} and ours.restore(model) == {}


def test_parametrizations_stay_and_copies_that_share_their_class(place: str) -> None:
    theirs = nn.Sequential(parametrizations.weight_norm(nn.LayerNorm((4, 8), device=place)))
    mine = copy.deepcopy(theirs)
    assert type(mine[0]) is type(theirs[0])
    assert ours.replace(mine) == {"0": "LayerNorm"}
    assert isinstance(mine[0], ours.LayerNorm) and not isinstance(theirs[0], ours.LayerNorm)
    assert_alike(mine, theirs, torch.randn(2, 4, 8, device=place))
    assert repr(mine) == repr(theirs) and mine.state_dict().keys() == theirs.state_dict().keys()
    assert ours.restore(copy.deepcopy(mine)) == {"0": "LayerNorm"} and isinstance(mine[0], ours.LayerNorm)
    parametrize.remove_parametrizations(mine[0], "weight")
    assert type(mine[0]) is ours.LayerNorm


@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_the_former_weight_norm_stays(place: str) -> None:
    mine, theirs = (torch.nn.utils.weight_norm(nn.LayerNorm((4, 8), device=place)) for _ in range(2))
    assert ours.replace(mine) == {"": "LayerNorm"}
    assert_alike(mine, theirs, torch.randn(2, 4, 8, device=place))


def test_a_model_compiles_whole(place: str) -> None:
    model = nn.Sequential(encoder(place), nn.Dropout(0.5), nn.GELU(), nn.RMSNorm(8, device=place), nn.Softmax(-1))
    ours.replace(model)
    model[1].eval()
    x, target = torch.randn(2, 5, 8, device=place), torch.tensor([1, 7], device=place)
    loss = ours.CrossEntropyLoss()

    def whole(x: Tensor) -> Tensor:
        return loss(model(x)[:, 0], target)

    assert_alike(torch.compile(whole, fullgraph=True, backend="aot_eager"), whole, x)


def test_attention_with_masks_compiles_whole(place: str) -> None:
    module, x = ours.MultiheadAttention(8, 2, batch_first=True, device=place), torch.randn(2, 5, 8, device=place)
    call = {"key_padding_mask": PADDING.to(place), "attn_mask": CAUSAL.to(place) < 0, "need_weights": False}
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert_alike(lambda x: compiled(x, x, x, **call), lambda x: module(x, x, x, **call), x)
    for run in (module, compiled):
        with pytest.raises((AssertionError, RuntimeError), match=r"shape\[1\] to be 5, but got 4"):
            run(x, x, x, **call | {"key_padding_mask": call["key_padding_mask"][:, 1:]})


def test_softmax_without_a_dim_compiles_whole(place: str) -> None:
    compiled = torch.compile(ours.Softmax(), fullgraph=True, backend="aot_eager")
    assert_alike(compiled, lambda x: x.softmax(1), torch.randn(4, 8, device=place))


def test_in_place_compiles_whole(place: str) -> None:
    module = ours.SiLU(inplace=True)
    compiled = torch.compile(lambda x: module(x * 2) + 1, fullgraph=True, backend="aot_eager")
    assert_alike(compiled, lambda x: F.silu(x * 2) + 1, torch.randn(4, 8, device=place))


def test_dropouts_of_several_probabilities_compile_whole(place: str) -> None:
    x = torch.ones(64, 64, device=place, requires_grad=True)
    for p in (0.0, 0.25, 0.5):  # from the second on torch.compile has a symbol for it
        y = torch.compile(ours.Dropout(p), fullgraph=True, backend="aot_eager")(x)
        (dx,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(dx, y.detach()) and abs((dx == 0).float().mean() - p) < 0.05
        assert dx.max().item() == pytest.approx(1 / (1 - p))


def test_a_model_compiled_before_is_compiled_anew() -> None:
    from emulate import emulating

    model = nn.Sequential(nn.LayerNorm(8), nn.GELU())
    compiled, x = torch.compile(model, backend="aot_eager"), torch.randn(4, 8)
    want = compiled(x)
    assert ours.replace(compiled).keys() == {"_orig_mod.0", "_orig_mod.1"}
    with emulating("sm_90a"):
        launches = tkjit.cache.stats()["launches"]
        assert_close(compiled(x), want)
        assert tkjit.cache.stats()["launches"] == launches + 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it is shown for it")
def test_the_readme_runs_on_the_cpu(root: Path) -> None:
    shown = re.search(r"<!-- modules -->\n```python\n(.*?)```", (root / "README.md").read_text(), re.DOTALL)
    assert shown is not None
    names: dict = {"torch": torch, "tkjit": tkjit}
    exec(shown[1].replace('"cuda"', '"cpu"'), names)
    assert names["y"].shape == (2, 50, 64) and type(names["model"].norm1) is nn.LayerNorm
