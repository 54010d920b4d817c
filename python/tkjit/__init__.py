"""tkjit: CUDA kernels for PyTorch, compiled at run time from templates.

``tkjit.softmax(x)`` and its kin take torch tensors and are differentiable. Importing tkjit touches neither torch, CUDA nor a
compiler; an op is loaded when it is first named.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._core import __version__
from ._errors import CompileError, DeviceError, EmulatorError, Error, LaunchError

if TYPE_CHECKING:
    from . import attention, cache, nn, optim
    from ._warmup import warmup
    from .kernel import Kernel, bf16, bool_, elementwise, f16, f32, f64, i32, i64, reduction, struct, u32, u64
    from .ops.attention import scaled_dot_product_attention
    from .ops.cross_entropy import cross_entropy
    from .ops.dropout import dropout, dropout_add
    from .ops.layer_norm import layer_norm, rms_norm
    from .ops.linear_cross_entropy import linear_cross_entropy
    from .ops.pointwise import (
        add,
        copy,
        geglu,
        gelu,
        leaky_relu,
        mish,
        mul,
        reglu,
        relu,
        sigmoid,
        silu,
        softplus,
        swiglu,
        tanh,
    )
    from .ops.rotary import rotary_embedding
    from .ops.softmax import log_softmax, softmax

# name -> the module that holds it
_LAZY = {
    "Kernel": "kernel",
    "add": "ops.pointwise",
    "attention": "attention",
    "bf16": "kernel",
    "bool_": "kernel",
    "cache": "cache",
    "copy": "ops.pointwise",
    "cross_entropy": "ops.cross_entropy",
    "dropout": "ops.dropout",
    "dropout_add": "ops.dropout",
    "elementwise": "kernel",
    "f16": "kernel",
    "f32": "kernel",
    "f64": "kernel",
    "geglu": "ops.pointwise",
    "gelu": "ops.pointwise",
    "i32": "kernel",
    "i64": "kernel",
    "layer_norm": "ops.layer_norm",
    "leaky_relu": "ops.pointwise",
    "linear_cross_entropy": "ops.linear_cross_entropy",
    "log_softmax": "ops.softmax",
    "mish": "ops.pointwise",
    "mul": "ops.pointwise",
    "nn": "nn",
    "optim": "optim",
    "reduction": "kernel",
    "reglu": "ops.pointwise",
    "relu": "ops.pointwise",
    "rms_norm": "ops.layer_norm",
    "rotary_embedding": "ops.rotary",
    "scaled_dot_product_attention": "ops.attention",
    "sigmoid": "ops.pointwise",
    "silu": "ops.pointwise",
    "softmax": "ops.softmax",
    "softplus": "ops.pointwise",
    "struct": "kernel",
    "swiglu": "ops.pointwise",
    "tanh": "ops.pointwise",
    "u32": "kernel",
    "u64": "kernel",
    "warmup": "_warmup",
}

__all__ = [
    "CompileError",
    "DeviceError",
    "EmulatorError",
    "Error",
    "Kernel",
    "LaunchError",
    "__version__",
    "add",
    "attention",
    "bf16",
    "bool_",
    "cache",
    "copy",
    "cross_entropy",
    "dropout",
    "dropout_add",
    "elementwise",
    "f16",
    "f32",
    "f64",
    "geglu",
    "gelu",
    "i32",
    "i64",
    "layer_norm",
    "leaky_relu",
    "linear_cross_entropy",
    "log_softmax",
    "mish",
    "mul",
    "nn",
    "optim",
    "reduction",
    "reglu",
    "relu",
    "rms_norm",
    "rotary_embedding",
    "scaled_dot_product_attention",
    "sigmoid",
    "silu",
    "softmax",
    "softplus",
    "struct",
    "swiglu",
    "tanh",
    "u32",
    "u64",
    "warmup",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_LAZY[name]}")
    value = module if _LAZY[name] == name else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
