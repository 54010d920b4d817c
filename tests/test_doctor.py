"""``python -m tkjit doctor`` says what is there, what is missing, and what to do about it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from engine import fresh_source, instance, tkjit_command
from tkjit import DeviceError, _core, doctor


def lines_of(done: subprocess.CompletedProcess[str]) -> dict[str, list[str]]:
    """name of a check -> its lines"""
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines()[:-1]:
        state, name, text = line[:4], *line[5:].split(": ", 1)
        assert state in ("ok  ", "FAIL"), line
        found.setdefault(name, []).append(f"{state.strip()} {text}")
    return found


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> subprocess.CompletedProcess[str]:
    """Of a machine whose GPUs are hidden, if it has any."""
    folder = tmp_path_factory.mktemp("doctor")
    return tkjit_command("doctor", TKJIT_CACHE_DIR=str(folder / "cache"), CUDA_VISIBLE_DEVICES="")


def test_without_a_gpu_the_doctor_says_so_and_fails(report) -> None:
    assert report.returncode == 1 and report.stderr == ""
    found = lines_of(report)
    assert list(found) == [name for name, _ in doctor.CHECKS]
    assert any("GPU" in line and line.startswith("FAIL") for line in found["driver"])
    assert any(line.startswith("FAIL not run") for line in found["self-test"])
    ill = sum(line.startswith("FAIL") for lines in found.values() for line in lines)
    assert report.stdout.splitlines()[-1] == f"{ill} finding{'s' * (ill != 1)} to look at"


def test_what_is_well_is_said_to_be_well(report) -> None:
    found = lines_of(report)
    assert all(line.startswith("ok") for line in found["versions"][:2]) and "torch" in found["versions"][1]
    assert "CUDA" in found["versions"][2]
    assert found["environment"][0].startswith("ok TKJIT_CACHE_DIR=") and len(found["environment"]) == 1
    assert "NVRTC" in found["compiler"][0] and "90" in found["compiler"][0] and found["compiler"][0].startswith("ok")
    assert "0 entries" in found["cache"][0] and "0 damaged" in found["cache"][0] and found["cache"][0].startswith("ok")


def test_an_unknown_variable_is_named(tmp_path: Path) -> None:
    done = tkjit_command("doctor", TKJIT_CACHE_DIR=str(tmp_path), TKJIT_CACHE_DRI="/x", TKJIT_NOJIT="1")
    (line,) = [line for line in lines_of(done)["environment"] if line.startswith("FAIL")]
    assert "TKJIT_CACHE_DRI" in line and "TKJIT_NOJIT" in line and "TKJIT_CACHE_DIR" not in line


def test_a_missing_compiler_is_told_with_its_place(tmp_path: Path) -> None:
    done = tkjit_command("doctor", TKJIT_CACHE_DIR=str(tmp_path), TKJIT_NVRTC="/nonexistent/libnvrtc.so")
    assert done.returncode == 1 and "FAIL compiler: " in done.stdout
    assert "/nonexistent/libnvrtc.so" in done.stdout and "pip install nvidia-cuda-nvrtc" in done.stdout


def findings(check) -> list[doctor.Finding]:
    return list(check())


def test_a_damaged_entry_is_counted(own_cache: Path) -> None:
    instance(fresh_source()).compiled("sm_90a")
    ((well, text),) = findings(doctor._cache)
    assert well and "1 entries" in text and str(own_cache) in text and "0 damaged" in text
    (path,) = own_cache.glob("??/*.tkc")
    path.write_bytes(b"x")
    ((well, text),) = findings(doctor._cache)
    assert not well and "1 damaged" in text


def test_a_refused_folder_is_named_with_its_reason(own_cache: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setenv("TKJIT_CACHE_DIR", f"{own_cache}:{tmp_path / 'open'}")
    (refused, home) = findings(doctor._cache)
    assert not refused[0] and str(tmp_path / "open") in refused[1] and "TKJIT_CACHE_TRUST=1" in refused[1]
    assert home[0] and str(own_cache) in home[1]


@pytest.mark.filterwarnings("ignore")
def test_a_cache_in_memory_only_is_a_finding(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TKJIT_CACHE_DIR", str(tmp_path / "file"))
    assert (False, "kernels are kept in memory only") in findings(doctor._cache)


def test_every_gpu_is_described(monkeypatch) -> None:
    info = {"name": "Some GPU", "cc": (9, 0), "sms": 132, "memory_bytes": 141 << 30, "l2_bytes": 50 << 20}
    monkeypatch.setattr(_core, "driver_info", lambda: (13000, 2))
    monkeypatch.setattr(_core, "device_info", lambda index: info)
    texts = [text for well, text in findings(doctor._driver) if well]
    assert texts[0] == "driver for CUDA 13.0, 2 GPUs"
    assert texts[2] == "cuda:0 Some GPU: sm_90a, 132 multiprocessors, 141 GiB, L2 50 MiB" and texts[3].startswith(
        "cuda:1"
    )
    monkeypatch.setattr(_core, "driver_info", lambda: (12040, 0))
    assert findings(doctor._driver)[1] == (False, "no GPU is visible; see CUDA_VISIBLE_DEVICES")


def test_an_error_in_a_check_is_a_finding_and_the_rest_goes_on(monkeypatch, capsys) -> None:
    def fail():
        raise DeviceError("as was asked for")
        yield

    monkeypatch.setattr(doctor, "CHECKS", (("first", fail), ("second", lambda: iter([(True, "well")]))))
    assert doctor.run() == 1
    assert capsys.readouterr().out == "FAIL first: as was asked for\nok   second: well\n1 finding to look at\n"
    monkeypatch.setattr(doctor, "CHECKS", doctor.CHECKS[1:])
    assert doctor.run() == 0 and capsys.readouterr().out.endswith("all is well\n")


@pytest.mark.parametrize("folder", [None, "/somewhere"])
def test_the_self_test_leaves_the_environment_as_it_was(monkeypatch, folder: str | None) -> None:
    import torch

    def fail(*args: object, **kwargs: object) -> None:
        assert os.environ["TKJIT_CACHE_DIR"] not in (None, "/somewhere")
        raise DeviceError("as was asked for")

    monkeypatch.delenv("TKJIT_CACHE_DIR", raising=False)
    if folder:
        monkeypatch.setenv("TKJIT_CACHE_DIR", folder)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "randn", fail)
    before = dict(os.environ)
    with pytest.raises(DeviceError, match="as was asked for"):
        findings(doctor._self_test)
    assert dict(os.environ) == before
