"""What tests of the benchmarks share; beside an installed wheel, without benchmarks, they skip."""

from __future__ import annotations

import sys

import pytest
import torch
from toolkits import ROOT

if not (ROOT / "benchmarks").is_dir():
    pytest.skip("no benchmarks beside tests/", allow_module_level=True)
sys.path.append(str(ROOT))

from benchmarks.options import Options

CPU = torch.device("cpu")
TINY = Options(CPU, quick=True, turns=3, dtypes=(torch.float32,))


def assert_spreads(spreads: dict[str, dict], names: set[str]) -> None:
    assert spreads.keys() == names
    for spread in spreads.values():
        assert 0 < spread["p20"] <= spread["p50"] <= spread["p80"]
