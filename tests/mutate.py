"""Do the emulator's tests find faults? Breaks the device code in one place at a time, to see.

Each mutant (mutants/) is put into a scratch copy, compiled there and run through the tests of the
emulator, the quick ones first. It is caught once a test fails, or hangs, or dies. A mutant that
does not apply or compile says nothing about the tests: an error, as is a failure without any
mutant. The last line reads ``mutants: N of M caught``; the exit status is 0 only where all are.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from mutants import common, host, kernels
from mutants.mutant import DoesNotApply, Mutant, orderings

ROOT = Path(__file__).resolve().parents[1]
PYTEST = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]

CAUGHT, SURVIVED, ERROR = "caught", "survived", "ERROR"


class Steps(NamedTuple):
    """What is run in each copy: arguments of Python that build, and that test, quick ones first."""

    build: Sequence[str]
    tests: Sequence[Sequence[str]]


STEPS = Steps(
    ["-c", "from emulator.build import load; load()"],
    [
        [*PYTEST, "tests/test_emulator.py", "-k", "not every_schedule"],
        [*PYTEST, "tests/test_plan.py", "tests/test_emulated_host.py", "tests/test_message.py"],
        [*PYTEST, "tests/test_emulator.py", "-k", "every_schedule"],
    ],
)


class Outcome(NamedTuple):
    """What became of a mutant."""

    mutant: Mutant
    verdict: str
    why: str
    seconds: float = 0.0


class Failure(Exception):
    """The sources as they are do not pass."""


class Copy:
    """A scratch copy of the sources, which holds one mutant after the other."""

    def __init__(self, root: Path, room: Path) -> None:
        self.room = room
        for name in ("csrc", "tests"):
            shutil.copytree(root / name, room / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(root / "pyproject.toml", room)
        # What the unmutated sources compile to; a mutant's build takes from it what it has left.
        self.built = room / "built"
        self.built.mkdir()

    def run(
        self, arguments: Sequence[str], cache: Path, limit: float | None = None
    ) -> tuple[int, str]:
        """Runs Python; returns its exit status and what it wrote."""
        path = os.pathsep.join([str(self.room / "tests"), str(ROOT)])
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.room,
            env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(cache)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit,
        )
        return done.returncode, done.stdout

    @contextlib.contextmanager
    def broken(self, mutant: Mutant) -> Iterator[Path]:
        """Holds the mutant; yields its cache, which goes with it."""
        path = self.room / "csrc" / mutant.file
        original = path.read_text()
        path.write_text(mutant.applied(original))
        cache = self.room / "cache"
        shutil.copytree(self.built, cache, copy_function=os.link)
        try:
            yield cache
        finally:
            path.write_text(original)
            shutil.rmtree(cache)


def every(csrc: Path) -> list[Mutant]:
    return [*kernels.FAULTS, *common.FAULTS, *host.FAULTS, *orderings(csrc)]


def _failed_test(output: str) -> str:
    found = re.search(r"^(?:FAILED|ERROR) (?:\S+::)?(.+?)(?: - .*)?$", output, re.MULTILINE)
    return found[1] if found else "a failure that names no test"


def _last_line(output: str) -> str:
    return (output.strip() or "not a word").splitlines()[-1]


def _verdict(copy: Copy, cache: Path, steps: Steps, limits: Sequence[float]) -> tuple[str, str]:
    status, output = copy.run(steps.build, cache)
    if status != 0:
        return ERROR, f"does not compile: {output.strip()}"
    for test, limit in zip(steps.tests, limits, strict=True):
        try:
            status, output = copy.run(test, cache, limit)
        except subprocess.TimeoutExpired:
            return CAUGHT, f"hangs: not done in {limit:.0f} s"
        if status < 0:
            return CAUGHT, f"dies of signal {-status}"
        if status == 1:
            return CAUGHT, _failed_test(output)
        if status != 0:
            return ERROR, f"the tests did not run: {_last_line(output)}"
    return SURVIVED, "all tests pass"


def judge(mutant: Mutant, copy: Copy, steps: Steps, limits: Sequence[float]) -> Outcome:
    """Builds and tests one mutant."""
    started = time.monotonic()
    try:
        with copy.broken(mutant) as cache:
            verdict, why = _verdict(copy, cache, steps, limits)
    except DoesNotApply as error:
        verdict, why = ERROR, str(error)
    return Outcome(mutant, verdict, why, time.monotonic() - started)


def check(copies: Sequence[Copy], steps: Steps) -> list[float]:
    """Builds and tests the sources as they are; returns how many seconds each test may take."""

    def passes(copy: Copy, step: Sequence[str]) -> float:
        started = time.monotonic()
        status, output = copy.run(step, copy.built)
        if status != 0:
            raise Failure(f"the sources as they are do not pass:\n{output}")
        return time.monotonic() - started

    with ThreadPoolExecutor(len(copies)) as pool:
        list(pool.map(lambda copy: passes(copy, steps.build), copies))
        turns = [copies[i % len(copies)] for i in range(len(steps.tests))]
        return [60 + 10 * seconds for seconds in pool.map(passes, turns, steps.tests)]


def try_all(
    mutants: Sequence[Mutant], copies: Sequence[Copy], steps: Steps, limits: Sequence[float]
) -> list[Outcome]:
    """Judges all mutants, one in each copy at a time, and says how it goes."""
    idle: queue.SimpleQueue[Copy] = queue.SimpleQueue()
    for copy in copies:
        idle.put(copy)

    def one(mutant: Mutant) -> Outcome:
        copy = idle.get()
        try:
            return judge(mutant, copy, steps, limits)
        finally:
            idle.put(copy)

    outcomes = []
    with ThreadPoolExecutor(len(copies)) as pool:
        for future in as_completed([pool.submit(one, mutant) for mutant in mutants]):
            mutant, verdict, why, seconds = outcome = future.result()
            outcomes.append(outcome)
            place = f"{len(outcomes):3}/{len(mutants)}"
            print(
                f"{place} {verdict:8} {seconds:4.0f} s  {mutant}  [{_last_line(why)}]", flush=True
            )
    return outcomes


def report(outcomes: Sequence[Outcome]) -> int:
    """Names what was not caught; returns the exit status."""
    left = [outcome for outcome in outcomes if outcome.verdict != CAUGHT]
    for mutant, verdict, why, _ in left:
        print(f"\n{verdict}: {mutant}\n- {mutant.old}\n+ {mutant.new}\n{why}")
    print(f"mutants: {len(outcomes) - len(left)} of {len(outcomes)} caught")
    return int(bool(left) or not outcomes)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few, with the quick tests alone")
    parser.add_argument("--only", default="", help="those with this text in their file or name")
    options = parser.parse_args()
    steps = STEPS._replace(tests=STEPS.tests[:1]) if options.quick else STEPS
    mutants = [
        mutant
        for mutant in every(ROOT / "csrc")
        if options.only in str(mutant) and (mutant.quick or not options.quick)
    ]
    with tempfile.TemporaryDirectory() as room:
        copies = [Copy(ROOT, Path(room) / str(i)) for i in range(os.cpu_count() or 1)]
        started = time.monotonic()
        try:
            limits = check(copies, steps)
        except Failure as failure:
            print(failure)
            return 1
        print(f"the sources as they are pass: {time.monotonic() - started:.0f} s", flush=True)
        status = report(try_all(mutants, copies, steps, limits))
    return status


if __name__ == "__main__":
    sys.exit(main())
