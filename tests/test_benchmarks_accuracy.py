"""The accuracy study: no cell is beyond its bound, and a loss of digits would be told."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from benchmarked import CPU
from toolkits import ROOT
from torch import Tensor

from benchmarks import __main__ as entry
from benchmarks import accuracy, accuracy_docs, accuracy_forms
from benchmarks.accuracy_cells import POISONED, Cell, every, quick
from benchmarks.accuracy_forms import EPS, FORMS, OURS, PLAIN, SYNC, TEXTBOOK
from benchmarks.accuracy_reference import BOUNDED, RESULTS, Right, error, right, scale_of, ulp
from benchmarks.options import Options
from benchmarks.report import rows_of
from syncbn_cuda._library import STEPS, kernels_for


def test_no_cell_of_the_quick_study_is_beyond_its_bound() -> None:
    rows = accuracy.measure(Options(CPU, quick=True))
    assert len(rows) == len(quick()) > 100
    assert accuracy.failures(rows) == []


def plant(monkeypatch: pytest.MonkeyPatch, step: str, spoil: Callable[[Tensor], Tensor]) -> None:
    """Makes one step of the package's kernels give a spoilt message."""
    kernels = kernels_for(CPU)

    def spoilt(*arguments: Any) -> Any:
        given = getattr(kernels, step)(*arguments)
        return spoil(given) if isinstance(given, Tensor) else (spoil(given[0]), *given[1:])

    planted = SimpleNamespace(**{name: getattr(kernels, name) for name in STEPS} | {step: spoilt})
    monkeypatch.setattr(accuracy_forms, "kernels_for", lambda device: planted)


def in_float32(message: Tensor) -> Tensor:
    return message.float().double()


def in_bfloat16(message: Tensor) -> Tensor:
    return message.bfloat16().double()


def mixed(message: Tensor) -> Tensor:
    return message + 0 * message.sum()


@pytest.mark.parametrize(
    ("step", "spoil", "cell", "beyond"),
    [
        ("batch_norm_stats", in_float32, Cell("", mean=1e3), {"y", "dx", "running_var"}),
        ("batch_norm_stats", in_float32, Cell("", mean=1e3, dtype="float64"), {*BOUNDED}),
        (
            *("batch_norm_stats", in_float32, Cell("", kind="constant", mean=1e4)),
            {"y", "dx", "running_var"},
        ),
        ("batch_norm_backward_reduce", in_bfloat16, Cell("", gradient="slope"), {"dx"}),
        ("batch_norm_stats", mixed, Cell("", kind="NaN"), {*BOUNDED}),
        ("batch_norm_backward_reduce", mixed, Cell("", kind="Inf"), {"dx"}),
    ],
)
def test_a_planted_loss_is_found(monkeypatch, step, spoil, cell, beyond) -> None:
    plant(monkeypatch, step, spoil)
    with np.errstate(all="ignore"):
        row = accuracy.row_of(cell)
    assert set(row["beyond"]) >= beyond


def exact(values: Tensor) -> list[Fraction]:
    return [Fraction(value) for value in values.double().tolist()]


@pytest.mark.parametrize(
    "cell",
    [
        Cell("", values=63),
        Cell("", values=63, mean=1e6, dtype="float64", gradient="slope"),
        Cell("", values=63, kind="outlier", mean=1e8),
        Cell("", values=63, kind="constant", mean=1e10, dtype="float64"),
        Cell("", values=2, mean=1e6),
        Cell("", values=63, kind="denormal", dtype="float64"),
    ],
    ids=str,
)
def test_what_is_right_is_so_in_exact_fractions(cell) -> None:
    batch = cell.draw()
    given = right(*batch, EPS)
    for channel, (x, dy) in enumerate(zip(*map(lambda t: map(exact, t), batch[:2]), strict=True)):
        weight, bias = (exact(vector[channel : channel + 1])[0] for vector in batch[2:])
        mean, mean_dy = sum(x) / len(x), sum(dy) / len(x)
        var = sum((v - mean) ** 2 for v in x) / len(x)
        with localcontext() as context:
            context.prec = 60
            total = var + Fraction(EPS)
            root = (Decimal(total.numerator) / Decimal(total.denominator)).sqrt()
        scale = weight / Fraction(root)
        sum_dy_xmu = sum(g * (v - mean) for g, v in zip(dy, x, strict=True))
        slope = sum_dy_xmu / len(x) / total
        expected = {
            "y": [(v - mean) * scale + bias for v in x],
            "dx": [(g - mean_dy - (v - mean) * slope) * scale for g, v in zip(dy, x, strict=True)],
            "running_mean": [mean],
            "running_var": [var * len(x) / (len(x) - 1)],
            "dweight": [sum_dy_xmu / Fraction(root)],
            "dbias": [sum(dy)],
        }
        assert expected.keys() == set(RESULTS)
        for result, values in expected.items():
            found = [Fraction(*v.as_integer_ratio()) for v in getattr(given, result)[channel]]
            off = max(abs(a - b) for a, b in zip(found, values, strict=True))
            unit = ulp(scale_of(result, given, EPS)[channel], cell.parameters)
            assert off <= Fraction(float(unit[0])) / 4, result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_an_ulp_is_the_distance_of_neighbouring_numbers(dtype) -> None:
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    info = torch.finfo(dtype)
    numbers = torch.tensor(
        [1.0, 1.5, 1.99, 2.0, 3e4, 1e-3, info.tiny, info.tiny / 4, 0.0], dtype=dtype
    )
    above = (numbers.view(bits) + 1).view(dtype)
    distance = above.double() - numbers.double()
    assert (ulp(numbers.double().numpy(), dtype) == distance.numpy()).all()


def test_errors_are_the_worst_of_any_element_in_units_of_its_channel() -> None:
    expected = np.array([[1.0, -4.0], [0.0, 0.0]], np.longdouble)
    var = np.array([[8.0], [0.0]], np.longdouble)
    means = np.array([[-1.0], [0.0]], np.longdouble)
    of = Right(expected, expected, means, var, means, means, var, var, expected)
    assert scale_of("y", of, EPS).tolist() == [[4.0], [1.0]]
    assert scale_of("running_var", of, EPS).tolist() == [[8.0], [EPS]]
    assert scale_of("running_mean", of, EPS).tolist() == [[2.0], [1.0]]  # std / sqrt(2)
    unit = np.array([[2.0], [0.25]])
    assert error(expected + [[0, 3.0], [0, 0.5]], expected, unit) == 2.0
    assert error(expected + [[0, math.nan], [0, 0]], expected, unit) == math.inf


@pytest.mark.parametrize("split", ["equal", "unequal", "half empty", "one against many", "sorted"])
@pytest.mark.parametrize(("values", "ranks"), [(4000, 8), (4000, 1), (63, 64), (2, 8)])
def test_the_ranks_of_a_cell_share_its_values(values, ranks, split) -> None:
    counts = Cell("", values=values, ranks=ranks, split=split).counts()
    assert len(counts) == ranks
    assert sum(counts) == values and min(counts) >= 0


def test_the_forms_agree_where_nothing_is_lost() -> None:
    for cell in (
        *(Cell("", split=split) for split in ("unequal", "half empty", "one against many")),
        Cell("", layout="rows", dtype="float64"),
        Cell("", values=1500, ranks=1),
        Cell("", values=3, ranks=2, std=1e2),
    ):
        row = accuracy.row_of(cell)
        for name in FORMS:
            # dx of three values is what little of it is across the input.
            assert row["relative"][name]["y"] < 1e-5, (name, cell)
            assert row["relative"][name]["dx"] < (1e-5 if cell.values > 3 else 1e-2), (name, cell)


def test_the_other_forms_lose_what_they_are_known_for() -> None:
    ulps = accuracy.row_of(Cell("", mean=1e4))["ulps"]
    assert ulps[OURS]["y"] < 4
    assert 100 < ulps[PLAIN]["y"] < 1e4  # mean * scale is rounded
    assert 1000 < ulps[SYNC]["y"] < 1e5  # and so is the mean of each rank
    assert ulps[TEXTBOOK]["running_var"] > 1e6 / 4


def test_the_study_has_every_cell_that_is_asked_for() -> None:
    cells = every()
    assert len({(cell.axis, str(cell)) for cell in cells}) == len(cells)
    assert {cell.axis for cell in quick()} == {cell.axis for cell in cells}
    for of, least, most in (
        (lambda cell: cell.mean, 0, 1e6),
        (lambda cell: cell.std, 1e-8, 1e8),
        (lambda cell: cell.values, 2, 10**7),
        (lambda cell: cell.ranks, 1, 64),
    ):
        found = [of(cell) for cell in cells if cell.kind == "normal"]
        assert (min(found), max(found)) == (least, most)
    constants = {cell.mean for cell in cells if cell.kind == "constant"}
    assert (min(constants), max(constants)) == (1, 1e10)
    for name in ("kind", "split", "gradient", "layout", "dtype"):
        values = {getattr(cell, name) for cell in cells}
        assert {getattr(cell, name) for cell in quick()} == values and len(values) > 1


@pytest.mark.parametrize("kind", ["constant", "largest", "outlier", "denormal", "NaN"])
def test_a_cell_draws_the_values_that_it_names(kind) -> None:
    x, dy, weight, bias = Cell("", kind=kind, mean=1e4, values=100).draw()
    assert (x.shape, weight.shape) == ((16, 100), (16,)) == (dy.shape, bias.shape)
    tiny = torch.finfo(torch.float32).tiny
    holds = {
        "constant": lambda: (x == x[:, :1]).all() and len(x.unique()) == 16 and bias.all(),
        "largest": lambda: x.abs().max() > 1e38 and x.isfinite().all(),
        "outlier": lambda: ((x == 1e4).sum(1) == 1).all() and x.sort(1).values[:, -2].max() < 10,
        "denormal": lambda: (x.abs() < tiny).all() and (x > 0).any(),
        "NaN": lambda: x.isnan().any(1).nonzero().tolist() == [[POISONED]],
    }
    assert holds[kind]()


def asked(monkeypatch: pytest.MonkeyPatch, match: str, folder: Path) -> None:
    arguments = ["benchmarks", "accuracy", "--device", "cpu", "--match", match]
    monkeypatch.setattr(sys, "argv", [*arguments, "--out", str(folder)])
    entry.main()


def test_the_command_writes_a_table_a_plot_and_a_summary(monkeypatch, tmp_path, capsys) -> None:
    pytest.importorskip("matplotlib")
    asked(monkeypatch, "mean / std: mean/std 1", tmp_path)
    text = (tmp_path / "bench-cpu.md").read_text()
    assert "| mean / std | mean/std 1000, std 1, N 4000, 8 ranks, float32 |" in text
    assert "Times in" not in text
    assert (tmp_path / "error-against-mean.png").stat().st_size > 10_000
    run = json.loads((tmp_path / "bench-cpu.json").read_text())
    page = f"before\n{accuracy_docs.BEGIN}\nold\n{accuracy_docs.END}\nafter\n"
    filled = accuracy_docs.filled(page, run)
    assert filled == accuracy_docs.filled(filled, run)
    assert filled.startswith("before\n") and filled.endswith("after\n") and "old" not in filled
    (line,) = [line for line in filled.splitlines() if line.startswith("| mean / std | ")]
    assert line in text


def test_the_command_fails_beyond_a_bound(monkeypatch, tmp_path) -> None:
    plant(monkeypatch, "batch_norm_stats", in_float32)
    with pytest.raises(SystemExit, match="beyond their bounds:\nconstant: constant 1000, N 3,"):
        asked(monkeypatch, "constant 1000, N 3,", tmp_path)
    assert (tmp_path / "bench-cpu.md").exists()


@pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="not beside tests/: docs")
def test_the_documentation_tells_of_the_stored_run() -> None:
    run = json.loads((ROOT / "benchmarks/results/cpu-accuracy/bench-cpu.json").read_text())
    page = (ROOT / "docs/numerics.md").read_text()
    assert accuracy_docs.filled(page, run) == page
    rows = rows_of(run, accuracy)
    assert {row["cell"] for row in rows} == {str(cell) for cell in every()}
    assert accuracy.failures(rows) == []
