"""Build of the one extension, tkjit._core. Everything else is declared in pyproject.toml.

Switches, read from the environment:
    TKJIT_WERROR=1     the full list of warnings, as errors
    TKJIT_HOSTILE=1    allocations, reads and NVRTC calls can be told to fail
    TKJIT_SANITIZE=1   AddressSanitizer and UndefinedBehaviorSanitizer
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
TEMPLATES = Path("csrc") / "templates"

WARNINGS = "-Wall -Wextra -Wshadow -Wstrict-prototypes -Wwrite-strings -Wvla -Wundef -Wconversion -Werror"
SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined"


def switch(name: str) -> bool:
    return os.environ.get(name, "0") not in ("", "0")


def aten_flags() -> list[str]:
    """Where ATen/dlpack.h lies, or nothing: then csrc/abi declares the same itself."""
    try:
        from torch.utils.cpp_extension import include_paths

        folders = include_paths()
    except Exception:  # no torch, or one that does not import: neither is needed
        return []
    for folder in folders:
        header = Path(folder) / "ATen" / "dlpack.h"
        if header.is_file() and "DLPackExchangeAPI" in header.read_text():
            return ["-DTKJIT_HAVE_ATEN_DLPACK", "-isystem", folder]
    return []


class BuildExt(build_ext):
    def finalize_options(self) -> None:
        super().finalize_options()
        # What was built with other switches is not up to date.
        self.force = self.force or any(map(switch, ("TKJIT_WERROR", "TKJIT_HOSTILE", "TKJIT_SANITIZE")))

    def build_extension(self, ext: Extension) -> None:
        ext.define_macros.append(("TKJIT_VERSION", f'"{self.distribution.get_version()}"'))
        ext.extra_compile_args += aten_flags()
        super().build_extension(ext)


class BuildPy(build_py):
    """Also puts the CUDA templates, which live beside the C sources, into the package."""

    def templates(self) -> list[tuple[Path, Path]]:
        into = Path(self.build_lib) / "tkjit" / "templates"
        return [(file, into / file.relative_to(TEMPLATES)) for file in sorted(TEMPLATES.rglob("*.cuh"))]

    def run(self) -> None:
        super().run()
        if not getattr(self, "editable_mode", False):  # an editable install reads csrc/templates
            shutil.rmtree(Path(self.build_lib) / "tkjit" / "templates", ignore_errors=True)
            for source, target in self.templates():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *(str(target) for _, target in self.templates())]


def extension() -> Extension:
    # Python's own headers do not pass our warnings, so they come in as system headers.
    python = ["-isystem", sysconfig.get_path("include")]
    compile_args = ["-std=c11", "-O2", "-fvisibility=hidden", *python]
    link_args = []
    macros: list[tuple[str, str | None]] = [("Py_LIMITED_API", "0x030A0000")]
    if switch("TKJIT_WERROR"):
        compile_args += WARNINGS.split()
    if switch("TKJIT_HOSTILE"):
        macros.append(("TKJIT_HOSTILE", "1"))
    if switch("TKJIT_SANITIZE"):
        compile_args += [*SANITIZERS.split(), "-O1", "-g", "-fno-omit-frame-pointer"]
        link_args += SANITIZERS.split()
    else:
        compile_args.append("-g0")
    return Extension(
        "tkjit._core",
        sources=sorted(str(file) for file in Path("csrc").glob("*.c")),
        depends=[
            "setup.py",
            "pyproject.toml",
            *sorted(str(file) for file in Path("csrc").rglob("*.h")),
            *sorted(str(file) for file in Path("csrc/templates/tk/emu").glob("*.cuh")),
        ],
        include_dirs=["csrc"],
        define_macros=macros,
        extra_compile_args=compile_args,
        extra_link_args=link_args,
        libraries=["dl", "pthread"],
        py_limited_api=True,
    )


os.chdir(ROOT)
setup(
    license="Apache-2.0",
    ext_modules=[extension()],
    cmdclass={"build_ext": BuildExt, "build_py": BuildPy},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
