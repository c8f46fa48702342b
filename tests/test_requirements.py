"""requirements-dev.txt pins whatever the extras of pyproject.toml and the build ask for."""

from __future__ import annotations

import pytest
from packaging.requirements import Requirement
from toolkits import ROOT

tomllib = pytest.importorskip("tomllib")  # of Python 3.11
PINNED = ROOT / "requirements-dev.txt"
pytestmark = pytest.mark.skipif(not PINNED.is_file(), reason=f"not beside tests/: {PINNED.name}")


def pins() -> list[Requirement]:
    lines = PINNED.read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def asked() -> list[Requirement]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = settings["project"]["optional-dependencies"].values()
    lists = [settings["build-system"]["requires"], settings["project"]["dependencies"], *extras]
    return [Requirement(text) for each in lists for text in each]


def test_each_line_pins_one_version():
    assert len(pins()) > 50
    for pin in pins():
        (specifier,) = pin.specifier
        assert specifier.operator == "==" and "*" not in specifier.version, pin
        assert pin.url is None


@pytest.mark.parametrize("wanted", asked() if PINNED.is_file() else [], ids=str)
def test_all_that_is_asked_for_is_pinned(wanted):
    found = [pin for pin in pins() if pin.name == wanted.name]
    assert found
    for pin in found:
        (specifier,) = pin.specifier
        assert wanted.specifier.contains(specifier.version)
