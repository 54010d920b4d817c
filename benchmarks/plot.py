"""Draw results, a panel for each dtype and direction.

    python benchmarks/plot.py benchmarks/results/softmax-nvidia-h200-2026-12-01.json
    python benchmarks/plot.py --into benchmarks/results/pointwise.png benchmarks/results/{add,mul,gelu}-*.json

Each file becomes a PNG beside it. Cases that lie on an axis are drawn as a rate over it: a line for each peer, the copy as
ceiling. Others, such as those of rotary_embedding, and several files in one figure are drawn case by case, as shares of the
copy's rate. Needs matplotlib.
"""

import argparse
import functools
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
#: What an axis counts, where the group's name doesn't say that.
AXES = {"last dim": "N, size of the reduced dimension", "mean": "classes"}
#: Groups whose places are megabytes.
MEGABYTES = ("whole", "p = 0.1")


def draw(results: dict[str, Any], path: pathlib.Path, group: str | None = None) -> pathlib.Path:
    """One figure of the cases of ``group`` (by default the first group that has more than one place on the axis)."""
    plt = _pyplot()
    entries = results.get("device", [])
    group = group or group_with_axis(entries)
    entries = [e for e in entries if e["group"] == group]
    if not entries:
        raise ValueError(f"no device timings of the group {group!r} to draw")
    dtypes = list(dict.fromkeys(e["dtype"] for e in entries))
    directions = list(dict.fromkeys(e["direction"] for e in entries))
    size = (0.6 + 5.2 * len(directions), 0.9 + 3.1 * len(dtypes))
    figure, axes = plt.subplots(len(dtypes), len(directions), figsize=size, squeeze=False, sharex=True, sharey=True)
    top = 1.1 * max(y for e in entries for y in map(functools.partial(_rate, e), e["peers"]) if y is not None)
    for row, dtype in zip(axes, dtypes, strict=True):
        for axis, direction in zip(row, directions, strict=True):
            _panel(axis, [e for e in entries if (e["dtype"], e["direction"]) == (dtype, direction)], top)
            axis.set_title(f"{dtype} {direction}", loc="left", fontsize=10)
    for axis in axes[-1]:
        axis.set_xlabel(AXES.get(group, group), fontsize=9)
    for axis in axes[:, 0]:
        axis.set_ylabel(report.unit(entries[0]), fontsize=9)
    return _save(figure, [results], path)


def draw_cases(several: Sequence[dict[str, Any]], path: pathlib.Path) -> pathlib.Path:
    """One figure of all cases of these results: a column for each, the peers' shares of the copy's rate in it."""
    plt = _pyplot()
    named = len(several) > 1
    entries = [e | {"place": _place(r["op"], e, named)} for r in several for e in r.get("device", [])]
    entries = [e for e in entries if any("of_copy" in p for p in e["peers"].values())]
    if not entries:
        raise ValueError("no device timings beside a copy to draw")
    dtypes = list(dict.fromkeys(e["dtype"] for e in entries))
    directions = list(dict.fromkeys(e["direction"] for e in entries))
    places = list(dict.fromkeys(e["place"] for e in entries))
    names = [name for name in dict.fromkeys(name for e in entries for name in e["peers"]) if name != "copy"]
    others = iter(OTHERS * len(names))
    colours = {name: COLOURS.get(name) or next(others) for name in names}
    size = (max(8.0, 1.5 + (1.2 + 0.42 * len(places)) * len(directions)), 2.2 + 2.4 * len(dtypes))
    figure, axes = plt.subplots(len(dtypes), len(directions), figsize=size, squeeze=False, sharex=True, sharey=True)
    for row, dtype in zip(axes, dtypes, strict=True):
        for axis, direction in zip(row, directions, strict=True):
            some = [e for e in entries if (e["dtype"], e["direction"]) == (dtype, direction)]
            axis.axhline(1.0, color=COPY, **STYLES["copy"])
            for i, name in enumerate(names):
                beside = 0.6 * ((i + 0.5) / len(names) - 0.5)
                timed = [(e["place"], e["peers"].get(name, {})) for e in some]
                points = [(places.index(place) + beside, p["of_copy"]) for place, p in timed if "of_copy" in p]
                xs, ys = zip(*points, strict=True) if points else ((), ())
                large = {"marker": "D", "s": 34} if name == "tkjit" else {"marker": "o", "s": 20}
                axis.scatter(xs, ys, color=colours[name], label=name, zorder=2, **large)
            axis.set_title(f"{dtype} {direction}", loc="left", fontsize=10)
            axis.set_xticks(range(len(places)), places, rotation=90)
            _plain(axis)
    for axis in axes[:, 0]:
        axis.set_ylabel("share of the copy's rate", fontsize=9)
        axis.set_ylim(bottom=0)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper right", ncols=len(labels), fontsize=8, frameon=False)
    return _save(figure, several, path)


def _place(op: str, entry: dict[str, Any], named: bool) -> str:
    """What a case is called beside others, without the dtype, which its panel has."""
    case = entry["case"].removesuffix(f" {entry['dtype']}")
    where = f"{entry['x']:g} MB" if entry["group"] in MEGABYTES else case
    return f"{op} {where}" if named else where


def _rate(entry: dict[str, Any], name: str) -> float | None:
    """Of a peer that was timed; a copy has none in operations."""
    peer = entry["peers"].get(name, {"status": "absent"})
    shown = peer["status"] == "ok" and not (name == "copy" and "flops" in entry)
    return report.rate(entry, peer) if shown else None


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def _save(figure: Any, several: Sequence[dict[str, Any]], path: pathlib.Path) -> pathlib.Path:
    """With a title, and below by what each was measured."""
    title = ", ".join([*(results["op"] for results in several), several[0]["gpu"]])
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    line = 0.13 / figure.get_figheight()
    for i, results in enumerate(reversed(several)):
        made = f"{results['date'][:10]}, commit {results['commit']}, driver {results['driver']}"
        source = f"{made}, torch {results['versions'].get('torch', '?')}   {results['command']}"
        figure.text(0.01, 0.005 + i * line, source, fontsize=6.5, color="#666666")
    figure.tight_layout(rect=(0, 0.01 + len(several) * line, 1, 1))
    figure.savefig(path, dpi=110)
    _pyplot().close(figure)
    return path


def _plain(axis: Any) -> None:
    axis.grid(axis="y", color="#E5E5E5", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=8)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def group_with_axis(entries: Sequence[dict[str, Any]]) -> str:
    places = _places(entries)
    if not places:
        raise ValueError("no device timings to draw")
    return next((group for group, xs in places.items() if len(xs) > 1), next(iter(places)))


def lies_on_an_axis(results: dict[str, Any]) -> bool:
    """Whether lines can be drawn: in each dtype some group has three places or more. Operations have no share of a copy's rate."""
    entries = results.get("device", [])
    each = [_places([e for e in entries if e["dtype"] == dtype]) for dtype in {e["dtype"] for e in entries}]
    return any("flops" in e for e in entries) or all(max(map(len, places.values())) > 2 for places in each)


def _places(entries: Sequence[dict[str, Any]]) -> dict[str, set[float]]:
    places: dict[str, set[float]] = {}
    for entry in entries:
        places.setdefault(entry["group"], set()).add(entry["x"])
    return places


def _panel(axis: Any, entries: Sequence[dict[str, Any]], top: float) -> None:
    names = list(dict.fromkeys(name for e in entries for name in e["peers"]))
    others = iter(OTHERS * len(names))
    labels: list[tuple[float, str, str]] = []
    # tkjit last, so that it lies on top.
    for name in sorted(names, key=lambda n: n == "tkjit"):
        points = sorted((e["x"], y) for e in entries if (y := _rate(e, name)) is not None)
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
    _plain(axis)
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
    parser.add_argument("--into", type=pathlib.Path, help="one PNG of all the files, such as the pointwise ops'")
    options = parser.parse_args(argv)
    several = {path: report.read(path) for path in options.results}
    if options.into:
        print(draw_cases(list(several.values()), options.into))
        return 0
    for path, results in several.items():
        target = (options.out or path.parent) / path.with_suffix(".png").name
        target.parent.mkdir(parents=True, exist_ok=True)
        lines = options.group or lies_on_an_axis(results)
        print(draw(results, target, options.group) if lines else draw_cases([results], target))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
