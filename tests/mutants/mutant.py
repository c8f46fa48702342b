"""A fault in the device code, and how it is put there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ORDERING = re.compile(r"__(?:syncthreads|threadfence)\(\);")


class DoesNotApply(Exception):
    """The sources have moved on and the list of faults has not."""


class Mutant(NamedTuple):
    """One fault: in a file of csrc the text ``old``, found there exactly once, becomes ``new``."""

    file: str
    old: str
    new: str
    what: str
    quick: bool = False  # of the few that stand for all

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"

    def applied(self, text: str) -> str:
        found = text.count(self.old)
        if found != 1:
            raise DoesNotApply(f"{found} places to apply it instead of one: {self.old!r}")
        return text.replace(self.old, self.new)


def _unique(text: str, begin: int, end: int) -> str:
    """Text that ends at ``end``, from as many lines before it as tell it from all other places."""
    while text.count(text[begin:end]) > 1:
        begin = max(text.rfind("\n", 0, begin), 0)
    return text[begin:end]


def orderings(csrc: Path) -> Iterator[Mutant]:
    """Yields one mutant for each barrier and each fence of the kernels: without it."""
    kinds = set()
    for path in sorted((csrc / "cuda").glob("*.cuh")):
        text = path.read_text()
        for match in ORDERING.finditer(text):
            old = _unique(text, match.start(), match.end())
            statement, line = match[0], text.count("\n", 0, match.start()) + 1
            yield Mutant(
                f"cuda/{path.name}",
                old,
                old.removesuffix(statement),
                f"without {statement[:-1]} in line {line}",
                quick=statement not in kinds,
            )
            kinds.add(statement)
