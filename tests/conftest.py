"""Fixtures of all tests."""

from __future__ import annotations

import importlib

import distributed
import pytest
import torch
from toolkits import ROOT

import syncbn_cuda
from syncbn_cuda import _library

REPORTS = pytest.StashKey[list[tuple[str, str]]]()


def pytest_report_header() -> str:
    info = syncbn_cuda.build_info()
    return (
        f"syncbn_cuda {info['version']} from {syncbn_cuda.__file__}, torch {info['torch']}; "
        f"cpu: {info['cpu']}; cuda: {info['cuda']}"
    )


def pytest_terminal_summary(terminalreporter, config) -> None:
    for title, text in config.stash.get(REPORTS, []):
        terminalreporter.section(title)
        terminalreporter.write_line(text)


@pytest.fixture(scope="session")
def report(pytestconfig):
    """Shows a text under a title once the tests are through, also where all pass."""
    reports = pytestconfig.stash.setdefault(REPORTS, [])
    return lambda title, text: reports.append((title, text))


@pytest.fixture(scope="session")
def support():
    """What setup.py decides with; of a checkout alone."""
    if not (ROOT / "setup.py").exists():
        pytest.skip("needs a checkout: setup.py is not part of an installed wheel")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT)
        return importlib.import_module("build_support")


@pytest.fixture
def compiled():
    """The compiled operators."""
    operators = _library._available.compiled
    assert operators is not None, syncbn_cuda.build_info()
    return operators


@pytest.fixture(scope="session")
def run():
    """Starts ranks (distributed.py): here over Gloo, with tensors on the CPU."""
    return distributed.run


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def uninitialized_is_nan():
    """Fills every uninitialised tensor with NaN, so that an element nobody wrote shows.

    What our operators allocate on the CPU is out of its reach: SYNCBN_POISON (csrc/tensors.h) does
    the same in the emulator's build and that of ``make sanitize``.
    """
    torch.use_deterministic_algorithms(True)
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    yield
    torch.utils.deterministic.fill_uninitialized_memory = before
    torch.use_deterministic_algorithms(False)
