"""The list of faults fits the sources, and `make mutants` tells what is caught from what is not."""

from __future__ import annotations

import re
from collections import Counter

import mutate
import pytest
from mutants.mutant import DoesNotApply, Mutant, orderings

CSRC = mutate.ROOT / "csrc"
FILE = "cuda/kernel.cuh"

# Stand-ins: the source is Python that the build compiles and each test runs.
STEPS = mutate.Steps(
    ["-c", f"compile(open('csrc/{FILE}').read(), 'kernel', 'exec')"],
    [
        ["-c", f"exec(open('csrc/{FILE}').read()); quick()"],
        ["-c", f"exec(open('csrc/{FILE}').read()); slow()"],
    ],
)
SOURCE = """
import os, signal, time
total = 1 + 1
def quick():
    if total != 2:
        print('FAILED tests/test_it.py::test_sum[(1, 2)-x] - assert 3 == 2')
        raise SystemExit(1)
def slow():
    pass
"""


@pytest.fixture
def sources():
    """The device code, where the tests have it at their side."""
    if not (CSRC / "cuda").is_dir():
        pytest.skip("needs a checkout: csrc is not part of an installed wheel")
    return CSRC


@pytest.fixture
def copy(tmp_path):
    """A copy of a project that is a stand-in for this one."""
    kernel = tmp_path / "project" / "csrc" / FILE
    kernel.parent.mkdir(parents=True)
    kernel.write_text(SOURCE)
    (tmp_path / "project" / "tests").mkdir()
    (tmp_path / "project" / "pyproject.toml").touch()
    return mutate.Copy(tmp_path / "project", tmp_path / "copy")


def judged(copy, old, new, limits=(60, 60)):
    return mutate.judge(Mutant(FILE, old, new, "a fault"), copy, STEPS, limits)


def test_every_mutant_applies_and_changes_something(sources):
    mutants = mutate.every(sources)
    changed = set()
    for mutant in mutants:
        text = (sources / mutant.file).read_text()
        assert mutant.applied(text) != text
        changed.add((mutant.file, mutant.applied(text)))
    assert len(changed) == len(mutants), "one fault twice"


def test_every_file_has_its_faults(sources):
    mutants = mutate.every(sources)
    assert len(mutants) >= 40
    count = Counter(mutant.file for mutant in mutants)
    for path in (sources / "cuda").glob("*.cuh"):
        assert count[f"cuda/{path.name}"] >= 4, path.name
    assert count["cuda/plan.h"] >= 4 and count["statistics.h"] >= 4
    quick = {mutant.file for mutant in mutants if mutant.quick}
    assert len(quick) >= 8


def test_every_barrier_and_fence_is_dropped(sources):
    dropped = Counter(mutant.what.split("(")[0] for mutant in orderings(sources))
    text = "".join(path.read_text() for path in (sources / "cuda").glob("*.cuh"))
    for name in ("__syncthreads", "__threadfence"):
        assert dropped[f"without {name}"] == len(re.findall(rf"\b{name}\b", text)) > 0
    for mutant in orderings(sources):
        before = (sources / mutant.file).read_text()
        after = mutant.applied(before)
        assert len(before) - len(after) in {len("__syncthreads();"), len("__threadfence();")}


@pytest.mark.parametrize("old", ["not there", "1"])
def test_a_mutant_that_does_not_fit_is_an_error(copy, old):
    with pytest.raises(DoesNotApply):
        Mutant(FILE, old, "", "a fault").applied(SOURCE)
    assert judged(copy, old, "").verdict == mutate.ERROR


def test_a_mutant_that_does_not_compile_is_an_error(copy):
    outcome = judged(copy, "1 + 1", "1 +")
    assert outcome.verdict == mutate.ERROR
    assert "does not compile" in outcome.why and "SyntaxError" in outcome.why


def test_tests_that_do_not_run_are_an_error(copy):
    assert judged(copy, "    pass", "    raise SystemExit(2)").verdict == mutate.ERROR


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("1 + 1", "1 + 2", "test_sum[(1, 2)-x]"),
        ("    pass", "    raise SystemExit(1)", "a failure that names no test"),
        ("    pass", "    os.kill(os.getpid(), signal.SIGSEGV)", "dies of signal 11"),
        ("    pass", "    time.sleep(600)", "hangs: not done in 2 s"),
    ],
)
def test_a_test_that_fails_catches(copy, old, new, why):
    outcome = judged(copy, old, new, (60, 2))
    assert (outcome.verdict, outcome.why) == (mutate.CAUGHT, why)


def test_a_copy_is_as_before_after_each_mutant(copy):
    assert judged(copy, "1 + 1", "1 + 2").verdict == mutate.CAUGHT
    assert judged(copy, "1 + 1", "2 + 0").verdict == mutate.SURVIVED
    assert sorted(path.name for path in copy.room.iterdir()) == [
        "built",
        "csrc",
        "pyproject.toml",
        "tests",
    ]


def test_sources_that_fail_by_themselves_catch_nothing(copy):
    assert all(limit >= 60 for limit in mutate.check([copy], STEPS))
    (copy.room / "csrc" / FILE).write_text(SOURCE.replace("1 + 1", "1 + 2"))
    with pytest.raises(mutate.Failure, match=r"test_sum\[\(1, 2\)-x\]"):
        mutate.check([copy], STEPS)


@pytest.mark.parametrize(
    ("changes", "status", "last"),
    [
        (["1 + 2", "2 + 2"], 0, "mutants: 2 of 2 caught"),
        (["1 + 2", "2 * 1"], 1, "mutants: 1 of 2 caught"),
        (["1 + 2", "1 +"], 1, "mutants: 1 of 2 caught"),
        ([], 1, "mutants: 0 of 0 caught"),
    ],
)
def test_the_last_line_and_the_status(copy, capsys, changes, status, last):
    mutants = [Mutant(FILE, "1 + 1", new, f"fault {i}") for i, new in enumerate(changes)]
    outcomes = mutate.try_all(mutants, [copy], STEPS, (60, 60))
    assert mutate.report(outcomes) == status
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == last
    for mutant, verdict, *_ in outcomes:
        assert (f"{verdict}: {mutant}" in lines) == (verdict != mutate.CAUGHT)
