"""Time tkjit beside its peers.

    python benchmarks/run.py                      every op, on the device
    python benchmarks/run.py softmax --budget 150
    python benchmarks/run.py softmax --all        device, host time a call, first call, import

What is timed comes from the ops (their ``CASES`` and ``TIMED``) and adamw.py, whom they are timed beside from peers.py,
how from timing.py. Writes ``benchmarks/results/<op>-<gpu>-<date>.json`` and prints tables.
"""

import argparse
import functools
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import torch  # noqa: E402

import adamw  # noqa: E402
import peers  # noqa: E402
import report  # noqa: E402
import timing  # noqa: E402
from tkjit.testing import DTYPE_NAMES, BenchCase, OpCases, all_timed, as_tuple, closeness, in_float64  # noqa: E402

DIRECTIONS = ("forward", "backward")

#: A check here finds a kernel that computes something else; how accurate tkjit is, the tests judge.
CHECK_FUDGE = 4.0
CHECK_ROWS = 32
CHECK_ELEMENTS = 1 << 24


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    if not torch.cuda.is_available():
        print("run.py: no CUDA device: there is nothing to time here", file=sys.stderr)
        return 2
    found = all_timed() | {adamw.NAME: adamw.CASES}
    unknown = [name for name in options.op if name not in found]
    if unknown:
        print(f"run.py: no op named {', '.join(unknown)}; there are {', '.join(found)}", file=sys.stderr)
        return 2
    options.deadline = time.monotonic() + options.budget
    torch.manual_seed(0)
    for name in options.op or found:
        op = found[name]
        results = report.provenance(name, argv)
        try:
            measure(op, options, results)
        finally:
            # What was measured before something broke is kept.
            path = report.write(results, options.out)
            where = f"{results['gpu']}, driver {results['driver']}, {results['date']}, commit {results['commit']}"
            print(f"\n{where}: {path.name}", flush=True)
    return 0


def measure(op: OpCases, options: argparse.Namespace, results: dict[str, Any]) -> None:
    if options.device:
        results["device"] = on_device(op, options, timing.CudaClock())
        if results["device"]:
            print("\n" + report.verdicts(results["device"]), flush=True)
    small = bool(op.dtypes)  # an optimizer has no small call
    if options.host and small:
        results["host"] = on_host(op, options)
        print("\n" + report.host_table(op.name, results["host"]), flush=True)
    if options.first_call and small:
        results["first_call"] = first_calls(op, options)
        results["import"] = [import_time(options)]
        show_first_calls(op.name, results)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="run.py", description="Time tkjit beside its peers on a GPU.")
    parser.add_argument("op", nargs="*", help="which ops (default: all)")
    what = parser.add_argument_group("what to time (default: --device)")
    what.add_argument("--device", action="store_true", help="the op's bench cases, on the device")
    what.add_argument("--host", action="store_true", help="host time a call on a small tensor")
    what.add_argument("--first-call", action="store_true", help="the first call in fresh processes, and the import")
    what.add_argument("--all", action="store_true", help="all three")
    which = parser.add_argument_group("which cases")
    which.add_argument("--group", action="append", help="only this group (repeat for more), e.g. 'last dim'")
    which.add_argument("--dtype", action="append", choices=sorted(DTYPE_NAMES.values()), help="only this dtype")
    which.add_argument("--direction", action="append", choices=DIRECTIONS, help="only this direction")
    which.add_argument("--x", action="append", type=float, help="only cases at this place on the axis, e.g. this width")
    which.add_argument("--peer", action="append", help="only this peer, beside tkjit and the copy")
    which.add_argument(
        "--quick", action="store_true", help="every third case, fewer rounds: to see that it works, not to publish"
    )
    parser.add_argument("--rounds", type=int, help="timed calls of each peer and case (default: 30)")
    parser.add_argument(
        "--budget",
        type=float,
        default=float("inf"),
        help="seconds; cases that it doesn't reach are reported as not run",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=float("inf"),
        help="seconds that one peer's first calls (compiling) may take in all; further cases go without it",
    )
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results", help="folder of the JSON files")
    options = parser.parse_args(argv)
    if options.all:
        options.device = options.host = options.first_call = True
    elif not (options.host or options.first_call):
        options.device = True
    if options.rounds is None:
        options.rounds = 8 if options.quick else 30
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


# --- On the device ------------------------------------------------------------


def selected(op: OpCases, options: argparse.Namespace) -> list[BenchCase]:
    cases = [
        case
        for case in op.bench
        if (not options.group or case.group in options.group)
        and (not options.dtype or DTYPE_NAMES[case.dtype] in options.dtype)
        and (not options.x or case.x in options.x)
    ]
    return cases[::3] if options.quick else cases


def on_device(op: OpCases, options: argparse.Namespace, clock: timing.Clock) -> list[dict[str, Any]]:
    """Time the selected cases; prints a table whenever a group of one dtype is complete."""
    chosen = [p for p in peers.peers_of(op) if not options.peer or p.name in ("tkjit", "copy", *options.peer)]
    directions = options.direction or DIRECTIONS
    entries: list[dict[str, Any]] = []
    made_s: Counter[str] = Counter()
    cases = selected(op, options)
    for i, case in enumerate(cases):
        for direction in directions_of(case, directions):
            if time.monotonic() > options.deadline:
                not_run = {p.name: {"status": "not run: over the budget"} for p in chosen}
                entries.append(entry_of(case, direction) | {"peers": not_run})
            else:
                spent = f"not run: its first calls took {options.patience:g} s"
                own = ("tkjit", "copy")
                late = [p.name for p in chosen if made_s[p.name] > options.patience and p.name not in own]
                some = [replace(p, missing=spent) if p.name in late else p for p in chosen]
                entries.append(time_case(op, case, direction, some, options.rounds, clock))
                made_s.update({name: p.get("made_s", 0.0) for name, p in entries[-1]["peers"].items()})
        last = i + 1 == len(cases) or (cases[i + 1].group, cases[i + 1].dtype) != (case.group, case.dtype)
        if last:
            for direction in directions_of(case, directions):
                key = (case.group, DTYPE_NAMES[case.dtype], direction)
                part = [e for e in entries if (e["group"], e["dtype"], e["direction"]) == key]
                print("\n" + report.device_table(op.name, part), flush=True)
    return entries


def directions_of(case: BenchCase, asked: Sequence[str]) -> list[str]:
    return [direction for direction in asked if direction == "forward" or case.grad_of]


def entry_of(case: BenchCase, direction: str) -> dict[str, Any]:
    flops = {"flops": case.flops[direction == "backward"]} if case.flops else {}
    return flops | {
        "case": case.label,
        "group": case.group,
        "x": case.x,
        "dtype": DTYPE_NAMES[case.dtype],
        "direction": direction,
        "bytes": case.forward_bytes if direction == "forward" else case.backward_bytes,
    }


def time_case(
    op: OpCases,
    case: BenchCase,
    direction: str,
    chosen: Sequence[peers.Peer],
    rounds: int,
    clock: timing.Clock,
    device: str = "cuda",
) -> dict[str, Any]:
    """One case in one direction: build each peer, check what it returns, then time those that are right, in turns."""
    entry = entry_of(case, direction)
    try:
        if device == "cuda":
            torch.cuda.empty_cache()
        call = make_call(op, case, direction, device)
        expected = Expected(call)
        calls: dict[str, timing.Thunk] = {}
        entry["peers"] = {
            peer.name: {"status": peer.missing} if peer.missing else prepare(peer, call, expected, clock, calls)
            for peer in chosen
        }
        samples = timing.interleave(calls, rounds, clock, heat_s=0.05) if calls else {}
    except Exception as e:  # out of memory, or a kernel that took the context with it: the other results still count
        entry["peers"] = {peer.name: {"status": failure(e)} for peer in chosen}
        return entry
    for name, several in samples.items():
        took = timing.summary(several)
        entry["peers"][name] |= took | {"gbps": entry["bytes"] / took["median"] / 1e6}
    compare(entry)
    return entry


def failure(e: Exception) -> str:
    return f"failed: {type(e).__name__}: {report.without_paths(str(e))}"


def compare(entry: dict[str, Any]) -> None:
    """Add each peer's ratio to the copy, and whether tkjit is ahead of it."""
    timed = {name: peer for name, peer in entry["peers"].items() if peer["status"] == "ok"}
    if "copy" in timed:
        for peer in timed.values():
            peer["of_copy"] = peer["gbps"] / timed["copy"]["gbps"]
    if "tkjit" in timed:
        mine = timed["tkjit"]["median"]
        entry["ahead"] = {name: mine < peer["median"] for name, peer in timed.items() if name not in ("tkjit", "copy")}


def make_call(op: OpCases, case: BenchCase, direction: str, device: str) -> peers.Call:
    args = case.make(device)
    with torch.no_grad():
        outputs = as_tuple(op.reference(*args, **case.kwargs))
    # A loss' own gradient is 1.
    grads = tuple(torch.randn_like(o) if o.ndim else torch.ones_like(o) for o in outputs)
    grads = grads if direction == "backward" else ()
    return peers.Call(op, case, direction, args, outputs, grads)


def prepare(
    peer: peers.Peer, call: peers.Call, expected: "Expected", clock: timing.Clock, calls: dict[str, timing.Thunk]
) -> dict[str, Any]:
    """Build a peer and check its result. Its status is "ok", and it gets an entry in ``calls``, or why not; ``made_s`` are the
    seconds until its first result."""
    began = time.monotonic()
    try:
        thunk = peer.build(call)
        if peer.checked:
            spoil(call)
        result = thunk()
        clock.synchronize()
        wrong = ""
    except peers.NotApplicable as e:
        wrong = f"n/a: {e}"
    except Exception as e:  # whatever a peer dies of is its result
        wrong = failure(e)
    made = {"made_s": round(time.monotonic() - began, 3)}
    if not wrong and peer.checked:
        judged = expected.judge(as_tuple(result))
        wrong = f"wrong: {judged}" if judged else ""
    if wrong:
        return {"status": wrong} | made
    calls[peer.name] = thunk
    return {"status": "ok"} | made


def spoil(call: peers.Call) -> None:
    """Leave NaN in the memory that the results will get: else it may hold another peer's right ones."""
    results = call.outputs if call.direction == "forward" else [call.args[i] for i in call.case.grad_of]
    held = [torch.full(t.shape, math.nan, dtype=t.dtype, device=t.device) for t in results for _ in range(3)]
    del held


def gradients(
    call: peers.Call, args: Sequence[Any], grads: Sequence[torch.Tensor], places: Sequence[int], wide: bool = False
) -> tuple[torch.Tensor, ...]:
    """Of the arguments in these places, by torch's own function; ``wide``: in float64."""
    leaves = tuple(
        (a.detach().double() if wide else a.detach()).requires_grad_() if i in call.case.grad_of else a
        for i, a in enumerate(args)
    )
    reference = call.op.reference
    outputs = in_float64(reference, leaves, call.kwargs) if wide else reference(*leaves, **call.kwargs)
    return torch.autograd.grad(
        as_tuple(outputs), [leaves[i] for i in places], [g.double() if wide else g for g in grads]
    )


class Expected:
    """What a call should return, from float64, on some of the rows where these are independent."""

    def __init__(self, call: peers.Call) -> None:
        self.rows, self.batch = self._pick(call), call.case.batch
        args = tuple(self._part(a) if isinstance(a, torch.Tensor) else a for a in call.args)
        grads = tuple(map(self._part, call.grads))
        self.op, self.slack = call.op, call.op.slack[call.direction == "backward"]
        if call.direction == "forward":
            with torch.no_grad():
                self.want = as_tuple(in_float64(call.op.reference, args, call.kwargs))
                self.torch = as_tuple(call.op.reference(*args, **call.kwargs))
        else:
            grad_of = call.case.grad_of
            self.want = gradients(call, args, grads, grad_of, wide=True)
            self.torch = gradients(call, args, grads, grad_of)
            if self.rows is not None and not all(self._has_rows(call.args[i]) for i in grad_of):
                self._sum_over_all_rows(call)

    def _sum_over_all_rows(self, call: peers.Call) -> None:
        """Of weights and their like: each row adds to their gradients."""
        own = {i: k for k, i in enumerate(call.case.grad_of) if not self._has_rows(call.args[i])}
        want, torchs = list(self.want), list(self.torch)
        for k in own.values():
            want[k] = torch.zeros_like(want[k])
        step = max(1, 4 * CHECK_ELEMENTS // max(1, call.args[0].numel() // self.batch))
        for at in range(0, self.batch, step):
            args, grads = (
                [t[at : at + step] if self._has_rows(t) else t for t in ts] for ts in (call.args, call.grads)
            )
            for k, one in zip(own.values(), gradients(call, args, grads, list(own), wide=True), strict=True):
                want[k] += one
        for k, one in zip(own.values(), gradients(call, call.args, call.grads, list(own)), strict=True):
            torchs[k] = one
        self.want, self.torch = tuple(want), tuple(torchs)

    def _has_rows(self, tensor: Any) -> bool:
        return isinstance(tensor, torch.Tensor) and tensor.ndim > 0 and tensor.shape[0] == self.batch

    def _pick(self, call: peers.Call) -> torch.Tensor | None:
        batch = call.case.batch
        if batch is None:
            return None
        first = call.args[0]
        most = max(2, min(CHECK_ROWS, CHECK_ELEMENTS // max(1, first.numel() // batch)))
        if batch <= most:
            return None
        # The first and the last, and some between.
        middle = torch.randint(1, batch - 1, (most - 2,)).tolist()
        return torch.tensor(sorted({0, batch - 1, *middle}), device=first.device)

    def _part(self, tensor: torch.Tensor) -> torch.Tensor:
        """Its rows that are looked at; all of what has none of its own, such as weights."""
        return tensor.index_select(0, self.rows) if self.rows is not None and self._has_rows(tensor) else tensor

    def judge(self, results: tuple[Any, ...]) -> str:
        """Empty if they are right, else what is wrong."""
        if len(results) != len(self.want):
            return f"{len(results)} results, should be {len(self.want)}"
        for got, want, own in zip(results, self.want, self.torch, strict=True):
            if not isinstance(got, torch.Tensor):
                return f"{type(got).__name__}, should be a tensor"
            # A loss may be given in more digits than torch's.
            if got.dtype != own.dtype and not (got.ndim == 0 and got.dtype == torch.float32):
                return f"dtype {got.dtype}, should be {own.dtype}"
            part = self._part(got.detach()).to(own.dtype)
            if part.shape != want.shape:
                return f"shape {tuple(part.shape)}, should be {tuple(want.shape)}"
            verdict = closeness(part, want, own, fudge=CHECK_FUDGE, dim=self.op.dim, slack=self.slack)
            if not verdict.ok:
                return str(verdict)
        return ""


# --- On the host --------------------------------------------------------------


def on_host(
    op: OpCases,
    options: argparse.Namespace,
    device: str = "cuda",
    synchronize: Callable[[], None] = torch.cuda.synchronize,
) -> list[dict[str, Any]]:
    """Host time a call of tkjit and torch on the op's smallest sample, without and with gradients."""
    batches = 20 if options.quick else 100
    entries = []
    for dtype in (torch.float32, torch.bfloat16):
        if dtype not in op.dtypes or (options.dtype and DTYPE_NAMES[dtype] not in options.dtype):
            continue
        sample = op.samples(device, dtype)[0]
        functions = {"tkjit": op.public, "torch": op.reference}
        leaf = sample.args[0].detach().requires_grad_()
        with_grad = (leaf, *sample.args[1:])
        dy = tuple(torch.randn_like(y) for y in as_tuple(op.reference(*sample.args, **sample.kwargs)))

        def both(function: Callable[..., Any], args: tuple, kwargs: Any, leaf: torch.Tensor, dy: tuple) -> None:
            torch.autograd.grad(as_tuple(function(*args, **kwargs)), leaf, dy)

        modes = {
            "no grad": {n: functools.partial(f, *sample.args, **sample.kwargs) for n, f in functions.items()},
            "grad, forward": {n: functools.partial(f, *with_grad, **sample.kwargs) for n, f in functions.items()},
            "grad, forward and backward": {
                n: functools.partial(both, f, with_grad, sample.kwargs, leaf, dy) for n, f in functions.items()
            },
        }
        for mode, calls in modes.items():
            for call in calls.values():
                for _ in range(20):
                    call()
            took = {n: timing.summary(s) for n, s in timing.host_time(calls, batches, 200, synchronize).items()}
            shape = tuple(sample.args[0].shape)
            entries.append(
                {
                    "dtype": DTYPE_NAMES[dtype],
                    "mode": mode,
                    "shape": list(shape),
                    "unit": "us",
                    "peers": {n: {"status": "ok"} | t for n, t in took.items()},
                    "ratio": took["tkjit"]["median"] / took["torch"]["median"],
                }
            )
    return entries


# --- In fresh processes -------------------------------------------------------


def first_calls(op: OpCases, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The first call of the smallest sample, a case in the middle and the longest: cold, and from a warm disk cache."""
    repeats = 1 if options.quick else 3
    both = [case for case in op.bench if case.grad_of]
    same = [case for case in both if case.dtype == torch.bfloat16] or both
    longest = max(same, key=lambda case: case.x) if same else None
    middle = same[len(same) // 2] if same else None
    labels = list(dict.fromkeys(["small/bf16", *(case.label for case in (middle, longest) if case is not None)]))
    entries = []
    for label in labels:
        for direction in DIRECTIONS:
            cold, warm = [], []
            failed = ""
            for _ in range(repeats):
                if time.monotonic() > options.deadline:
                    failed = "not run: over the budget"
                    break
                with tempfile.TemporaryDirectory() as cache:
                    try:
                        cold.append(
                            child([str(HERE / "first_call.py"), op.name, label, direction, "cold"], cache)["ms"]
                        )
                        warm.append(
                            child([str(HERE / "first_call.py"), op.name, label, direction, "warm"], cache)["ms"]
                        )
                    except ChildFailed as e:
                        failed = f"failed: {e}"
                        break
            for start, took in (("cold", cold), ("warm", warm)):
                entry: dict[str, Any] = {"case": label, "dtype": "bf16", "direction": direction, "start": start}
                entry |= {"ms": statistics.median(took), "samples": took} if took else {"ms": None, "status": failed}
                entries.append(entry)
    return entries


class ChildFailed(Exception):
    pass


def child(words: Sequence[str], cache: str) -> dict[str, Any]:
    """Run Python with an own cache folder; the JSON on its last line."""
    env = os.environ | {"TKJIT_CACHE_DIR": cache}
    try:
        done = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        raise ChildFailed("no end after 120 s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise ChildFailed(report.without_paths(lines[-1]))
    return json.loads(done.stdout.strip().splitlines()[-1])


IMPORT = """
import json, pathlib, time
import torch

def nvrtc():
    maps = pathlib.Path("/proc/self/maps")
    return maps.exists() and "nvrtc" in maps.read_text()

by_torch = nvrtc()
before = time.perf_counter_ns()
import tkjit
ms = (time.perf_counter_ns() - before) / 1e6
loaded = nvrtc() and not by_torch
print(json.dumps({"ms": ms, "cuda_initialized": torch.cuda.is_initialized(), "nvrtc_loaded": loaded}))
"""


def import_time(options: argparse.Namespace) -> dict[str, Any]:
    """What ``import tkjit`` adds to ``import torch``; whether it touched CUDA or loaded an NVRTC that torch hadn't."""
    with tempfile.TemporaryDirectory() as cache:
        several = [child(["-c", IMPORT], cache) for _ in range(2 if options.quick else 5)]
    return {
        "module": "tkjit",
        "ms": statistics.median(one["ms"] for one in several),
        "samples": [one["ms"] for one in several],
        "cuda_initialized": any(one["cuda_initialized"] for one in several),
        "nvrtc_loaded": any(one["nvrtc_loaded"] for one in several),
    }


def show_first_calls(name: str, results: dict[str, Any]) -> None:
    by_case: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in results["first_call"]:
        by_case.setdefault((entry["case"], entry["direction"]), {})[entry["start"]] = entry
    rows = [
        [
            f"{case} {direction}",
            *(f"{e['ms']:.1f}" if e["ms"] is not None else e["status"] for e in (both["cold"], both["warm"])),
        ]
        for (case, direction), both in by_case.items()
    ]
    print("\n" + report.table([f"{name} first call, ms", "cold", "warm disk"], rows))
    for entry in results["import"]:
        touched = [what for what, did in (("CUDA", entry["cuda_initialized"]), ("NVRTC", entry["nvrtc_loaded"])) if did]
        what = " and ".join(touched) or "neither CUDA nor NVRTC"
        print(f"import {entry['module']} after torch: {entry['ms']:.1f} ms; touches {what}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
