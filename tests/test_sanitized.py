"""Whether the sanitizers are at work; for `make sanitize`, which builds everything with them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from emulator.build import load

import syncbn_cuda

pytestmark = pytest.mark.skipif(
    "SYNCBN_SANITIZE" not in os.environ, reason="the libraries are built without sanitizers"
)

PROLOGUE = "import numpy as np; from emulator.build import load; m = load(); x = np.ones(64, 'f');"
SHORT_BY_ONE = "m.Emulation(1, 2, 32, False).stats(x, np.empty(4))"
INTO_THE_GUARD = """
m.guard(x, 16, 48, True)
m.Emulation(1, 2, 20, False).stats(x[8:48], np.empty(5))
"""


def symbols(path):
    return subprocess.run(["nm", "-D", str(path)], capture_output=True, text=True).stdout


@pytest.mark.parametrize("path", [Path(syncbn_cuda.__file__).parent / "_cpu.abi3.so", "emulator"])
def test_the_libraries_are_instrumented(path):
    found = symbols(load().__spec__.origin if path == "emulator" else path)
    assert "__asan_report_store" in found and "__ubsan_handle" in found


@pytest.mark.parametrize("code", [SHORT_BY_ONE, INTO_THE_GUARD])
def test_an_access_outside_a_tensor_ends_the_process(code):
    done = subprocess.run(
        [sys.executable, "-c", PROLOGUE + code],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0 and "ERROR: AddressSanitizer" in done.stderr, done.stderr[-2000:]
