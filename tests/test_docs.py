"""The tables of the documentation name tests that there are."""

from __future__ import annotations

import ast
import re

import pytest
from toolkits import ROOT

TABLES = ("situations.md",)
#: A row's last cell: tests as `file::test`.
NAMED = re.compile(r"`(test_\w+)::(test_\w+)`")

pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="not beside tests/: docs")


def rows(table):
    """Returns the cells of each row of a page's tables, without their headings."""
    lines = [line for line in (ROOT / "docs" / table).read_text().splitlines() if line[:1] == "|"]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in cells if row[-1] not in ("shown by",) and set(row[0]) - set("- |")]


def names_in(file):
    path = ROOT / "tests" / f"{file}.py"
    if not path.is_file():
        return set()
    body = ast.parse(path.read_text()).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("table", TABLES)
def test_each_row_is_shown_by_tests(table):
    assert len(rows(table)) > 10
    missing = [
        f"{row[0]}: {file}::{test}"
        for row in rows(table)
        for file, test in NAMED.findall(row[-1])
        if test not in names_in(file)
    ]
    assert not missing
    assert not [row[0] for row in rows(table) if not NAMED.search(row[-1])]
