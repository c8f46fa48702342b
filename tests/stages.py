"""Stages of a check that runs unattended: each has its time limit, and all leave a report.

A stage that fails or hangs does not stop the next, and the report is written anew after each, so
that it is complete when the machine is taken away. Standard library alone: gpu_check.py runs before
anything is built.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

#: Seconds that what has been killed gets to be gone: on a hung GPU it may never be.
GRACE_S = 3.0


class Failed(Exception):
    """A stage found something wrong; the text goes into the table."""


class Skipped(Exception):
    """A stage has nothing to do here; the text says why."""


class Done(NamedTuple):
    """How a command ended, and all that it wrote."""

    code: int | None  # None: stopped at the time limit
    output: str


def last_line(output: str) -> str:
    """Returns the last line that says anything, without what frames it."""
    lines = (line.strip("= ") for line in reversed(output.splitlines()))
    return next((line for line in lines if line), "")[:200]


def require(done: Done, limit_s: float) -> str:
    """Returns what a command wrote that succeeded."""
    if done.code is None:
        raise Failed(f"stopped after {limit_s:.0f} s")
    if done.code != 0:
        raise Failed(f"exit status {done.code}: {last_line(done.output)}")
    return done.output


def run(
    commands: Mapping[str, list[str]],
    log: Path,
    limit_s: float,
    environment: Mapping[str, str],
    folder: Path,
) -> dict[str, Done]:
    """Runs commands side by side for at most ``limit_s``, their output line by line in one log.

    Each is killed with everything that it started in its session, at the time limit and when this
    process is told to end.
    """
    deadline = time.monotonic() + limit_s
    lines: dict[str, list[str]] = {name: [] for name in commands}
    codes: dict[str, int | None] = {}
    processes: dict[str, subprocess.Popen[str]] = {}
    with log.open("a") as stream:
        try:
            for name, command in commands.items():
                stream.write(f"$ {' '.join(command)}\n")
                processes[name] = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    env=dict(environment),
                    cwd=folder,
                    start_new_session=True,  # to be killed as one
                )
            prefixes = {name: f"{name}: " if len(commands) > 1 else "" for name in commands}
            readers = [
                threading.Thread(
                    target=_follow,
                    args=(process, prefixes[name], lines[name], stream),
                    daemon=True,  # Python waits for the others, before it ends
                )
                for name, process in processes.items()
            ]
            for reader in readers:
                reader.start()
            for name, process in processes.items():
                codes[name] = _wait(process, deadline)
        finally:
            deadline = time.monotonic() + GRACE_S
            for process in processes.values():
                _kill(process, deadline)
        # What took a session of its own, and stays, may hold the other end.
        deadline = time.monotonic() + GRACE_S
        for reader in readers:
            reader.join(max(0.0, deadline - time.monotonic()))
    return {name: Done(codes[name], "".join(lines[name])) for name in commands}


def _follow(process: subprocess.Popen[str], prefix: str, lines: list[str], stream) -> None:
    with suppress(ValueError):  # the log is closed
        for line in process.stdout or ():
            lines.append(line)
            stream.write(prefix + line)
            stream.flush()


def _wait(process: subprocess.Popen[str], deadline: float) -> int | None:
    try:
        return process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None


def _kill(process: subprocess.Popen[str], deadline: float) -> None:
    """Kills the session of a command, though its first process may be gone.

    Its process group would not do: ninja gives each compiler a group of its own.
    """
    while members := _session(process.pid):
        for pid in members:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)
    process.wait()


def end_at_signals() -> None:
    """Makes signals that end a process raise SystemExit, so that ``run`` kills what it started.

    The first alone, as another would break that off: where a group gets a signal, make passes it on
    once more. What is ignored already, as under nohup, stays so.
    """
    signals = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
    signals = [each for each in signals if signal.getsignal(each) is not signal.SIG_IGN]

    def end(number: int, frame: object) -> None:
        for each in signals:
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    for each in signals:
        signal.signal(each, end)


def _session(leader: int) -> list[int]:
    """Returns the processes of a session that still run."""
    members = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, _, session, *_ = entry.read_text().rsplit(")", 1)[1].split()
            if int(session) == leader and state not in "ZX":
                members.append(int(entry.parent.name))
    return members


@dataclass(frozen=True)
class Stage:
    """One stage: what it does within its time limit, and which stage it builds on."""

    name: str
    limit_s: float
    action: Callable[[float], str]  # returns what to say in the table; raises Failed or Skipped
    needs: str | None = None


@dataclass
class Result:
    """One row of the table."""

    stage: str
    result: str = "not reached"
    seconds: float = 0.0
    detail: str = ""


@dataclass
class Report:
    """What is known so far; stages add to ``machine`` and ``sections``."""

    folder: Path
    machine: dict[str, str] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    sections: dict[str, str] = field(default_factory=dict)  # Markdown by heading

    def table(self) -> str:
        """The results in columns, for a terminal."""
        rows = [("stage", "result", "seconds", "detail")]
        rows += [(r.stage, r.result, f"{r.seconds:.1f}", r.detail) for r in self.results]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        return "\n".join(
            "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]])
            for row in rows
        )

    def markdown(self) -> str:
        lines = ["# GPU check", "", *(f"* {key}: {value}" for key, value in self.machine.items())]
        lines += ["", "| stage | result | seconds | detail |", "| --- | --- | ---: | --- |"]
        for r in self.results:
            detail = r.detail.replace("|", "\\|")
            lines.append(f"| {r.stage} | {r.result} | {r.seconds:.1f} | {detail} |")
        for heading, text in self.sections.items():
            lines += ["", f"## {heading}", "", text.strip()]
        return "\n".join(lines) + "\n"

    def write(self) -> None:
        content = {
            "machine": self.machine,
            "stages": [asdict(result) for result in self.results],
            "sections": self.sections,
        }
        for name, text in (
            ("report.json", json.dumps(content, indent=1) + "\n"),
            ("report.md", self.markdown()),
        ):
            scratch = self.folder / f".{name}"
            scratch.write_text(text)
            scratch.replace(self.folder / name)  # at once: never half a report


def carry_out(stages: Iterable[Stage], report: Report) -> bool:
    """Runs all stages in turn; returns whether none failed."""
    stages = list(stages)
    report.results = [Result(stage.name) for stage in stages]
    by_name = {result.stage: result for result in report.results}
    for stage in stages:
        result = by_name[stage.name]
        result.result = "running"
        report.write()
        began = time.monotonic()
        try:
            if stage.needs is not None and by_name[stage.needs].result != "passed":
                raise Skipped(f"the {stage.needs} failed")
            result.detail = stage.action(stage.limit_s)
            result.result = "passed"
        except Skipped as reason:
            result.result, result.detail = "skipped", str(reason)
        except Failed as reason:
            result.result, result.detail = "failed", str(reason)
        except Exception as error:  # a mistake in one stage must not take the others along
            result.result, result.detail = "failed", f"{type(error).__name__}: {error}"
        result.seconds = time.monotonic() - began
        report.write()
        print(f"{stage.name}: {result.result} after {result.seconds:.1f} s", flush=True)
    return all(result.result != "failed" for result in report.results)
