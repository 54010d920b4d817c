"""Every kernel of softmax for every architecture, without a GPU: it compiles, spills nothing and keeps to its registers.

All kernels for all architectures are an hour's work for two cores, so a run takes a selection, another one for each
architecture; ``pytest tests/test_kernels.py --all-kernels`` takes them all.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
import random
import re
import subprocess
import types
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tkjit import _plan
from tkjit._device import ARCHS, Device
from tkjit._plan import Spec, empty, plan
from tkjit._template import Instance, Template, template
from tkjit.ops import softmax

every_arch = pytest.mark.parametrize("arch", ARCHS)

# Registers a thread, by kernel and threads of a block. 65536 make a multiprocessor, so 128 is all that 512 threads can have.
BUDGET = {
    ("fwd", 512): 128, ("fwd", 256): 255, ("fwd", 128): 255, ("fwd", 64): 255,
    ("bwd", 512): 128, ("bwd", 256): 255, ("bwd", 128): 255, ("bwd", 64): 255,
    ("fwd_cols", 512): 128, ("fwd_cols", 256): 255, ("fwd_cols", 128): 255, ("fwd_cols", 64): 255, ("fwd_cols", 32): 255,
    ("bwd_cols", 512): 128, ("bwd_cols", 256): 255, ("bwd_cols", 128): 255, ("bwd_cols", 64): 255, ("bwd_cols", 32): 255,
    ("fwd_any", 256): 128, ("bwd_any", 256): 128,
    ("fwd_part", 512): 128, ("bwd_part", 512): 128,
    ("fwd_apply", 512): 128, ("bwd_apply", 512): 128,
}  # fmt: skip

FACTS = re.compile(
    r"Function properties for (\S+)\n.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\n"
    r".*?Used (\d+) registers"
)

Kernel = tuple[str, dict[str, Any]]


def instance(kernel: Kernel, op: str = "softmax") -> Instance:
    name, parameters = kernel
    return template(op).kernel(name, **parameters)


def threads(kernel: Kernel) -> int:
    """Of a block, as the planners launch it."""
    name, p = kernel
    if "kTeams" in p:
        return p["kTeam"] * p["kTeams"]
    if "kAcross" in p:
        return p["kAcross"] * p["kDown"]
    return 256 if name.endswith("_any") else softmax.THREADS


def every_nth(kernels: list[Kernel], count: int, start: int) -> list[Kernel]:
    """About ``count`` of them, spread over the list."""
    return kernels[start % max(1, len(kernels) // count) :: max(1, len(kernels) // count)]


def chosen(arch: str, everything: bool) -> list[Kernel]:
    """The kernels to compile: all, or a part in which blocks of 512 threads, the first to spill, count for more."""
    device = Device.of_arch(arch)
    if everything:
        return list(softmax.all_kernels(device))
    kernels = list(softmax.all_kernels(device, dims=(1, 2, 4)))
    full = [kernel for kernel in kernels if threads(kernel) == 512]
    rest = [kernel for kernel in kernels if threads(kernel) != 512]
    start = 7 * ARCHS.index(arch)
    return every_nth(full, 60, start) + every_nth(rest, 50, start)


def compile_together(arch: str, kernels: list[Kernel], op: str = "softmax") -> list[tuple[str, int, int, int]]:
    """(mangled name, stack, spilled bytes, registers) of each kernel, from one compile: parsing costs as much as a kernel."""
    names = [instance(kernel, op).expression for kernel in kernels]
    wanted = "".join(f"__device__ auto kernel_{i} = &{name};\n" for i, name in enumerate(names))
    source = Template.from_source(f"{template(op).source}\n{wanted}", op)
    log = Instance(source, names[0]).compiled(arch).log
    facts = [(name, int(stack), int(out) + int(back), int(used)) for name, stack, out, back, used in FACTS.findall(log)]
    assert len(facts) == len(set(names)), f"{len(facts)} kernels in the compiler's log, {len(set(names))} asked for"
    return facts


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TKJIT_CACHE_DIR", str(tmp_path / "cache"))


@every_arch
def test_kernels_compile_without_a_spill_and_within_their_registers(arch: str, request: pytest.FixtureRequest):
    groups: dict[tuple[str, int], list[Kernel]] = defaultdict(list)
    for kernel in chosen(arch, request.config.getoption("--all-kernels")):
        groups[kernel[0], threads(kernel)].append(kernel)
    unknown = set(groups) - set(BUDGET)
    assert not unknown, f"no budget is written down for {unknown}"
    work = [(key, group[i : i + 16]) for key, group in groups.items() for i in range(0, len(group), 16)]
    faults = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for (key, _), facts in zip(work, pool.map(lambda item: compile_together(arch, item[1]), work), strict=True):
            for name, stack, spilled, registers in facts:
                if stack or spilled or registers > BUDGET[key]:
                    faults.append(f"{name}: {spilled} bytes spilled, {stack} of stack, {registers} registers")
    if faults:
        pytest.fail("\n".join(faults))


@every_arch
def test_no_kernel_is_listed_twice_and_none_needs_more_than_a_block_has(arch: str):
    kernels = list(softmax.all_kernels(Device.of_arch(arch)))
    names = [instance(kernel).expression for kernel in kernels]
    assert len(set(names)) == len(names)
    assert {kernel[0] for kernel in kernels} == {name for name, _ in BUDGET}
    for kernel in kernels:
        assert threads(kernel) <= 1024 and threads(kernel) % 32 == 0, kernel
        assert kernel[1].get("kCluster", 1) <= Device.of_arch(arch).max_cluster, kernel
        assert Device.of_arch(arch).bulk_copy or not kernel[1].get("kRing"), kernel


# --- Instructions ------------------------------------------------------------------------------------------------------


def instructions(kernel: Kernel, arch: str, folder: Path) -> Counter[str]:
    """Loads, stores and bulk copies of a kernel's machine code, by name."""
    spec = importlib.util.find_spec("nvidia.cu13")
    tools = [Path(place) / "bin" for place in (spec.submodule_search_locations or ())] if spec else []
    path = os.pathsep.join([*map(str, tools), os.environ.get("PATH", "")])
    binary = folder / "kernel.cubin"
    binary.write_bytes(instance(kernel).compiled(arch).image)
    command, env = ["cuobjdump", "-sass", str(binary)], {**os.environ, "PATH": path}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    return Counter(re.findall(r"\b((?:LDG|STG|LD|ST|LDS|STS|LDL|STL|UBLKCP)\b[.\w]*)", done.stdout))


def one_of_each(arch: str) -> dict[tuple, Kernel]:
    """For each kernel, access path, element size and size of a vector one with several vectors a thread."""
    found: dict[tuple, Kernel] = {}
    for name, p in softmax.all_kernels(Device.of_arch(arch)):
        size = softmax.ITEMSIZE[p["T"]]
        whole = p.get("kVec", 16 // size) * size == 16
        # Short rows that are read directly have one version of the code, by halves.
        words = name in ("fwd", "bwd") and (p["kRing"] or p["kVecs"] > 8)
        if p["T"] != p["Out"] or p.get("kVecs", 4) < 2 or not (whole or words):
            continue
        found.setdefault((name, size, p.get("kRing"), whole, p.get("kCluster", 1) > 1), (name, p))
    return found


def test_vector_kernels_move_16_bytes_at_a_time_and_others_whole_words(tmp_path: Path):
    kinds = one_of_each("sm_90a")
    assert {key[0] for key in kinds} >= {"fwd", "bwd", "fwd_cols", "bwd_cols", "fwd_apply", "bwd_apply"}
    for (name, size, ring, whole, _), kernel in kinds.items():
        if name.endswith("_any"):
            continue
        seen = instructions(kernel, "sm_90a", tmp_path)
        what = f"{instance(kernel).expression}: {dict(seen)}"
        inputs = 1 if name.startswith("fwd") else 2
        wide_loads = sum(n for op, n in seen.items() if op.startswith("LDG") and op.endswith(".128"))
        assert not any(op.startswith(("LDL", "STL")) for op in seen), f"local memory in {what}"
        if ring:
            assert sum(n for op, n in seen.items() if op.startswith("UBLKCP")) >= inputs, f"no bulk copy in {what}"
        elif whole:
            assert wide_loads >= inputs, f"no 16-byte loads in {what}"
        if not whole:  # pairs of two bytes as words, where the row allows it
            word = ".64" if size == 8 else ""
            assert any(op == f"STG.E{word}" for op in seen), f"no words stored in {what}"
            assert any(op == (f"LDS{word}" if ring else f"LDG.E{word}") for op in seen), f"no words loaded in {what}"
        elif not name.endswith("_part"):
            assert any(op.startswith("STG") and op.endswith(".128") for op in seen), f"no 16-byte stores in {what}"
        if whole and ring is not None:
            narrow = [op for op in seen if op.startswith(("LDG", "STG", "LD.", "ST.")) and not op.endswith(".128")]
            assert not narrow, f"narrow accesses in {what}"


# --- Plans -------------------------------------------------------------------------------------------------------------


def random_strides(rng: random.Random, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a view: permuted, padded, sliced, expanded."""
    order = list(range(len(shape)))
    if rng.random() < 0.4:
        rng.shuffle(order)
    strides, step = [0] * len(shape), rng.choice((1, 1, 1, 1, 2, 3))
    for d in reversed(order):
        strides[d] = step if rng.random() < 0.93 else 0
        step *= shape[d]
        step += rng.choice((0, 0, 0, 0, 1, 3, 8, 64))
    return tuple(strides)


def random_shape(rng: random.Random) -> tuple[int, ...]:
    sizes = [1, 2, 3, 5, 7, 8, 16, 17, 31, 64, 100, 128, 781, 1000, 1024, 4096, 5001, 50_257, 65_536, 300_000]
    sizes += [2_000_003]
    shape: list[int] = []
    for _ in range(rng.randrange(7)):
        size = rng.choice(sizes)
        shape.append(size if math.prod(shape) * size < 1 << 34 else rng.randrange(1, 4))
    return tuple(shape)


def random_specs(rng: random.Random, name: str, shape: tuple[int, ...]) -> list[Spec]:
    """The tensors of a call, the output first."""
    dtype, out_dtype = rng.choice(
        [("float16", "float16"), ("bfloat16", "bfloat16"), ("float32", "float32"), ("float64", "float64")] * 3
        + ([("float16", "float32"), ("bfloat16", "float32")] if name == "fwd" else [("float32", "float16")])
    )
    inputs = []
    for i in range(1 if name == "fwd" else 2):
        size = softmax.ITEMSIZE[dtype]
        align = rng.choice([16, 16, 16, *(a for a in (2, 4, 8) if a >= size)])
        contiguous = empty(shape, dtype, Spec(dtype, (), (), 0, 16)).strides
        strides = contiguous if rng.random() < 0.5 else random_strides(rng, shape)
        inputs.append(Spec(dtype, shape, strides, 0, align, i))
    return [empty(shape, out_dtype, inputs[0]), *inputs]


def plans_of(arch: str, count: int) -> Any:
    """(name, log, dim, tensors, launches) of random calls, as the planners would answer them."""
    rng, device = random.Random(arch), Device.of_arch(arch)
    for i in range(count):
        name, log, shape = rng.choice(("fwd", "bwd")), rng.random() < 0.5, random_shape(rng)
        dim = rng.randrange(len(shape)) if shape else 0
        tensors = random_specs(rng, name, shape)
        yield i, name, log, dim, tensors, softmax._launches(name, log, softmax.Layout.of(tensors, dim), device)


@every_arch
def test_any_call_has_a_plan_that_the_device_can_run(arch: str, monkeypatch: pytest.MonkeyPatch):
    device = Device.of_arch(arch)
    listed = {instance(kernel).expression for kernel in softmax.all_kernels(device, dims=(1, 2, 4, 8))}
    monkeypatch.setattr(Device, "of", staticmethod(lambda index: device))
    monkeypatch.setattr(
        Instance, "compiled", lambda self, arch, emulated=False: types.SimpleNamespace(facts={"shared_bytes": 0})
    )
    used, missing = set(), {}
    for i, name, log, dim, tensors, launches in plans_of(arch, 600):
        what = f"call {i}: {name} log={log} dim={dim} {[(t.dtype, t.shape, t.strides, t.align) for t in tensors]}"
        assert launches, what
        for launch in launches:
            used.add(launch.instance.expression.split("<")[0])
            block, grid, cluster = (math.prod(size) for size in (launch.block, launch.grid, launch.cluster))
            assert 32 <= block <= 1024 and block % 32 == 0, what
            assert 0 < launch.grid[0] < 2**31 and max(launch.grid[1:]) <= 65535 and min(launch.grid) > 0, what
            assert 0 <= launch.smem <= device.smem_block, f"{launch.smem} bytes of shared memory, {what}"
            assert cluster <= device.max_cluster and grid % cluster == 0, what
            if launch.instance.expression not in listed:
                missing.setdefault(launch.instance.expression, what)
        _, outputs, buffers, steps = _plan._freeze(plan(tensors[0], *launches), tensors[1:], len(tensors) - 1)
        run = [step for step in steps if step[0] is not None]  # the others fill scratch memory
        assert len(outputs) == 1 and len(run) == len(launches), what
        for _, _, _, _, _, blob, offsets, patches, _ in run:
            assert len(blob) <= 4096 and len(offsets) <= 64 and len(patches) >= len(tensors), what
        assert sum(args[0][0] for args, _ in buffers) <= 64 << 20, f"too much scratch, {what}"
    assert not missing, "all_kernels() leaves out\n" + "\n".join(f"{name} of {what}" for name, what in missing.items())
    assert len(used) >= 9, f"the calls reach only {used}"


@every_arch
def test_layout_keeps_every_element(arch: str):
    """The collapsed dims reach the same addresses, in the same order in all tensors, as the dims did."""
    for i, _, _, dim, tensors, _ in plans_of(arch, 200):
        layout = softmax.Layout.of(tensors, dim)
        shape = tensors[0].shape or (1,)
        small = tuple(min(size, 3) for size in shape)
        if small != shape and any(size > 3 for size in shape):
            continue
        for t, tensor in enumerate(tensors):
            strides = tensor.strides or (1,)
            others = [d for d in range(len(shape)) if d != (dim % len(shape))]
            want = [sum(p * strides[d] for p, d in zip(at, others, strict=True)) for at in _places(shape, others)]
            rows = layout.rows
            got = [
                sum(p * strides_[t] for p, (_, strides_) in zip(at, rows, strict=True))
                for at in itertools.product(*(range(size) for size, _ in rows))
            ]
            assert got == want, f"call {i}, tensor {t}"
            assert layout.n == shape[dim] and (layout.n == 1 or layout.strides[t] == strides[dim])


def _places(shape: tuple[int, ...], dims: list[int]) -> Any:
    return itertools.product(*(range(shape[d]) for d in dims))


@every_arch
def test_plan_of_a_row_depends_on_its_length_and_not_on_the_batch(arch: str):
    """The way a row is shared among threads decides the order of its sum, and so its bits. Rows on 16 bytes have their own."""
    device = Device.of_arch(arch)
    for n, dtype, name in itertools.product(
        (16, 37, 256, 781, 1024, 5000, 16_384, 50_257, 200_000), softmax.DTYPES, ("fwd", "bwd")
    ):
        ways: dict[bool, set[tuple[str, ...]]] = {False: set(), True: set()}
        for rows, pad, align in itertools.product((1, 2, 1000, 100_000), (0, 3), (softmax.ITEMSIZE[dtype], 16)):
            inputs = [Spec(dtype, (rows, n), (n + pad, 1), 0, align, i) for i in range(1 if name == "fwd" else 2)]
            out = empty((rows, n), dtype, inputs[0])
            layout = softmax.Layout.of([out, *inputs], 1)
            seen = ways[layout.aligned(16 // softmax.ITEMSIZE[dtype])]
            (launch, *_) = softmax._launches(name, False, layout, device)
            kernel, _, arguments = launch.instance.expression.partition("<")
            if kernel.endswith(("::fwd", "::bwd")):
                seen.add((kernel, *arguments.split(", ")[3:8]))  # kTeam, kTeams, kCluster, kVecs, kChunkVecs
            else:
                seen.add((kernel,))
        assert all(len(seen) <= 1 for seen in ways.values()), f"{n} columns of {dtype}: {ways}"
