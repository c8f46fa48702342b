"""The tables of the documentation name tests that there are, and every case of the parity table."""

from __future__ import annotations

import ast
import re

import pytest
import test_parity
from toolkits import ROOT

TABLES = ("situations.md", "parity.md")
#: How the last cell of a row names a test, and a function that is a case of it.
NAMED = re.compile(r"`(test_\w+)::(test_\w+)(?:\[(\w+)\])?`")

pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="not beside tests/: docs")


def tables(file):
    """Returns the tables of a document: the cells of each row, those of the header first."""
    found = []
    for block in (ROOT / "docs" / file).read_text().split("\n\n"):
        lines = [line for line in block.splitlines() if line[:1] == "|"]
        cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
        if cells:
            found.append([cells[0], *cells[2:]])
    return found


def rows(file):
    """Returns the cells of each row of the tables whose last column says what shows it."""
    return [row for head, *body in tables(file) if head[-1] == "shown by" for row in body]


def functions_of(file):
    path = ROOT / "tests" / f"{file}.py"
    if not path.is_file():
        return set()
    body = ast.parse(path.read_text()).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("table", TABLES)
def test_each_row_is_shown_by_tests(table):
    assert len(rows(table)) > 10
    missing = [
        f"{row[0]}: {file}::{name}"
        for row in rows(table)
        for file, *names in NAMED.findall(row[-1])
        for name in names
        if name and name not in functions_of(file)
    ]
    assert not missing
    assert not [row[0] for row in rows(table) if not NAMED.search(row[-1])]


def test_the_parity_table_has_every_case():
    named = {(test, case) for row in rows("parity.md") for _, test, case in NAMED.findall(row[-1])}
    for test, table in (
        ("test_on_two_ranks", test_parity.RANKS_ROWS),
        ("test_alone", test_parity.ALONE_ROWS),
    ):
        assert {row[0].__name__ for row in table} == {case for t, case in named if t == test}
