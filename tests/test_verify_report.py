"""The texts of the health check stay short, however many ranks and layers there are."""

from __future__ import annotations

import pytest

from syncbn_cuda import Finding, HealthReport
from syncbn_cuda.health.report import differing, shown_groups, spans


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([0], "0"), ([3, 1], "1, 3"), ([0, 1], "0-1"), ([5, 0, 1, 2, 7, 8], "0-2, 5, 7-8")],
)
def test_neighbours_are_a_span(ranks, text):
    assert spans(ranks) == text


def consecutive(size, world):
    return [tuple(range(first, min(first + size, world))) for first in range(0, world, size)]


@pytest.mark.parametrize(
    ("groups", "world", "text"),
    [
        ([(0,)], 1, "a world of one"),
        (consecutive(8, 8) * 8, 8, "all 8 ranks"),
        (consecutive(4, 8), 8, "ranks 0-3 | 4-7"),
        (consecutive(8, 512), 512, "64 groups of 8 ranks"),
        (consecutive(8, 500), 500, "63 groups of 4 or 8 ranks"),
        ([], 8, "unknown ranks"),
    ],
)
def test_groups_are_counted_where_they_are_many(groups, world, text):
    assert shown_groups(groups, world) == text


def test_the_value_of_most_ranks_comes_first_and_the_others_have_the_finding():
    (finding,) = differing({0: 7, 1: 5, 2: 5, 3: 5, 4: 6}, "size differs", "make it one")
    assert finding.problem == "size differs: 5 on ranks 1-3; 7 on rank 0; 6 on rank 4"
    assert finding.ranks == (0, 4)
    assert differing({0: 7, 1: 7}, "size differs", "make it one") == []


def test_between_two_values_that_are_as_frequent_the_first_rank_is_right():
    (finding,) = differing({0: 9, 1: 5}, "size differs", "make it one")
    assert finding.ranks == (1,)


def test_long_lists_are_cut():
    (finding,) = differing({rank: rank for rank in range(9)}, "size differs", "make it one")
    assert finding.problem.endswith("; 5 on rank 5; and 3 more")
    finding = finding._replace(layers=tuple(f"bn{i}" for i in range(100)))
    assert "[bn0, bn1, bn2, bn3, bn4, bn5, and 94 more] (ranks 1-8): make it one" in str(finding)


def test_the_findings_are_numbered_below_the_table():
    finding = Finding("It is broken", (), (0, 2), "mend it")
    assert str(HealthReport([], [])) == "nothing found"
    report = HealthReport([finding, finding._replace(layers=("",))], [], ["tried"])
    assert str(report).splitlines() == [
        "tried",
        "2 found:",
        "1. It is broken (ranks 0, 2): mend it",
        "2. It is broken [(the model)] (ranks 0, 2): mend it",
    ]
