"""A run on paper: JSON, Markdown and plots.

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


def as_table(header: list[str], lines: list[list[str]], texts: int = 1) -> str:
    """A Markdown table whose columns, but for the first few, are of numbers."""
    rules = ["---"] * texts + ["---:"] * (len(header) - texts)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rules, *lines))


def run_of(rows: list[dict], machine: dict, compiled: bool) -> dict:
    """Puts a run together."""
    where = {name: machine[name] for name in IN_EACH_ROW}
    return {
        "machine": machine,
        "compiled": compiled,
        "rows": [row | {"machine": where} for row in rows],
    }


def markdown(run: dict, modules: list[ModuleType]) -> str:
    """The tables of all questions, under the machine and what is demanded."""
    lines = ["# Benchmarks", ""]
    lines += [f"* {name}: {value}" for name, value in run["machine"].items() if value is not None]
    lines += [f"* compiled kernels: {'in use' if run['compiled'] else 'NOT in use'}"]
    if any(name.endswith("_us") for row in run["rows"] for name in row):
        lines += ["", "Times in microseconds: median [20th, 80th percentile]."]
    answers = [(module, rows) for module in modules if (rows := rows_of(run, module))]
    demands = [bar for module, rows in answers for bar in _bars(module, rows)]
    if demands:
        lines += ["", "## Bars", "", as_table(["bar", "value", "measured"], demands, texts=3)]
    for module, rows in answers:
        lines += ["", f"## {question_of(module)}", "", module.table(rows).strip()]
    return "\n".join(lines) + "\n"


def question_of(module: ModuleType) -> str:
    return module.__name__.rpartition(".")[2]


def rows_of(run: dict, module: ModuleType) -> list[dict]:
    return [row for row in run["rows"] if row["question"] == question_of(module)]


def _bars(module: ModuleType, rows: list[dict]) -> list[list[str]]:
    return [list(bar) for bar in module.bars(rows)] if hasattr(module, "bars") else []


def failures(run: dict, modules: list[ModuleType]) -> list[str]:
    """What questions that have bounds found beyond them."""
    asked = [module for module in modules if hasattr(module, "failures")]
    return [line for module in asked for line in module.failures(rows_of(run, module))]


def write(
    run: dict, text: str, modules: list[ModuleType], folder: Path, plots: bool = True
) -> list[Path]:
    """Writes bench-DEVICE.json and .md, and what plots its questions have."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"bench-{'cuda' if run['machine']['gpu'] else 'cpu'}"
    written = [stem.with_suffix(".json"), stem.with_suffix(".md")]
    written[0].write_text(json.dumps(run, indent=1) + "\n")
    written[1].write_text(text)
    for module in modules if plots else ():
        rows = rows_of(run, module)
        if rows and hasattr(module, "plots"):
            try:
                written += module.plots(rows, folder)
            except ModuleNotFoundError as error:
                if error.name != "matplotlib":
                    raise
                print(f"No plots of {question_of(module)}: {error}; pip install '.[bench]'")
    return written
