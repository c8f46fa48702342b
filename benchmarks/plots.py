"""Plots of layers: time against bytes beside the floor, and the ratio of each layer."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display is needed, and there may be none

from matplotlib import pyplot as plt
from matplotlib.ticker import LogLocator, NullFormatter

from benchmarks.candidates import BOTH, FLOOR

#: Colours that colour-blind readers tell apart (Okabe & Ito).
COLOURS = {
    "ours": "#0072B2",
    "torch": "#D55E00",
    "ours synchronised": "#56B4E9",
    "torch synchronised": "#CC79A7",
    "cuDNN": "#E69F00",
    "apex": "#009E73",
    "inplace_abn": "#F0E442",
    FLOOR: "#555555",
}
DTYPE_COLOURS = {"float32": "#0072B2", "bfloat16": "#D55E00", "float16": "#009E73"}
MARKERS = {"contiguous": "o", "channels last": "s"}


def time_against_bytes(rows: list[dict], folder: Path) -> Path:
    """Draws forward and backward together, a panel for each type; a copy is the floor."""
    rows = [row for row in rows if row["direction"] == BOTH]
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    figure, axes = plt.subplots(
        1, len(dtypes), figsize=(5.5 * len(dtypes), 4.8), squeeze=False, sharey=True
    )
    for ax, dtype in zip(axes[0], dtypes, strict=True):
        some = sorted((r for r in rows if r["dtype"] == dtype), key=lambda r: r["pass_bytes"])
        for name in dict.fromkeys(name for row in some for name in row["times_us"]):
            points = [r for r in some if name in r["times_us"]]
            colour = COLOURS.get(name)
            if name == FLOOR:
                ax.plot(*_points(points, name), color=colour, label="floor: a copy", lw=1.5)
                continue
            for layout, marker in MARKERS.items():
                those = [r for r in points if r["layout"] == layout]
                label = f"{name}, {layout}"
                ax.scatter(*_points(those, name), color=colour, marker=marker, s=22, label=label)
        ax.set(xscale="log", yscale="log", title=dtype, xlabel="bytes moved at least, MB")
        ax.grid(alpha=0.3)
    axes[0][0].set_ylabel(f"{BOTH}, us")
    axes[0][-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return saved(figure, folder / "time-against-bytes.png")


def _points(rows: list[dict], name: str) -> tuple[list[float], list[float]]:
    return (
        [row["passes"] * row["pass_bytes"] / 1e6 for row in rows],
        [row["times_us"][name]["p50"] for row in rows],
    )


def ratio_by_layer(rows: list[dict], folder: Path) -> Path:
    """Draws each layer's ratios, forward and backward together, a panel for each baseline."""
    rows = [row for row in rows if row["direction"] == BOTH]
    pairs = list(dict.fromkeys(p for row in rows for p in row["ratios"] if FLOOR not in p))
    layers = list(dict.fromkeys(row["layer"] for row in rows))
    height = 1.5 + 0.22 * len(layers)
    figure, axes = plt.subplots(
        1, len(pairs), figsize=(4 + 4 * len(pairs), height), squeeze=False, sharey=True
    )
    for ax, pair in zip(axes[0], pairs, strict=True):
        for dtype in dict.fromkeys(row["dtype"] for row in rows):
            some = [r for r in rows if r["dtype"] == dtype and pair in r["ratios"]]
            spreads = [row["ratios"][pair] for row in some]
            middle = [each["p50"] for each in spreads]
            around = [
                [each["p50"] - each["p20"] for each in spreads],
                [each["p80"] - each["p50"] for each in spreads],
            ]
            places = [layers.index(row["layer"]) for row in some]
            colour = DTYPE_COLOURS.get(dtype)
            ax.errorbar(middle, places, xerr=around, fmt="o", ms=4, color=colour, label=dtype)
        ax.axvline(1, color="black", lw=1)
        ax.set(xscale="log", xlabel=f"time of {pair}")
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        ax.xaxis.set_major_formatter("{x:g}")
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.grid(alpha=0.3)
    axes[0][0].set_yticks(range(len(layers)), layers, fontsize=8)
    axes[0][0].invert_yaxis()
    axes[0][0].legend(fontsize=8)
    return saved(figure, folder / "ratio-by-layer.png")


def saved(figure: plt.Figure, path: Path) -> Path:
    """Writes a figure."""
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)
    return path
