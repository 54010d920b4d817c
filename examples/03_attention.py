"""Attention beside torch's composite in float64: causal, grouped heads, a mask with a gradient, a window, a whole model.

    python examples/03_attention.py

On a machine without a GPU the same kernels run on the CPU, through the emulator, on small sizes.
"""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import tkjit

CUDA = torch.cuda.is_available()
DEVICE, LENGTH = ("cuda", 1024) if CUDA else ("cpu", 40)


def heads(count, length=LENGTH, d=64):
    return torch.randn(2, count, length, d, device=DEVICE).bfloat16().requires_grad_()


def error(got, want):
    return float((got.detach().double() - want.detach()).abs().max() / want.detach().abs().max())


def compare(name, ours, torchs, inputs):
    """Output and gradients of ours in bfloat16 against torch's composite in float64."""
    wide = [t.detach().double().requires_grad_() for t in inputs]
    out = ours(*inputs)
    with sdpa_kernel(SDPBackend.MATH):
        want = torchs(*wide)
    g = torch.randn_like(out)
    grads = torch.autograd.grad(out, inputs, g)
    want_grads = torch.autograd.grad(want, wide, g.double())
    errors = [error(a, b) for a, b in zip((out, *grads), (want, *want_grads), strict=True)]
    print(f"{name:14} error {errors[0]:.1e}, of the gradients {', '.join(f'{e:.1e}' for e in errors[1:])}")


def main():
    torch.manual_seed(0)
    ours, torchs = tkjit.scaled_dot_product_attention, F.scaled_dot_product_attention
    print(f"on {torch.cuda.get_device_name() if CUDA else 'the CPU, emulated'}")

    qkv = [heads(4), heads(4), heads(4)]
    compare("causal", *(lambda q, k, v, f=f: f(q, k, v, is_causal=True) for f in (ours, torchs)), qkv)

    grouped = [heads(4), heads(2), heads(2)]
    compare("grouped heads", *(lambda q, k, v, f=f: f(q, k, v, enable_gqa=True) for f in (ours, torchs)), grouped)

    bias = torch.randn(4, LENGTH, LENGTH, device=DEVICE).bfloat16().requires_grad_()
    compare("bias", ours, torchs, [*qkv, bias])

    near = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=DEVICE).tril().triu(-15)
    compare(
        "window of 16",
        lambda q, k, v: tkjit.attention.attend(q, k, v, window=(15, 0)),
        lambda q, k, v: torchs(q, k, v, near),
        qkv,
    )

    # A model that knows nothing of tkjit. Tensors on the CPU stay torch's there.
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, device=DEVICE)
    x = torch.randn(2, LENGTH, 64, device=DEVICE)
    want = layer(x)
    with tkjit.attention.enabled():
        got = layer(x)
    print(f"{'a layer':14} differs by {float((got - want).detach().abs().max()):.1e}")


if __name__ == "__main__":
    main()
