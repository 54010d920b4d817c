"""Templates: their text, an instance's name and key, and the compiled kernel."""

from __future__ import annotations

import functools
import hashlib
import re
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from . import _core, _emulator, _env, _nvrtc, cache
from ._errors import CompileError

if TYPE_CHECKING:
    from ._plan import Arg, Launch

SCHEMA = 1  # of the key; another meaning of an entry needs another number

# How a dtype reads in a template's arguments.
CTYPES = {
    "float16": "tk::f16",
    "bfloat16": "tk::bf16",
    "float32": "float",
    "float64": "double",
    "int8": "signed char",
    "uint8": "unsigned char",
    "int16": "short",
    "int32": "int",
    "int64": "long long",
    "bool": "bool",
}

OPTIONS = ("--std=c++17", "--no-source-include", "--ptxas-options=-v")  # -v: registers and spills, into the log

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)


def _root() -> Path:
    """Where the template texts lie: in the package, or beside the C sources of an editable install."""
    installed = Path(__file__).parent / "templates"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "csrc" / "templates"


@functools.cache
def _text(name: str) -> str:
    return (_root() / name).read_text(encoding="utf-8")


def _closure(source: str) -> dict[str, str]:
    """Every file that the source includes, directly or not, by the name it is included by."""
    found: dict[str, str] = {}
    waiting = _INCLUDE.findall(source)
    while waiting:
        name = waiting.pop()
        if name not in found and (_root() / name).is_file():  # else NVRTC says what is missing, with its line
            found[name] = _text(name)
            waiting += _INCLUDE.findall(found[name])
    return dict(sorted(found.items()))


def _argument(value: object) -> str:
    """A template argument as C++ reads it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return CTYPES.get(value, value) if isinstance(value, str) else str(value)


@dataclass(frozen=True)
class Template:
    """A CUDA source whose kernels are templates. ``name`` is its file's stem and its namespace.

    ``texts``: what of it a user wrote, by the names under which the compiler counts their lines.
    """

    name: str
    source: str = field(repr=False)
    headers: dict[str, str] = field(compare=False, repr=False)
    namespace: str = ""
    texts: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def file(self) -> str:
        """What the compiler is told. Not a name that a user's text may include."""
        return f"{self.name}.source.cuh" if self.texts else f"{self.name}.cuh"

    @staticmethod
    def from_source(source: str, name: str, texts: Mapping[str, str] | None = None) -> Template:
        """A template from text rather than from the package; it may include the package's files."""
        return Template(name, source, _closure(source), texts=texts or {})

    def kernel(self, kernel: str, **arguments: object) -> Instance:
        """An instance, its template arguments in the order given."""
        inner = ", ".join(_argument(value) for value in arguments.values())
        path = f"{self.namespace}::{kernel}" if self.namespace else kernel
        return Instance(self, f"{path}<{inner}>" if arguments else path)


@functools.cache
def template(name: str) -> Template:
    """The package's template of this name."""
    source = _text(f"{name}.cuh")
    return Template(name, source, _closure(source), name)


@dataclass(frozen=True)
class Instance:
    """A kernel of a template with its arguments: for any architecture, not compiled yet."""

    template: Template
    expression: str

    def launch(
        self,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[Arg],
        cluster: int | Sequence[int] = 1,
        smem: int = 0,
    ) -> Launch:
        """One launch in a plan; grid counts blocks, smem is dynamic shared memory in bytes."""
        from ._plan import Launch

        return Launch(self, three(grid), three(block), three(cluster), smem, tuple(args))

    def compiled(self, arch: str, emulated: bool = False) -> _core.Kernel:
        """The kernel's binary for an architecture: from memory, from the cache, or compiled now.

        ``emulated``: what the CPU runs in its place.
        """
        if emulated:
            kernel = _host_kernel(self.template, self.expression, arch, _emulator.checking())
            _ensure(kernel, self, arch, emulated=True)
            return kernel
        target, ptx = _nvrtc.target_of(arch)
        kernel = _kernel(self.template, self.expression, target, ptx)
        if _ensure(kernel, self, target):
            return kernel
        _nvrtc.forget()
        _kernels.clear()
        return self.compiled(arch)


def three(size: int | Sequence[int]) -> tuple[int, int, int]:
    """A size in three dimensions."""
    x, y, z = (*((size,) if isinstance(size, int) else tuple(size)), 1, 1, 1)[:3]
    return (int(x), int(y), int(z))


def without_comments(source: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", " ", source, flags=re.DOTALL)


def key_fields(template: Template, expression: str, options: Sequence[str], version: tuple[int, int]) -> list[str]:
    """All that a binary depends on, and nothing else: no path, no driver, no time."""
    headers = [part for item in _for_gpu(template.headers).items() for part in item]
    return [
        f"tkjit kernel {SCHEMA}",
        f"nvrtc {version[0]}.{version[1]}",
        expression,
        *options,
        "",
        template.source,
        *headers,
    ]


def digest(fields: Sequence[str]) -> str:
    """SHA-256 over the fields, each behind its length, so that no two lists run into one."""
    sha = hashlib.sha256()
    for text in fields:
        data = text.encode("utf-8", "surrogatepass")
        sha.update(len(data).to_bytes(8, "little"))
        sha.update(data)
    return sha.hexdigest()


_kernels: dict[tuple[Template, str, str], _core.Kernel] = {}
_kernels_lock = threading.Lock()


def _kernel(template: Template, expression: str, target: str, ptx: bool) -> _core.Kernel:
    """One Kernel for each instance and architecture, so that threads that ask at once compile once."""
    found = _kernels.get((template, expression, target))
    if found is not None:
        return found
    version = _nvrtc.identify().version
    options = (f"--gpu-architecture={target}", *OPTIONS)
    meta = {"template": template.name, "kernel": expression, "arch": target, "nvrtc": f"{version[0]}.{version[1]}"}
    kernel = _core.Kernel(
        key=digest(key_fields(template, expression, options, version)),
        name=template.file,
        source=template.source,
        expression=expression,
        headers=tuple(_for_gpu(template.headers).items()),
        options=options,
        ptx=ptx,
        meta=_meta(meta),
    )
    with _kernels_lock:
        return _kernels.setdefault((template, expression, target), kernel)


def _host_kernel(template: Template, expression: str, arch: str, check: int) -> _core.Kernel:
    """The same for the emulator."""
    path, identity = _emulator.compiler()
    target = f"{arch} on {path}, check {check}"
    found = _kernels.get((template, expression, target))
    if found is not None:
        return found
    options = _emulator.options(arch, check)
    source = _emulator.source_of(template, expression)
    meta = {"template": template.name, "kernel": expression, "arch": arch, "compiler": identity, "checks": check > 0}
    kernel = _core.Kernel(
        key=digest([f"tkjit host kernel {SCHEMA}", identity, *options[2:], "", source]),
        name=template.file,
        source=source,
        expression=expression,
        headers=(),
        options=options,
        ptx=False,
        meta=_meta(meta),
        host=1 + check,
    )
    if check > 1:
        _emulator.count(kernel)
    with _kernels_lock:
        return _kernels.setdefault((template, expression, target), kernel)


def _meta(fields: Mapping[str, object]) -> str:
    return "".join(f"{name}: {value}\n" for name, value in fields.items())


def _for_gpu(headers: dict[str, str]) -> dict[str, str]:
    """Without the CPU's versions of the primitives, which no GPU's binary depends on."""
    return {name: text for name, text in headers.items() if not name.startswith("tk/emu/")}


# How long a process waits for another that compiles the same kernel, before it compiles too.
PATIENCE_MS = 10_000


def _ensure(kernel: _core.Kernel, instance: Instance, target: str, emulated: bool = False) -> bool:
    """Have the kernel's binary made. False if the compiler is another than the one its key was made for."""
    folders = cache.folders()
    trust = _env.flag("TKJIT_CACHE_TRUST")
    if kernel.ensure(folders.all, folders.home, trust, False, 0) != "nowhere":
        return True
    if _env.flag("TKJIT_NO_JIT"):
        raise CompileError(
            f"{instance.expression} for {target} is not in the cache, and TKJIT_NO_JIT forbids to compile it. Run the op once "
            "without TKJIT_NO_JIT, or tkjit.warmup(), to fill the cache",
            name=instance.template.name,
            expression=instance.expression,
            arch=target,
            options=kernel.options,
        )
    if (
        not emulated and _nvrtc.open_library().version != _nvrtc.identify().version
    ):  # only now: a warm cache needs no compiler
        return False
    try:
        origin = kernel.ensure(folders.all, folders.home, trust, True, PATIENCE_MS)
    except CompileError as error:
        raise _explained(error, kernel, instance, target) from None
    if origin in ("nvrtc", "host"):
        cache.after_compile(kernel.publish_errno)
    return True


def _explained(error: CompileError, kernel: _core.Kernel, instance: Instance, target: str) -> CompileError:
    """The same error with what a person needs to mend it."""
    log = str(error)
    texts = instance.template.texts or {instance.template.file: instance.template.source}
    listings = {name: _excerpt(text, log, name) for name, text in texts.items()}
    saved = _save_reproducer(instance, kernel.options, log)
    parts = [f"{instance.expression} did not compile for {target}:\n{log.strip()}"]
    parts += [f"{name}:\n{listing}" for name, listing in listings.items() if listing]
    parts.append(f"options: {' '.join(kernel.options)}")
    if saved:
        parts.append(f"reproducer: {saved}")
    message = "\n\n".join(parts)
    source = instance.template.source
    return CompileError(
        message, instance.template.name, instance.expression, target, kernel.options, log, source, saved
    )


def _excerpt(source: str, log: str, name: str, around: int = 3) -> str:
    """The numbered lines around the first error that the log places in the file."""
    # As NVRTC names a place, and as g++ and clang do.
    place = re.search(rf"^{re.escape(name)}[(:](\d+)(?:\)|:\d+): (?:catastrophic |fatal )?error", log, re.MULTILINE)
    if place is None:
        return ""
    at = int(place[1])
    lines = source.split("\n")
    first, last = max(1, at - around), min(len(lines), at + around)
    return "\n".join(f"{'>' if n == at else ' '} {n:5} | {lines[n - 1][:200]}" for n in range(first, last + 1))


def _save_reproducer(instance: Instance, options: Sequence[str], log: str) -> str | None:
    """One file that compiles alone and holds options and log; None where it cannot be written."""
    head = [f"// {instance.expression}", f"// nvrtc {' '.join(options)}", *(f"// {line}" for line in log.splitlines())]
    texts: list[str] = []
    _inline(instance.template.source, instance.template.headers, set(), texts)
    try:
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", prefix="tkjit-", suffix=".cu", delete=False) as file:
            file.write("\n".join([*head, "", *texts]))
        return file.name
    except OSError:
        return None


def _inline(source: str, headers: dict[str, str], seen: set[str], out: list[str]) -> None:
    """Append the source with its known includes written out, each once."""
    for line in source.split("\n"):
        match = _INCLUDE.match(line)
        if match is None or match[1] not in headers:
            out.append(line)
        elif match[1] not in seen:
            seen.add(match[1])
            _inline(headers[match[1]], headers, seen, out)
