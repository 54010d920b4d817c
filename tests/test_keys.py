"""The key of a compiled kernel: all that the binary depends on, and nothing else."""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
from pathlib import Path

import pytest

from engine import NOBODY, PACKAGE, fresh_source, run
from tkjit import _core, _nvrtc, _template

TEMPLATE = _template.Template("user", "source", {"a.cuh": "text a", "b.cuh": "text b"})
OPTIONS = ("--one", "--two")


def key(template=TEMPLATE, expression="f<1>", options=OPTIONS, version=(13, 0)) -> str:
    return _template.digest(_template.key_fields(template, expression, options, version))


def with_headers(headers: dict[str, str]) -> _template.Template:
    return _template.Template("user", "source", headers)


CHANGES = {
    "the template's text": {"template": _template.Template("user", "source ", TEMPLATE.headers)},
    "the first header's text": {"template": with_headers({"a.cuh": "text A", "b.cuh": "text b"})},
    "the last header's text": {"template": with_headers({"a.cuh": "text a", "b.cuh": "text B"})},
    "a header's name": {"template": with_headers({"a.cuh": "text a", "c.cuh": "text b"})},
    "a header less": {"template": with_headers({"a.cuh": "text a"})},
    "a header more": {"template": with_headers({**TEMPLATE.headers, "c.cuh": ""})},
    "headers with their texts swapped": {"template": with_headers({"a.cuh": "text b", "b.cuh": "text a"})},
    "the expression": {"expression": "f<2>"},
    "the first option": {"options": ("--One", "--two")},
    "the last option": {"options": ("--one", "--Two")},
    "the order of the options": {"options": OPTIONS[::-1]},
    "an option less": {"options": OPTIONS[:1]},
    "an option more": {"options": (*OPTIONS, "")},
    "NVRTC's major version": {"version": (12, 0)},
    "NVRTC's minor version": {"version": (13, 1)},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_key_changes_with(change: dict) -> None:
    assert key(**change) != key()


def test_every_change_gives_a_key_of_its_own(monkeypatch) -> None:
    keys = [key(), *(key(**change) for change in CHANGES.values())]
    monkeypatch.setattr(_template, "SCHEMA", _template.SCHEMA + 1)
    keys.append(key())
    assert len(set(keys)) == len(CHANGES) + 2


def test_the_key_does_not_change_with_the_name_of_the_template() -> None:
    assert key(template=_template.Template("another", "source", TEMPLATE.headers, "space")) == key()


def test_every_field_counts() -> None:
    fields = _template.key_fields(TEMPLATE, "f<1>", OPTIONS, (13, 0))
    known = _template.digest(fields)
    for i, field in enumerate(fields):
        assert _template.digest([*fields[:i], field + "x", *fields[i + 1 :]]) != known, field
        assert _template.digest([*fields[:i], *fields[i + 1 :]]) != known, field


def test_moving_a_character_between_neighbours_changes_the_key() -> None:
    fields = _template.key_fields(TEMPLATE, "f<1>", OPTIONS, (13, 0))
    known = _template.digest(fields)
    for i, (left, right) in enumerate(itertools.pairwise(fields)):
        moved = [(left + right[:1], right[1:]), (left[:-1], left[-1:] + right), (left + right, ""), ("", left + right)]
        for pair in moved:
            if pair != (left, right):
                assert _template.digest([*fields[:i], *pair, *fields[i + 2 :]]) != known, (left, right, pair)


def test_options_do_not_run_into_texts() -> None:
    one = _template.key_fields(_template.Template("user", "--two", {}), "f", ("--one",), (13, 0))
    two = _template.key_fields(_template.Template("user", "", {}), "f", ("--one", "--two"), (13, 0))
    assert _template.digest(one) != _template.digest(two)


def test_the_digest_is_sha256_over_length_prefixed_fields() -> None:
    fields = ["", "ä", "x" * 300]
    data = b"".join(len(f.encode()).to_bytes(8, "little") + f.encode() for f in fields)
    assert _template.digest(fields) == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("sizes", [range(0, 260), [1000, 4095, 4096, 65537, 1_000_003]], ids=["short", "long"])
def test_the_cores_sha256_equals_hashlibs(sizes) -> None:
    for size in sizes:
        data = os.urandom(size)
        assert _core.sha256(data) == hashlib.sha256(data).digest(), size


# --- The key of a Kernel ----------------------------------------------------------------------------------------------


def compiled_key(template: _template.Template, expression: str = "fill<1>", target: str = "sm_90a") -> str:
    return _template._kernel(template, expression, target, False).key


def test_a_kernel_carries_the_key_of_its_fields() -> None:
    template = _template.Template.from_source('#include "tk/tk.cuh"\n' + fresh_source(), "user")
    options = ("--gpu-architecture=sm_90a", *_template.OPTIONS)
    assert {"tk/tk.cuh", "tk/math.cuh"} <= set(template.headers)
    assert compiled_key(template) == key(template, "fill<1>", options, _nvrtc.identify().version)
    assert compiled_key(template, "fill<2>") != compiled_key(template)
    assert compiled_key(template, target="sm_100a") != compiled_key(template)


def test_a_change_in_any_included_file_changes_the_key(monkeypatch, tmp_path: Path) -> None:
    shutil.copytree(_template._root(), tmp_path / "templates")
    monkeypatch.setattr(_template, "_root", lambda: tmp_path / "templates")
    source = '#include "tk/tk.cuh"\n' + fresh_source()

    def now() -> str:
        _template._text.cache_clear()
        return compiled_key(_template.Template.from_source(source, "user"))

    try:
        before = now()
        headers = _template.Template.from_source(source, "user").headers
        assert len(headers) > 3
        for name in headers:
            if name.startswith("tk/emu/"):
                continue
            file = tmp_path / "templates" / name
            text = file.read_text()
            file.write_text(text + "\n")
            _template._kernels.clear()
            assert now() != before, name
            file.write_text(text)
        _template._kernels.clear()
        assert now() == before
        # What the CPU runs in a primitive's place is no part of a GPU's binary.
        (tmp_path / "templates" / "tk" / "emu" / "sync.cuh").write_text("another")
        _template._kernels.clear()
        assert now() == before
    finally:
        _template._text.cache_clear()


KEYS = """
import os
from tkjit import _nvrtc, _template
_nvrtc.open_library()
{drop}
softmax = _template.template("softmax")
user = _template.Template.from_source('#include "tk/tk.cuh"\\n' + "template <int N> __global__ void f() {{}}", "user")
print(_template._kernel(softmax, "softmax::f<float, 1>", "sm_90a", False).key)
print(_template._kernel(user, "f<1>", "sm_90a", False).key)
"""


def keys(tmp_path: Path, drop: str = "", where: str = "", cwd: Path | None = None, **variables: str | None) -> str:
    code = KEYS.format(drop=drop)
    if where:
        code = f"import sys; sys.path.insert(0, {where!r}); import tkjit; assert tkjit.__path__ == [{where!r} + '/tkjit']\n{code}"
    variables.setdefault("TKJIT_CACHE_DIR", str(tmp_path / "cache"))
    return run(code, cwd=cwd, **variables).stdout


def test_the_key_is_the_same_wherever_and_by_whomever_it_is_made(tmp_path: Path) -> None:
    known = keys(tmp_path)
    assert len(set(known.split())) == 2
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(PACKAGE, elsewhere / "tkjit", ignore=shutil.ignore_patterns("__pycache__"))
    if not (elsewhere / "tkjit" / "templates").is_dir():
        shutil.copytree(_template._root(), elsewhere / "tkjit" / "templates")
    others = {
        "install path": keys(tmp_path, where=str(elsewhere)),
        "PATH": keys(tmp_path, PATH="/usr/bin:/nowhere"),
        "HOME and cache": keys(tmp_path, HOME=str(tmp_path), TKJIT_CACHE_DIR=None, XDG_CACHE_HOME=None),
        "working folder": keys(tmp_path, cwd=tmp_path),
        "time": keys(tmp_path, drop="import time; time.time = lambda: 0.0", TZ="Asia/Tokyo"),
        "locale": keys(tmp_path, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0"),
        "hash seed": keys(tmp_path, PYTHONHASHSEED="1"),
        "another hash seed": keys(tmp_path, PYTHONHASHSEED="2"),
        "optimised Python": keys(tmp_path, PYTHONOPTIMIZE="1"),
    }
    if os.geteuid() == 0:
        templates = "_template.template('softmax'), _template.Template.from_source('#include \"tk/tk.cuh\"', '')"
        others["user"] = keys(tmp_path, drop=f"{templates}; os.setresuid({NOBODY}, {NOBODY}, {NOBODY})")
    assert {name: value for name, value in others.items() if value != known} == {}
