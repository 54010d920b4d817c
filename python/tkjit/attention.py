"""Attention beyond torch's signature, and tkjit behind torch's own: ``F.scaled_dot_product_attention`` of unmodified models runs
tkjit's kernels.

    tkjit.attention.enable()            # from here on
    with tkjit.attention.enabled():     # in the block
        model(x)

What a model calls is the name in ``torch.nn.functional``; that is what changes, for the whole process. CUDA tensors go to
tkjit, all others to torch as before.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import CausalBias

from .ops.attention import (
    ScoreMod,
    _torchs,
    attend,
    materialized,
    scaled_dot_product_attention,
    varlen,
    with_kv_cache,
    without_bias,
)

__all__ = ["ScoreMod", "attend", "disable", "enable", "enabled", "is_enabled", "varlen", "with_kv_cache"]

_lock = threading.Lock()


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **more: Any,
) -> Tensor:
    """scaled_dot_product_attention: tkjit's for CUDA tensors, else torch's."""
    if isinstance(query, Tensor) and query.is_cuda:
        return scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **more)
    if isinstance(attn_mask, CausalBias):
        # It knows torch's function by its place, which is taken.
        attn_mask, upper = without_bias(query, key, attn_mask, is_causal)
        attn_mask, is_causal = materialized(query, key, attn_mask, upper, None)
    return _torchs(query, key, value, attn_mask, dropout_p, is_causal, **more)


_before: list[Any] = []  # what stood there; empty while it stands there
_asked = {"enable": False, "blocks": 0}


def _set() -> None:
    """Ours, or what was there before, by what is asked for; under the lock."""
    wanted = _asked["enable"] or _asked["blocks"] > 0
    if wanted and not _before:
        _before.append(F.scaled_dot_product_attention)
        F.scaled_dot_product_attention = cast(Any, _attention)
    elif not wanted and _before:
        F.scaled_dot_product_attention = _before.pop()


def enable() -> None:
    """Put tkjit's kernels behind ``torch.nn.functional.scaled_dot_product_attention``, until :func:`disable`.

    nn.MultiheadAttention, nn.TransformerEncoder and what calls the function by its place in ``torch.nn.functional`` use it,
    models of the transformers library with ``attn_implementation="sdpa"`` among them. What imported the function by name before
    keeps torch's, and so does the fused inference path of nn.MultiheadAttention, which never calls it.
    """
    with _lock:
        _asked["enable"] = True
        _set()


def disable() -> None:
    """Put back what stood there; within a block of :func:`enabled`, at its end."""
    with _lock:
        _asked["enable"] = False
        _set()


def is_enabled() -> bool:
    """Whether ``torch.nn.functional.scaled_dot_product_attention`` leads to tkjit."""
    return F.scaled_dot_product_attention is _attention


@contextmanager
def enabled() -> Iterator[None]:
    """:func:`enable` for a block. Blocks may overlap, in threads too: it lasts until the last one ends."""
    with _lock:
        _asked["blocks"] += 1
        _set()
    try:
        yield
    finally:
        with _lock:
            _asked["blocks"] -= 1
            _set()
