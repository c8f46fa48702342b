"""How exact is a layer: ours beside torch's two and the textbook, against extended precision?

In each cell (accuracy_cells.py) the four forms (accuracy_forms.py) do one step of training on the
same batch, in simulated ranks on the CPU. The error of a result is the largest difference of any
element of a channel from what is right for the batch as rounded to its type, in ulps: the distance
of neighbouring numbers of the result's type (y and dx: that of the input; the buffers: float32, or
float64 for float64 input) at the largest right magnitude of that channel, of a mean at least that
of std / sqrt(N). A cell has the worst of its channels. ``relative`` in the rows is the same divided
by that magnitude instead.

Up to a mean of 1e5 stds (of a constant channel: 1e4) our error in y, dx, running mean and running
variance is at most 1.34 times the best of the others, or 4 ulps. Beyond, and for float64 input, it
may also be what the sums over R ranks lose: (R + 8) 2^-73 mean^2 of the variance, which the low
parts of the message round off, and (R + 8) 2^-53 std of the mean, which local sums do.
Where a channel has NaN or Inf, the same channels are affected as in torch's BatchNorm.

A cell beyond its bound makes the command fail.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.accuracy_cells import NOT_FINITE, Cell, every, quick
from benchmarks.accuracy_forms import EPS, FORMS, OURS, PLAIN, Results
from benchmarks.accuracy_reference import (
    BOUNDED,
    RESULTS,
    WIDE,
    Right,
    error,
    right,
    scale_of,
    ulp,
)
from benchmarks.harness import progress
from benchmarks.options import Options
from benchmarks.report import as_table

#: Our error is at most so many times the best other, or so many ulps.
TIMES_BEST, ULPS = 1.34, 4.0

#: Roundings from local sums to the statistics, beside those of the sum over ranks.
ROUNDINGS = 8


def measure(options: Options) -> list[dict]:
    """Compares the forms in each cell; returns a row for each."""
    cells = quick() if options.quick else every()
    wanted = [cell for cell in cells if options.match in f"{cell.axis}: {cell}"]
    with np.errstate(all="ignore"):  # an overflow is a result like any other
        return [row_of(cell) for cell in progress(wanted, "cell")]


def row_of(cell: Cell) -> dict:
    """One cell: the errors of each form, our bounds, and the results of ours beyond theirs."""
    batch = cell.draw()
    got = {name: form(batch, cell) for name, form in FORMS.items()}
    row = {
        "question": "accuracy",
        "axis": cell.axis,
        "cell": str(cell),
        "dtype": cell.dtype,
        "values": cell.values,
        "ranks": cell.ranks,
        "mean": cell.mean,
    }
    if cell.kind in NOT_FINITE:
        return row | _affected(got)
    expected = right(*batch, EPS)
    ulps, relative = _errors(cell, got, expected)
    bounds = _bounds(cell, ulps, expected)
    return row | {
        "bounded_by": "the others" if cell.demanded else "the others or the message",
        "ulps": _stored(ulps),
        "relative": _stored(relative),
        "bounds": _stored(bounds),
        "beyond": [result for result in BOUNDED if not ulps[OURS][result] <= bounds[result]],
    }


def _stored(values: Any) -> Any:
    """Numbers at any depth, to the digits that count."""
    if isinstance(values, dict):
        return {name: _stored(inner) for name, inner in values.items()}
    return float(f"{values:.4g}")


def _unit(cell: Cell, result: str, expected: Right) -> np.ndarray:
    dtype = cell.type if result in ("y", "dx") else cell.parameters
    return ulp(scale_of(result, expected, EPS), dtype)


def _errors(cell: Cell, got: dict[str, Results], expected: Right) -> tuple[dict, dict]:
    ulps: dict[str, dict[str, float]] = {}
    relative: dict[str, dict[str, float]] = {}
    for name, results in got.items():
        for result in RESULTS:
            true = getattr(expected, result)
            units = (_unit(cell, result, expected), scale_of(result, expected, EPS))
            for errors, unit in zip((ulps, relative), units, strict=True):
                errors.setdefault(name, {})[result] = error(results[result], true, unit)
    return ulps, relative


def _bounds(cell: Cell, ulps: dict[str, dict[str, float]], expected: Right) -> dict[str, float]:
    """How many ulps each of our results may be off."""
    bounds = {}
    for result in BOUNDED:
        best = min(errors[result] for name, errors in ulps.items() if name != OURS)
        bounds[result] = max(ULPS, TIMES_BEST * best)
    if cell.demanded:
        return bounds
    allowed = allowance(expected, cell)
    for result in BOUNDED:
        in_ulps = allowed[result] / _unit(cell, result, expected)
        bounds[result] = max(bounds[result], ULPS + float(in_ulps.max()))
    return bounds


def allowance(expected: Right, cell: Cell) -> Results:
    """What the statistics lose by the sums, and what results from it; (C, 1) each."""
    roundings = cell.ranks + ROUNDINGS
    lost_var = roundings * WIDE(2.0**-73) * expected.running_mean**2
    lost_mean = roundings * WIDE(2.0**-53) * np.sqrt(expected.var)
    var = expected.var + WIDE(EPS)
    least = np.maximum(expected.var - lost_var, 0) + WIDE(EPS)
    # Of 1 / sqrt(var + eps), relative: at most 1 too small.
    off = np.maximum(np.sqrt(var / least) - 1, 1 - np.sqrt(var / (var + lost_var)))

    def largest(values: np.ndarray) -> np.ndarray:
        return np.abs(values).max(1, keepdims=True)

    pull = largest(expected.pull)
    shift = lost_mean * expected.scale
    return {
        "y": off * largest(expected.y) + shift * (1 + off),
        # Its pull has the cube of 1 / sqrt(var + eps), and the mean twice: in a sum and beside it.
        "dx": ((1 + off) ** 3 - 1) * (largest(expected.dx) + pull)
        + 2 * lost_mean / np.sqrt(var) * (1 + off) ** 3 * pull,
        "running_mean": lost_mean,
        "running_var": lost_var * cell.values / max(cell.values - 1, 1),
    }


def _affected(got: dict[str, Results]) -> dict:
    """Which channels are not finite, in ours and in torch's layer, and where these differ."""
    channels = {
        name: {
            result: np.flatnonzero(~np.isfinite(got[name][result]).all(1)).tolist()
            for result in BOUNDED
        }
        for name in (OURS, PLAIN)
    }
    differ = [result for result in BOUNDED if channels[OURS][result] != channels[PLAIN][result]]
    return {"bounded_by": "the same channels", "not_finite": channels, "beyond": differ}


def failures(rows: list[dict]) -> list[str]:
    """Names the cells beyond their bound."""
    return [f"{row['axis']}: {row['cell']}: {', '.join(row['beyond'])}"
            for row in rows if row["beyond"]]  # fmt: skip


def bars(rows: list[dict]) -> list[tuple[str, str, str]]:
    """Returns the demand on all cells, and how many meet it."""
    by: dict[str, list[dict]] = {}
    for row in rows:
        by.setdefault(row["bounded_by"], []).append(row)
    return [
        (f"cells within their bound: {bound}", "all",
         f"{sum(not row['beyond'] for row in some)} of {len(some)}")
        for bound, some in by.items()
    ]  # fmt: skip


def table(rows: list[dict]) -> str:
    """Formats the rows of a run: a summary, then a line for each cell."""
    numbers = [row for row in rows if "ulps" in row]
    affected = [row for row in rows if "not_finite" in row]
    parts = [f"Errors in ulps, of {', '.join(FORMS)}."] if numbers else []
    if numbers:
        parts += ["### Largest errors", summary(numbers), "### Cells", _cells(numbers)]
    if affected:
        parts += ["### Channels that are not finite", _channels(affected)]
    return "\n\n".join(parts)


def summary(rows: list[dict]) -> str:
    """The worst of the cells that are bounded by the others, a line for each axis."""
    axes: dict[str, list[dict]] = {}
    for row in rows:
        if row["bounded_by"] == "the others":
            axes.setdefault(row["axis"], []).append(row)
    lines = [
        [axis, str(len(some)), *(
            " / ".join(_short(max(row["ulps"][name][result] for row in some)) for result in BOUNDED)
            for name in FORMS
        )]
        for axis, some in axes.items()
    ]  # fmt: skip
    what = " / ".join(result.replace("_", " ") for result in BOUNDED)
    return f"Of {what}:\n\n" + as_table(["", "cells", *FORMS], lines)


def _cells(rows: list[dict]) -> str:
    lines = []
    for row in rows:
        cells = [
            ", ".join(_short(row["ulps"][name][result]) for name in FORMS) for result in BOUNDED
        ]
        bounds = " / ".join(_short(row["bounds"][result]) for result in BOUNDED)
        beyond = ", ".join(row["beyond"])
        lines.append([row["axis"], row["cell"], *cells, bounds, beyond])
    return as_table(["axis", "cell", *BOUNDED, "our bounds", "beyond"], lines, texts=2)


def _channels(rows: list[dict]) -> str:
    def told(channels: dict[str, list[int]]) -> str:
        return " / ".join(", ".join(map(str, each)) or "none" for each in channels.values())

    lines = [
        [row["cell"], *(told(row["not_finite"][name]) for name in (OURS, PLAIN)),
         ", ".join(row["beyond"])]
        for row in rows
    ]  # fmt: skip
    what = " / ".join(BOUNDED)
    return as_table(["cell", f"{OURS}: {what}", PLAIN, "beyond"], lines, texts=3)


def _short(value: float) -> str:
    return f"{value:.2g}" if value < 10 else f"{value:.0f}" if value < 1e4 else f"{value:.0e}"


def plots(rows: list[dict], folder: Path) -> list[Path]:
    """Draws the errors against mean / std, where these cells were measured."""
    from benchmarks.accuracy_plot import AXIS, error_against_mean

    drawn = [row for row in rows if row["axis"] == AXIS]
    return [error_against_mean(drawn, folder)] if drawn else []
