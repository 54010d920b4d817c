"""Ops in torch's dispatcher, for torch.compile, export, dispatch modes and fake tensors. Eager calls go straight to C."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("tkjit", "DEF")


def define(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    setup_context: Callable[..., None],
    backward: Callable[..., Any],
) -> Callable[..., Any]:
    """Register ``tkjit::<schema>`` and return its ``torch.ops`` entry.

    Args:
        schema: As torch writes it, without the namespace.
        run: The raw op.
        fake: Shapes, dtypes and strides of the result, from fake tensors.
        setup_context: ``(ctx, inputs, output)``; what the backward keeps.
        backward: ``(ctx, *grads)``, made of ops that torch can differentiate again.
    """
    name = schema.split("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, run, "CUDA")
    _library.impl(name, run, "CPU")
    torch.library.register_fake(f"tkjit::{name}", fake, lib=_library)
    torch.library.register_autograd(f"tkjit::{name}", backward, setup_context=setup_context, lib=_library)
    return getattr(torch.ops.tkjit, name).default
