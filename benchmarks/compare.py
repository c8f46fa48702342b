"""Two runs, row by row: what changed beyond its spread?"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import Spread
from benchmarks.report import as_table

#: Of the machine, what may differ between two runs that are compared.
MAY_DIFFER = ("commit",)

Identity = tuple[tuple[str, str | int], ...]


def compare(before: Path, after: Path) -> str:
    """Compares two runs that are stored as JSON; returns Markdown.

    Rows belong together where their texts and whole numbers are the same (report.py). Two spreads
    differ where one begins above the end of the other.
    """
    runs = [json.loads(path.read_text()) for path in (before, after)]
    old, new = ({key: row for key, row in _identified(run["rows"])} for run in runs)
    both = [key for key in old if key in new]
    labels = _labels(both)
    lines, changed = [], []
    for key in both:
        others = dict(_spreads(new[key]))
        for what, was in _spreads(old[key]):
            if what in others:
                line = [labels[key], what, *_cells(was, others[what])]
                differs = _differ(was, others[what])
                lines.append([*line, "*" * differs])
                changed += [line] if differs else []
    header = ["row", "what", "before", "after", "before / after"]
    parts = ["# Two runs compared", f"* before: {before}\n* after: {after}", *_warnings(*runs)]
    parts.append(
        "Median [20th, 80th percentile]. The ratio has the least and the largest that the two "
        "spreads allow; for times it is above 1 where the second run is faster."
    )
    parts.append(f"{len(changed)} of {len(lines)} differ beyond their spreads.")
    if unmatched := len(old.keys() ^ new.keys()):
        parts.append(f"{unmatched} rows are in one run only.")
    if changed:
        parts += ["## Beyond their spreads", as_table(header, changed, texts=2)]
    parts += ["## All", as_table([*header, ""], lines, texts=2)]
    return "\n\n".join(parts) + "\n"


def _warnings(old: dict, new: dict) -> list[str]:
    """Says where the runs are not of one machine in one state."""
    pairs = [(name, old["machine"].get(name), new["machine"].get(name)) for name in old["machine"]]
    pairs.append(("compiled kernels", old["compiled"], new["compiled"]))
    return [
        f"**Warning**: {name} differs: {was} before, {now} after."
        for name, was, now in pairs
        if was != now and name not in MAY_DIFFER
    ]


def _identified(rows: list[dict]) -> Iterator[tuple[Identity, dict]]:
    """Yields each row with what it is about; a number tells those about the same apart."""
    seen: dict[Identity, int] = {}
    for row in rows:
        about = tuple((name, v) for name, v in row.items() if isinstance(v, str | int))
        seen[about] = seen.get(about, 0) + 1
        yield (*about, ("occurrence", seen[about])), row


def _labels(keys: list[Identity]) -> dict[Identity, str]:
    """Names rows by their texts, and by their numbers where the texts leave two alike."""
    texts = {key: ", ".join(v for _, v in key if isinstance(v, str)) for key in keys}
    often = Counter(texts.values())
    return {
        key: text if often[text] == 1 else ", ".join(f"{name} {value}" for name, value in key)
        for key, text in texts.items()
    }


def _spreads(value: Any, path: str = "") -> Iterator[tuple[str, Spread]]:
    """Yields the spreads in a row, at any depth, each with the path to it."""
    if not isinstance(value, dict):
        return
    if value.keys() == {"p50", "p20", "p80"}:
        yield path, Spread(**value)
        return
    for name, inner in value.items():
        yield from _spreads(inner, f"{path}.{name}" if path else name)


def _differ(a: Spread, b: Spread) -> bool:
    return a.p20 > b.p80 or a.p80 < b.p20


def _cells(a: Spread, b: Spread) -> list[str]:
    return [str(a), str(b), str(Spread(a.p50 / b.p50, a.p20 / b.p80, a.p80 / b.p20))]
