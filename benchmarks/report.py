"""A run on paper: JSON, Markdown, and two runs compared.

The JSON of a run is ``{"machine": {...}, "compiled": bool, "rows": [...]}``. A row has the question
that it answers; what was measured, in texts and whole numbers; and what came out: spreads
``{"p50", "p20", "p80"}`` (times in microseconds under a key that ends in ``_us``), other floats,
and dictionaries of either. So rows of two runs belong together where their texts and whole numbers
are the same, and what can be compared are their spreads, at any depth.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

#: What of the machine stands in each row too, so that rows can be moved about.
IN_EACH_ROW = ("gpu", "driver", "torch", "commit")


def run_of(rows: list[dict], machine: dict, compiled: bool) -> dict:
    """Puts a run together."""
    where = {name: machine[name] for name in IN_EACH_ROW}
    return {
        "machine": machine,
        "compiled": compiled,
        "rows": [row | {"machine": where} for row in rows],
    }


def markdown(run: dict, modules: list[ModuleType]) -> str:
    """The tables of all questions, under the machine."""
    lines = ["# Benchmarks", ""]
    lines += [f"* {name}: {value}" for name, value in run["machine"].items() if value is not None]
    lines += [f"* compiled kernels: {'in use' if run['compiled'] else 'NOT in use'}"]
    lines += ["", "Times in microseconds: median [20th, 80th percentile]."]
    for module in modules:
        name = module.__name__.rpartition(".")[2]
        rows = [row for row in run["rows"] if row["question"] == name]
        if rows:
            lines += ["", f"## {name}", "", module.table(rows).strip()]
    return "\n".join(lines) + "\n"


def write(run: dict, text: str, modules: list[ModuleType], folder: Path) -> list[Path]:
    """Writes bench-DEVICE.json and .md, and the plots of the questions that have any."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"bench-{'cuda' if run['machine']['gpu'] else 'cpu'}"
    stem.with_suffix(".json").write_text(json.dumps(run, indent=1) + "\n")
    stem.with_suffix(".md").write_text(text)
    return [stem.with_suffix(".json"), stem.with_suffix(".md")]


def compare(before: Path, after: Path) -> str:
    """Compares two runs row by row."""
    raise NotImplementedError
