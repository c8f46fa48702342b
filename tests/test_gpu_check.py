"""What gpu_check.py makes of its stages, which stand-ins take the place of: limits and report."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import checkout
import gpu_check
import pytest
import stages
from stages import Done, Failed, Report, Skipped, Stage, carry_out, run

#: Starts a child in a process group of its own, says who that is, and waits for it.
HANGS = ["bash", "-c", "set -m; sleep 600 & echo $!; wait"]
LEAVES = ["bash", "-c", "set -m; sleep 600 & echo $!"]


def is_alive(pid):
    """Whether a process runs; a zombie that nobody has collected yet does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_time_limit_ends_a_command_and_what_it_started(tmp_path):
    log = tmp_path / "x.log"
    began = time.monotonic()
    done = run({"hangs": HANGS, "ends": ["echo", "done"]}, log, 2, os.environ, tmp_path)
    assert time.monotonic() - began < 30
    assert done["ends"] == Done(0, "done\n")
    assert done["hangs"].code is None
    wait_until(lambda: not is_alive(int(done["hangs"].output)))
    assert "ends: done" in log.read_text()


def test_what_a_command_left_running_ends_with_it(tmp_path):
    (done,) = run({"x": LEAVES}, tmp_path / "x.log", 60, os.environ, tmp_path).values()
    assert done.code == 0
    wait_until(lambda: not is_alive(int(done.output)))


def test_what_took_a_session_of_its_own_does_not_hold_up_the_check(tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "GRACE_S", 0.1)
    escapes = ["bash", "-c", "setsid sleep 600 & echo $!; wait"]
    began = time.monotonic()
    (done,) = run({"x": escapes}, tmp_path / "x.log", 1, os.environ, tmp_path).values()
    assert time.monotonic() - began < 30
    os.kill(int(done.output), signal.SIGKILL)


def test_what_cannot_be_killed_does_not_hold_up_the_check(tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "GRACE_S", 0.1)
    monkeypatch.setattr(stages, "_session", lambda leader: [2**30])  # more than there can be
    began = time.monotonic()
    assert run({"x": ["true"]}, tmp_path / "x.log", 60, os.environ, tmp_path) == {"x": Done(0, "")}
    assert time.monotonic() - began < 30


def start(tmp_path, *lines):
    """Starts Python beside stages.py."""
    code = "\n".join(["import os, signal", "from pathlib import Path", "import stages", *lines])
    environment = os.environ | {"PYTHONPATH": str(Path(gpu_check.__file__).parent)}
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, cwd=tmp_path, env=environment)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_commands_end_when_the_check_is_told_to(tmp_path, name):
    """As on a machine that is taken back. The signal comes twice where make passes it on."""
    commands = {str(index): HANGS for index in range(6)}
    check = start(
        tmp_path,
        f"signal.signal(signal.{name}, signal.SIG_DFL)  # though this process ignores it",
        "stages.end_at_signals()",
        f"stages.run({commands}, Path('x.log'), 60, os.environ, '.')",
    )
    log = tmp_path / "x.log"

    def told():
        return re.findall(r"^\d: (\d+)$", log.read_text(), re.MULTILINE) if log.exists() else []

    wait_until(lambda: len(told()) == len(commands))
    number = signal.Signals[name]
    check.send_signal(number)
    time.sleep(0.03)
    check.send_signal(number)
    assert check.wait(30) == 128 + number
    wait_until(lambda: not any(is_alive(int(pid)) for pid in told()))


def test_a_signal_that_is_ignored_stays_so(tmp_path):
    """A check under nohup outlives the terminal."""
    ignored = "signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    check = start(tmp_path, ignored, "stages.end_at_signals()", "signal.raise_signal(1)")
    assert check.wait(30) == 0


def fails(limit_s):
    raise Failed("3 | wrong")


def skips(limit_s):
    raise Skipped("nothing to do")


def breaks(limit_s):
    raise KeyError("a mistake")


STAGES = [
    Stage("one", 1, fails),
    Stage("two", 2, lambda limit_s: f"had {limit_s} s"),
    Stage("three", 1, skips),
    Stage("four", 1, breaks),
    Stage("five", 1, lambda limit_s: "never", needs="one"),
    Stage("six", 1, lambda limit_s: "fine", needs="two"),
]


def test_a_failing_stage_does_not_stop_the_next(tmp_path):
    report = Report(tmp_path, {"GPU": "none"})
    assert not carry_out(STAGES, report)
    assert [(r.stage, r.result, r.detail) for r in report.results] == [
        ("one", "failed", "3 | wrong"),
        ("two", "passed", "had 2 s"),
        ("three", "skipped", "nothing to do"),
        ("four", "failed", "KeyError: 'a mistake'"),
        ("five", "skipped", "the one failed"),
        ("six", "passed", "fine"),
    ]
    assert carry_out(STAGES[1:3], report)


def test_the_table_and_the_report_say_the_same(tmp_path):
    report = Report(tmp_path, {"GPU": "none", "commit": "abc"})
    report.sections["Failures"] = "tests/x.py"
    carry_out(STAGES, report)
    header, *rows = report.table().splitlines()
    assert header.split() == ["stage", "result", "seconds", "detail"]
    assert [row.split()[:2] for row in rows] == [[r.stage, r.result] for r in report.results]
    assert rows[0].endswith("3 | wrong")
    told = json.loads((tmp_path / "report.json").read_text())
    assert [stage["result"] for stage in told["stages"]] == [r.result for r in report.results]
    assert told["machine"]["commit"] == "abc"
    text = (tmp_path / "report.md").read_text()
    for part in ("* GPU: none", "| one | failed | 0.0 | 3 \\| wrong |", "## Failures", "| six |"):
        assert part in text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.json", "report.md"]


def test_the_report_is_complete_at_every_moment(tmp_path):
    seen = []

    def look(limit_s):
        told = json.loads((tmp_path / "report.json").read_text())
        seen.append([stage["result"] for stage in told["stages"]])
        return ""

    carry_out([Stage(name, 1, look) for name in "ab"], Report(tmp_path))
    assert seen == [["running", "not reached"], ["passed", "running"]]


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with a GPU whose commands answer what a test wants them to."""
    answers = {}

    class Scripted(gpu_check.Machine):
        def run(self, log, limit_s, **commands):
            (self.out / log).touch()
            self.commands.update(commands)
            return {name: answers.get(name, answers.get("")) for name in commands}

    scripted = Scripted(tmp_path, tmp_path, {"PATH": ""}, "580.1", "9.0")
    Scripted.answers, Scripted.commands = answers, {}
    return scripted


SOUND = "36 steps are right on cuda\n========= ERROR SUMMARY: 0 errors\n"


def test_the_sanitizers_verdicts(machine, monkeypatch):
    monkeypatch.setattr(gpu_check, "compute_sanitizer", lambda: "/compute-sanitizer")
    machine.answers[""] = Done(0, SOUND)
    assert "nothing found" in gpu_check.sanitize(machine, 9)
    assert set(machine.commands) == set(gpu_check.TOOLS)
    machine.answers["racecheck"] = Done(1, "========= RACECHECK SUMMARY: 2 hazards displayed\n")
    machine.answers["synccheck"] = Done(None, "")
    with pytest.raises(Failed, match="racecheck: RACECHECK SUMMARY: 2 haz.*synccheck was stopped"):
        gpu_check.sanitize(machine, 9)
    machine.answers.update(racecheck=Done(0, SOUND), synccheck=Done(0, SOUND.splitlines()[1]))
    with pytest.raises(Failed, match="synccheck: ERROR SUMMARY: 0 errors"):  # and watched nothing
        gpu_check.sanitize(machine, 9)
    machine.answers[""] = Done(1, "========= Error: Device not supported. Please refer to ...\n")
    with pytest.raises(Skipped, match="Device not supported"):
        gpu_check.sanitize(machine, 9)
    monkeypatch.setattr(gpu_check, "compute_sanitizer", lambda: None)
    with pytest.raises(Skipped, match="no compute-sanitizer"):
        gpu_check.sanitize(machine, 9)


def test_the_tests_verdicts(machine, tmp_path):
    passed = "../tests/test_gpu.py::test_a[torch.float32-(5, 3)] PASSED [ 50%]\n"
    report = Report(tmp_path)
    test = partial(gpu_check.test, machine, report, 9)
    machine.answers[""] = Done(0, passed + passed + "=== 2 passed in 1 s ===\n")
    assert test().endswith("passed")
    failed = "x.py::test_b FAILED [100%]\nFAILED x.py::test_b - assert 1 == 2\n"
    machine.answers[""] = Done(1, passed + failed)
    with pytest.raises(Failed, match="1 failed|[0-9]+ failed, [0-9]+ passed"):
        test()
    assert "FAILED x.py::test_b - assert 1 == 2" in report.sections["Failures"]
    machine.answers[""] = Done(None, passed + "x.py::test_c ")
    with pytest.raises(Failed, match="stopped after 9 s: .* in x.py::test_c"):
        test()
    machine.answers[""] = Done(5, "=== no tests ran in 1 s ===\n")
    with pytest.raises(Failed, match="no test was collected"):
        test()
    machine.answers[""] = Done(0, passed.replace("PASSED", "SKIPPED (no GPU)"))
    with pytest.raises(Skipped, match="skipped"):
        test()


def test_a_gpu_that_torch_does_not_find_is_a_failure(machine):
    with pytest.raises(Failed, match="torch finds none"):
        gpu_check.build(machine._replace(arch=None), 9)


def test_python_without_torch_is_a_failure_that_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "PROBE", "import no_such_torch")
    machine, about = gpu_check.survey(tmp_path, tmp_path)
    assert about["GPU"] == "none found"
    what = f"cannot be imported in this Python, {sys.executable}: .*named 'no_such_torch'"
    with pytest.raises(Failed, match=what):
        gpu_check.build(machine, 9)


def test_commands_run_in_an_environment_of_the_check(tmp_path, monkeypatch):
    """A killed build leaves its scratch in what is removed, and pytest runs as it is told here."""
    monkeypatch.setattr(gpu_check, "PROBE", "")
    monkeypatch.setenv("PYTEST_ADDOPTS", "--collect-only")
    machine, _ = gpu_check.survey(tmp_path, tmp_path)
    assert "PYTEST_ADDOPTS" not in machine.environment
    scratch = Path(machine.environment["TMPDIR"])
    assert scratch.is_dir() and scratch.is_relative_to(machine.scratch)


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_of_the_checkout_alone(tmp_path, monkeypatch):
    inner = tmp_path / "inner"
    inner.mkdir()
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setattr(checkout, "ROOT", tmp_path)
    assert re.fullmatch("[0-9a-f]{40,}", checkout.commit())
    monkeypatch.setattr(checkout, "ROOT", inner)
    assert checkout.commit().startswith("unknown; sources ")


def test_what_a_check_did_not_write_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", str(tmp_path)])
    monkeypatch.setattr(gpu_check, "end_at_signals", lambda: None)
    monkeypatch.setattr(gpu_check, "survey", lambda *_: (None, {"GPU": "none"}))
    monkeypatch.setattr(gpu_check, "plan", lambda *_: [])
    for name in (*gpu_check.FILES, "my.log"):
        (tmp_path / name).touch()
    assert gpu_check.main() == 0
    assert [path.name for path in tmp_path.iterdir()] == ["my.log"]


def test_every_stage_within_seven_minutes_and_eight_files(machine, tmp_path, monkeypatch):
    stages = gpu_check.plan(machine, Report(tmp_path))
    assert [stage.name for stage in stages] == list(gpu_check.LIMITS_S)
    assert sum(stage.limit_s for stage in stages) <= 400
    logs = {f"{stage.name}.log" for stage in stages}
    files = logs | {"report.json", "report.md", "bench-cuda.json", "bench-cuda.md"}
    assert files < set(gpu_check.FILES) and len(files) <= 8
