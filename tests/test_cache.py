"""The cache of compiled kernels under fire: damage, strangers, races, kills, full and forbidden folders.

Whatever happens to it, a kernel that is asked for is there and right; at worst it is compiled once more.
"""

from __future__ import annotations

import ast
import errno
import hashlib
import json
import os
import random
import signal
import struct
import subprocess
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

import engine
import tkjit
from engine import ORDINARY_USER, PACKAGE, ensure, entry_path, environment, facts, fresh_source, instance, kernel, run
from tkjit import _core, _nvrtc, _template, cache

# struct entry_header of csrc/cubin_cache.c
HEADER = struct.Struct("<8sIIIIQ64s5iI")
DIGEST = 32

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture(scope="module")
def compiled() -> tuple[str, str, tuple, bytes]:
    """(source, key, facts, the entry's bytes) of a kernel; most tests spoil a copy of the entry."""
    import tempfile

    source = fresh_source()
    with tempfile.TemporaryDirectory() as folder:
        k = kernel(source)
        assert ensure(k, folder) == "nvrtc"
        return source, k.key, facts(k), entry_path(folder, k.key).read_bytes()


@pytest.fixture
def planted(compiled, tmp_path: Path) -> Callable[[bytes], str]:
    """Puts bytes in the entry's place and says where the kernel comes from then, without compiling."""
    source, key, _, _ = compiled
    path = entry_path(tmp_path, key)
    path.parent.mkdir()

    def plant(data: bytes) -> str:
        path.write_bytes(data)
        return ensure(kernel(source, key=key), tmp_path, compile=False)

    return plant


# --- The entry --------------------------------------------------------------------------------------------------------


def test_an_entry_holds_all_that_was_compiled(compiled, tmp_path: Path) -> None:
    source, key, known, data = compiled
    path = entry_path(tmp_path, key)
    path.parent.mkdir()
    path.write_bytes(data)
    k = kernel(source, key=key)
    assert ensure(k, tmp_path, compile=False) == "disk"
    assert facts(k) == known
    assert "ptxas info" in k.log and k.log.encode() in data
    assert _core.read_entry(str(path)) == ("kernel: fill<1>\n", known[1], len(known[0]))


def test_an_entry_is_laid_out_as_documented(compiled) -> None:
    _, key, (image, lowered, numbers), data = compiled
    fields = HEADER.unpack_from(data)
    meta_size, lowered_size, log_size, image_size = fields[2:6]
    assert fields[0] == b"tkjit\0\r\n" and fields[6].decode() == key
    assert dict(zip(numbers, fields[7:12])) == numbers
    rest = data[HEADER.size :]
    assert len(rest) == meta_size + lowered_size + log_size + image_size + DIGEST
    assert rest[meta_size:][:lowered_size] == lowered.encode() + b"\0"
    assert rest[meta_size + lowered_size :][:log_size].startswith(b"ptxas info")
    assert rest[:-DIGEST].endswith(image)
    assert hashlib.sha256(data[:-DIGEST]).digest() == data[-DIGEST:]


def test_an_entry_cut_at_every_64th_byte_is_a_miss(compiled, planted) -> None:
    data = compiled[3]
    before = cache.stats()["damaged"]
    lengths = [*range(0, len(data), 64), *range(len(data) - 40, len(data))]
    assert [n for n in lengths if planted(data[:n]) != "nowhere"] == []
    assert cache.stats()["damaged"] - before == len(lengths)
    assert planted(data) == "disk"


def test_an_entry_with_bytes_behind_it_is_a_miss(compiled, planted) -> None:
    data = compiled[3]
    assert [n for n in (1, 32, 4096) if planted(data + bytes(n)) != "nowhere"] == []


def test_an_entry_with_a_flipped_byte_is_a_miss(compiled, planted) -> None:
    data = compiled[3]
    _, _, meta, lowered, log = HEADER.unpack_from(data)[:5]
    text_end = HEADER.size + meta + lowered + log
    rng = random.Random(3)
    # Each byte of the header, of the texts and of the digest, and a sample of the image.
    places = [
        *range(text_end),
        *range(len(data) - DIGEST, len(data)),
        *rng.sample(range(text_end, len(data) - DIGEST), 200),
    ]
    survived = []
    for place in places:
        spoilt = bytearray(data)
        spoilt[place] ^= 1 << rng.randrange(8)
        if planted(bytes(spoilt)) != "nowhere":
            survived.append(place)
    assert survived == []


@pytest.mark.parametrize("field", range(1, 13), ids=lambda i: f"field{i}")
@pytest.mark.parametrize("value", [0, 1, 0xFFFFFFFF], ids=hex)
def test_a_header_that_lies_under_a_right_digest_is_never_read_past_its_end(
    compiled, planted, field: int, value: int
) -> None:
    data = compiled[3]
    fields = list(HEADER.unpack_from(data))
    if field == 6:
        fields[field] = b"%064x" % value
    else:
        fields[field] = value if not 7 <= field < 12 else -1
    if fields == list(HEADER.unpack_from(data)):
        return
    body = HEADER.pack(*fields) + data[HEADER.size : -DIGEST]
    origin = planted(body + hashlib.sha256(body).digest())
    assert origin == ("disk" if field >= 7 else "nowhere")  # facts and the spare word are only numbers


def test_another_keys_entry_in_the_place_is_a_miss(compiled, tmp_path: Path) -> None:
    source, key, known, _ = compiled
    other = kernel(fresh_source())
    ensure(other, tmp_path)
    path = entry_path(tmp_path, key)
    path.parent.mkdir(exist_ok=True)
    os.replace(entry_path(tmp_path, other.key), path)
    mine = kernel(source, key=key)
    assert ensure(mine, tmp_path) == "nvrtc"
    assert facts(mine) == known
    assert ensure(kernel(source, key=key), tmp_path) == "disk"  # and it was replaced


def _folder(path: Path, data: bytes) -> None:
    path.mkdir()


def _full_folder(path: Path, data: bytes) -> None:
    path.mkdir()
    (path / "something").touch()


def _dangling_link(path: Path, data: bytes) -> None:
    path.symlink_to(path.parent / "nothing")


def _link_to_an_entry(path: Path, data: bytes) -> None:
    aside = path.parent.parent / "aside"
    aside.write_bytes(data)
    path.symlink_to(aside)


def _fifo(path: Path, data: bytes) -> None:
    os.mkfifo(path)


def _of_another_user(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    os.chown(path, engine.NOBODY, engine.NOBODY)


def _group_writable(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    path.chmod(0o664)


def _writable_by_all(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    path.chmod(0o646)


def _empty(path: Path, data: bytes) -> None:
    path.touch()


STRANGERS = [_folder, _dangling_link, _link_to_an_entry, _fifo, _group_writable, _writable_by_all, _empty]


@pytest.mark.parametrize(
    "strange", [*STRANGERS, pytest.param(_of_another_user, marks=root_only)], ids=lambda f: f.__name__
)
def test_a_strange_thing_in_the_place_is_a_miss_and_replaced(compiled, tmp_path: Path, strange: Callable) -> None:
    source, key, known, data = compiled
    path = entry_path(tmp_path, key)
    path.parent.mkdir()
    strange(path, data)
    before = cache.stats()["damaged"]
    assert ensure(kernel(source, key=key), tmp_path, compile=False) == "nowhere"
    assert cache.stats()["damaged"] == before + 1
    k = kernel(source, key=key)
    assert ensure(k, tmp_path) == "nvrtc" and k.publish_errno == 0
    assert facts(k) == known
    assert ensure(kernel(source, key=key), tmp_path, compile=False) == "disk"
    assert path.stat().st_uid == os.geteuid()


def test_a_full_folder_in_the_place_stays_and_is_no_error(compiled, tmp_path: Path) -> None:
    source, key, known, data = compiled
    path = entry_path(tmp_path, key)
    path.parent.mkdir()
    _full_folder(path, data)
    k = kernel(source, key=key)
    assert ensure(k, tmp_path) == "nvrtc" and k.publish_errno != 0
    assert facts(k) == known
    assert (path / "something").exists() and not list((tmp_path / "tmp").iterdir())


def test_trust_takes_an_entry_that_others_may_write(compiled, tmp_path: Path) -> None:
    source, key, _, data = compiled
    path = entry_path(tmp_path, key)
    path.parent.mkdir()
    _group_writable(path, data)
    assert ensure(kernel(source, key=key), tmp_path, compile=False, trust=True) == "disk"


def test_one_damaged_file_is_counted_once(own_cache: Path) -> None:
    wanted = instance()
    first = wanted.compiled("sm_90a")
    path = entry_path(own_cache, first.key)
    path.write_bytes(path.read_bytes()[:-1])
    _template._kernels.clear()
    before = cache.stats()
    assert facts(wanted.compiled("sm_90a")) == facts(first)
    after = cache.stats()
    assert after["damaged"] - before["damaged"] == 1
    assert after["compiles"] - before["compiles"] == 1 and after["published"] - before["published"] == 1
    assert _core.read_entry(str(path)) is not None


# --- Many at once -----------------------------------------------------------------------------------------------------

RACER = """
import os, sys, time
from engine import facts, instance
from tkjit import _nvrtc, cache
import hashlib
_nvrtc.open_library()
open(sys.argv[1] + f"/ready-{os.getpid()}", "w").close()
while not os.path.exists(sys.argv[1] + "/go"):
    time.sleep(0.001)
k = instance(open(sys.argv[1] + "/source").read()).compiled("sm_90a")
print(cache.stats()["compiles"], hashlib.sha256(repr(facts(k)).encode()).hexdigest())
"""

# Takes NVRTC some 100 ms, so that 16 processes meet in it.
SLOW_BODY = "float a = N; " + "".join(f"a = sinf(a * x[{i}]) + cosf(a); " for i in range(40)) + "x[threadIdx.x] = a;"


def _race(folder: Path, cache_folder: Path, processes: int) -> list[tuple[int, str]]:
    folder.mkdir(exist_ok=True)
    (folder / "source").write_text(fresh_source(SLOW_BODY))
    argv = [*engine.command(RACER), str(folder)]
    env = environment(TKJIT_CACHE_DIR=str(cache_folder))
    racers = [subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True) for _ in range(processes)]
    deadline = time.monotonic() + 100
    while len(list(folder.glob("ready-*"))) < processes and time.monotonic() < deadline:
        time.sleep(0.01)
    (folder / "go").touch()
    answers = [racer.communicate(timeout=100)[0].split() for racer in racers]
    assert [racer.returncode for racer in racers] == [0] * processes
    return [(int(compiles), digest) for compiles, digest in answers]


def test_16_processes_cold_on_one_kernel_compile_it_once(tmp_path: Path) -> None:
    answers = _race(tmp_path / "race", tmp_path / "cache", 16)
    assert len({digest for _, digest in answers}) == 1
    assert sum(compiles for compiles, _ in answers) == 1
    assert not list((tmp_path / "cache" / "tmp").iterdir())


def test_processes_that_cannot_lock_compile_each_for_itself(tmp_path: Path) -> None:
    (tmp_path / "cache" / "lock").mkdir(parents=True)  # not a file: no lock can be had
    answers = _race(tmp_path / "race", tmp_path / "cache", 4)
    assert len({digest for _, digest in answers}) == 1
    assert 1 <= sum(compiles for compiles, _ in answers) <= 4


def test_a_process_that_finds_the_lock_held_too_long_compiles_all_the_same(tmp_path: Path) -> None:
    import fcntl

    source = fresh_source()
    key = _template.digest([source])
    (tmp_path / "tmp").mkdir()
    with open(tmp_path / "lock", "w") as held:
        fcntl.lockf(held, fcntl.LOCK_EX, 1, int(key[:15], 16))
        before = cache.stats()["lock_waits"]
        k = kernel(source, key=key)
        started = time.monotonic()
        assert k.ensure((str(tmp_path),), str(tmp_path), False, True, 200) == "nvrtc"
        assert time.monotonic() - started >= 0.15
    assert cache.stats()["lock_waits"] == before + 1
    assert entry_path(tmp_path, key).exists()


def test_a_lock_of_one_kernel_does_not_hold_up_another(tmp_path: Path) -> None:
    import fcntl

    source = fresh_source()
    (tmp_path / "tmp").mkdir()
    with open(tmp_path / "lock", "w") as held:
        fcntl.lockf(held, fcntl.LOCK_EX, 1, int(_template.digest(["another"])[:15], 16))
        before = cache.stats()["lock_waits"]
        assert ensure(kernel(source), tmp_path) == "nvrtc"
    assert cache.stats()["lock_waits"] == before


# --- Kills ------------------------------------------------------------------------------------------------------------

COMPILER = """
import sys
from engine import ensure, kernel, fresh_source
from tkjit import _nvrtc
_nvrtc.open_library()
print("ready", flush=True)
for n in range(10000):
    ensure(kernel(fresh_source()), sys.argv[1])
"""

# Its image takes a while to digest and to write.
PUBLISHER = """
import sys
from engine import ensure, kernel, fresh_source
ensure(kernel(fresh_source(head="__device__ char big[4 << 20] = {1};", body="x[0] = big[N];")), sys.argv[1])
"""


def _kill_while_compiling(folder: Path, seconds: float) -> None:
    child = subprocess.Popen([*engine.command(COMPILER), str(folder)], env=environment(), stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"ready\n"
    time.sleep(seconds)
    child.kill()
    assert child.wait() == -signal.SIGKILL
    child.stdout.close()


def _kill_while_publishing(folder: Path, seconds: float) -> None:
    """Kills so long after the first sign of a new file."""

    def files() -> set[Path]:
        return {*folder.glob("tmp/*"), *folder.glob("??/*.tkc")}

    before = files()
    child = subprocess.Popen([*engine.command(PUBLISHER), str(folder)], env=environment())
    while files() == before:
        assert child.poll() is None
    time.sleep(seconds)
    child.kill()
    child.wait()


@pytest.mark.parametrize("kill", [_kill_while_compiling, _kill_while_publishing], ids=["compiling", "publishing"])
def test_a_kill_leaves_whole_entries_or_none(own_cache: Path, kill: Callable[[Path, float], None]) -> None:
    rng = random.Random(11)
    for _ in range(6):
        kill(own_cache, rng.uniform(0, 0.05))
        damaged = [path for path in own_cache.glob("??/*.tkc") if _core.read_entry(str(path)) is None]
        assert damaged == []
    if kill is _kill_while_publishing:
        assert list((own_cache / "tmp").iterdir()), "no kill came before the rename"
    # The next one works, waits for no lock, and sweeps what is left, once it is old.
    (own_cache / "tmp" / "1-0-left").write_bytes(b"half")
    own_cache.chmod(0o700)
    before = cache.stats()["lock_waits"]
    assert ensure(kernel(fresh_source()), own_cache) == "nvrtc"
    assert cache.stats()["lock_waits"] == before
    instance().compiled("sm_90a")
    for left in (own_cache / "tmp").iterdir():
        os.utime(left, (0, time.time() - 3600))
    cache.prune()
    assert list((own_cache / "tmp").iterdir()) == []


def test_a_leftover_of_the_same_process_number_does_not_stop_a_publish(tmp_path: Path) -> None:
    # In a container the first process is always number 1.
    code = """
        import os, sys
        from engine import ensure, fresh_source, kernel
        k = kernel(fresh_source())
        os.makedirs(sys.argv[1] + "/tmp")
        open(f"{sys.argv[1]}/tmp/{os.getpid()}-0-{k.key[:16]}", "w").close()
        assert ensure(k, sys.argv[1]) == "nvrtc" and k.publish_errno == 0, k.publish_errno
    """
    subprocess.run([*engine.command(code), str(tmp_path / "cache")], env=environment(), check=True)


def test_a_sweep_takes_what_is_old_and_nothing_else(own_cache: Path) -> None:
    assert cache.folders().home == str(own_cache)
    tmp = own_cache / "tmp"
    keep = [f"{os.getpid()}-0-mine", "not-ours", f"{2**70}-0-large", "1-0-of-another-container"]
    go = [f"{os.getpid()}-1-old", "2-0-old"]
    (tmp / "3-folder").mkdir()  # cannot be unlinked, and must not stop the rest
    for name in [*keep, *go]:
        (tmp / name).touch()
    for name in [*go, "3-folder"]:
        os.utime(tmp / name, (0, time.time() - 3600))
    cache.prune()
    assert {path.name for path in tmp.iterdir() if path.is_file()} == set(keep)


# --- Folders ----------------------------------------------------------------------------------------------------------


def _use(monkeypatch: pytest.MonkeyPatch, *paths: Path | str) -> None:
    monkeypatch.setenv("TKJIT_CACHE_DIR", ":".join(map(str, paths)))


def _warnings_of(action: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        action()
    return [str(warning.message) for warning in seen]


def _compile_twice() -> None:
    instance().compiled("sm_90a")
    instance().compiled("sm_90a")


def test_a_new_folder_is_for_its_owner_alone(own_cache: Path) -> None:
    umask = os.umask(0)
    try:
        k = instance().compiled("sm_90a")
    finally:
        os.umask(umask)
    assert own_cache.stat().st_mode & 0o777 == 0o700
    assert (own_cache / "tmp").stat().st_mode & 0o777 == 0o700
    assert entry_path(own_cache, k.key).stat().st_mode & 0o022 == 0


def test_an_existing_folder_keeps_its_mode(own_cache: Path) -> None:
    own_cache.mkdir(mode=0o750)
    assert cache.folders().home == str(own_cache)
    assert own_cache.stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o707])
def test_a_folder_that_others_can_write_to_is_refused_with_one_warning(own_cache: Path, mode: int, monkeypatch) -> None:
    own_cache.mkdir()
    own_cache.chmod(mode)
    seen = _warnings_of(_compile_twice)
    assert len(seen) == 1 and "other users can write to it" in seen[0] and "TKJIT_CACHE_TRUST=1" in seen[0]
    assert str(own_cache) in seen[0] and not list(own_cache.iterdir())
    monkeypatch.setenv("TKJIT_CACHE_TRUST", "1")
    assert _warnings_of(_compile_twice) == [] and cache.folders().home == str(own_cache)
    assert len(cache.entries()) == 2


@root_only
def test_a_folder_of_another_user_is_refused_with_one_warning(own_cache: Path, monkeypatch) -> None:
    own_cache.mkdir(mode=0o755)
    os.chown(own_cache, engine.NOBODY, engine.NOBODY)
    seen = _warnings_of(_compile_twice)
    assert len(seen) == 1 and f"belongs to another user (uid {engine.NOBODY})" in seen[0]
    monkeypatch.setenv("TKJIT_CACHE_TRUST", "1")
    assert _warnings_of(_compile_twice) == [] and len(cache.entries()) == 2


def test_a_read_only_folder_is_read_and_nothing_more(public_path: Path) -> None:
    done = run(
        f"""
        import os, warnings
        from engine import entry_path, facts, fresh_source, instance
        from tkjit import _core, _nvrtc, _template, cache
        _nvrtc.open_library()
        {ORDINARY_USER}
        home = os.environ["TKJIT_CACHE_DIR"] = {str(_given_away(public_path) / "cache")!r}
        source = fresh_source()
        known = facts(instance(source).compiled("sm_90a"))
        before = {{path: os.stat(path).st_mtime_ns for path, _, _ in os.walk(home)}}
        for path in (home + "/tmp", *[f.path for f in os.scandir(home) if f.is_dir()], home):
            os.chmod(path, 0o555)
        cache._chosen.clear()
        _template._kernels.clear()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            assert facts(instance(source).compiled("sm_90a")) == known
            assert _core.stats()["disk_hits"] == 1 and _core.stats()["compiles"] == 1
            assert instance().compiled("sm_90a").image and instance().compiled("sm_90a").image
        assert len(seen) == 1 and "it cannot be written to" in str(seen[0].message), [str(w.message) for w in seen]
        assert before == {{path: os.stat(path).st_mtime_ns for path, _, _ in os.walk(home)}}
        assert _core.stats()["publish_failures"] == 0
        """
    )
    assert done.stdout == ""


def _given_away(folder: Path) -> Path:
    """A folder that belongs to whom ORDINARY_USER becomes."""
    inner = folder / "of-nobody"
    inner.mkdir()
    if os.geteuid() == 0:
        os.chown(inner, engine.NOBODY, engine.NOBODY)
    return inner


NO_HOME = {
    "HOME is not set": {"HOME": None},
    "HOME is empty": {"HOME": ""},
    "HOME is relative": {"HOME": "somewhere"},
}


@pytest.mark.parametrize("variables", NO_HOME.values(), ids=NO_HOME)
def test_without_a_home_kernels_live_in_memory_with_one_warning(monkeypatch, variables: dict, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TKJIT_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    cache._warned.clear()
    cache._chosen.clear()
    monkeypatch.delenv("HOME", raising=False)
    for name, value in variables.items():
        if value is not None:
            monkeypatch.setenv(name, value)
    seen = _warnings_of(_compile_twice)
    assert cache.folders() == cache.Folders(None, (), ())
    assert len(seen) == 1 and "in memory only" in seen[0] and "HOME" in seen[0]
    assert list(tmp_path.iterdir()) == []


def test_a_home_that_is_a_file_is_no_home(monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "home").touch()
    monkeypatch.delenv("TKJIT_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    seen = _warnings_of(_compile_twice)
    assert cache.folders().home is None
    assert len(seen) == 1 and str(tmp_path / "home") in seen[0]


def test_the_default_folders_are_those_of_the_desktop_standard(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TKJIT_CACHE_DIR", "")  # empty is unset
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache.folders().home == str(tmp_path / "home" / ".cache" / "tkjit")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.folders().home == str(tmp_path / "xdg" / "tkjit")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, says the standard
    assert cache.folders().home == str(tmp_path / "home" / ".cache" / "tkjit")


def test_the_first_writable_folder_of_the_list_is_written_and_all_are_read(monkeypatch, tmp_path: Path) -> None:
    far = tmp_path / "far"
    _use(monkeypatch, far)
    source = fresh_source()
    known = facts(instance(source).compiled("sm_90a"))
    (tmp_path / "file").touch()
    near = tmp_path / "near"
    _use(monkeypatch, tmp_path / "file", "", near, far, tmp_path / "missing")
    _template._kernels.clear()
    before = cache.stats()
    assert _warnings_of(lambda: instance(source).compiled("sm_90a")) == []
    assert cache.folders().home == str(near) and cache.folders().all == (str(near), str(far))
    assert {path for path, _ in cache.folders().refused} == {str(tmp_path / "file"), str(tmp_path / "missing")}
    assert cache.stats()["disk_hits"] - before["disk_hits"] == 1
    far_files = sorted(far.rglob("*"))
    new = instance().compiled("sm_90a")
    assert entry_path(near, new.key).exists() and sorted(far.rglob("*")) == far_files
    assert not (tmp_path / "missing").exists()
    assert facts(instance(source).compiled("sm_90a")) == known


def test_damage_in_the_first_folder_does_not_hide_the_second(monkeypatch, tmp_path: Path) -> None:
    _use(monkeypatch, tmp_path / "far")
    source = fresh_source()
    k = instance(source).compiled("sm_90a")
    spoilt = entry_path(tmp_path / "near", k.key)
    spoilt.parent.mkdir(parents=True)
    spoilt.write_bytes(b"spoilt")
    _use(monkeypatch, tmp_path / "near", tmp_path / "far")
    _template._kernels.clear()
    before = cache.stats()
    assert facts(instance(source).compiled("sm_90a")) == facts(k)
    assert cache.stats()["compiles"] == before["compiles"] and cache.stats()["damaged"] == before["damaged"] + 1


def test_a_disk_without_room_is_one_warning(tmp_path: Path) -> None:
    done = run(
        """
        import resource, warnings
        from engine import instance
        from tkjit import _core, _nvrtc, cache
        _nvrtc.identify()
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for n in range(3):
                assert len(instance(n=n).compiled("sm_90a").image) > 2048
        print(len(seen), seen[0].message)
        print(_core.stats()["publish_failures"], _core.stats()["published"])
        """,
        TKJIT_CACHE_DIR=str(tmp_path / "cache"),
    )
    first, second = done.stdout.splitlines()
    assert first.startswith("1 ") and os.strerror(errno.EFBIG) in first and str(tmp_path / "cache") in first
    assert second == "3 0"
    assert not list((tmp_path / "cache" / "tmp").iterdir()) and not list((tmp_path / "cache").glob("??/*"))


def test_a_folder_that_is_taken_away_is_one_warning(own_cache: Path) -> None:
    import shutil

    instance().compiled("sm_90a")
    shutil.rmtree(own_cache)
    seen = _warnings_of(_compile_twice)
    assert len(seen) == 1 and os.strerror(errno.ENOENT) in seen[0]


# --- Size -------------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_go_first(own_cache: Path, monkeypatch) -> None:
    sources = [fresh_source() for _ in range(6)]
    paths = [entry_path(own_cache, instance(source).compiled("sm_90a").key) for source in sources]
    now = time.time()
    for age, path in enumerate(reversed(paths)):
        os.utime(path, (now - 100 * (age + 1),) * 2)
    _template._kernels.clear()
    instance(sources[0]).compiled("sm_90a")  # the oldest is used again
    sizes = [path.stat().st_size for path in paths]
    assert [entry.path for entry in cache.entries()] == [*paths[1:], paths[0]]
    assert cache.prune(sum(sizes)) == []
    assert cache.prune(sum(sizes) - 1) == [paths[1]]
    assert cache.prune(sizes[0] + sizes[5]) == paths[2:5]
    assert [path for path in paths if path.exists()] == [paths[0], paths[5]]
    monkeypatch.setenv("TKJIT_CACHE_MAX_MB", "0")
    assert cache.prune() == [paths[5], paths[0]]


def test_compiling_keeps_the_folder_below_its_cap(own_cache: Path, monkeypatch) -> None:
    big = fresh_source(head="__device__ char big[1 << 19] = {1};", body="x[0] = big[N];")
    monkeypatch.setenv("TKJIT_CACHE_MAX_MB", "2")
    monkeypatch.setattr(cache, "_PRUNE_EVERY", 1)
    for n in range(8):
        instance(big, n).compiled("sm_90a")
        assert sum(entry.size for entry in cache.entries()) <= 2 << 20
    left = [entry.meta["kernel"] for entry in cache.entries() if entry.meta]
    assert left == ["fill<5>", "fill<6>", "fill<7>"]


def test_a_cap_that_is_no_number_says_so(own_cache: Path, monkeypatch) -> None:
    monkeypatch.setenv("TKJIT_CACHE_MAX_MB", "lots")
    with pytest.raises(ValueError, match="TKJIT_CACHE_MAX_MB must be a whole number, not 'lots'"):
        cache.prune()


# --- Shipping ---------------------------------------------------------------------------------------------------------


def test_an_exported_cache_serves_a_process_that_may_not_compile(own_cache: Path, tmp_path: Path) -> None:
    source = fresh_source()
    known = facts(instance(source).compiled("sm_90a"))
    damaged = own_cache / "00" / "damaged.tkc"
    damaged.parent.mkdir(exist_ok=True)
    damaged.write_bytes(b"damaged")
    umask = os.umask(0)  # a folder that others can write to would not be used
    try:
        assert cache.export(str(tmp_path / "shipped")) == 1
    finally:
        os.umask(umask)
    (tmp_path / "source").write_text(source)
    run(
        f"""
        from engine import facts, instance
        from tkjit import _core, CompileError
        k = instance(open({str(tmp_path / "source")!r}).read()).compiled("sm_90a")
        assert facts(k) == {known!r}
        stats = _core.stats()
        assert stats["compiles"] == 0 and stats["disk_hits"] == 1, stats
        try:
            instance().compiled("sm_90a")
        except CompileError as error:
            assert "fill<1> for sm_90a is not in the cache, and TKJIT_NO_JIT forbids" in str(error), error
            assert "warmup" in str(error) and error.expression == "fill<1>" and error.arch == "sm_90a"
            assert error.options and error.name == "user"
        else:
            raise AssertionError("it was compiled")
        assert _core.stats()["compiles"] == 0
        """,
        TKJIT_CACHE_DIR=f"{tmp_path / 'empty'}:{tmp_path / 'shipped'}",
        TKJIT_NO_JIT="1",
    )


# --- What is remembered of NVRTC --------------------------------------------------------------------------------------

MEMO_USER = """
from engine import instance
from tkjit import _nvrtc
print(*_nvrtc.identify().version, len(_nvrtc.identify().archs) > 5, _nvrtc._core.nvrtc_info() is None)
assert instance().compiled("sm_90a").image
"""


@pytest.fixture(scope="module")
def memo(tmp_path_factory) -> tuple[str, dict]:
    """(what a process says of NVRTC, the memo it leaves)"""
    folder = tmp_path_factory.mktemp("memo")
    said = run(MEMO_USER, TKJIT_CACHE_DIR=str(folder)).stdout
    return said, json.loads((folder / "nvrtc.json").read_text())


def _without(memo: dict, name: str) -> str:
    return json.dumps({key: value for key, value in memo.items() if key != name})


BAD_MEMOS: dict[str, Callable[[dict], str]] = {
    "empty": lambda memo: "",
    "cut": lambda memo: json.dumps(memo)[:-7],
    "no JSON": lambda memo: "\x00\xff",
    "a list": lambda memo: "[]",
    "without a stamp": lambda memo: _without(memo, "stamp"),
    "without a version": lambda memo: _without(memo, "version"),
    "without architectures": lambda memo: json.dumps({**memo, "archs": []}),
    "a version of words": lambda memo: json.dumps({**memo, "version": ["a", "b"]}),
    "a version of null": lambda memo: json.dumps({**memo, "version": None}),
    "an infinite version": lambda memo: json.dumps({**memo, "version": [float("inf"), 0]}),
    "of another file": lambda memo: json.dumps({**memo, "stamp": ["/other", *memo["stamp"][1:]], "version": [99, 9]}),
    "of another size": lambda memo: json.dumps(
        {**memo, "stamp": [memo["stamp"][0], 1, memo["stamp"][2]], "version": [99, 9]}
    ),
}


def test_a_good_memo_spares_opening_nvrtc(memo, tmp_path: Path) -> None:
    said, text = memo
    assert said.endswith("True False\n")
    (tmp_path / "nvrtc.json").write_text(json.dumps(text))
    assert run(MEMO_USER, TKJIT_CACHE_DIR=str(tmp_path)).stdout == said.replace("False\n", "True\n")


@pytest.mark.parametrize("bad", BAD_MEMOS.values(), ids=BAD_MEMOS)
def test_a_bad_memo_is_replaced(memo, tmp_path: Path, bad: Callable[[dict], str], monkeypatch) -> None:
    _, text = memo
    monkeypatch.setenv("TKJIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(_core, "nvrtc_info", lambda: None)  # as in a process that has not opened it
    (tmp_path / "nvrtc.json").write_bytes(bad(text).encode("latin-1"))
    assert _nvrtc._remembered(text["stamp"][0]) is None
    _nvrtc._remember(_nvrtc.Nvrtc(text["stamp"][0], tuple(text["version"]), tuple(text["archs"])))
    assert json.loads((tmp_path / "nvrtc.json").read_text()) == text


def test_a_folder_in_the_memos_place_is_no_error(memo, tmp_path: Path) -> None:
    (tmp_path / "nvrtc.json").mkdir()
    assert run(MEMO_USER, TKJIT_CACHE_DIR=str(tmp_path)).stdout == memo[0]


# --- The command line -------------------------------------------------------------------------------------------------


def test_the_command_line_lists_verifies_prunes_and_exports(own_cache: Path, tmp_path: Path) -> None:
    def tkjit_cache(*args: str) -> subprocess.CompletedProcess[str]:
        return engine.tkjit_command("cache", *args, TKJIT_CACHE_DIR=str(own_cache))

    name = "two\nlines"  # a name of the user's may be anything
    paths = [entry_path(own_cache, instance(n=n, name=name).compiled("sm_90a").key) for n in (7, 8)]
    done = tkjit_cache("ls")
    assert done.returncode == 0 and done.stderr == ""
    listing = done.stdout.splitlines()
    assert len(listing) == 3 and "fill<7>" in listing[0] and "sm_90a" in listing[0] and "fill<8>" in listing[1]
    assert listing[2].startswith("2 entries") and str(own_cache) in listing[2]

    done = tkjit_cache("export", str(tmp_path / "out"))
    assert done.returncode == 0 and done.stdout.startswith("2 entries copied")
    assert all((tmp_path / "out" / path.relative_to(own_cache)).read_bytes() == path.read_bytes() for path in paths)

    assert tkjit_cache("verify").stdout == "2 entries are whole, 0 were damaged\n"
    paths[0].write_bytes(b"damage")
    assert "(damaged)" in tkjit_cache("ls").stdout
    done = tkjit_cache("verify")
    assert done.returncode == 1 and f"damaged: {paths[0]}" in done.stdout and not paths[0].exists()
    assert tkjit_cache("verify").returncode == 0

    assert tkjit_cache("prune").stdout == "0 entries removed\n"
    assert tkjit_cache("prune", "--mb", "0").stdout == "1 entries removed\n" and not paths[1].exists()
    done = tkjit_cache("prune", "--mb", "x")
    assert done.returncode == 2 and "usage:" in done.stderr and done.stdout == ""


# --- Manners ----------------------------------------------------------------------------------------------------------


def test_nothing_is_printed_and_nothing_written_but_the_cache(tmp_path: Path) -> None:
    work, home, temporary = tmp_path / "work", tmp_path / "home", tmp_path / "temporary"
    for folder in (work, home, temporary):
        folder.mkdir()
    done = run(
        'from engine import instance; instance().compiled("sm_90a")',
        cwd=work,
        HOME=str(home),
        XDG_CACHE_HOME=None,
        TMPDIR=str(temporary),
    )
    assert done.stdout == "" and done.stderr == ""
    assert list(work.iterdir()) == [] and list(temporary.iterdir()) == []
    assert [path.name for path in home.iterdir()] == [".cache"]
    assert [path.name for path in (home / ".cache").iterdir()] == ["tkjit"]
    assert sorted(path.name for path in (home / ".cache" / "tkjit").iterdir() if len(path.name) > 2) == [
        "lock",
        "nvrtc.json",
        "tmp",
    ]


def test_no_module_reads_pickles() -> None:
    forbidden = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found += [(path.name, alias.name) for alias in node.names if alias.name in forbidden]
            elif isinstance(node, ast.ImportFrom) and node.module in forbidden:
                found.append((path.name, node.module))
            elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load":
                found.append((path.name, "torch.load"))
    assert found == []
    assert tkjit.cache is cache


# --- A cache that was shipped ------------------------------------------------------------------------------------------


def test_exported_kernels_are_found_where_there_is_no_compiler(own_cache: Path, tmp_path: Path) -> None:
    """The version in the keys is then the one that the exported folder notes."""
    source = fresh_source()
    instance(source).compiled("sm_90a")
    shipped = tmp_path / "shipped"
    assert cache.export(str(shipped)) == 1
    code = f"""
        from tkjit import _nvrtc
        _nvrtc._loaded = _nvrtc._from_pip = _nvrtc._from_pathfinder = list
        _nvrtc.candidates = _nvrtc._rest = lambda: ("/nonexistent/libnvrtc.so",)
        from engine import instance
        import tkjit
        print(len(instance({source!r}).compiled("sm_90a").image) > 1000, tkjit.cache.stats()["compiles"])
        try:
            instance({source!r}, n=2).compiled("sm_90a")
        except tkjit.DeviceError as error:
            print("NVRTC" in str(error))
    """
    done = engine.run(code, TKJIT_CACHE_DIR=f"{tmp_path / 'front'}:{shipped}")
    assert done.stdout.split() == ["True", "0", "True"]


@pytest.mark.parametrize("target", ["", "itself"])
def test_an_export_that_makes_no_sense_is_refused(own_cache: Path, target: str) -> None:
    with pytest.raises(ValueError, match=r"no name|the cache itself"):
        cache.export(str(cache.folders().home) if target else "")
