"""What a user gets: the archives, the one shared object in the wheel, and an import that touches nothing.

The source archive is made from a copy of the tree, the wheel from the unpacked source archive: so the tree stays as it
is, and a file that the source archive forgot is missed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.package

TREE = [".clang-format", "CHANGES.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "Makefile", "README.md"]
TREE += ["pyproject.toml", "requirements-dev.txt", "setup.py", "csrc", "python", "tests"]


def run(*command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build(what: str, tree: Path, into: Path) -> Path:
    """Call a build hook, as pip does without isolation; the archive it made."""
    into.mkdir()
    run(sys.executable, "-c", f"from setuptools import build_meta as b; b.build_{what}({str(into)!r})", cwd=tree)
    (archive,) = into.iterdir()
    return archive


@pytest.fixture(scope="module")
def tree(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is committed, without anything that was built in place."""
    copy = tmp_path_factory.mktemp("tree")
    skip = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__")
    for name in TREE:
        if (root / name).is_dir():
            shutil.copytree(root / name, copy / name, ignore=skip)
        else:
            shutil.copy(root / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def sdist(tree: Path) -> Path:
    return build("sdist", tree, tree / "out-sdist")


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return build("wheel", source, folder / "out-wheel")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the wheel's content, as site-packages would."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def core(installed: Path) -> Path:
    (library,) = installed.rglob("*.so")
    return library


def names(root: Path) -> set[str]:
    """Every template, as a path below csrc/templates."""
    folder = root / "csrc" / "templates"
    return {str(file.relative_to(folder)) for file in folder.rglob("*.cuh")}


def test_sdist_has_the_sources(sdist: Path, root: Path) -> None:
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    sources = {str(file.relative_to(root)) for file in (root / "csrc").rglob("*.[ch]")}
    templates = {f"csrc/templates/{name}" for name in names(root)}
    assert templates
    assert sources | templates | {"LICENSE", "README.md", "pyproject.toml", "setup.py"} <= held
    assert not [name for name in held if name.endswith((".so", ".pyc"))]


def test_wheel_is_small_and_serves_every_python(wheel: Path) -> None:
    assert re.fullmatch(r"tkjit-[\d.]+\w*-cp310-abi3-linux_\w+\.whl", wheel.name)
    assert wheel.stat().st_size < 1_000_000


def test_wheel_holds_the_package(wheel: Path, root: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    modules = {str(file.relative_to(root / "python")) for file in (root / "python").rglob("*.py")}
    stubs = {str(file.relative_to(root / "python")) for file in (root / "python").rglob("*.pyi")}
    templates = {f"tkjit/templates/{name}" for name in names(root)}
    assert templates
    assert modules | stubs | templates | {"tkjit/py.typed"} <= held
    assert [name for name in held if name.endswith(".so")] == ["tkjit/_core.abi3.so"]
    assert {re.split("[-/]", name)[0] for name in held} == {"tkjit"}


def test_library_exports_one_name(core: Path) -> None:
    exported = [line.split()[-1] for line in run("nm", "-D", "--defined-only", core).splitlines()]
    assert exported == ["PyInit__core"]


def test_library_links_libc_alone(core: Path) -> None:
    needed = re.findall(r"NEEDED.*\[(.*)\]", run("readelf", "-d", core))
    assert needed
    assert [name for name in needed if not re.match(r"(libc|libdl|libpthread|ld-linux[-\w]*)\.so", name)] == []


def test_version_is_written_once(installed: Path) -> None:
    code = "import tkjit, tkjit._core, importlib.metadata as m; print(tkjit.__version__ == m.version('tkjit'))"
    assert run(sys.executable, "-c", code, env={"PYTHONPATH": str(installed)}).split() == ["True"]


LOADED = """
import sys
import tkjit, tkjit._core
maps = open("/proc/self/maps").read()
print([name for name in ("torch", "triton", "numpy", "cuda.pathfinder") if name in sys.modules])
print([name for name in ("libcuda.", "libnvrtc", "libtorch", "libcudart") if name in maps])
"""


def test_import_loads_neither_torch_nor_cuda(installed: Path) -> None:
    assert run(sys.executable, "-c", LOADED, env={"PYTHONPATH": str(installed)}).split("\n") == ["[]", "[]", ""]


def interpreters() -> list[str]:
    """One CPython of each version from 3.10 on: of those on PATH and those that pyenv and uv keep."""
    kept = [*Path.home().glob(".pyenv/versions/*/bin"), *Path.home().glob(".local/share/uv/python/*/bin")]
    path = os.pathsep.join([os.environ.get("PATH", ""), *map(str, kept)])
    found = []
    for version in (f"3.{minor}" for minor in range(10, 30)):
        places = (shutil.which(f"python{version}", path=place) for place in path.split(os.pathsep))
        found += next(([name] for name in places if name and version_of(name) == version), [])
    return found or [sys.executable]


def version_of(python: str) -> str:
    """Its version, or nothing if it does not start, as a pyenv shim of a version that is not switched on."""
    command = [python, "-I", "-c", "import sys; print(*sys.version_info[:2], sep='.')"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


@pytest.mark.parametrize("python", interpreters(), ids=lambda path: Path(path).name)
def test_one_wheel_imports_on(python: str, installed: Path, tmp_path: Path) -> None:
    """The same shared object on each interpreter; these have no torch, and need none for this."""
    code = "import tkjit._core as c; print(c.__file__)"
    shown = run(python, "-I", "-c", f"import sys; sys.path.insert(0, {str(installed)!r}); {code}", cwd=tmp_path)
    assert shown.strip() == str(installed / "tkjit" / "_core.abi3.so")


def test_editable_install_finds_the_templates(tree: Path, tmp_path: Path) -> None:
    """Its path leads into the tree, where the templates stay beside the C sources."""
    editable = build("editable", tree, tmp_path / "out")
    with zipfile.ZipFile(editable) as archive:
        archive.extractall(tmp_path / "site")
    code = f"import site; site.addsitedir({str(tmp_path / 'site')!r}); import tkjit, tkjit._core; print(tkjit.__file__)"
    package = Path(run(sys.executable, "-I", "-c", code, cwd=tmp_path).strip()).parent
    assert package == tree / "python" / "tkjit"
    assert not (package / "templates").exists()
    assert names(package.parent.parent) == names(tree)
