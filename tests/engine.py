"""What the tests of the engine share: small kernels, fresh folders, other processes."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import tkjit
from tkjit import _core, _nvrtc, _template

PACKAGE = Path(tkjit.__file__).resolve().parent
NOBODY = 65534  # a user that owns nothing
MOST_PATIENT_MS = 60_000

_serial = itertools.count()


def fresh_source(body: str = "x[threadIdx.x] = N;", head: str = "") -> str:
    """A template that no test and no cache has seen before; its kernel is ``fill<N>``."""
    mark = f"// {os.getpid()}-{next(_serial)}-{os.urandom(6).hex()}"
    return f"{mark}\n{head}\ntemplate <int N> __global__ void fill(float *x) {{ {body} }}\n"


def instance(source: str | None = None, n: int = 1, name: str = "user") -> _template.Instance:
    """``fill<n>`` of a source."""
    return _template.Template.from_source(source or fresh_source(), name).kernel("fill", N=n)


def kernel(
    source: str, *, key: str | None = None, expression: str = "fill<1>", meta: str = "kernel: fill<1>\n", **more: Any
):
    """A ``_core.Kernel`` for sm_90 that has neither looked into a cache nor compiled."""
    _nvrtc.open_library()
    fields: dict[str, Any] = {
        "key": key or _template.digest([source, expression]),
        "name": "user.cuh",
        "source": source,
        "expression": expression,
        "headers": (),
        "options": ("--gpu-architecture=sm_90", *_template.OPTIONS),
        "ptx": False,
        "meta": meta,
        **more,
    }
    return _core.Kernel(**fields)


def ensure(k: Any, folder: Path | str, compile: bool = True, trust: bool = False) -> str:
    """Where the kernel's binary came from: 'memory', 'disk', 'nvrtc' or 'nowhere'."""
    (Path(folder) / "tmp").mkdir(parents=True, exist_ok=True)
    return k.ensure((str(folder),), str(folder), trust, compile, MOST_PATIENT_MS)


def entry_path(folder: Path | str, key: str) -> Path:
    return Path(folder, key[:2], key[2:] + ".tkc")


def facts(k: Any) -> tuple:
    """What every compile of a kernel gives alike; the log also says how long it took."""
    return k.image, k.lowered_name, k.facts


def environment(**variables: str | None) -> dict[str, str]:
    """The environment of another process: ours, without TKJIT_ variables, with these; None takes one away."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("TKJIT_")}
    ours = [str(PACKAGE.parent), str(Path(__file__).parent)]
    theirs = [os.path.abspath(path) for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*ours, *theirs]))
    for name, value in variables.items():
        env.pop(name, None)
        if value is not None:
            env[name] = str(value)
    return env


def command(code: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code)]


def run(code: str, *, cwd: Path | str | None = None, timeout: float = 120, **variables: str | None):
    """Run Python text in a process of its own, which must succeed."""
    done = subprocess.run(
        command(code), cwd=cwd, env=environment(**variables), capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def tkjit_command(*args: str, **variables: str | None) -> subprocess.CompletedProcess[str]:
    """``python -m tkjit ...``"""
    return subprocess.run(
        [sys.executable, "-m", "tkjit", *args],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=120,
    )


# For the text of another process: become a user for whom permissions count. Import first, since that user may not read us.
ORDINARY_USER = (
    f"if os.geteuid() == 0: os.setresgid({NOBODY}, {NOBODY}, {NOBODY}); os.setresuid({NOBODY}, {NOBODY}, {NOBODY})"
)
