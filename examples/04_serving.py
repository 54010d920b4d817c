"""Serving: prompts of different lengths without padding, then token by token from a cache in pages, with a score_mod.

    python examples/04_serving.py

On a machine without a GPU the same kernels run on the CPU, through the emulator, on small sizes.
"""

import torch
import torch.nn.functional as F

from tkjit.attention import ScoreMod, varlen, with_kv_cache

CUDA = torch.cuda.is_available()
DEVICE, LENGTHS, PAGE = ("cuda", [700, 33, 256], 64) if CUDA else ("cpu", [20, 3, 11], 8)
HEADS, KV_HEADS, D = 4, 2, 32

# A learned bias for each head and distance, as T5 has it; distances from 15 on share one. It keeps the score's slope.
BIAS = torch.randn(HEADS, 16, device=DEVICE)
MOD = ScoreMod("score + bias[head * 16 + min(max(k_len - q_len + query - key, 0), 15)]", slope="1", bias=BIAS)


def normal(*shape):
    return torch.randn(shape, device=DEVICE).bfloat16()


def plain(q, k, v):
    """One sequence in float64, of plain ops: (tokens, heads, columns), the last query at the last key."""
    distance = torch.arange(len(k) - len(q), len(k), device=DEVICE)[:, None] - torch.arange(len(k), device=DEVICE)
    bias = BIAS[:, distance.clamp(0, 15)].double().masked_fill(distance < 0, -torch.inf)
    heads = (t.double().transpose(0, 1) for t in (q, k, v))
    return F.scaled_dot_product_attention(*heads, bias, enable_gqa=True).transpose(0, 1)


def error(got, want):
    return float((got.detach().double() - want.detach()).abs().max() / want.detach().abs().max())


def prompts():
    """All at once, one behind the other; with a gradient, for training packs its sequences as well."""
    total, starts = sum(LENGTHS), torch.tensor([0, *LENGTHS], device=DEVICE).cumsum(0)
    q, k, v = normal(total, HEADS, D).requires_grad_(), normal(total, KV_HEADS, D), normal(total, KV_HEADS, D)
    out = varlen(q, k, v, starts, is_causal=True, score_mod=MOD)
    g = torch.randn_like(out)
    (dq,) = torch.autograd.grad(out, q, g)

    wide = q.detach().double().requires_grad_()
    each = [t.split(LENGTHS) for t in (wide, k, v)]
    want = torch.cat([plain(*one) for one in zip(*each, strict=True)])
    (want_dq,) = torch.autograd.grad(want, wide, g.double())
    print(f"prompts of {LENGTHS}: error {error(out, want):.1e}, of q's gradient {error(dq, want_dq):.1e}")
    return each[1:]


def paged(sequences, table):
    """The cache: pages anywhere in it, those of a sequence by its row of the table."""
    cache = torch.zeros(table.numel() + 2, PAGE, KV_HEADS, D, device=DEVICE, dtype=torch.bfloat16)
    for row, tokens in zip(table, sequences, strict=True):
        for n, page in enumerate(tokens.split(PAGE)):
            cache[row[n], : len(page)] = page
    return cache


def step(keys, values):
    """The next token of each sequence, whose key and value have just gone into the cache."""
    keys, values = ([torch.cat((t, normal(1, KV_HEADS, D))) for t in ts] for ts in (keys, values))
    lengths = torch.tensor([len(t) for t in keys], device=DEVICE)
    pages = -(-int(lengths.max()) // PAGE)
    table = torch.randperm(len(keys) * pages + 2, device=DEVICE)[: len(keys) * pages].view(len(keys), pages)
    q = normal(len(keys), 1, HEADS, D)
    out = with_kv_cache(q, paged(keys, table), paged(values, table), lengths, table, score_mod=MOD)
    want = torch.stack([plain(*one) for one in zip(q, keys, values, strict=True)])
    print(f"a token each, from pages of {PAGE}: error {error(out, want):.1e}")


def main():
    torch.manual_seed(0)
    print(f"on {torch.cuda.get_device_name() if CUDA else 'the CPU, emulated'}")
    step(*prompts())


if __name__ == "__main__":
    main()
