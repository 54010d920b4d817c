"""What a run leaves behind: the JSON file, and the tables on the console."""

import contextlib
import datetime
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch

SCHEMA = 1
ROOT = pathlib.Path(__file__).resolve().parent.parent

# Section -> the keys that each of its entries has.
_ENTRY_KEYS = {
    "device": {"case", "group", "x", "dtype", "direction", "bytes", "peers"},
    "host": {"dtype", "mode", "peers"},
    "first_call": {"case", "dtype", "direction", "start", "ms"},
    "import": {"module", "ms", "cuda_initialized", "nvrtc_loaded"},
}
_META_KEYS = {"schema", "op", "gpu", "driver", "date", "commit", "versions", "command"}


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def without_paths(text: str, limit: int = 120) -> str:
    """The first line of a message, folders cut out of it: results are published, a machine's paths aren't."""
    line = next((line for line in text.splitlines() if line.strip()), "").strip()
    line = re.sub(r"(?<![\w.])(?:~|\.{1,2})?(?:/[\w.+~-]+)*/([\w.+~-]+)", r"\1", line)
    return line if len(line) <= limit else line[: limit - 1] + "…"


def command(argv: Sequence[str]) -> str:
    """The command line as a reader would type it, without ``--out``."""
    kept, skip = [], False
    for argument in argv:
        if skip or argument == "--out":
            skip = not skip
        elif not argument.startswith("--out="):
            kept.append(argument)
    return shlex.join(["python", "benchmarks/run.py", *kept])


def commit() -> str:
    """``TKJIT_COMMIT``, else git's HEAD (with ``-dirty`` where files differ from it), else "unknown"."""
    if os.environ.get("TKJIT_COMMIT"):
        return os.environ["TKJIT_COMMIT"]
    head = _output("git", "rev-parse", "--short=12", "HEAD")
    if not head:
        return "unknown"
    return head + ("-dirty" if _output("git", "status", "--porcelain", "--untracked-files=no") else "")


def _output(*words: str) -> str:
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def versions() -> dict[str, str]:
    """Of everything that moves the numbers; what isn't installed is left out."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "cuda": str(torch.version.cuda)}
    for name in ("tkjit", "triton", "quack-kernels", "nvidia-cutlass-dsl", "liger-kernel"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def provenance(op: str, argv: Sequence[str]) -> dict[str, Any]:
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    return {
        "schema": SCHEMA,
        "op": op,
        "gpu": torch.cuda.get_device_name(),
        "driver": driver[0].strip() if driver else "unknown",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": versions(),
        "command": command(argv),
    }


def check(results: Any) -> None:
    """Raise ValueError unless ``results`` is what this version writes."""
    if not isinstance(results, dict) or not results.keys() >= _META_KEYS:
        raise ValueError(f"not a results file: it lacks {', '.join(sorted(_META_KEYS - set(results)))}")
    if results["schema"] != SCHEMA:
        raise ValueError(f"results of schema {results['schema']}; this reads {SCHEMA}")
    for section, keys in _ENTRY_KEYS.items():
        for i, entry in enumerate(results.get(section, [])):
            if not keys <= entry.keys():
                raise ValueError(f"{section}[{i}] lacks {', '.join(sorted(keys - entry.keys()))}")
            for name, peer in entry.get("peers", {}).items():
                if "status" not in peer or (peer["status"] == "ok") != ("median" in peer):
                    raise ValueError(f"{section}[{i}]: peer {name!r} needs a status, and a median only if that is ok")


def write(results: dict[str, Any], folder: pathlib.Path) -> pathlib.Path:
    """Write ``<op>-<gpu>-<date>.json``; a file that is there is kept, and the new one numbered."""
    check(results)
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{results['op']}-{slug(results['gpu'])}-{results['date'][:10]}"
    text = json.dumps(results, indent=1, allow_nan=False) + "\n"
    number = 1
    while True:
        path = folder / (f"{stem}.json" if number == 1 else f"{stem}-{number}.json")
        try:
            with path.open("x") as file:
                file.write(text)
            return path
        except FileExistsError:
            number += 1


def read(path: pathlib.Path) -> dict[str, Any]:
    results = json.loads(pathlib.Path(path).read_text())
    check(results)
    return results


# --- Tables -------------------------------------------------------------------


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as they need, the first to the left and the others to the right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    padded = [
        [line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))]
        for line in lines
    ]
    return "\n".join("  ".join(line).rstrip() for line in padded)


def _in_order(entries: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for entry in entries for name in entry["peers"]))


def _notes(entries: Sequence[dict[str, Any]], label: str) -> list[str]:
    """One line for each reason why numbers are missing, with the cases it holds for."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        for name, peer in entry["peers"].items():
            if peer["status"] != "ok":
                reasons.setdefault((name, peer["status"]), []).append(str(entry[label]))
    return [
        f"  {name}: {why}" + ("" if len(cases) == len(entries) else f" [{', '.join(dict.fromkeys(cases))}]")
        for (name, why), cases in reasons.items()
    ]


def unit(entry: dict[str, Any]) -> str:
    """What its rates are counted in."""
    return "TFLOP/s" if "flops" in entry else "GB/s"


def rate(entry: dict[str, Any], peer: dict[str, Any]) -> float:
    return entry["flops"] / peer["median"] / 1e9 if "flops" in entry else peer["gbps"]


def device_table(op: str, entries: Sequence[dict[str, Any]]) -> str:
    """GB/s or TFLOP/s of one dtype and direction; behind tkjit its ratio to the copy; ``>`` marks who tkjit isn't ahead of."""
    names = [
        name for name in _in_order(entries) if any(e["peers"].get(name, {}).get("status") == "ok" for e in entries)
    ]
    header = [f"{op} {entries[0]['dtype']} {entries[0]['direction']}, {unit(entries[0])}"]
    for name in names:
        header += [name, "/copy"] if name == "tkjit" else [name]
    rows = []
    for entry in entries:
        row = [f"{entry['group']} {entry['x']:g}"]
        for name in names:
            peer = entry["peers"].get(name, {"status": "absent"})
            if peer["status"] != "ok":
                row += ["-", "-"] if name == "tkjit" else ["-"]
                continue
            ahead = entry.get("ahead", {}).get(name, True)
            row.append(f"{'' if ahead else '>'}{rate(entry, peer):.0f}")
            if name == "tkjit":
                row.append(f"{peer['of_copy']:.3f}" if "of_copy" in peer else "-")
        rows.append(row)
    return "\n".join([table(header, rows), *_notes(entries, "x")])


def host_table(op: str, entries: Sequence[dict[str, Any]]) -> str:
    names = _in_order(entries)
    rows = []
    for entry in entries:
        row = [f"{entry['dtype']} {entry['mode']}"]
        for name in names:
            peer = entry["peers"].get(name, {"status": "absent"})
            row.append(f"{peer['median']:.2f}" if peer["status"] == "ok" else "-")
        row.append(f"{entry['ratio']:.3f}" if "ratio" in entry else "-")
        rows.append(row)
    return "\n".join([table([f"{op} host, us a call", *names, "tkjit/torch"], rows), *_notes(entries, "mode")])


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def verdicts(entries: Sequence[dict[str, Any]]) -> str:
    """Each group, dtype and direction in a line: ratio to the copy, and against whom tkjit isn't ahead."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for entry in entries:
        groups.setdefault((entry["group"], entry["dtype"], entry["direction"]), []).append(entry)
    rows = []
    for (group, dtype, direction), some in groups.items():
        ratios = {e["x"]: e["peers"]["tkjit"]["of_copy"] for e in some if "of_copy" in e["peers"].get("tkjit", {})}
        behind = [f"{name} at {e['x']:g}" for e in some for name, ahead in e.get("ahead", {}).items() if not ahead]
        missing = len(some) - len(ratios)
        least = min(ratios, key=lambda x: ratios[x]) if ratios else None
        rows.append(
            [
                f"{group} {dtype} {direction}",
                f"{geometric_mean(list(ratios.values())):.3f}" if ratios else "-",
                f"{ratios[least]:.3f} at {least:g}" if least is not None else "-",
                str(missing) if missing else "",
                ", ".join(behind) or "none",
            ]
        )
    return table(["tkjit / copy", "geomean", "least", "not timed", "not ahead of"], rows)


def markdown(results: dict[str, Any]) -> str:
    """README's table: the rate of tkjit and of the best other, bold where tkjit is ahead of all, and what it was measured by."""
    entries = results["device"]
    kinds = list(dict.fromkeys((e["dtype"], e["direction"]) for e in entries))
    cells: dict[tuple[str, str], dict[tuple[str, str], str]] = {}
    for e in entries:
        others = {n: rate(e, p) for n, p in e["peers"].items() if n not in ("tkjit", "copy") and p["status"] == "ok"}
        best = max(others, key=lambda name: others[name], default=None)
        own = f"{rate(e, e['peers']['tkjit']):.0f}" if e["peers"]["tkjit"]["status"] == "ok" else "-"
        if own != "-" and all(e.get("ahead", {}).values()):
            own = f"**{own}**"
        place = (e["group"], f"{e['x']:g}")
        cells.setdefault(place, {})[e["dtype"], e["direction"]] = own + (
            f" / {others[best]:.0f} {best}" if best else ""
        )
    names = [name for name in _in_order(entries) if name != "tkjit"]
    others_named = ", ".join(name for name in names if name != "copy")
    lines = [
        f"{results['gpu']}, {results['date'][:10]}, commit {results['commit']}, `{results['command']}`.",
        f"{unit(entries[0])} of tkjit / of the best other (peers: {others_named}); bold: ahead of all.",
        "",
        "| case | " + " | ".join(f"{dtype} {direction}" for dtype, direction in kinds) + " |",
        "| --- |" + " --- |" * len(kinds),
        *(f"| {group} {x} | " + " | ".join(row.get(kind, "-") for kind in kinds) + " |" for (group, x), row in cells.items()),
    ]  # fmt: skip
    copies = [e["peers"]["copy"]["gbps"] for e in entries if e["peers"].get("copy", {}).get("status") == "ok"]
    if copies:
        lines += ["", f"`copy_` of as many bytes: {min(copies):.0f} to {max(copies):.0f} GB/s."]
    return "\n".join(lines)


if __name__ == "__main__":  # python benchmarks/report.py FILE: the block between README's markers
    print(markdown(read(pathlib.Path(sys.argv[1]))))
