"""Writes the summary of a stored run of the accuracy study into a page of the documentation.

    python -m benchmarks.accuracy_docs RUN.json docs/numerics.md

It stands there between two marks, which stay.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks import accuracy
from benchmarks.report import rows_of

BEGIN, END = "<!-- summary of the stored run -->", "<!-- end of the summary -->"


def told(run: dict) -> str:
    """What the page says of a run."""
    rows = rows_of(run, accuracy)
    cells = "\n".join(f"* {bar}: {measured}" for bar, _, measured in accuracy.bars(rows))
    return f"{cells}\n\n{accuracy.summary([row for row in rows if 'ulps' in row])}"


def filled(page: str, run: dict) -> str:
    """The page with another summary."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"accuracy_docs: the page has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n\n{told(run)}\n\n{END}{after}"


def main() -> None:
    stored, page = map(Path, sys.argv[1:])
    page.write_text(filled(page.read_text(), json.loads(stored.read_text())))


if __name__ == "__main__":
    main()
