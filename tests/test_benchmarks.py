"""The benchmarks: what they measure, and what they make of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from toolkits import ROOT

import syncbn_cuda

if not (ROOT / "benchmarks").is_dir():
    pytest.skip("no benchmarks beside tests/", allow_module_level=True)
sys.path.append(str(ROOT))

from benchmarks import __main__ as entry


def run(*arguments: str) -> str:
    """Runs the benchmarks on the CPU, from the root of the repository."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--device", "cpu", *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def test_layers_are_timed_with_the_compiled_kernels(tmp_path: Path) -> None:
    run(
        *("layers", "--quick", "--match", "classifier", "--dtypes", "float32"),
        *("--turns", "3", "--out", str(tmp_path)),
    )
    told = json.loads((tmp_path / "bench-cpu.json").read_text())
    assert told["compiled"]
    rows = told["rows"]
    assert [row["direction"] for row in rows] == ["forward", "backward"]
    for row in rows:
        assert row["machine"]["torch"] and row["machine"]["commit"]
        for key in ("ours_us", "baseline_us", "times_as_fast"):
            assert 0 < row[key]["p20"] <= row[key]["p50"] <= row[key]["p80"]
        assert 0 < row["ours_error"] <= 4 * row["baseline_error"]
    table = (tmp_path / "bench-cpu.md").read_text()
    assert table.count("| classifier 64x512 |") == 2


def test_torch_is_not_timed_against_torch_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"cpu": {"loaded": False, "reason": "nobody built them"}}
    monkeypatch.setattr(syncbn_cuda, "build_info", lambda: state)
    with pytest.raises(SystemExit, match="nobody built them\n.*--allow-composite"):
        entry.require_kernels("cpu", allow_composite=False)
    assert not entry.require_kernels("cpu", allow_composite=True)
