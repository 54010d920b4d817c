"""Our declarations of foreign ABIs equal the real headers.

`csrc/abi` declares what tkjit uses of the CUDA driver, NVRTC and DLPack. Here each of those headers is read for the
names it declares; one small C program is built twice, on our header and on the real one, and prints every value, size
and offset; the two printouts must be the same. Function types are compared by the compiler, with both headers in one
file.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest

ABI = Path(__file__).resolve().parent.parent / "csrc" / "abi"
WARNINGS = "-Wall -Wextra -Wshadow -Wstrict-prototypes -Wwrite-strings -Wvla -Wundef -Wconversion -Werror".split()


def package_folder(package: str, header: str) -> Path:
    """The include folder of a header that an installed package carries."""
    for file in metadata.files(package) or []:
        if file.name == header:
            return Path(str(file.locate())).parent
    raise FileNotFoundError(f"{package} has no {header}; install tkjit[test]")


def aten_folder() -> Path:
    """torch's include folder, found without importing torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("torch is not installed")
    return Path(spec.origin).parent / "include"


@dataclass(frozen=True)
class Abi:
    """One header of ours and the real one it stands for."""

    ours: str
    real: str
    package: str
    functions: str | None = None

    def text(self) -> str:
        return (ABI / self.ours).read_text()

    def real_folder(self) -> Path:
        return aten_folder() if self.package == "torch" else package_folder(self.package, self.real)


CUDA = Abi("cuda_abi.h", "cuda.h", "nvidia-cuda-runtime", "TK_CUDA_FUNCTIONS")
NVRTC = Abi("nvrtc_abi.h", "nvrtc.h", "nvidia-cuda-nvrtc", "TK_NVRTC_FUNCTIONS")
DLPACK = Abi("dlpack_abi.h", "ATen/dlpack.h", "torch")
ALL = [CUDA, NVRTC, DLPACK]


def without_comments(text: str) -> str:
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


def constants(text: str) -> list[str]:
    """Every enumerator, and every macro that stands for a number."""
    text = without_comments(text)
    found = [
        name
        for body in re.findall(r"typedef enum \{(.*?)\} \w+;", text, flags=re.DOTALL)
        for name in re.findall(r"(\w+)\s*=", body)
    ]
    return found + re.findall(r"^#define (\w+) \d+(?:UL)?$", text, flags=re.MULTILINE)


def aggregates(text: str) -> dict[str, list[str]]:
    """Every struct and union with its fields; those of an inner struct as `outer.inner`."""
    text = without_comments(text)
    found = {}
    for head in re.finditer(r"typedef (?:struct|union)(?: \w+)? \{", text):
        end, depth = head.end(), 1
        while depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        closing = re.match(r" (\w+);", text[end:])
        assert closing, f"{head.group()} has no name at its end"
        found[closing.group(1)] = fields(text[head.end() : end - 1])
    return found


def fields(body: str) -> list[str]:
    found = []
    for inner, name in re.findall(r"struct \{(.*?)\}\s*(\w+);", body, flags=re.DOTALL):
        found += [name] + [f"{name}.{field}" for field in fields(inner)]
    for line in re.sub(r"struct \{.*?\}\s*\w+;", "", body, flags=re.DOTALL).split(";"):
        name = re.search(r"\(\*(\w+)\)|(\w+)(?:\[[^]]*\])?\s*$", line)
        if name:
            found.append(name.group(1) or name.group(2))
    return found


def enums(text: str) -> list[str]:
    return re.findall(r"typedef enum \{[^}]*\} (\w+);", without_comments(text))


def probe(text: str) -> str:
    """The body of a program that prints all that `text` declares, one line each."""
    lines = [f'printf("{name} = %lld\\n", (long long)({name}));' for name in constants(text)]
    for name in enums(text) + list(aggregates(text)):
        lines.append(f'printf("{name}: %zu bytes, alignment %zu\\n", sizeof({name}), _Alignof({name}));')
    for name, members in aggregates(text).items():
        for field in members:
            place = f"offsetof({name}, {field}), sizeof((({name} *)0)->{field})"
            lines.append(f'printf("{name}.{field}: offset %zu, %zu bytes\\n", {place});')
    return "\n    ".join(lines)


PROGRAM = """#include <stddef.h>
#include <stdio.h>
#include "{header}"

int
main(void)
{{
    {body}
    return 0;
}}
"""

# Equal types may be declared twice, and a function's address is assigned without a cast: the compiler compares.
PROOF = """#include "{real}"
#define TKJIT_ABI_PROOF
#include "{ours}"

{pointers}
"""
POINTERS = """#define POINTER(name, symbol, required, result, args) \\
    extern const tk_##name p_##name;                          \\
    const tk_##name p_##name = &name;
{functions}(POINTER)"""


def compiler() -> str:
    """The compiler that builds the package."""
    return (sysconfig.get_config_var("CC") or "cc").split()[0]


def compile_c(source: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    file = folder / "program.c"
    file.write_text(source)
    command = [compiler(), "-std=c11", *options, str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def printed(abi: Abi, header: str, include: Path, folder: Path) -> list[str]:
    """What the probe of our header prints when it is built on `header`."""
    program = folder / "program"
    source = PROGRAM.format(header=header, body=probe(abi.text()))
    built = compile_c(source, folder, "-isystem", str(include), "-o", str(program))
    assert built.returncode == 0, built.stderr
    return subprocess.run([program], capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()


def differences(abi: Abi, ours: Path, folder: Path) -> list[tuple[str, str]]:
    """The lines in which the header under `ours` and the real one differ."""
    mine = printed(abi, abi.ours, ours, folder)
    real = printed(abi, abi.real, abi.real_folder(), folder)
    assert len(mine) == len(real)
    return [pair for pair in zip(mine, real, strict=True) if pair[0] != pair[1]]


def prove(abi: Abi, ours: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Compile our header after the real one, comparing handles and functions."""
    pointers = POINTERS.format(functions=abi.functions) if abi.functions else ""
    source = PROOF.format(real=abi.real, ours=abi.ours, pointers=pointers)
    options = ["-isystem", str(abi.real_folder()), "-I", str(ours), "-c", "-o", str(folder / "proof.o")]
    return compile_c(source, folder, *WARNINGS, *options)


def planted(abi: Abi, old: str, new: str, folder: Path) -> Path:
    """A copy of our headers in which `old` has become `new`."""
    copy = folder / "abi"
    shutil.copytree(ABI, copy)
    assert abi.text().count(old) == 1, old
    (copy / abi.ours).write_text(abi.text().replace(old, new))
    return copy


@pytest.mark.parametrize("abi", ALL, ids=lambda abi: abi.ours)
def test_values_sizes_and_offsets(abi: Abi, tmp_path: Path) -> None:
    assert differences(abi, ABI, tmp_path) == []


@pytest.mark.parametrize("abi", ALL, ids=lambda abi: abi.ours)
def test_handles_and_functions(abi: Abi, tmp_path: Path) -> None:
    proof = prove(abi, ABI, tmp_path)
    assert proof.returncode == 0, proof.stderr


@pytest.mark.parametrize("abi", ALL, ids=lambda abi: abi.ours)
def test_header_stands_alone(abi: Abi, tmp_path: Path) -> None:
    built = compile_c(f'#include "{abi.ours}"\n', tmp_path, *WARNINGS, "-I", str(ABI), "-c", "-o", str(tmp_path / "o"))
    assert built.returncode == 0, built.stderr


def test_dlpack_comes_from_aten(tmp_path: Path) -> None:
    source = '#include "dlpack_abi.h"\n#ifndef DLPACK_DLL\n#error "not the header of ATen"\n#endif\n'
    options = [
        "-DTKJIT_HAVE_ATEN_DLPACK",
        "-isystem",
        str(aten_folder()),
        "-I",
        str(ABI),
        "-c",
        "-o",
        str(tmp_path / "o"),
    ]
    built = compile_c(source, tmp_path, *WARNINGS, *options)
    assert built.returncode == 0, built.stderr


def test_symbols_are_the_ones_linked(tmp_path: Path) -> None:
    """The string given to dlsym is the name to which the real header maps the function."""
    source = f"""#include "{CUDA.real}"
#include "{NVRTC.real}"
#include "{CUDA.ours}"
#include "{NVRTC.ours}"
#include <stdio.h>
#define TEXT(name) #name
#define SHOW(name, symbol, required, result, args) printf("%s %s\\n", TEXT(name), symbol);
int
main(void)
{{
    {CUDA.functions}(SHOW) {NVRTC.functions}(SHOW)
    return 0;
}}
"""
    program = tmp_path / "program"
    folders = ["-I", str(ABI), "-isystem", str(CUDA.real_folder()), "-isystem", str(NVRTC.real_folder())]
    built = compile_c(source, tmp_path, *folders, "-o", str(program))
    assert built.returncode == 0, built.stderr
    pairs = subprocess.run([program], capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    assert len(pairs) > 30
    assert [pair for pair in pairs if len(set(pair.split())) != 1] == []


def test_nothing_is_left_out() -> None:
    """The readers above see every enum, struct and field of the headers."""
    for abi in ALL:
        text = without_comments(abi.text())
        assert len(re.findall(r"typedef (?:enum|struct|union)\b[^;]*\{", text)) == len(enums(text)) + len(
            aggregates(text)
        )
    assert "CUDA_ERROR_UNKNOWN" in constants(CUDA.text())
    assert "CU_TENSOR_MAP_NUM_QWORDS" in constants(CUDA.text())
    assert "DLPACK_FLAG_BITMASK_IS_COPIED" in constants(DLPACK.text())
    assert aggregates(CUDA.text())["CUlaunchAttributeValue"] == [
        "clusterDim",
        "clusterDim.x",
        "clusterDim.y",
        "clusterDim.z",
        "pad",
        "cooperative",
        "clusterSchedulingPolicyPreference",
        "programmaticStreamSerializationAllowed",
        "priority",
    ]
    assert aggregates(DLPACK.text())["DLManagedTensorVersioned"] == [
        "version",
        "manager_ctx",
        "deleter",
        "flags",
        "dl_tensor",
    ]


@pytest.mark.parametrize(
    ("abi", "old", "new"),
    [
        (CUDA, "CUDA_ERROR_LAUNCH_FAILED = 719", "CUDA_ERROR_LAUNCH_FAILED = 718"),
        (CUDA, "_Alignas(128)", "_Alignas(64)"),
        (CUDA, "_Alignas(8) char pad[64]", "char pad[64]"),
        (CUDA, "gridDimX;\n    unsigned int gridDimY;", "gridDimY;\n    unsigned int gridDimX;"),
        (NVRTC, "NVRTC_ERROR_COMPILATION = 6", "NVRTC_ERROR_COMPILATION = 5"),
        (DLPACK, "kDLFloat8_e5m2 = 12", "kDLFloat8_e5m2 = 13"),
        (DLPACK, "uint16_t lanes", "uint32_t lanes"),
    ],
)
def test_a_planted_change_is_seen(abi: Abi, old: str, new: str, tmp_path: Path) -> None:
    assert differences(abi, planted(abi, old, new, tmp_path), tmp_path) != []


@pytest.mark.parametrize(
    ("abi", "old", "new"),
    [
        (CUDA, "typedef int CUdevice;", "typedef unsigned CUdevice;"),
        (CUDA, "size_t count, CUstream stream", "int count, CUstream stream"),
        (CUDA, "(CUdevice *device, int ordinal)", "(int ordinal, CUdevice *device)"),
        (NVRTC, "int option_count, const char *const *options", "const char *const *options, int option_count"),
        (DLPACK, "(void *py_object, DLTensor *out)", "(void *py_object, void *out)"),
    ],
)
def test_a_planted_function_is_seen(abi: Abi, old: str, new: str, tmp_path: Path) -> None:
    assert prove(abi, planted(abi, old, new, tmp_path), tmp_path).returncode != 0
