"""The tables of the question `layers`: means of groups first, then layers, then what they cost."""

from __future__ import annotations

from collections import Counter

from benchmarks.candidates import BOTH, FLOOR
from benchmarks.harness import Spread, geometric_mean
from benchmarks.report import as_table


def headline(rows: list[dict]) -> list[dict]:
    """The times that count first: on CUDA those of graphs, from memory."""
    kept = ("wall", "graph")
    timed = [row for row in rows if row["measured"] == "time"]
    return [r for r in timed if r["clock"] in kept and r.get("cache") != "warm"]


def table(rows: list[dict]) -> str:
    """Formats the rows of a run."""
    first = headline(rows)
    parts = [
        "Ratios are taken turn by turn: the time of the first over that of the second, so above 1 "
        f"the second is faster. `{FLOOR}` copies the bytes that a direction moves at least; its "
        "ratio is the fraction of the copy's bandwidth that a layer reaches.",
    ]
    if first:
        parts += ["### Geometric means", _means(first)]
    timed = [row for row in rows if row["measured"] == "time"]
    for setting in dict.fromkeys((row["clock"], row.get("cache", "")) for row in timed):
        some = [row for row in timed if (row["clock"], row.get("cache", "")) == setting]
        parts += [f"### Layers: {' '.join(filter(None, setting))}", _layers(some)]
    costs = [row for row in rows if row["measured"] == "cost"]
    if costs:
        parts += ["### Errors against float64", _errors(costs)]
    if any(row.get("counts") for row in costs):
        parts += ["### Launches and waits", _counts(costs)]
    if any("peak_bytes" in row for row in costs):
        parts += ["### Peak memory", _peaks(costs)]
    absent = {f"{name}: {why}" for row in costs for name, why in row["absent"].items()}
    parts += [f"Not measured: {'; '.join(sorted(absent))}."] if absent else []
    return "\n\n".join(parts)


def _means(rows: list[dict]) -> str:
    """A line for all of a direction, and one for each net, layout and type."""
    pairs = list(dict.fromkeys(pair for row in rows for pair in row["ratios"]))
    groups: dict[tuple[str, ...], list[dict]] = {}
    for row in rows:
        every, dtype, direction = ("all", "all"), row["dtype"], row["direction"]
        names = [(*every, "all", direction), (*every, dtype, direction)]
        if direction == BOTH:
            names.append((row["net"], row["layout"], dtype, direction))
        for name in names:
            groups.setdefault(name, []).append(row)
    lines = []
    for name in sorted(groups, key=lambda name: -name.count("all")):
        members = groups[name]
        ratios = [[r["ratios"][pair] for r in members if pair in r["ratios"]] for pair in pairs]
        means = [str(geometric_mean(each)) if each else "" for each in ratios]
        lines.append([*name, str(len(members)), *means])
    return as_table(["net", "layout", "dtype", "direction", "layers", *pairs], lines, texts=4)


def _layers(rows: list[dict]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row["times_us"]))
    every = dict.fromkeys(pair for row in rows for pair in row["ratios"])
    pairs = [pair for pair in every if FLOOR not in pair or "ours" in pair]
    lines = []
    for row in rows:
        cells = [_cell(row["times_us"], name) for name in names]
        cells += [_cell(row["ratios"], pair) for pair in pairs]
        floor = row["times_us"][FLOOR]["p50"]
        rate = row["passes"] * row["pass_bytes"] / floor / 1e3
        lines.append([row["layer"], row["dtype"], row["direction"], *cells, f"{rate:.1f}"])
    header = ["layer", "dtype", "direction", *(f"{name}, us" for name in names), *pairs]
    return as_table([*header, f"{FLOOR}, GB/s"], lines, texts=3)


def _cell(spreads: dict[str, dict], name: str) -> str:
    return str(Spread(**spreads[name])) if name in spreads else ""


def _errors(costs: list[dict]) -> str:
    """The worst of all layers, for each type and candidate."""
    worst: dict[tuple[str, str], dict[str, float]] = {}
    for row in costs:
        for name, errors in row["errors"].items():
            so_far = worst.setdefault((row["dtype"], name), {"y": 0.0, "dx": 0.0})
            for what, error in errors.items():
                so_far[what] = max(so_far[what], error)
    lines = [[*key, *(f"{e[what]:.1e}" for what in ("y", "dx"))] for key, e in worst.items()]
    return as_table(["dtype", "", "largest error of y", "of dx"], lines, texts=2)


def _counts(costs: list[dict]) -> str:
    """Each count that was seen, and in how many layers."""
    seen = Counter(
        (name, direction, *counts.items())
        for row in costs
        for name, directions in row.get("counts", {}).items()
        for direction, counts in directions.items()
    )
    lines = [
        [name, direction, *(str(number) for _, number in counts), str(layers)]
        for (name, direction, *counts), layers in sorted(seen.items())
    ]
    what = [word.replace("_", " ") for word, _ in next(iter(seen))[2:]]
    return as_table(["", "direction", *what, "layers"], lines, texts=2)


def _peaks(costs: list[dict]) -> str:
    """Forward and backward beyond the input and the gradient given, in sizes of the input."""
    peaks: dict[str, list[float]] = {}
    for row in costs:
        for name, peak in row.get("peak_bytes", {}).items():
            peaks.setdefault(name, []).append(peak / row["pass_bytes"])
    lines = [[name, f"{min(each):.2f}", f"{max(each):.2f}"] for name, each in peaks.items()]
    return as_table(["", "least, inputs", "most, inputs"], lines)
