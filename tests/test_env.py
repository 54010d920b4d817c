"""The environment variables: one table, and nothing read that is not in it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from engine import PACKAGE, tkjit_command
from tkjit import _env

BUILD_SWITCHES = {"TKJIT_WERROR", "TKJIT_HOSTILE", "TKJIT_SANITIZE"}  # of setup.py


def test_readme_holds_the_table(root: Path) -> None:
    readme = (root / "README.md").read_text()
    between = re.search(r"<!-- env -->\n(.*?)\n<!-- /env -->", readme, re.DOTALL)
    assert between is not None, "README.md lacks the markers <!-- env --> and <!-- /env -->"
    assert between[1].strip() == _env.markdown(), "write the output of `python -m tkjit env` between README's markers"


def test_the_command_prints_the_table() -> None:
    done = tkjit_command("env")
    assert (done.returncode, done.stdout, done.stderr) == (0, _env.markdown() + "\n", "")


def test_the_table_has_a_row_for_each_variable() -> None:
    rows = _env.markdown().splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == list(_env.VARIABLES)
    assert all(row.count("|") == 3 for row in rows)


def names_read() -> set[str]:
    """Every string that starts with TKJIT_, outside docstrings and messages."""
    found: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and re.fullmatch(r"TKJIT_[A-Z_]+\w", node.value)
            ):
                found.add(node.value)
    return found


def test_every_variable_read_is_in_the_table_and_every_row_is_read() -> None:
    assert names_read() - set(_env.OF_BUILD) == set(_env.VARIABLES)


def test_only_env_and_doctor_touch_tkjits_part_of_the_environment() -> None:
    """The others ask ``_env``; what they take from ``os.environ`` belongs to others, such as HOME."""
    strangers = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.unparse(node) if isinstance(node, (ast.Call, ast.Subscript)) else ""
            if re.match(r"os\.(environ(\.get\(|\[)|getenv\()['\"]TKJIT_", text) and path.name not in (
                "_env.py",
                "doctor.py",
            ):
                strangers.append((path.name, text))
    assert strangers == []


def test_the_core_reads_no_environment(root: Path) -> None:
    assert [path.name for path in sorted((root / "csrc").glob("*.[ch]")) if "getenv" in path.read_text()] == []


def test_the_build_reads_its_own_switches_only(root: Path) -> None:
    assert set(re.findall(r"TKJIT_\w+(?==1)", (root / "setup.py").read_text())) == BUILD_SWITCHES


@pytest.mark.parametrize(("value", "expected"), [(None, False), ("", False), ("0", False), ("1", True), ("yes", True)])
def test_a_flag_is_set_by_anything_but_0(monkeypatch, value: str | None, expected: bool) -> None:
    monkeypatch.delenv("TKJIT_NO_JIT", raising=False)
    if value is not None:
        monkeypatch.setenv("TKJIT_NO_JIT", value)
    assert _env.flag("TKJIT_NO_JIT") is expected


def test_a_number_is_whole_or_the_default(monkeypatch) -> None:
    for value, expected in ((None, 7), ("", 7), ("12", 12), ("0", 0)):
        monkeypatch.delenv("TKJIT_CACHE_MAX_MB", raising=False)
        if value is not None:
            monkeypatch.setenv("TKJIT_CACHE_MAX_MB", value)
        assert _env.number("TKJIT_CACHE_MAX_MB", 7) == expected
    monkeypatch.setenv("TKJIT_CACHE_MAX_MB", "1.5")
    with pytest.raises(ValueError, match=r"TKJIT_CACHE_MAX_MB must be a whole number, not '1\.5'"):
        _env.number("TKJIT_CACHE_MAX_MB", 7)


def test_a_variable_that_is_not_in_the_table_cannot_be_read() -> None:
    with pytest.raises(KeyError, match="TKJIT_OTHER"):
        _env.get("TKJIT_OTHER")
