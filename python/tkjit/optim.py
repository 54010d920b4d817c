"""Optimizers: AdamW, all parameters of a group in one launch or a few.

Written with :class:`tkjit.Kernel`, as a user would write it.
"""

from __future__ import annotations

import array
import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from ._torch import FLOATING, accumulator
from .kernel import Kernel, f32, f64, i32, struct, u32

__all__ = ["AdamW"]

MANY = 72  # tensors a launch: their table is 3.7 of the 4 kB that a kernel's arguments have
STEPS = 480  # steps' counters a launch
THREADS = 256
BYTES = 16  # of a parameter's vector
UNROLL = 1

SOURCE = (
    f"constexpr int kMany = {MANY}, kSteps = {STEPS}, kThreads = {THREADS};\n"
    + r"""
// AdamW over many tensors, element by element of their memory:
//
//   g = sign * g / grad_scale          m = m + (g - m) * (1 - beta1)        v = beta2 * v + (1 - beta2) * g * g
//   p = p * decay - step_size * m / (sqrt(v) * scale + eps)                 amsgrad: the largest v so far in v's place
//   decay = 1 - lr * weight_decay      step_size = lr / (1 - beta1^step)    scale = 1 / sqrt(1 - beta2^step)
//
// Bytes: p, g, m and v are read once and p, m and v written once: 28 a float parameter.
// The host guarantees: the tensors of one index have one layout without gaps; first[i] counts the blocks before tensor i, of
// kThreads * kUnroll vectors each.

// decay, step_size and scale of a tensor, and the step itself.
template <class A> struct Factors { A decay, step_size, scale, step; };

template <class T, class S, class A>
struct Table {
    T* p[kMany];
    T* g[kMany];
    S* m[kMany];
    S* v[kMany];
    S* largest[kMany];
    long long n[kMany];
    int first[kMany];
    int count;
};

template <class A>
struct How {
    Factors<A> all;
    A beta1, beta2, rest1, rest2, eps, sign;  // rest: 1 - beta
    unsigned seed;
    const Factors<A>* factors;  // (count,), of each tensor its own; null: all have `all`
    const float* grad_scale;    // (1,) or null
    const float* found_inf;     // (1,) or null; 1: nothing is written
};

TK_DEVICE float root(float v) { return __fsqrt_rn(v); }
TK_DEVICE double root(double v) { return sqrt(v); }

// 32 well mixed bits of a counter.
TK_DEVICE unsigned mixed(unsigned x)
{
    x = (x ^ x >> 16) * 0x85ebca6bu;
    x = (x ^ x >> 13) * 0xc2b2ae35u;
    return x ^ x >> 16;
}

// To one of the two neighbours in bfloat16, the nearer one more often: right on average. What isn't finite stays so.
TK_DEVICE float to_neighbour(float v, unsigned bits16)
{
    const unsigned bits = tk::bits_of(v);
    const bool finite = (bits & 0x7f800000u) != 0x7f800000u;
    return finite ? tk::float_of((bits + bits16) & 0xffff0000u) : v;
}

template <class T, class S, class A, bool kAmsgrad, bool kStochastic>
TK_DEVICE void update(A& p, A& g, A& m, A& v, A& largest, const How<A>& how, const Factors<A>& f, unsigned at)
{
    const A signed_g = how.sign * g;
    m += (signed_g - m) * how.rest1;
    v = how.beta2 * v + how.rest2 * signed_g * signed_g;
    A used = v;
    if constexpr (kAmsgrad) {
        used = largest > v || largest != largest ? largest : v;  // a NaN stays
        largest = used;
    }
    p = p * f.decay - f.step_size * (m / (root(used) * f.scale + how.eps));
    if constexpr (kStochastic) {
        const unsigned bits = mixed(at);
        m = to_neighbour(float(m), bits & 0xffffu);
        v = to_neighbour(float(v), bits >> 16);
        if constexpr (kAmsgrad) {
            largest = to_neighbour(float(largest), bits >> 16);
        }
    }
}

template <class T, class S, class A, bool kAmsgrad, bool kStochastic, int kVec, int kUnroll>
__global__ void __launch_bounds__(kThreads)
adamw(const __grid_constant__ Table<T, S, A> t, const __grid_constant__ How<A> how)
{
    if (how.found_inf != nullptr && *how.found_inf == 1.0f) {
        return;
    }
    // Which tensor the block belongs to: the last whose first block is no later.
    int i = 0;
#pragma unroll
    for (int half = 64; half > 0; half /= 2) {
        if (i + half < t.count && t.first[i + half] <= int(blockIdx.x)) {
            i += half;
        }
    }
    T* p = t.p[i];
    T* g = t.g[i];
    S* m = t.m[i];
    S* v = t.v[i];
    S* largest = t.largest[i];
    const long long n = t.n[i];
    // Not `f = how.all; if (...) f = how.factors[i];`: NVRTC 13.0 forgets the second decay.
    const Factors<A> f = *(how.factors != nullptr ? how.factors + i : &how.all);
    const unsigned seed = how.seed + unsigned(int(f.step)) * 0x9e3779b9u;
    const A by = how.grad_scale != nullptr ? A(1) / A(*how.grad_scale) : A(1);
    constexpr int kSpan = kThreads * kVec;
    // 64 bits: a tensor may have more than 2^31 elements.
    const long long begin = (long long)(int(blockIdx.x) - t.first[i]) * (kSpan * kUnroll);
    const unsigned number = mixed(seed + blockIdx.x) + threadIdx.x * (kVec * kUnroll);
    using Tv = tk::Vec<T, kVec>;
    using Sv = tk::Vec<S, kVec>;

    const unsigned long long places = (unsigned long long)p | (unsigned long long)g | (unsigned long long)m |
                                      (unsigned long long)v | (unsigned long long)largest;
    if (places % 16 == 0 && begin + kSpan * kUnroll <= n) {
        // All loads first: as many bytes on their way as the registers have room for.
        Tv pv[kUnroll], gv[kUnroll];
        Sv mv[kUnroll], vv[kUnroll], lv[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            const long long at = begin + u * kSpan + threadIdx.x * kVec;
            pv[u].raw = tk::load_global<Tv::kBytes>(p + at);
            gv[u].raw = tk::load_global<Tv::kBytes>(g + at);
            mv[u].raw = tk::load_global<Sv::kBytes>(m + at);
            vv[u].raw = tk::load_global<Sv::kBytes>(v + at);
            if constexpr (kAmsgrad) {
                lv[u].raw = tk::load_global<Sv::kBytes>(largest + at);
            }
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            const long long at = begin + u * kSpan + threadIdx.x * kVec;
            A pa[kVec], ga[kVec];
            typename Sv::Acc ms[kVec], vs[kVec], ls[kVec];
            pv[u].unpack(pa);
            gv[u].unpack(ga);
            mv[u].unpack(ms);
            vv[u].unpack(vs);
            if constexpr (kAmsgrad) {
                lv[u].unpack(ls);
            }
#pragma unroll
            for (int k = 0; k < kVec; ++k) {
                A ma = A(ms[k]), va = A(vs[k]), la = kAmsgrad ? A(ls[k]) : A(0);
                ga[k] *= by;
                update<T, S, A, kAmsgrad, kStochastic>(pa[k], ga[k], ma, va, la, how, f, number + u * kVec + k);
                ms[k] = ma;
                vs[k] = va;
                ls[k] = la;
            }
            tk::store_global<Tv::kBytes>(p + at, Tv::pack(pa).raw);
            tk::store_global<Sv::kBytes>(m + at, Sv::pack(ms).raw);
            tk::store_global<Sv::kBytes>(v + at, Sv::pack(vs).raw);
            if constexpr (kAmsgrad) {
                tk::store_global<Sv::kBytes>(largest + at, Sv::pack(ls).raw);
            }
            if (how.grad_scale != nullptr) {
                tk::store_global<Tv::kBytes>(g + at, Tv::pack(ga).raw);
            }
        }
        return;
    }
    // The last block of a tensor, and one whose memory no vector fits.
    for (int k = 0; k < kVec * kUnroll; ++k) {
        const long long at = begin + k * kThreads + threadIdx.x;
        if (at < n) {
            A pa = A(tk::to_acc(p[at])), ga = A(tk::to_acc(g[at])) * by;
            A ma = A(tk::to_acc(m[at])), va = A(tk::to_acc(v[at])), la = A(0);
            if constexpr (kAmsgrad) {
                la = A(tk::to_acc(largest[at]));
            }
            update<T, S, A, kAmsgrad, kStochastic>(pa, ga, ma, va, la, how, f, number + k);
            p[at] = tk::from_acc<T>(pa);
            m[at] = tk::from_acc<S>(ma);
            v[at] = tk::from_acc<S>(va);
            if constexpr (kAmsgrad) {
                largest[at] = tk::from_acc<S>(la);
            }
            if (how.grad_scale != nullptr) {
                g[at] = tk::from_acc<T>(ga);
            }
        }
    }
}

struct Steps {
    float* step[kSteps];
};

// One step more of each counter, and what follows from it; a thread a tensor.
template <class A>
__global__ void count_steps(
    const __grid_constant__ Steps t,
    Factors<A>* out,          // (n,)
    const double* lr_tensor,  // (1,) or null: lr
    const float* found_inf,   // (1,) or null; 1: no step is counted
    double lr, double weight_decay, double beta1, double beta2, int n)
{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) {
        return;
    }
    const bool skipped = found_inf != nullptr && *found_inf == 1.0f;
    const float step = *t.step[i] + (skipped ? 0.0f : 1.0f);
    if (!skipped) {
        *t.step[i] = step;
    }
    const double rate = lr_tensor != nullptr ? *lr_tensor : lr;
    Factors<A> f;
    f.decay = A(1.0 - rate * weight_decay);
    f.step_size = A(rate / (1.0 - pow(beta1, double(step))));
    f.scale = A(1.0 / sqrt(1.0 - pow(beta2, double(step))));
    f.step = A(step);
    out[i] = f;
}
"""
)


@functools.cache
def _kernel(dtype: torch.dtype, state: torch.dtype, amsgrad: bool, stochastic: bool) -> Kernel:
    return Kernel(
        SOURCE, "adamw", T=dtype, S=state, A=accumulator(dtype), kAmsgrad=amsgrad, kStochastic=stochastic,
        kVec=BYTES // dtype.itemsize, kUnroll=UNROLL,
    )  # fmt: skip


@functools.cache
def _counter(dtype: torch.dtype) -> Kernel:
    return Kernel(SOURCE, "count_steps", A=accumulator(dtype))


class _Bucket:
    """Parameters that one kernel may serve, with what belongs to each, in one order."""

    def __init__(self) -> None:
        self.lists: tuple[list[Tensor], ...] = ([], [], [], [], [])  # p, g, m, v, the largest v
        self.steps: list[Tensor] = []
        self.owners: list[dict[str, Any]] = []
        self.copied: list[tuple[Tensor, Tensor]] = []  # a gradient, and its copy in the parameter's layout


class AdamW(torch.optim.AdamW):
    """``torch.optim.AdamW`` in one fused kernel.

    The arguments, the groups and ``state_dict()`` are torch's, so a checkpoint of either loads into the other; closures, hooks,
    schedulers, GradScaler and CUDA graphs work as there. As in torch, ``fused=True`` and ``capturable=True`` keep the step on the
    device: with ``fused=True`` GradScaler needs no synchronization, with ``capturable=True`` step() may be captured. Without
    either the kernel is the same, and the step is counted on the host.

    Args:
        state_dtype: The dtype of ``exp_avg``, ``exp_avg_sq`` and ``max_exp_avg_sq``: None, the parameter's, as in torch;
            torch.float32; or torch.bfloat16, which halves the memory of a float32 parameter's states. In bfloat16 a state moves
            by less than half of its last place in most steps (``exp_avg_sq`` by 0.1 % with a beta of 0.999, its last place is
            0.4 %), so rounding to nearest would leave it where it is: states kept in bfloat16 by this argument are rounded to one
            of the two neighbours at random, right on average. The random bits come from the step and the place: equal runs are
            equal, and no generator is touched. bfloat16 parameters without ``state_dtype`` have torch's rounding.

    Computed in float32 (float64 for float64), rounded once. Parameters that the kernel doesn't take (tensor subclasses, memory
    with gaps or overlaps) and ``differentiable=True`` go to torch's own step; under torch.compile all do.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        if state_dtype not in (None, torch.float32, torch.bfloat16):
            raise ValueError(f"AdamW(): state_dtype must be None, torch.float32 or torch.bfloat16, not {state_dtype}")
        if state_dtype is not None and differentiable:
            raise RuntimeError("AdamW(): differentiable=True has no state_dtype")
        self.state_dtype = state_dtype
        # By group and bucket: its counters on the host, and the tensor that they are views of.
        self._counted: dict[Any, tuple[list[Tensor], Tensor]] = {}
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, foreach=foreach, capturable=capturable,
            differentiable=differentiable, fused=fused,
        )  # fmt: skip

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"state_dtype": self.state_dtype}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._counted = {}
        if self.state_dtype is not None:  # torch loads states in the parameter's dtype
            for of_param in self.state.values():
                for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
                    if name in of_param and not of_param[name].is_complex():
                        of_param[name] = of_param[name].to(self.state_dtype)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns what ``closure`` returns, which is called with gradients enabled."""
        if self.defaults["differentiable"] or torch.compiler.is_compiling():
            return super().step(closure)
        check = getattr(self, "_accelerator_graph_capture_health_check", None)
        (check or self._cuda_graph_capture_health_check)()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for number, group in enumerate(self.param_groups):
                buckets, left = self._sorted(group)
                for key, bucket in buckets.items():
                    self._update(number, group, key, bucket)
                if left:
                    self._by_torch(group, left)
        return loss

    def _new_state(self, group: dict[str, Any], p: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[p]
        on_device = group["capturable"] or group["fused"]
        wide = torch.get_default_dtype() == torch.float64 and not group["fused"]
        state["step"] = torch.zeros(
            (), dtype=torch.float64 if wide else torch.float32, device=p.device if on_device else "cpu"
        )
        dtype = p.dtype if p.is_complex() or self.state_dtype is None else self.state_dtype
        for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: 3 if group["amsgrad"] else 2]:
            state[name] = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
        return state

    def _sorted(self, group: dict[str, Any]) -> tuple[dict[Any, _Bucket], list[Tensor]]:
        """The parameters that have gradients by the kernel that serves them, and those that none does."""
        buckets: dict[Any, _Bucket] = {}
        left: list[Tensor] = []
        amsgrad, on_device = group["amsgrad"], bool(group["capturable"] or group["fused"])
        # To read those of a GPU is to wait for it.
        tensor_betas = any(isinstance(beta, Tensor) and beta.device.type != "cpu" for beta in group["betas"])
        for p in group["params"]:
            g = p.grad
            if g is None:
                continue
            if g.is_sparse:
                raise RuntimeError("Adam does not support sparse gradients, please consider SparseAdam instead")
            state = self.state[p] or self._new_state(group, p)
            given = (p, g, state["exp_avg"], state["exp_avg_sq"], *((state["max_exp_avg_sq"],) if amsgrad else ()))
            shape = p.shape
            if any(t.shape != shape for t in given[1:]):
                names = ("gradient", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
                wrong = ", ".join(f"{n} {tuple(t.shape)}" for n, t in zip(names, given[1:]) if t.shape != shape)
                raise RuntimeError(f"AdamW: a parameter of shape {tuple(shape)} has {wrong}")
            if p.is_complex():
                if any(t.is_conj() for t in (p, *given[2:])):  # torch's step too raises, once it has decayed p
                    raise RuntimeError(
                        "AdamW: a complex parameter or its state is conjugated; resolve_conj() makes it plain"
                    )
                given = tuple(map(torch.view_as_real, (p, g.resolve_conj(), *given[2:])))
            bucket_of = None if tensor_betas else _key(given, state["step"], on_device)
            if bucket_of is None:
                left.append(p)
                continue
            bucket = buckets.get(bucket_of)
            if bucket is None:
                bucket = buckets[bucket_of] = _Bucket()
            if given[1].stride() != given[0].stride() or given[1].dtype != given[0].dtype or given[1].is_neg():
                copy = torch.empty_like(given[0]).copy_(given[1])
                bucket.copied.append((given[1], copy))
                given = (given[0], copy, *given[2:])
            for into, tensor in zip(bucket.lists, given):
                into.append(tensor)
            bucket.steps.append(state["step"])
            bucket.owners.append(state)
        return buckets, left

    def _update(self, number: int, group: dict[str, Any], key: Any, b: _Bucket) -> None:
        device, dtype, state_dtype, on_device = key
        scale, found = (_to(getattr(self, name, None), device) for name in ("grad_scale", "found_inf"))
        if on_device:
            self._count_on_device(group, b, device, dtype, found, scale, state_dtype)
            return
        if scale is not None or found is not None:
            raise RuntimeError("AdamW: grad_scale and found_inf are for fused=True")
        steps = self._count(number, key, b)
        for step in sorted(set(steps)):
            own = [i for i, of in enumerate(steps) if of == step]
            lists = b.lists if len(own) == len(steps) else tuple([x[i] for i in own] if x else x for x in b.lists)
            lr, (beta1, beta2) = float(group["lr"]), map(float, group["betas"])
            factors = (
                1 - lr * group["weight_decay"],
                lr / (1 - beta1**step),
                1 / (1 - beta2**step) ** 0.5,
                step,
            )
            self._launch(group, lists, dtype, state_dtype, factors, None, None, None)

    def _count(self, number: int, key: Any, b: _Bucket) -> list[float]:
        """One step more of each; the counters are views of one tensor, so that one addition does it."""
        counted, flat = self._counted.get((number, key), ([], None))
        if flat is None or len(counted) != len(b.steps) or not all(map(operator.is_, counted, b.steps)):
            flat = torch.stack(b.steps)
            counted = list(flat.unbind())
            for state, step in zip(b.owners, counted):
                state["step"] = step
            self._counted[number, key] = (counted, flat)
        flat += 1
        return flat.tolist()

    def _count_on_device(
        self, group: dict[str, Any], b: _Bucket, device: torch.device, dtype: torch.dtype, found: Tensor | None,
        scale: Tensor | None, state_dtype: torch.dtype,
    ) -> None:  # fmt: skip
        lr, (beta1, beta2) = group["lr"], map(float, group["betas"])
        rate = _to(lr, device).to(torch.float64) if isinstance(lr, Tensor) and lr.device.type != "cpu" else None
        rows = torch.empty((len(b.steps), 4), dtype=accumulator(dtype), device=device)
        for at in range(0, len(b.steps), STEPS):
            some = b.steps[at : at + STEPS]
            table = struct(some + [None] * (STEPS - len(some)), writes=some)
            numbers = (0.0 if rate is not None else float(lr), float(group["weight_decay"]), beta1, beta2)
            args = (table, rows[at:], rate, found, *map(f64, numbers), i32(len(some)))
            _counter(dtype).launch(-(-len(some) // 128), 128, args)
        self._launch(group, b.lists, dtype, state_dtype, (0.0,) * 4, rows, scale, found)
        if scale is not None:
            for g, copy in b.copied:
                g.copy_(copy)

    def _launch(
        self, group: dict[str, Any], lists: tuple[list[Tensor], ...], dtype: torch.dtype, state_dtype: torch.dtype,
        factors: tuple[float, ...], rows: Tensor | None, scale: Tensor | None, found: Tensor | None,
    ) -> None:  # fmt: skip
        stochastic = self.state_dtype == torch.bfloat16 == state_dtype
        kernel = _kernel(dtype, state_dtype, group["amsgrad"], stochastic)
        acc: Any = f64 if dtype == torch.float64 else f32
        beta1, beta2 = map(float, group["betas"])
        sign = -1.0 if group["maximize"] else 1.0
        numbers = [acc(value) for value in (*factors, beta1, beta2, 1 - beta1, 1 - beta2, float(group["eps"]), sign)]
        span = THREADS * UNROLL * (BYTES // dtype.itemsize)
        for at in range(0, len(lists[0]), MANY):
            some = [x[at : at + MANY] for x in lists]
            p = some[0]
            sizes = array.array("q", map(Tensor.numel, p))
            first, blocks = array.array("i"), 0
            for size in sizes:
                first.append(blocks)
                blocks += -(-size // span)
            if blocks == 0:
                continue
            pad = MANY - len(p)
            sizes.extend((0,) * pad)
            first.extend((blocks,) * pad)
            table = struct(
                *(x + [None] * (MANY - len(x)) for x in some), sizes, first, i32(len(p)),
                writes=[*p, *some[2], *some[3], *some[4], *(some[1] if scale is not None else ())],
            )  # fmt: skip
            seed = u32(at * 0x85EBCA6B % 2**32)
            how = struct(*numbers, seed, rows[at:] if rows is not None else None, scale, found)
            kernel.launch(blocks, THREADS, (table, how))

    def _by_torch(self, group: dict[str, Any], params: list[Tensor]) -> None:
        states = [self.state[p] for p in params]
        if self.state_dtype is not None and any(s["exp_avg"].dtype != p.dtype for s, p in zip(states, params)):
            raise NotImplementedError("AdamW: with state_dtype parameters are plain tensors without gaps")
        beta1, beta2 = group["betas"]
        adamw(
            params,
            [p.grad.resolve_conj() for p in params],
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            [s["max_exp_avg_sq"] for s in states] if group["amsgrad"] else [],
            [s["step"] for s in states],
            foreach=group["foreach"],
            capturable=group["capturable"],
            fused=group["fused"],
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
            has_complex=any(map(torch.is_complex, params)),
            amsgrad=group["amsgrad"],
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )


_PLAIN = (Tensor, torch.nn.Parameter)


def _key(given: tuple[Tensor, ...], step: Tensor, on_device: bool) -> Any:
    """(device, dtype, states' dtype, whether steps are counted on the device) of what the kernel takes, else None."""
    p, g, *states = given
    dtype, state_dtype, device = p.dtype, states[0].dtype, p.device
    if type(p) not in _PLAIN or type(g) is not Tensor or dtype not in FLOATING or device.type not in ("cpu", "cuda"):
        return None
    if state_dtype not in FLOATING or p.is_neg() or g.device != device or g.layout != torch.strided:
        return None
    if not p.is_contiguous() and not _dense(p):
        return None
    strides = p.stride()
    for s in states:
        if type(s) is not Tensor or s.stride() != strides or s.dtype != state_dtype or s.device != device or s.is_neg():
            return None
    if on_device and (step.device != device or step.dtype != torch.float32):
        return None
    if not on_device and step.device.type != "cpu":
        return None
    return device, dtype, state_dtype, on_device


def _dense(p: Tensor) -> bool:
    """Whether the elements fill their memory, each place once."""
    step = 1
    for stride, size in sorted((stride, size) for size, stride in zip(p.shape, p.stride()) if size > 1):
        if stride != step:
            return False
        step *= size
    return True


def _to(tensor: Any, device: torch.device) -> Any:
    return None if tensor is None else tensor.to(device, non_blocking=True)
