"""The benchmarks: what they measure, and what they make of it."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarked import CPU
from optional import optional
from toolkits import ROOT
from torch import nn

import syncbn_cuda
from benchmarks import __main__ as entry
from benchmarks import compare, harness, layers, report, shapes
from benchmarks.candidates import BOTH, candidates
from benchmarks.options import Options


def run(*arguments: str) -> str:
    """Runs the benchmarks on the CPU, from the root of the repository."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two small layers."""
    folder = tmp_path_factory.mktemp("bench")
    run(
        *("layers", "--device", "cpu", "--quick", "--match", "odd", "--dtypes", "float32"),
        *("--turns", "3", "--out", str(folder)),
    )
    return folder


def test_layers_are_timed_with_the_compiled_kernels(measured: Path) -> None:
    told = json.loads((measured / "bench-cpu.json").read_text())
    assert told["compiled"] and told["machine"]["cpu"]
    assert len({row["layer"] for row in told["rows"]}) == 2
    timed = [row for row in told["rows"] if row["measured"] == "time"]
    assert [row["direction"] for row in timed] == 2 * ["forward", "backward", BOTH]
    assert [row["passes"] for row in timed] == 2 * [3, 5, 8]
    for row in timed:
        assert row["machine"]["torch"] and row["machine"]["commit"]
        assert row["times_us"].keys() == {"ours", "torch", "copy"}
        assert row["ratios"].keys() == {"torch / ours", "copy / ours", "copy / torch"}
        for spread in (*row["times_us"].values(), *row["ratios"].values()):
            assert 0 < spread["p20"] <= spread["p50"] <= spread["p80"]


def test_the_report_has_bars_means_and_layers(measured: Path) -> None:
    text = (measured / "bench-cpu.md").read_text()
    assert "| odd N=3 | channels last | float32 | forward + backward | 1 |" in text
    assert text.count("| odd 3x37x29x31 NCHW | float32 |") == 3
    (bar,) = [line for line in text.splitlines() if line.startswith("| CPU, forward + backward")]
    assert "(odd 3x37x29x31 N" in bar
    assert "| ours synchronised / cuDNN" in text
    assert "| float32 | ours |" in text


def test_a_stored_run_gives_the_same_tables_and_plots(measured: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run("--render", str(measured / "bench-cpu.json"), "--out", str(tmp_path))
    assert (tmp_path / "bench-cpu.md").read_text() == (measured / "bench-cpu.md").read_text()
    for name in ("time-against-bytes.png", "ratio-by-layer.png"):
        assert (tmp_path / name).stat().st_size > 10_000
    assert len(list(tmp_path.iterdir())) == 4


def test_plots_are_left_out_without_matplotlib(
    measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.delitem(sys.modules, "benchmarks.plots", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # importing it fails
    told = json.loads((measured / "bench-cpu.json").read_text())
    written = report.write(told, "text", [layers], tmp_path)
    assert [path.suffix for path in written] == [".json", ".md"]
    assert "matplotlib" in capsys.readouterr().out


def test_comparing_flags_what_differs_beyond_its_spread(measured: Path, tmp_path: Path) -> None:
    before = json.loads((measured / "bench-cpu.json").read_text())
    after = copy.deepcopy(before)
    same = tmp_path / "same.json"
    same.write_text(json.dumps(after))
    # 2 layers x 3 directions x (3 times and 3 ratios)
    assert "0 of 36 differ" in compare.compare(measured / "bench-cpu.json", same)
    after["machine"] |= {"gpu": "another", "commit": "another"}
    slower = after["rows"][0]["times_us"]["ours"]
    slower.update({name: 100 * value for name, value in slower.items()})
    after["rows"].pop()
    other = tmp_path / "other.json"
    other.write_text(json.dumps(after))
    text = compare.compare(measured / "bench-cpu.json", other)
    assert "1 of 36 differ" in text
    assert "1 rows are in one run only" in text
    assert "gpu differs: None before, another after" in text and "commit differs" not in text
    flagged, everything = text.split("## Beyond their spreads")[1].split("## All")
    (line,) = [line for line in flagged.splitlines() if "times_us.ours" in line]
    assert "| 0.01 [" in line and before["rows"][0]["layer"] in line
    assert everything.count(" | * |") == 1


def test_the_entry_refuses_what_it_does_not_know(capsys) -> None:
    for arguments, message in (
        (["how"], "no such question: how; there are layers, host"),
        (["--turns", "0"], "expected at least 1, got 0"),
    ):
        with pytest.raises(SystemExit):
            entry.parse_arguments(arguments)
        assert message in capsys.readouterr().err


def test_torch_is_not_timed_against_torch_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"cpu": {"loaded": False, "reason": "nobody built them"}}
    monkeypatch.setattr(syncbn_cuda, "build_info", lambda: state)
    with pytest.raises(SystemExit, match="nobody built them\n.*--allow-composite"):
        entry.require_kernels("cpu", allow_composite=False)
    assert not entry.require_kernels("cpu", allow_composite=True)


def inputs_of_batch_norms(model: nn.Module, *size: int) -> set[tuple[int, ...]]:
    seen: set[tuple[int, ...]] = set()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.register_forward_hook(lambda _, inputs, output: seen.add(inputs[0].shape))
    model(torch.empty(size, device="meta"))
    return {tuple(shape) for shape in seen}


def test_the_layers_are_those_of_resnet50() -> None:
    models = optional("torchvision.models")
    with torch.device("meta"):
        model = models.resnet50()
    stated = [shape.size for shape in shapes.resnet50(2) if not shape.channels_last]
    assert len(stated) == 12
    assert set(stated) == inputs_of_batch_norms(model, 2, 3, 224, 224)


def test_the_layers_have_every_kind() -> None:
    assert len(set(shapes.SHAPES)) == len(shapes.SHAPES)
    assert set(shapes.QUICK_CUDA) <= set(shapes.SHAPES)
    for chosen in (shapes.SHAPES, shapes.QUICK_CPU, shapes.QUICK_CUDA):
        assert {shape.layout for shape in chosen} >= {"NC", "NCHW", "NHWC", "NCDHW"}
        assert any(shape.channels == 3 for shape in chosen)
        assert any(shape.channels % 2 for shape in chosen if shape.channels > 3)
        assert any(shape.offset for shape in chosen)
        assert any(shape.size == (2, 2048, 7, 7) for shape in chosen)
    sizes = {(shape.size, shape.channels_last) for shape in shapes.SHAPES}
    for size in ((2, 64, 512, 512), (2, 32, 128, 128, 128), (2, 65, 317, 211), (32, 64, 112, 112)):
        assert sizes >= {(size, False), (size, True)}
    # What runs on a CPU is small enough to be over in two minutes.
    assert max(shape.bytes(torch.float32) for shape in shapes.QUICK_CPU) < 20e6


@pytest.mark.parametrize("shape", shapes.QUICK_CPU, ids=str)
def test_a_shape_is_laid_out_as_it_says(shape: shapes.Shape) -> None:
    x = shape.random(torch.bfloat16, CPU)
    assert tuple(x.shape) == shape.size
    assert x.nbytes == shape.bytes(torch.bfloat16)
    assert x.stride(1) == 1 if shape.channels_last else x.is_contiguous()
    assert x.data_ptr() % 16 == 2 * shape.offset
    assert x.movedim(1, 0).flatten(1).std(dim=1).std() > 0  # each channel has its own


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", shapes.QUICK_CPU, ids=str)
def test_real_layers_are_as_exact_as_torch(shape: shapes.Shape, dtype: torch.dtype) -> None:
    made, _ = candidates(shape, dtype, CPU, False)
    x, dy = shape.random(dtype, CPU).requires_grad_(), shape.random_gradient(dtype, CPU)
    errors = layers.errors(made, x, dy)
    for what in ("y", "dx"):
        assert errors["ours"][what] <= 4 * errors["torch"][what]


def test_geometric_means_and_ratios() -> None:
    times = {"a": np.array([1.0, 2.0, 4.0]), "b": np.array([2.0, 8.0, 8.0])}
    assert harness.ratio(times, "a", "b") == harness.Spread(2.0, 2.0, 3.2)
    spreads = [dict(p50=2.0, p20=1.0, p80=3.0), dict(p50=8.0, p20=4.0, p80=27.0)]
    mean = harness.geometric_mean(spreads)
    assert (mean.p50, mean.p20, mean.p80) == pytest.approx((4.0, 2.0, 9.0))


def test_several_ranks_are_another_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="the question for several is: ranks"):
        layers.measure(Options(CPU, quick=True))


def test_a_run_ends_when_its_time_is_up(capsys) -> None:
    options = Options(CPU, quick=True, match="odd", turns=1, seconds=0)
    assert layers.measure(options) == []
    assert "stopped after 0 of 4 as time is up" in capsys.readouterr().err


def test_a_match_with_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "argv", ["benchmarks", "layers", "--device", "cpu", "--match", "none!"]
    )
    with pytest.raises(SystemExit, match="no name has 'none!' in it"):
        entry.main()
