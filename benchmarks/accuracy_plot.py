"""The plot of the accuracy study: errors of the four forms against mean / std."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display is needed, and there may be none

from matplotlib import pyplot as plt

from benchmarks.accuracy import ULPS
from benchmarks.accuracy_forms import OURS, PLAIN, SYNC, TEXTBOOK
from benchmarks.accuracy_reference import BOUNDED

AXIS = "mean / std"

#: Colours that colour-blind readers tell apart (Okabe & Ito), and markers where lines coincide.
STYLES = {
    TEXTBOOK: ("#E69F00", "v"),
    SYNC: ("#CC79A7", "s"),
    PLAIN: ("#D55E00", "^"),
    OURS: ("#0072B2", "o"),
}


def error_against_mean(rows: list[dict], folder: Path) -> Path:
    """Draws a panel for each result."""
    rows = sorted(rows, key=lambda row: row["mean"])
    means = [row["mean"] for row in rows]
    figure, axes = plt.subplots(1, len(BOUNDED), figsize=(4 * len(BOUNDED), 4), sharey=True)
    for ax, result in zip(axes, BOUNDED, strict=True):
        for name, (colour, marker) in STYLES.items():
            errors = [row["ulps"][name][result] for row in rows]
            ax.plot(means, errors, color=colour, marker=marker, ms=4, lw=1.2, label=name)
        ax.axhline(ULPS, color="black", lw=0.8, ls=":", label=f"{ULPS:g} ulps")
        ax.set_xscale("symlog", linthresh=1)  # 0 is one of them
        ax.set(xlim=(-0.5, 2 * means[-1]), xticks=[0, 1, 1e2, 1e4, 1e6], xlabel=AXIS)
        ax.set(yscale="log", title=result.replace("_", " "))
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("error, ulps")
    axes[-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    path = folder / "error-against-mean.png"
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)
    return path
