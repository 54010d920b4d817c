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
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .ops.attention import scaled_dot_product_attention, sliding_window_attention

__all__ = ["disable", "enable", "enabled", "is_enabled", "sliding_window_attention"]

_torchs = torch._C._nn.scaled_dot_product_attention
_lock = threading.Lock()


def _attention(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """scaled_dot_product_attention: tkjit's for CUDA tensors, else torch's."""
    function = scaled_dot_product_attention if isinstance(query, Tensor) and query.is_cuda else _torchs
    return function(query, *args, **kwargs)


def enable() -> None:
    """Put tkjit's kernels behind ``torch.nn.functional.scaled_dot_product_attention``, until :func:`disable`.

    nn.MultiheadAttention, nn.TransformerEncoder and what calls the function by its place in ``torch.nn.functional`` use it,
    models of the transformers library with ``attn_implementation="sdpa"`` among them. What imported the function by name before
    keeps torch's, and so does the fused inference path of nn.MultiheadAttention, which never calls it.
    """
    with _lock:
        F.scaled_dot_product_attention = _attention


def disable() -> None:
    """Put torch's own function back."""
    with _lock:
        F.scaled_dot_product_attention = _torchs


def is_enabled() -> bool:
    """Whether ``torch.nn.functional.scaled_dot_product_attention`` leads to tkjit."""
    return F.scaled_dot_product_attention is _attention


@contextmanager
def enabled() -> Iterator[None]:
    """:func:`enable` for a block; afterwards it is as it was before."""
    before = is_enabled()
    enable()
    try:
        yield
    finally:
        (enable if before else disable)()
