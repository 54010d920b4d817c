"""torch.nn's modules on tkjit's kernels; :func:`replace` puts them into a model that is made of torch's.

    tkjit.nn.replace(model)     # {"layers.0.norm1": "LayerNorm", "layers.0.dropout": "Dropout", ...}
    tkjit.nn.restore(model)     # torch's again

A module is a subclass of torch's of the same name, with another ``forward`` and nothing else: its arguments and their errors,
``isinstance``, ``repr``, parameters, ``state_dict()``, hooks, copies and pickles are torch's. What its function has no kernel for,
it computes or refuses as the function does; tensors on the CPU go through the emulator.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations

from ._torch import compiling
from .ops.attention import scaled_dot_product_attention
from .ops.cross_entropy import cross_entropy
from .ops.dropout import dropout
from .ops.layer_norm import layer_norm, rms_norm
from .ops.pointwise import geglu, gelu, leaky_relu, mish, reglu, relu, sigmoid, silu, softplus, swiglu, tanh
from .ops.softmax import log_softmax, softmax

__all__ = [
    "GEGLU",
    "GELU",
    "CrossEntropyLoss",
    "Dropout",
    "LayerNorm",
    "LeakyReLU",
    "LogSoftmax",
    "Mish",
    "MultiheadAttention",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "Softplus",
    "SwiGLU",
    "Tanh",
    "TransformerEncoderLayer",
    "replace",
    "restore",
]

# --- norms, softmax, loss, dropout -----------------------------------------------------------------------------------


class LayerNorm(nn.LayerNorm):
    """``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` over the last dimensions, those of ``normalized_shape``.

    ``torch.nn.LayerNorm`` by :func:`tkjit.layer_norm`.
    """

    def forward(self, input: Tensor) -> Tensor:
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimensions, those of ``normalized_shape``.

    ``torch.nn.RMSNorm`` by :func:`tkjit.rms_norm`. Rounded once, at the end; LlamaRMSNorm of the transformers library rounds
    before the weight, too.
    """

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.normalized_shape, self.weight, self.eps)


class Softmax(nn.Softmax):
    """``exp(x) / sum(exp(x))`` along ``dim``. ``torch.nn.Softmax`` by :func:`tkjit.softmax`.

    Without ``dim`` it is, with torch's warning, 0 for inputs of 0, 1 or 3 dimensions and 1 for others.
    """

    def forward(self, input: Tensor) -> Tensor:
        return softmax(input, _dim(self, "softmax", input))


class LogSoftmax(nn.LogSoftmax):
    """``x - log(sum(exp(x)))`` along ``dim``, without which see :class:`Softmax`.

    ``torch.nn.LogSoftmax`` by :func:`tkjit.log_softmax`.
    """

    def forward(self, input: Tensor) -> Tensor:
        return log_softmax(input, _dim(self, "log_softmax", input))


def _dim(module: Any, name: str, input: Tensor) -> int:
    if module.dim is not None:
        return module.dim
    if not compiling():  # torch.compile doesn't warn
        # For the line that calls the module: behind this function, forward and two of nn.Module's.
        message = f"Implicit dimension choice for {name} has been deprecated. Change the call to include dim=X as an argument."
        warnings.warn(message, stacklevel=5)
    return 0 if input.dim() in (0, 1, 3) else 1


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """Cross entropy of logits (C,), (N, C) or (N, C, d1, ...) and classes or probabilities.

    ``torch.nn.CrossEntropyLoss`` by :func:`tkjit.cross_entropy`, which tells the formula, what is ignored, and errors.
    """

    def forward(self, input: Tensor, target: Tensor) -> Any:
        return cross_entropy(
            input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )


class Dropout(nn.Dropout):
    """In training each element 0 with probability ``p``, else ``x / (1 - p)``. ``torch.nn.Dropout`` by :func:`tkjit.dropout`."""

    def forward(self, input: Tensor) -> Tensor:
        return dropout(input, self.p, self.training, self.inplace)


# --- activations -----------------------------------------------------------------------------------------------------


class ReLU(nn.ReLU):
    """``max(x, 0)``. ``torch.nn.ReLU`` by :func:`tkjit.relu`."""

    def forward(self, input: Tensor) -> Tensor:
        return relu(input, self.inplace)


class LeakyReLU(nn.LeakyReLU):
    """``x`` above 0, else ``negative_slope * x``. ``torch.nn.LeakyReLU`` by :func:`tkjit.leaky_relu`."""

    def forward(self, input: Tensor) -> Tensor:
        return leaky_relu(input, self.negative_slope, self.inplace)


class GELU(nn.GELU):
    """``x P(x)``, P the normal distribution, or its approximation by tanh. ``torch.nn.GELU`` by :func:`tkjit.gelu`."""

    def forward(self, input: Tensor) -> Tensor:
        return gelu(input, self.approximate)


class SiLU(nn.SiLU):
    """``x sigmoid(x)``. ``torch.nn.SiLU`` by :func:`tkjit.silu`."""

    def forward(self, input: Tensor) -> Tensor:
        return silu(input, self.inplace)


class Mish(nn.Mish):
    """``x tanh(log(1 + e^x))``. ``torch.nn.Mish`` by :func:`tkjit.mish`."""

    def forward(self, input: Tensor) -> Tensor:
        return mish(input, self.inplace)


class Softplus(nn.Softplus):
    """``log(1 + e^(beta x)) / beta``; ``x`` where ``beta x > threshold``. ``torch.nn.Softplus`` by :func:`tkjit.softplus`."""

    def forward(self, input: Tensor) -> Tensor:
        return softplus(input, self.beta, self.threshold)


class Sigmoid(nn.Sigmoid):
    """``1 / (1 + e^-x)``. ``torch.nn.Sigmoid`` by :func:`tkjit.sigmoid`."""

    def forward(self, input: Tensor) -> Tensor:
        return sigmoid(input)


class Tanh(nn.Tanh):
    """The hyperbolic tangent. ``torch.nn.Tanh`` by :func:`tkjit.tanh`."""

    def forward(self, input: Tensor) -> Tensor:
        return tanh(input)


# --- gates, which torch has none of ----------------------------------------------------------------------------------


class SwiGLU(nn.Module):
    """``silu(gate) * up``; of one tensor, the halves of its last dimension. See :func:`tkjit.swiglu`."""

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        return swiglu(gate, up)


class GEGLU(nn.Module):
    """``gelu(gate) * up``; as :class:`SwiGLU`."""

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        return geglu(gate, up)


class ReGLU(nn.Module):
    """``relu(gate) * up``; as :class:`SwiGLU`."""

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        return reglu(gate, up)


# --- attention -------------------------------------------------------------------------------------------------------


def _check_padding(mask: Tensor, keys: int, batch: int) -> None:
    """As torch's, whose message torch.compile reads in torch's module alone."""
    for dim, size in enumerate((batch, keys)):
        if mask.shape[dim] != size:
            raise AssertionError(f"Expected key_padded_mask.shape[{dim}] to be {size}, but got {mask.shape[dim]}")


def _with_our_attention(function: Any) -> Callable[..., Any]:
    """A function of torch.nn.functional in which ``scaled_dot_product_attention`` is tkjit's, for it alone."""
    names = dict(function.__globals__)
    names |= {"scaled_dot_product_attention": scaled_dot_product_attention, "_check_key_padding_mask": _check_padding}
    # By it torch.compile would look the names up in torch's module.
    del names["__name__"]
    return types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)


_attention = _with_our_attention(F.multi_head_attention_forward)


class MultiheadAttention(nn.MultiheadAttention):
    """Attention between projections: ``out_proj(softmax(q k.T / sqrt(head_dim) + mask) v)`` of each head.

    ``torch.nn.MultiheadAttention`` by :func:`tkjit.scaled_dot_product_attention`, in training and in inference. torch's own
    computes where the weights are asked for, which they are by default (``need_weights=False`` is the fast call, and the one that
    torch's transformer layers make), and nested tensors.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if need_weights or query.is_nested or key.is_nested or value.is_nested:
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        turned = self.batch_first and query.dim() == 3
        if turned:
            # What is one tensor stays one: its projections are one product.
            same = query is key, value is key
            key = key.transpose(0, 1)
            query, value = (key if is_key else t.transpose(0, 1) for is_key, t in zip(same, (query, value)))
        output, _ = _attention(
            query, key, value, self.embed_dim, self.num_heads, self.in_proj_weight, self.in_proj_bias, self.bias_k,
            self.bias_v, self.add_zero_attn, self.dropout, self.out_proj.weight, self.out_proj.bias,
            training=self.training, key_padding_mask=key_padding_mask, need_weights=False, attn_mask=attn_mask,
            is_causal=is_causal, use_separate_proj_weight=not self._qkv_same_embed_dim,
            q_proj_weight=self.q_proj_weight, k_proj_weight=self.k_proj_weight, v_proj_weight=self.v_proj_weight,
        )  # fmt: skip
        return output.transpose(0, 1) if turned else output, None


class TransformerEncoderLayer(nn.TransformerEncoderLayer):
    """Self-attention and two linear layers, each with dropout, a sum with its input, and a norm.

    ``torch.nn.TransformerEncoderLayer`` of this module's parts, in training and in inference, where torch's calls one function
    of its own in place of the parts. Of nested tensors torch's does so here too: ``torch.nn.TransformerEncoder`` makes them of
    padded batches in inference, unless it has ``enable_nested_tensor=False``.
    """

    @functools.wraps(nn.TransformerEncoderLayer.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        replace(self)

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        if src.is_nested:
            return super().forward(src, src_mask, src_key_padding_mask, is_causal)
        padding = F._canonical_mask(
            src_key_padding_mask, "src_key_padding_mask", F._none_or_dtype(src_mask), "src_mask", src.dtype
        )
        mask = F._canonical_mask(src_mask, "src_mask", None, "", src.dtype, check_other=False)
        if self.norm_first:
            x = src + self._sa_block(self.norm1(src), mask, padding, is_causal)
            return x + self._ff_block(self.norm2(x))
        x = self.norm1(src + self._sa_block(src, mask, padding, is_causal))
        return self.norm2(x + self._ff_block(x))


# --- models that are there already -----------------------------------------------------------------------------------

_OURS: dict[type, type] = {
    cls.__base__: cls
    for cls in (
        CrossEntropyLoss, Dropout, GELU, LayerNorm, LeakyReLU, LogSoftmax, Mish, MultiheadAttention, ReLU, RMSNorm, SiLU,
        Sigmoid, Softmax, Softplus, Tanh, TransformerEncoderLayer,
    )
}  # fmt: skip
_TORCHS = {ours: theirs for theirs, ours in _OURS.items()}


def replace(model: nn.Module) -> dict[str, str]:
    """Turn the modules of a model that are torch's, and have a namesake here, into these; the model itself may be one.

    They change their class, and stay the objects they are: parameters, buffers, hooks, parametrizations, ``training`` and what
    else refers to them (an optimizer, another name in the model) are not touched. ``state_dict()`` keeps its names.

    Only what is exactly of torch's class changes. Subclasses stay, since their ``forward`` is their own, and so do modules with
    a ``forward`` set on the object, scripted and quantized ones, and those sharded by ``fully_shard``, which gives them classes
    of its own: replace first. RMSNorms of other libraries (LlamaRMSNorm) stay too: they round elsewhere. What a model calls as
    a function is not seen; for attention there is :func:`tkjit.attention.enable`.

    Args:
        model: Any module.

    Returns:
        What changed: qualified names (``""`` is the model itself) and the names of the classes. A module with several names
        stands under its first. Empty the second time.

    Raises:
        TypeError: ``model`` is no module.

    TorchScript and FX don't read these: :func:`restore` first.
    """
    return _turned("replace", model, _OURS)


def restore(model: nn.Module) -> dict[str, str]:
    """The reverse of :func:`replace`: what is of a class from here, however it came to be, is torch's afterwards.

    Arguments, result and errors as there. Modules that torch has none of stay.
    """
    return _turned("restore", model, _TORCHS)


def _turned(name: str, model: nn.Module, classes: dict[type, type]) -> dict[str, str]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{name}(): argument 'model' must be a torch.nn.Module, not {type(model).__name__}")
    changed = {}
    for path, module in model.named_modules():
        cls = classes.get(type_before_parametrizations(module))
        if cls is None or "forward" in vars(module):
            continue
        changed[path] = cls.__name__
        if is_parametrized(module):
            # It is of a subclass that holds the properties, and that copies of it may share: another one of the same content.
            content = {k: v for k, v in vars(type(module)).items() if k not in ("__dict__", "__weakref__")}
            cls = type(type(module).__name__, (cls,), content)
        module.__class__ = cls
    return changed
