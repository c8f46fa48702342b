"""Runs the examples as their users do, and imports their parts."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from toolkits import ROOT

LIMIT_S = 400  # on a busy machine; a tenth of it on an idle one


def needs(*files: str) -> pytest.MarkDecorator:
    """Skips where the tests lie beside an installed wheel, which holds the package alone."""
    missing = [file for file in files if not (ROOT / file).is_file()]
    return pytest.mark.skipif(bool(missing), reason=f"not beside tests/: {', '.join(missing)}")


def example(name: str) -> ModuleType:
    """Imports a module of the examples."""
    folder = str(ROOT / "examples")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


def environment(**more: str) -> dict[str, str]:
    """That of a process that computes on the CPU, with one thread."""
    return os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | more


def torchrun(ranks: int) -> tuple[str, ...]:
    return ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))


def run(
    *command: object, succeeds: bool = True, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Runs a Python command, from the root of the repository unless told otherwise."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    told = f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert (done.returncode == 0) == succeeds, told
    return done
