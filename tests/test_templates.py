"""What the template texts keep to: a primitive has its two versions in tk/, and nothing else knows of either."""

from __future__ import annotations

import re
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def templates(root: Path) -> dict[str, str]:
    folder = root / "csrc" / "templates"
    return {str(file.relative_to(folder)): file.read_text() for file in sorted(folder.rglob("*.cuh"))}


def code(text: str) -> str:
    """Without comments."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


def test_inline_ptx_stands_in_tk_ptx_alone(templates: dict[str, str]) -> None:
    assert [
        name for name, text in templates.items() if re.search(r"\basm\b", code(text)) and not name.startswith("tk/ptx/")
    ] == []


def test_no_template_includes_a_system_or_toolkit_header(templates: dict[str, str]) -> None:
    assert [name for name, text in templates.items() if re.search(r"#\s*include\s*<", code(text))] == []


def test_the_emulator_is_named_in_tk_alone(templates: dict[str, str]) -> None:
    assert [
        n for n, t in templates.items() if re.search(r"TK_?EMU", code(t), re.IGNORECASE) and not n.startswith("tk/")
    ] == []


def test_each_file_of_primitives_has_both_versions(templates: dict[str, str]) -> None:
    names = {
        folder: {n.split("/")[-1] for n in templates if n.startswith(f"tk/{folder}/")} for folder in ("ptx", "emu")
    }
    assert names["ptx"] <= names["emu"]
    assert names["emu"] - names["ptx"] == {"abi.cuh", "cuda.cuh", "cuda_math.cuh", "tensor_map.cuh"}


# What only the PTX of other primitives is made with.
INTERNAL = {"cache_policy", "hold", "peer_address", "shared_address"}


def primitives(text: str) -> set[str]:
    """Names of the functions that a file defines for kernels."""
    return set(re.findall(r"^TK_DEVICE [\w:<>, ]*?[\s&*](\w+)\(", code(text), re.MULTILINE))


def test_each_primitive_of_the_gpu_has_one_of_the_cpu(templates: dict[str, str]) -> None:
    for name, text in templates.items():
        if name.startswith("tk/ptx/"):
            missing = primitives(text) - primitives(templates[name.replace("/ptx/", "/emu/")])
            assert missing - INTERNAL == set(), name
