"""Mistakes to plant for the health check, and what it says of each."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple


class Mistake(NamedTuple):
    """How a rank sets something up wrong, and what is found: parts of the texts."""

    plant: Callable
    problem: str
    remedy: str
    layers: tuple[str, ...] = ("bn",)
    ranks: tuple[int, ...] = (1,)


def assert_is_the_one_finding(mistake: Mistake, first: tuple, second: tuple) -> None:
    """Compares with what two ranks report: their findings, and the text of the report."""
    assert first == second
    (finding,), text = first
    assert re.search(mistake.problem, finding.problem), finding
    assert re.search(mistake.remedy, finding.remedy), finding
    assert (finding.layers, finding.ranks) == (mistake.layers, mistake.ranks)
    assert text.endswith(f"1 found:\n1. {finding}")
