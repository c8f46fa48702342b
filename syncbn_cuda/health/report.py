"""What the health check says: findings, layers, and the table of both."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

Value = TypeVar("Value", bound=Hashable)

#: How many names or groups a text lists before it only counts them.
_LISTED = 6


class Finding(NamedTuple):
    """Something that is wrong with a set-up.

    Attributes:
        problem: what it is, with the values by rank where they differ.
        layers: the names of the layers that have it; empty where it is not one of layers.
        ranks: the ranks that have it; where ranks differ, those that differ from most.
        remedy: what to do.
    """

    problem: str
    layers: tuple[str, ...]
    ranks: tuple[int, ...]
    remedy: str

    def __str__(self) -> str:
        layers = f" [{_listed(map(named, self.layers))}]" if self.layers else ""
        return f"{self.problem}{layers} ({on(self.ranks)}): {self.remedy}"


class LayerHealth(NamedTuple):
    """A layer that normalises, over all ranks.

    Attributes:
        name: its dotted name, without the parts of wrappers ("module."); "" for the model itself.
        class_name: its class.
        over: the ranks that it normalises over, or "own rank".
        reason: what it was converted from, or why it was not, and whether it is in evaluation.
    """

    name: str
    class_name: str
    over: str
    reason: str


@dataclass(frozen=True)
class HealthReport:
    """The outcome of :func:`verify`, the same on every rank; ``str`` makes a table of it.

    Attributes:
        findings: what is wrong; empty when all is well.
        layers: each layer that normalises: its name, class, ranks, and the reason.
        notes: what was tried, and what could not be judged.
    """

    findings: list[Finding]
    layers: list[LayerHealth]
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        rows = [(named(row.name), *row[1:]) for row in self.layers]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        widths[-1:] = [0]  # nothing follows
        table = ["  ".join(map(str.ljust, row, widths)) for row in rows]
        found = [f"{number}. {finding}" for number, finding in enumerate(self.findings, 1)]
        head = f"{len(found)} found:" if found else "nothing found"
        return "\n".join([*table, *self.notes, head, *found])


class VerificationError(RuntimeError):
    """Raised by :func:`verify` with ``raise_on_error=True``; its text is that of the report.

    Attributes:
        report: the :class:`HealthReport`.
    """

    def __init__(self, report: HealthReport) -> None:
        super().__init__(str(report))
        self.report = report

    def __reduce__(self) -> tuple[type[VerificationError], tuple[HealthReport]]:
        return type(self), (self.report,)


def named(name: str) -> str:
    """Returns a layer's name as texts show it."""
    return name or "(the model)"


def spans(ranks: Iterable[int]) -> str:
    """Returns ranks as text, neighbours as a span: "0-3, 6"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return ", ".join("-".join(map(str, run)) for run in runs)


def on(ranks: Iterable[int]) -> str:
    """Returns "rank 1" or "ranks 0-3, 6"."""
    ranks = tuple(ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {spans(ranks)}"


def ranks_by(values: Mapping[int, Value]) -> dict[Value, list[int]]:
    """Returns which ranks hold each value, the value of most of them first."""
    holders: dict[Value, list[int]] = {}
    for rank in sorted(values):
        holders.setdefault(values[rank], []).append(rank)
    return dict(sorted(holders.items(), key=lambda item: -len(item[1])))


def differing(
    values: Mapping[int, Value], what: str, remedy: str, show: Callable[[Value], str] = str
) -> list[Finding]:
    """Returns a finding where ranks hold different values, none where they hold the same."""
    holders = ranks_by(values)
    if len(holders) < 2:
        return []
    told = _listed((f"{show(value)} on {on(ranks)}" for value, ranks in holders.items()), "; ")
    odd = sorted(rank for ranks in list(holders.values())[1:] for rank in ranks)
    return [Finding(f"{what}: {told}", (), tuple(odd), remedy)]


def over_ranks(found: Iterable[tuple[str, int, str]]) -> list[Finding]:
    """Returns findings of (problem, rank, remedy): one for the ranks that have the same."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for problem, rank, remedy in found:
        ranks.setdefault((problem, remedy), []).append(rank)
    return [Finding(problem, (), tuple(on), remedy) for (problem, remedy), on in ranks.items()]


def over_layers(found: Iterable[tuple[str, Finding]]) -> list[Finding]:
    """Returns findings of (layer, finding): one for the layers that have the same."""
    layers: dict[Finding, list[str]] = {}
    for name, finding in found:
        layers.setdefault(finding, []).append(name)
    return [finding._replace(layers=tuple(names)) for finding, names in layers.items()]


def shown_groups(groups: Iterable[tuple[int, ...]], world: int) -> str:
    """Returns the ranks that a layer normalises over: those of all groups that it has."""
    several = list(dict.fromkeys(groups))
    if not several:
        return "unknown ranks"
    if several == [tuple(range(world))]:
        return f"all {world} ranks" if world > 1 else "a world of one"
    if len(several) <= _LISTED:
        return "ranks " + " | ".join(map(spans, several))
    sizes = sorted({len(ranks) for ranks in several})
    return f"{len(several)} groups of {' or '.join(map(str, sizes))} ranks"


def _listed(texts: Iterable[str], between: str = ", ") -> str:
    several = list(texts)
    more = [f"and {len(several) - _LISTED} more"] if len(several) > _LISTED else []
    return between.join(several[:_LISTED] + more)
