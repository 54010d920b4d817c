"""Compiling: what a kernel knows of itself, what an error tells, and threads that compile at once."""

from __future__ import annotations

import os
import pickle
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import tkjit
from engine import ensure, entry_path, facts, fresh_source, instance, kernel, run
from tkjit import CompileError, DeviceError, _core, _nvrtc, _template, cache

BROKEN = """\
// line 1
template <int N>
__global__ void fill(float *x)
{
    x[threadIdx.x] = missing_name;
}
// line 7
"""

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where reproducers go."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def failure(source: str, n: int = 1, name: str = "user", arch: str = "sm_90a") -> CompileError:
    with pytest.raises(CompileError) as caught:
        instance(source, n, name).compiled(arch)
    return caught.value


# --- Errors -----------------------------------------------------------------------------------------------------------


def test_an_error_tells_all_that_is_needed_to_mend_it() -> None:
    error = failure(BROKEN)
    assert isinstance(error, tkjit.Error) and isinstance(error, RuntimeError)
    assert (error.name, error.expression, error.arch) == ("user", "fill<1>", "sm_90a")
    assert error.options == ("--gpu-architecture=sm_90a", *_template.OPTIONS)
    assert error.source == BROKEN
    assert 'user.cuh(5): error: identifier "missing_name" is undefined' in error.log
    text = str(error)
    assert text.startswith("fill<1> did not compile for sm_90a:\n")
    assert error.log.strip() in text and "options: --gpu-architecture=sm_90a" in text and str(error.reproducer) in text


def test_an_error_shows_the_users_lines_around_it() -> None:
    lines = str(failure(BROKEN)).split("user.cuh:\n")[1].split("\n\n")[0].splitlines()
    source = BROKEN.split("\n")
    assert lines == [f"{'>' if n == 5 else ' '} {n:5} | {source[n - 1]}" for n in range(2, 9)]


@pytest.mark.parametrize("line", [1, 2, 40])
def test_an_error_names_the_line_that_the_user_wrote(line: int) -> None:
    error = failure("\n" * (line - 1) + "int x = nowhere; // here\n")
    assert f"user.cuh({line}): error" in error.log and f"> {line:5} | int x = nowhere; // here" in str(error)


def test_an_error_in_an_included_file_names_that_file(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "part.cuh").write_text("\nint y = nowhere;\n")
    monkeypatch.setattr(_template, "_root", lambda: tmp_path / "templates")
    _template._text.cache_clear()
    error = failure('#include "part.cuh"\n' + fresh_source())
    _template._text.cache_clear()
    assert "part.cuh(2): error" in error.log and error.name == "user"


def test_the_reproducer_holds_options_and_log_and_compiles_alone() -> None:
    source = '#include "tk/tk.cuh"\n' + BROKEN
    error = failure(source)
    assert error.reproducer is not None
    text = Path(error.reproducer).read_text()
    assert f"// nvrtc {' '.join(error.options)}\n" in text and "// fill<1>\n" in text
    assert all(f"// {line}" in text for line in error.log.splitlines())
    alone = kernel(text)
    with pytest.raises(CompileError, match="missing_name"):
        ensure(alone, Path(error.reproducer).parent / "alone")
    mended = kernel(text.replace("missing_name", "1.0f"))
    assert ensure(mended, Path(error.reproducer).parent / "alone") == "nvrtc"


def test_an_error_without_a_place_for_the_reproducer_is_the_same_error(monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")
    error = failure(BROKEN)
    assert error.reproducer is None and "reproducer" not in str(error) and "missing_name" in str(error)


def test_an_error_in_a_latin_1_locale_is_the_same_error(tmp_path: Path) -> None:
    run(
        """
        import locale
        from engine import instance
        from tkjit import CompileError
        assert locale.getpreferredencoding(False) != "UTF-8"
        try:
            instance("// \\u4e2d\\u6587 \\U0001f600\\nint x = nowhere;").compiled("sm_90a")
        except CompileError as error:
            assert open(error.reproducer, encoding="utf-8").read().count("\\u4e2d\\u6587") == 1
        else:
            raise AssertionError
        """,
        LC_ALL="C",
        PYTHONUTF8="0",
        PYTHONCOERCECLOCALE="0",
        TMPDIR=str(tmp_path),
        TKJIT_CACHE_DIR=str(tmp_path / "cache"),
    )


def test_an_error_survives_pickling() -> None:
    error = failure(BROKEN)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is CompileError and str(copy) == str(error) and copy.__dict__ == error.__dict__


@pytest.mark.parametrize(
    "error", [tkjit.Error("a"), DeviceError("b"), tkjit.LaunchError("c"), CompileError("d")], ids=repr
)
def test_every_error_of_ours_survives_pickling(error: tkjit.Error) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error) and copy.args == error.args


def test_text_from_beyond_ascii_reaches_the_log_whole() -> None:
    error = failure('// größer 中文\n#error "größer 中文 😀"\n')
    assert "größer 中文 😀" in error.log


def test_text_cut_by_the_compiler_in_mid_character_is_still_told() -> None:
    error = failure("#error " + "中" * 3000 + "\n")
    assert "中中中" in error.log


@pytest.mark.parametrize("source", ["int x;\0int y;", "\0", "// \0"])
def test_a_nul_in_the_source_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match="NUL"):
        instance(source).compiled("sm_90a")


def test_a_nul_in_the_instance_is_refused() -> None:
    with pytest.raises(ValueError, match="NUL"):
        _template.Template.from_source(fresh_source(), "user").kernel("fill", N="1\0").compiled("sm_90a")


def test_a_lone_surrogate_in_the_source_is_refused() -> None:
    with pytest.raises(UnicodeEncodeError):
        instance("// \ud800\n" + fresh_source()).compiled("sm_90a")


def test_an_unknown_include_is_named() -> None:
    error = failure('\n#include "tk/nothing.cuh"\n' + fresh_source())
    assert "tk/nothing.cuh" in str(error) and "user.cuh(2)" in error.log


def test_an_unknown_kernel_is_named() -> None:
    with pytest.raises(CompileError, match="no_such_kernel"):
        _template.Template.from_source(fresh_source(), "user").kernel("no_such_kernel", N=1).compiled("sm_90a")


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(DeviceError, match="sm_61"):
        instance().compiled("sm_61")


def test_a_failure_is_not_cached_and_a_mended_source_works(own_cache: Path) -> None:
    before = cache.stats()
    failure(BROKEN)
    failure(BROKEN)
    assert cache.stats()["compiles"] == before["compiles"] and cache.stats()["published"] == before["published"]
    assert cache.entries() == []
    assert instance(BROKEN.replace("missing_name", "N")).compiled("sm_90a").image
    assert cache.stats()["compiles"] == before["compiles"] + 1 and len(cache.entries()) == 1


def test_a_kernel_that_failed_can_be_asked_again(tmp_path: Path) -> None:
    k = kernel(BROKEN)
    for _ in range(3):
        with pytest.raises(CompileError):
            ensure(k, tmp_path)
        with pytest.raises(ValueError, match="not compiled yet"):
            k.image  # noqa: B018
    assert ensure(kernel(BROKEN.replace("missing_name", "N"), key=k.key), tmp_path) == "nvrtc"
    assert ensure(k, tmp_path) == "disk"  # somebody else made it meanwhile


def test_a_source_of_a_megabyte_compiles() -> None:
    source = fresh_source() + "// " + "x" * 100 + "\n"
    source += "// filler\n" * ((1 << 20) // 10)
    assert len(source) > 1 << 20
    assert instance(source).compiled("sm_90a").lowered_name == "_Z4fillILi1EEvPf"
    error = failure(source + "int x = nowhere;\n")
    assert f"user.cuh({source.count(chr(10)) + 1}): error" in error.log and len(str(error)) < 10_000


@pytest.mark.parametrize(
    "wrong",
    [{"key": "short"}, {"key": 5}, {"headers": [("a", "b")]}, {"options": ["-a"]}, {"source": b"x"}, {"nothing": 1}],
    ids=repr,
)
def test_a_kernel_made_of_the_wrong_things_is_refused(wrong: dict) -> None:
    with pytest.raises((TypeError, ValueError)):
        kernel(fresh_source(), **wrong)


@pytest.mark.parametrize(
    "wrong",
    [{"headers": (1,)}, {"headers": (("a",),)}, {"headers": ((1, 2),)}, {"options": (1,)}, {"headers": ("ab",)}],
    ids=repr,
)
def test_a_kernel_whose_parts_are_wrong_is_refused_when_it_compiles(wrong: dict, tmp_path: Path) -> None:
    with pytest.raises((TypeError, IndexError, SystemError)):
        ensure(kernel(fresh_source(), **wrong), tmp_path)


@pytest.mark.parametrize("folders", [(1,), (None,), ("a\0b",)], ids=repr)
def test_folders_that_are_no_text_are_refused(folders: tuple) -> None:
    with pytest.raises((TypeError, ValueError)):
        kernel(fresh_source()).ensure(folders, None, False, False, 0)


def test_a_folder_with_a_long_name_is_a_miss_and_no_error(tmp_path: Path) -> None:
    k = kernel(fresh_source())
    deep = str(tmp_path) + "/x" * 3000
    assert k.ensure((deep,), deep, False, True, 100) == "nvrtc"
    assert k.publish_errno != 0


# --- Facts ------------------------------------------------------------------------------------------------------------


def test_a_small_kernel_neither_spills_nor_takes_shared_memory() -> None:
    k = instance().compiled("sm_90a")
    assert 1 <= k.facts["registers"] <= 32
    assert {name: k.facts[name] for name in k.facts if name != "registers"} == {
        "shared_bytes": 0,
        "stack_bytes": 0,
        "spill_stores": 0,
        "spill_loads": 0,
    }
    assert k.image[:4] == b"\x7fELF" and k.lowered_name.encode() in k.image


SPILLING = """
template <int N> __global__ void __launch_bounds__(1024, 2) fill(float *x)
{
    float v[96];
#pragma unroll
    for (int i = 0; i < 96; i++) v[i] = x[i * 1024 + threadIdx.x];
#pragma unroll
    for (int i = 0; i < 96; i++) v[i] = __fmaf_rn(v[i], v[95 - i], v[(i * 7) % 96]);
#pragma unroll
    for (int i = 0; i < 96; i++) x[i * 1024 + threadIdx.x] = v[i] + v[(i + 31) % 96] * N;
}
"""


def test_a_kernel_short_of_registers_says_that_it_spills() -> None:
    k = instance(SPILLING).compiled("sm_90a")
    assert k.facts["registers"] == 32
    assert k.facts["spill_stores"] > 0 and k.facts["spill_loads"] > 0 and k.facts["stack_bytes"] > 0
    easy = instance(SPILLING.replace("__launch_bounds__(1024, 2)", "")).compiled("sm_90a")
    assert easy.facts["registers"] > 64 and easy.facts["spill_stores"] == easy.facts["spill_loads"] == 0


def test_facts_are_of_the_kernel_asked_for_among_several() -> None:
    body = "__shared__ float s[{n}]; s[threadIdx.x] = x[0]; __syncthreads(); x[threadIdx.x] = s[threadIdx.x ^ 1];"
    plain = [f"__global__ void k{n}(float *x) {{ {body.format(n=n)} }}\n" for n in (77, 99)]
    source = plain[0] + fresh_source(body.format(n="N")) + plain[1]
    shared = {}
    for name, expression in (("k77", "k77"), ("fill", "fill<256>"), ("k99", "k99")):
        k = kernel(source, expression=expression)
        k.ensure((), None, False, True, 0)
        assert k.log.count("Compiling entry function") >= 2
        shared[name] = k.facts["shared_bytes"]
    assert shared == {"k77": 4 * 77, "fill": 4 * 256, "k99": 4 * 99}


def test_facts_are_of_the_kernel_and_not_of_what_it_calls() -> None:
    callee = "__device__ __noinline__ float deep(float *x, int n) { float v[64]; for (int i = 0; i < 64; i++) v[i] = x[i * n];"
    callee += " for (int i = 0; i < 64; i++) v[(i * n) & 63] += x[i]; return v[n & 63]; }\n"
    k = instance(callee + fresh_source("x[threadIdx.x] = deep(x, N + threadIdx.x);")).compiled("sm_90a")
    assert "deep" in k.log
    # A stack frame is the callee's, and yet this kernel's threads need it.
    assert k.facts["registers"] > 0 and k.facts["spill_stores"] == 0


def test_facts_and_log_come_back_from_the_disk() -> None:
    source = fresh_source(SPILLING.split("{", 1)[1].rsplit("}", 1)[0])
    k = instance(source).compiled("sm_90a")
    _template._kernels.clear()
    again = instance(source).compiled("sm_90a")
    assert again is not k and facts(again) == facts(k) and again.log == k.log


def test_a_very_long_instance_name_has_facts_too() -> None:
    chain = "wrap<" * 240 + "int" + ">" * 240  # longer than the core's buffer for it
    source = "template <class T> struct wrap {};\ntemplate <class T> __global__ void fill(float *x) { x[threadIdx.x] = 1; }\n"
    k = _template.Template.from_source(source, "user").kernel("fill", T=chain).compiled("sm_90a")
    assert len(k.lowered_name) > 1100 and k.facts["registers"] > 0


# --- The compiler -----------------------------------------------------------------------------------------------------


def pretend(monkeypatch, archs: tuple[int, ...], driver: int) -> None:
    known = _nvrtc.identify()
    monkeypatch.setattr(_nvrtc, "identify", lambda: _nvrtc.Nvrtc(known.path, known.version, archs))
    monkeypatch.setattr(_core, "driver_info", lambda: (driver, 1))


def test_a_gpu_newer_than_the_compiler_gets_ptx(monkeypatch, own_cache: Path) -> None:
    pretend(monkeypatch, (80, 90), driver=99000)
    assert _nvrtc.target_of("sm_90a") == ("sm_90a", False)
    assert _nvrtc.target_of("sm_130a") == ("compute_90", True)
    source = fresh_source()
    k = instance(source).compiled("sm_130a")
    assert b".target sm_90" in k.image and k.image.endswith(b"\0") and k.lowered_name.encode() in k.image
    assert set(k.facts.values()) == {-1}  # nothing has been assembled
    assert "--gpu-architecture=compute_90" in k.options
    _template._kernels.clear()
    before = cache.stats()["disk_hits"]
    assert facts(instance(source).compiled("sm_130a")) == facts(k) and cache.stats()["disk_hits"] == before + 1
    assert entry_path(own_cache, k.key).exists()


def test_a_driver_too_old_for_the_ptx_is_an_error_that_says_what_to_update(monkeypatch) -> None:
    pretend(monkeypatch, (80, 90), driver=12040)
    with pytest.raises(
        DeviceError, match=r"sm_130a is newer than NVRTC .* the driver \(CUDA 12.4\) is too old .* update"
    ):
        instance().compiled("sm_130a")


def test_an_architecture_the_compiler_dropped_is_an_error(monkeypatch) -> None:
    pretend(monkeypatch, (80, 90), driver=99000)
    with pytest.raises(DeviceError, match="does not compile for sm_86"):
        instance().compiled("sm_86")


@pytest.mark.parametrize(
    ("cc", "arch"), [((7, 5), "sm_75"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((12, 0), "sm_120a")]
)
def test_the_architecture_of_a_gpu_is_exact(cc: tuple[int, int], arch: str) -> None:
    assert _nvrtc.arch_of(cc) == arch


MISSING = """
from engine import instance
from tkjit import DeviceError, _core, _nvrtc
{setup}
try:
    instance().compiled("sm_90a")
except DeviceError as error:
    print(error)
else:
    raise AssertionError("NVRTC was found")
assert _core.stats()["compiles"] == 0
"""


def test_a_missing_compiler_is_an_error_that_names_the_place(tmp_path: Path) -> None:
    said = run(
        MISSING.format(setup=""), TKJIT_NVRTC="/nonexistent/libnvrtc.so", TKJIT_CACHE_DIR=str(tmp_path / "c")
    ).stdout
    assert "/nonexistent/libnvrtc.so: " in said and "No such file" in said
    assert "pip install nvidia-cuda-nvrtc" in said and "TKJIT_NVRTC" in said


def test_a_missing_compiler_names_every_place_that_was_tried(tmp_path: Path) -> None:
    home = tmp_path / "cuda" / "lib64"
    home.mkdir(parents=True)
    (home / "libnvrtc.so").write_text("not a library")
    setup = "_nvrtc._loaded = _nvrtc._from_pip = _nvrtc._from_pathfinder = list"
    setup += f"\n_nvrtc.candidates = lambda: ('libm.so.6', *_nvrtc._from_cuda_home(), {str(tmp_path / 'none')!r})"
    said = run(
        MISSING.format(setup=setup), CUDA_HOME=str(tmp_path / "cuda"), TKJIT_CACHE_DIR=str(tmp_path / "c")
    ).stdout
    lines = [line.strip() for line in said.splitlines()]
    assert lines[1].startswith("libm.so.6: it has no nvrtc")
    assert lines[2].startswith(f"{home / 'libnvrtc.so'}: ")
    assert lines[3].startswith(f"{tmp_path / 'none'}: ")


def test_the_places_are_searched_in_the_documented_order(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TKJIT_NVRTC", "/chosen.so")
    assert _nvrtc.candidates() == ("/chosen.so",)
    monkeypatch.delenv("TKJIT_NVRTC")
    monkeypatch.setattr(_nvrtc, "_loaded", lambda: ["/loaded.so"])
    monkeypatch.setattr(_nvrtc, "_from_pip", lambda: ["/pip.so"])
    monkeypatch.setattr(_nvrtc, "_from_pathfinder", lambda: ["/found.so"])
    assert _nvrtc.candidates() == ("/loaded.so",)
    monkeypatch.setattr(_nvrtc, "_loaded", list)
    assert _nvrtc.candidates() == ("/pip.so",)
    monkeypatch.setattr(_nvrtc, "_from_pip", list)
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / "libnvrtc.so.13").touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    places = ("/found.so", str(tmp_path / "lib64" / "libnvrtc.so.13"))
    assert _nvrtc.candidates() == (*places, "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")


def test_the_open_library_is_the_one_that_is_reported() -> None:
    nvrtc = _nvrtc.open_library()
    assert os.path.isfile(nvrtc.path) and nvrtc.version >= (12, 0) and {80, 90, 100} <= set(nvrtc.archs)
    assert nvrtc.path in _nvrtc._loaded()
    _core.nvrtc_open(("/nonexistent",))  # one is open: nothing to do
    assert _core.nvrtc_info()[0] == nvrtc.path


# --- Threads ----------------------------------------------------------------------------------------------------------


def together(count: int, action) -> list:
    """Run action(i) in so many threads that start at the same moment."""
    start = threading.Barrier(count)

    def run_one(i: int):
        start.wait()
        return action(i)

    with ThreadPoolExecutor(count) as pool:
        return [future.result(timeout=60) for future in [pool.submit(run_one, i) for i in range(count)]]


def test_16_threads_that_ask_for_one_cold_kernel_compile_it_once() -> None:
    source = fresh_source()
    before = cache.stats()
    kernels = together(16, lambda _: instance(source).compiled("sm_90a"))
    assert len({id(k) for k in kernels}) == 1
    assert cache.stats()["compiles"] == before["compiles"] + 1 and cache.stats()["published"] == before["published"] + 1


def test_16_threads_compile_once_without_a_cache_folder_too() -> None:
    k = kernel(fresh_source())
    before = cache.stats()["compiles"]
    origins = together(16, lambda _: k.ensure((), None, False, True, 0))
    assert sorted(origins) == ["memory"] * 15 + ["nvrtc"] and cache.stats()["compiles"] == before + 1


def test_16_threads_on_one_broken_kernel_all_get_the_error() -> None:
    errors = together(16, lambda _: failure(BROKEN))
    assert all("missing_name" in error.log for error in errors)


def test_threads_on_different_kernels_compile_each_once() -> None:
    source = fresh_source()
    before = cache.stats()["compiles"]
    kernels = together(8, lambda i: instance(source, i % 4).compiled("sm_90a"))
    assert [k.lowered_name for k in kernels] == [f"_Z4fillILi{i % 4}EEvPf" for i in range(8)]
    assert cache.stats()["compiles"] == before + 4


def test_python_goes_on_while_a_kernel_compiles() -> None:
    body = "float a = N; " + "".join(f"a = sinf(a * x[{i}]) + cosf(a); " for i in range(40)) + "x[threadIdx.x] = a;"
    done = threading.Event()
    ticks = 0

    def compile_slowly(_: int) -> float:
        started = time.monotonic()
        instance(fresh_source(body)).compiled("sm_90a")
        done.set()
        return time.monotonic() - started

    with ThreadPoolExecutor(1) as pool:
        took = pool.submit(compile_slowly, 0)
        while not done.is_set():
            time.sleep(0.001)
            ticks += 1
    assert ticks > 200 * took.result(), (ticks, took.result())
