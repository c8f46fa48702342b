"""Plots of the question `scaling`: what was measured with its fit, and what is predicted."""

from __future__ import annotations

from pathlib import Path

from benchmarks import share
from benchmarks.message import GATHER, SUM
from benchmarks.plots import plt, saved

COLOURS = {SUM: "#0072B2", GATHER: "#D55E00"}
OF_FORM = {share.SUM_TREE: "#0072B2", share.SUM_RING: "#56B4E9", share.TORCH: "#D55E00"}


def measured_and_fitted(rows: list[dict], fitted: list[dict], folder: Path) -> Path:
    """Draws times over ranks, a panel for each number of channels; lines are the fit."""
    channels = list(dict.fromkeys(row["channels"] for row in rows))
    figure, axes = plt.subplots(
        1, len(channels), figsize=(4 * len(channels), 4), squeeze=False, sharey=True
    )
    for ax, c in zip(axes[0], channels, strict=True):
        some = [row for row in rows if row["channels"] == c]
        ranks = [row["ranks"] for row in some]
        for form, colour in COLOURS.items():
            times = [row["times_us"][form] for row in some]
            middle = [each["p50"] for each in times]
            around = [
                [each["p50"] - each["p20"] for each in times],
                [each["p80"] - each["p50"] for each in times],
            ]
            ax.errorbar(ranks, middle, yerr=around, fmt="o", color=colour, label=form)
            for fit in (each for each in fitted if each["form"] == form):
                those = [row for row in some if row["regime"] == fit["regime"]]
                line = [
                    fit["alpha_us"] * row["traffic"][form]["steps"]
                    + fit["beta_us"] * row["traffic"][form]["sent"]
                    for row in those
                ]
                marker = "_" if len(those) == 1 else ""
                ax.plot([row["ranks"] for row in those], line, marker=marker, color=colour)
        ax.set(xscale="log", yscale="log", title=f"C = {c}", xlabel="ranks, over Gloo")
        ax.set_xticks(ranks, [str(each) for each in ranks])
        ax.minorticks_off()
        ax.grid(alpha=0.3)
    axes[0][0].set_ylabel("us; lines are fitted")
    axes[0][0].legend(fontsize=8)
    return saved(figure, folder / "measured-and-fitted.png")


def predicted_shares(rows: list[dict], folder: Path) -> Path:
    """Draws the shares of a step over GPUs, from low to high, a panel for each net."""
    nets = list(dict.fromkeys(row["net"] for row in rows))
    figure, axes = plt.subplots(
        1, len(nets), figsize=(6 * len(nets), 4.5), squeeze=False, sharey=True
    )
    for ax, net in zip(axes[0], nets, strict=True):
        some = [row for row in rows if row["net"] == net]
        of, step = next(iter(some[0]["steps_ms"].items()))
        ends = [cluster.name for cluster in share.CLUSTERS]
        flat, node = ([r for r in some if r["groups"] == g] for g in (share.FLAT, share.NODE))
        gpus = [row["gpus"] for row in flat]
        for form, colour in OF_FORM.items():
            low, high = ([_percent(row, form, end, step) for row in flat] for end in ends)
            ax.fill_between(gpus, low, high, color=colour, alpha=0.15, lw=0)
            ax.plot(gpus, low, color=colour, label=f"{form}: all ranks together")
        for end in ends:
            line = [_percent(row, share.SUM_TREE, end, step) for row in node]
            label = "sum: groups of a node" if end == ends[0] else None
            ax.plot(gpus, line, "--", color="black", lw=1, label=label)
        ax.set(xscale="log", yscale="log", xlabel="GPUs, nodes of 8")
        ax.set_title(f"{net}: {step:.0f} ms ({of})")
        ax.set_xticks(gpus, [f"{each:,}" for each in gpus], rotation=30)
        ax.minorticks_off()
        ax.grid(alpha=0.3)
    axes[0][0].set_ylabel("predicted share of the step, %")
    axes[0][0].legend(fontsize=8)
    return saved(figure, folder / "predicted-shares.png")


def _percent(row: dict, form: str, end: str, step: float) -> float:
    return 100 * share.share(row["added_ms"][form][end], step)
