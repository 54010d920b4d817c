"""Draw results: GB/s over the width; a panel for each dtype and direction, a line for each peer, the copy as ceiling.

    python benchmarks/plot.py benchmarks/results/softmax-nvidia-h200-2026-12-01.json

Each file becomes a PNG beside it. Needs matplotlib.
"""

import argparse
import math
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import report

# Okabe and Ito's colours, told apart by people with any colour vision; tkjit's is the strongest.
COLOURS = {
    "tkjit": "#D55E00",
    "torch": "#0072B2",
    "torch.compile": "#56B4E9",
    "triton": "#009E73",
    "quack": "#CC79A7",
    "liger": "#E69F00",
}
OTHERS = ("#000000", "#7F7F7F", "#F0E442")
COPY = "#555555"
STYLES: dict[str, dict[str, Any]] = {
    "copy": {"linestyle": "--", "linewidth": 1.1},
    "tkjit": {"marker": "o", "markersize": 4, "linewidth": 2.4},
}


def draw(results: dict[str, Any], path: pathlib.Path, group: str | None = None) -> pathlib.Path:
    """One figure of the cases of ``group`` (by default the first group that has more than one place on the axis)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    entries = results.get("device", [])
    group = group or group_with_axis(entries)
    entries = [e for e in entries if e["group"] == group]
    if not entries:
        raise ValueError(f"no device timings of the group {group!r} to draw")
    dtypes = list(dict.fromkeys(e["dtype"] for e in entries))
    directions = list(dict.fromkeys(e["direction"] for e in entries))
    size = (0.6 + 5.2 * len(directions), 0.9 + 3.1 * len(dtypes))
    figure, axes = plt.subplots(len(dtypes), len(directions), figsize=size, squeeze=False, sharex=True, sharey=True)
    top = 1.1 * max(p["gbps"] for e in entries for p in e["peers"].values() if p["status"] == "ok")
    for row, dtype in zip(axes, dtypes, strict=True):
        for axis, direction in zip(row, directions, strict=True):
            _panel(axis, [e for e in entries if (e["dtype"], e["direction"]) == (dtype, direction)], top)
            axis.set_title(f"{dtype} {direction}", loc="left", fontsize=10)
    for axis in axes[-1]:
        axis.set_xlabel("N, size of the reduced dimension" if "dim" in group else group, fontsize=9)
    for axis in axes[:, 0]:
        axis.set_ylabel("GB/s", fontsize=9)
    figure.suptitle(f"{results['op']}, {results['gpu']}", x=0.01, ha="left", fontsize=12, fontweight="bold")
    made = f"{results['date'][:10]}, commit {results['commit']}, driver {results['driver']}"
    source = f"{made}, torch {results['versions'].get('torch', '?')}   {results['command']}"
    figure.text(0.01, 0.005, source, fontsize=6.5, color="#666666")
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def group_with_axis(entries: Sequence[dict[str, Any]]) -> str:
    places: dict[str, set[float]] = {}
    for entry in entries:
        places.setdefault(entry["group"], set()).add(entry["x"])
    if not places:
        raise ValueError("no device timings to draw")
    return next((group for group, xs in places.items() if len(xs) > 1), next(iter(places)))


def _panel(axis: Any, entries: Sequence[dict[str, Any]], top: float) -> None:
    names = list(dict.fromkeys(name for e in entries for name in e["peers"]))
    others = iter(OTHERS * len(names))
    labels: list[tuple[float, str, str]] = []
    # tkjit last, so that it lies on top.
    for name in sorted(names, key=lambda n: n == "tkjit"):
        timed = [e for e in entries if e["peers"].get(name, {}).get("status") == "ok"]
        points = sorted((e["x"], e["peers"][name]["gbps"]) for e in timed)
        if not points:
            continue
        xs, ys = zip(*points, strict=True)
        colour = COPY if name == "copy" else COLOURS.get(name) or next(others)
        style = STYLES.get(name, {"marker": "o", "markersize": 3, "linewidth": 1.4})
        axis.plot(xs, ys, color=colour, **style)
        labels.append((ys[-1], name, colour))
    axis.set_xscale("log", base=2)
    axis.set_ylim(0, top)
    ticks = [x for x in sorted({e["x"] for e in entries}) if math.log2(x).is_integer()]
    if ticks:
        ticks = ticks[:: 2 if len(ticks) > 6 else 1]
        axis.set_xticks(ticks, [f"{x / 1024:g}k" if x >= 1024 else f"{x:g}" for x in ticks])
    axis.minorticks_off()
    axis.grid(axis="y", color="#E5E5E5", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=8)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for place, (_, name, colour) in zip(spread([y for y, _, _ in labels], 0.055 * top), labels, strict=True):
        bold = "bold" if name == "tkjit" else "normal"
        axis.annotate(
            name,
            (1.01, place / top),
            xycoords="axes fraction",
            va="center",
            fontsize=8,
            color=colour,
            fontweight=bold,
            annotation_clip=False,
        )


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Move places apart until neighbours are ``gap`` from each other, keeping their order and, about, their middle."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    # Clusters of places that touch, each centred on the mean of its members.
    clusters: list[list[int]] = []

    def extent(cluster: list[int]) -> tuple[float, float]:
        middle = sum(places[i] for i in cluster) / len(cluster)
        half = gap * (len(cluster) - 1) / 2
        return max(0.0, middle - half), max(0.0, middle - half) + 2 * half

    for i in order:
        clusters.append([i])
        while len(clusters) > 1 and extent(clusters[-2])[1] + gap > extent(clusters[-1])[0]:
            clusters[-2:] = [clusters[-2] + clusters[-1]]
    moved = list(places)
    for cluster in clusters:
        start = extent(cluster)[0]
        for k, i in enumerate(cluster):
            moved[i] = start + k * gap
    return moved


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="plot.py", description="Draw results of run.py.")
    parser.add_argument("results", nargs="+", type=pathlib.Path, help="JSON files of run.py")
    parser.add_argument("--group", help="which group of cases (default: the first with an axis)")
    parser.add_argument("--out", type=pathlib.Path, help="folder for the PNG files (default: beside each JSON file)")
    options = parser.parse_args(argv)
    for path in options.results:
        target = (options.out or path.parent) / path.with_suffix(".png").name
        target.parent.mkdir(parents=True, exist_ok=True)
        print(draw(report.read(path), target, options.group))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
