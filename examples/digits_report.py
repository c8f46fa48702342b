"""What the runs of ``digits_segmentation.py`` left behind: tables, numbers and a figure."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # a file, no window: it also runs where there is no display

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.patches import Patch
from matplotlib.ticker import NullFormatter
from torch import Tensor

#: Colours of the three arms, and of the classes: paper and the digits 0 to 9.
ARM_COLORS = {"a": "#d95f02", "b": "#1b4fd1", "c": "#8fb8e8"}
CLASS_COLORS = ["#ffffff", *matplotlib.color_sequences["tab10"]]

#: Of the figure: how many test pages it shows, and over how many steps a loss is averaged.
PAGES_SHOWN = 4
SMOOTH = 15


@dataclass
class Run:
    """What one training left behind; complete on rank 0."""

    losses: list[float] = field(default_factory=list)  # one a step
    scores: list[tuple[int, float]] = field(default_factory=list)  # (step, mean IoU)
    step_ms: list[float] = field(default_factory=list)  # one a step
    first: dict[str, Tensor] = field(default_factory=dict)  # copies after the first step
    last: dict[str, Tensor] = field(default_factory=dict)  # copies after the last step

    @property
    def score(self) -> float:
        return self.scores[-1][1]

    @property
    def final_loss(self) -> float:
        return statistics.fmean(self.losses[-10:])

    @property
    def median_ms(self) -> float:
        return statistics.median(self.step_ms)


Runs = dict[str, list[Run]]  # by arm, one a seed


def difference(run: dict[str, Tensor], reference: dict[str, Tensor], name: str) -> float:
    """The largest difference, relative to the largest value of the reference."""
    return ((run[name] - reference[name]).abs().max() / reference[name].abs().max()).item()


def differences(runs: Runs, arm: str) -> dict[str, dict[str, float]]:
    """How far an arm is from (c), for the seed where it is farthest."""
    pairs = list(zip(runs[arm], runs["c"], strict=True))
    return {
        "first step": {
            name: max(difference(run.first, one.first, name) for run, one in pairs)
            for name in ("logits", "gradients", "parameters", "buffers")
        },
        "last step": {
            "parameters": max(difference(run.last, one.last, "parameters") for run, one in pairs),
            "pixels": max(unlike(run.last["labels"], one.last["labels"]) for run, one in pairs),
        },
    }


def unlike(labels: Tensor, others: Tensor) -> float:
    """The share of pixels that two nets label differently."""
    return (labels != others).double().mean().item()


def print_tables(runs: Runs, names: dict[str, str], title: str) -> None:
    """Prints what each arm reached, and how far (a) and (b) are from (c)."""
    seeds = len(runs["c"])
    width = max(map(len, names.values()))
    print(f"\n{title}; mean and standard deviation over {seeds} seed{'s' * (seeds > 1)}")
    print(f"{'':{width}}  {'mean IoU':>14}  {'final loss':>14}  {'ms a step':>9}")
    for arm, name in names.items():
        score = spread([run.score for run in runs[arm]])
        loss = spread([run.final_loss for run in runs[arm]])
        speed = statistics.median(run.median_ms for run in runs[arm])
        print(f"{name:{width}}  {score:>14}  {loss:>14}  {speed:9.1f}")

    print("\nLargest difference from (c), relative to the largest value of (c); worst seed")
    print(f"{'':{width}}  {'---------- after the first step ----------':^44}  after the last step")
    kinds = ("logits", "gradients", "parameters", "buffers", "parameters", "pixels")
    print(f"{'':{width}}" + "".join(f"  {kind:>10}" for kind in kinds))
    for arm in "ab":
        far = differences(runs, arm)
        cells = [f"{value:10.1e}" for value in far["first step"].values()]
        cells += [f"{far['last step']['parameters']:10.1e}", f"{far['last step']['pixels']:10.1%}"]
        print(f"{names[arm]:{width}}  " + "  ".join(cells))
    print(
        "pixels: of the test pages, those labelled unlike (c)'s. float32 rounds at 6e-8.\n"
        "AdamW divides a gradient by its size, so of one near 0 a parameter shows the rounding;\n"
        "every step amplifies that, so other orders of summation end at other weights."
    )


def spread(values: list[float]) -> str:
    """Formats the mean and, of two or more values, the standard deviation."""
    mean = f"{statistics.fmean(values):.3f}"
    return f"{mean} ± {statistics.stdev(values):.3f}" if len(values) > 1 else mean


def write_numbers(path: Path, runs: Runs, names: dict[str, str], **settings: Any) -> None:
    """Writes the numbers behind tables and figure as JSON."""
    settings["out"] = str(settings["out"])
    document = {
        "settings": settings,
        "arms": {
            arm: {
                "name": name,
                "mean_iou": [run.score for run in runs[arm]],
                "final_loss": [run.final_loss for run in runs[arm]],
                "median_step_ms": [run.median_ms for run in runs[arm]],
                "losses": [run.losses for run in runs[arm]],
                "scores": [run.scores for run in runs[arm]],
            }
            for arm, name in names.items()
        },
        "difference_from_c": {arm: differences(runs, arm) for arm in "ab"},
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


def draw_figure(
    path: Path, runs: Runs, names: dict[str, str], images: Tensor, classes: Tensor
) -> None:
    """Draws loss and mean IoU over the steps, and what the nets of the first seed see."""
    figure = plt.figure(figsize=(14, 7.2), layout="constrained")
    curves, maps = figure.subfigures(1, 2, width_ratios=(1, 1.55))
    _draw_curves(curves, runs, names)
    _draw_maps(maps, runs, images, classes)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_curves(figure: Any, runs: Runs, names: dict[str, str]) -> None:
    loss_axes, score_axes = figure.subplots(2, 1, sharex=True)
    seeds = len(runs["c"])
    title = f"Mean over {seeds} seeds" if seeds > 1 else "One seed"
    # (c) is drawn first and wide, so that (b) can be seen to lie on it.
    styles = {"c": {"lw": 5.0}, "a": {"lw": 1.6}, "b": {"lw": 1.6}}
    for arm, style in styles.items():
        losses = np.mean([run.losses for run in runs[arm]], axis=0)
        smooth = max(1, min(SMOOTH, len(losses) // 3))
        losses = np.convolve(losses, np.ones(smooth) / smooth, mode="valid")
        steps = np.arange(smooth, smooth + len(losses))
        loss_axes.plot(steps, losses, color=ARM_COLORS[arm], label=names[arm], **style)

        steps = [step for step, _ in runs[arm][0].scores]
        scores = np.array([[score for _, score in run.scores] for run in runs[arm]])
        score_axes.plot(steps, scores.mean(axis=0), color=ARM_COLORS[arm], **style)
        if len(scores) > 1:
            for each in scores:
                score_axes.plot(steps, each, color=ARM_COLORS[arm], lw=0.7, alpha=0.6)
    loss_axes.set(ylabel="training loss", yscale="log", title=title)
    score_axes.set(ylabel="mean IoU, held-out digits", xlabel="step", ylim=(0, 1))
    loss_axes.set_yticks([0.1, 0.2, 0.5, 1, 2], ["0.1", "0.2", "0.5", "1", "2"])
    loss_axes.yaxis.set_minor_formatter(NullFormatter())
    handles, labels = loss_axes.get_legend_handles_labels()
    loss_axes.legend(handles[1:] + handles[:1], labels[1:] + labels[:1], fontsize=9)
    for axes in (loss_axes, score_axes):
        axes.grid(alpha=0.3)


def _draw_maps(figure: Any, runs: Runs, images: Tensor, classes: Tensor) -> None:
    columns = {"page": None, "truth": classes}
    for arm in "abc":
        columns[f"({arm})  IoU {runs[arm][0].score:.2f}"] = runs[arm][0].last["labels"]
    norm = BoundaryNorm(np.arange(-0.5, len(CLASS_COLORS)), len(CLASS_COLORS))
    grid = figure.subplots(PAGES_SHOWN, len(columns))
    for row, page in zip(grid, range(PAGES_SHOWN), strict=True):
        for axes, (title, labels) in zip(row, columns.items(), strict=True):
            if labels is None:
                axes.imshow(images[page, 0], cmap="gray_r")
            else:
                axes.imshow(labels[page], cmap=ListedColormap(CLASS_COLORS), norm=norm)
            axes.set(xticks=[], yticks=[])
            if page == 0:
                axes.set_title(title)
    patches = [
        Patch(facecolor=color, edgecolor="#888888", label=label)
        for color, label in zip(CLASS_COLORS, ["paper", *map(str, range(10))], strict=True)
    ]
    figure.legend(
        handles=patches,
        loc="outside lower center",
        ncols=len(patches),
        fontsize=9,
        handlelength=1.2,
        columnspacing=1.0,
    )
    figure.suptitle("Held-out digits, as labelled by the nets of seed 0", fontsize=12)
