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
    from . import attention, cache
    from ._warmup import warmup
    from .ops.attention import scaled_dot_product_attention
    from .ops.layer_norm import layer_norm, rms_norm
    from .ops.softmax import log_softmax, softmax

# name -> the module that holds it
_LAZY = {
    "attention": "attention",
    "cache": "cache",
    "layer_norm": "ops.layer_norm",
    "log_softmax": "ops.softmax",
    "rms_norm": "ops.layer_norm",
    "scaled_dot_product_attention": "ops.attention",
    "softmax": "ops.softmax",
    "warmup": "_warmup",
}

__all__ = [
    "CompileError",
    "DeviceError",
    "EmulatorError",
    "Error",
    "LaunchError",
    "__version__",
    "attention",
    "cache",
    "layer_norm",
    "log_softmax",
    "rms_norm",
    "scaled_dot_product_attention",
    "softmax",
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
