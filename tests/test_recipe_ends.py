"""How the training recipe ends where something is wrong: soon, saying why, and without harm."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from optional import optional
from scripts import LIMIT_S, environment, example, needs, run, torchrun
from test_recipe import FAULTS, RECIPE, SMALL
from toolkits import ROOT

pytestmark = needs(RECIPE)

for package in ("sklearn", "tqdm"):
    optional(package)


def begin(*command: object, **more: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        env=environment(**more),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )


def wait_for(path: Path, *processes: subprocess.Popen) -> None:
    """Waits until processes have written a file."""
    deadline = time.monotonic() + LIMIT_S
    while not path.exists():
        assert time.monotonic() < deadline
        assert all(process.poll() is None for process in processes)
        time.sleep(0.05)


def ranks_alone(*command: object, **more: str) -> list[subprocess.Popen]:
    """Two ranks, each started by itself."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"} | more
    return [
        begin(*command, RANK=str(rank), LOCAL_RANK=str(rank), MASTER_PORT=port, **world)
        for rank in range(2)
    ]


def ranks_of_torchrun(*command: object) -> list[subprocess.Popen]:
    return [begin(*torchrun(2), *command)]


@pytest.mark.parametrize(
    ("start", "number", "status"),
    (
        (ranks_alone, signal.SIGINT, 130),
        (ranks_of_torchrun, signal.SIGINT, 1),
        (ranks_of_torchrun, signal.SIGTERM, 1),
    ),
    ids=("alone", "torchrun", "time limit"),
)
def test_an_interruption_ends_all_ranks_and_leaves_a_whole_checkpoint(
    start, number, status, tmp_path
) -> None:
    # With workers, which get the signal as well.
    arguments = (*SMALL, "--epochs", 1000, "--workers", 1, "--out", tmp_path)
    processes = start(RECIPE, *arguments)
    try:
        wait_for(tmp_path / "checkpoint.pt", *processes)
        time.sleep(0.5)  # until its folder is on the disk as well
        interrupted = time.monotonic()
        for process in processes:
            process.send_signal(number)
        told = [process.communicate(timeout=LIMIT_S)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert time.monotonic() - interrupted < 60  # 1 or 2 on an idle machine; the timeout is 600
    # torchrun itself shows where the signal found it, and ends with 1.
    assert [process.returncode for process in processes] == [status] * len(processes)
    everything = "".join(told)
    assert everything.count("give the same arguments and --resume auto") == 1, everything
    for text in told:
        assert not re.search("KeyboardInterrupt|segmentation/", text), text[-4000:]
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["epoch"] >= 1


def test_ctrl_c_ends_a_rank_that_waits_for_another_one(tmp_path) -> None:
    stalled = tmp_path / "stalled"
    command = (FAULTS, "stalls", 1, *SMALL, "--out", tmp_path)
    first, second = ranks_alone(*command, STALLED=str(stalled))
    try:
        wait_for(stalled, first, second)
        time.sleep(2)  # until rank 0 is in the collective, where Python gets no signal
        first.send_signal(signal.SIGINT)
        told = first.communicate(timeout=60)[1]  # 3 seconds on an idle machine
        assert second.poll() is None
    finally:
        first.kill()
        second.kill()
    assert first.returncode == 130
    assert told.count("Interrupted. No epoch was completed; the same arguments start") == 1
    assert "Traceback" not in told


def interrupt_itself() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_of_a_process_that_prepares_batches_is_not_that_of_its_rank() -> None:
    reading, writing = os.pipe()
    for end in (reading, writing):
        os.set_blocking(end, False)
    before = signal.set_wakeup_fd(writing)
    try:
        worker = multiprocessing.get_context("fork").Process(target=interrupt_itself)
        with example("segmentation.launch").uninterrupted():
            worker.start()
        worker.join()
        assert worker.exitcode == 0  # deaf to it
        with pytest.raises(BlockingIOError):
            os.read(reading, 1)
        assert signal.set_wakeup_fd(before) == writing  # where the rank's own go again
    finally:
        signal.set_wakeup_fd(before)
        os.close(reading)
        os.close(writing)


IN_A_FINALISER = """
class Freed:
    pass

def ends(world):
    def send(_):
        os.kill(os.getpid(), NUMBER)
        time.sleep(0.01)
    freed = Freed()
    reference = weakref.ref(freed, send)
    del freed
    began = time.monotonic()
    try:
        while time.monotonic() - began < 60:
            time.sleep(0.001)
    finally:
        # Beyond that, the rank would have been ended from outside Python.
        print("soon" if time.monotonic() - began < launch.GRACE else "late", file=sys.stderr)
"""
WITH_A_WORKER = """
def ends(world):
    batches = iter(DataLoader(range(8), num_workers=1))
    next(batches)
    (worker,) = multiprocessing.active_children()
    say = launch._say_interrupted
    def end_the_worker_too(world):
        # By another process, as torchrun does: of its own rank it takes the signal as meant well.
        subprocess.run(["kill", str(worker.pid)], check=True)
        time.sleep(0.5)
        print("soon", file=sys.stderr)
        say(world)
    launch._say_interrupted = end_the_worker_too
    os.kill(os.getpid(), NUMBER)
"""


@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGTERM))
@pytest.mark.parametrize("ends", (IN_A_FINALISER, WITH_A_WORKER), ids=("finaliser", "worker"))
def test_a_signal_at_a_bad_moment_ends_a_run_as_at_any_other(ends, number, tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing, os, subprocess, sys, time, weakref\n"
        "from torch.utils.data import DataLoader\n"
        f"sys.path.append({str(ROOT / 'examples')!r})\n"
        "from segmentation import launch\n"
        f"NUMBER = {int(number)}\n{ends}\n"
        "launch.run(ends, 60)\n"
    )
    process = begin(script)
    told = process.communicate(timeout=LIMIT_S)[1]
    assert process.returncode == 130, told
    assert re.fullmatch("soon\n\nInterrupted. No epoch was completed; .*\n", told), told


@pytest.mark.parametrize("rank", (0, 1))
def test_an_error_in_one_rank_is_shown_once_and_ends_the_others(rank, tmp_path) -> None:
    began = time.monotonic()
    arguments = (*SMALL, "--epochs", 1, "--out", tmp_path)
    done = run(*torchrun(2), FAULTS, "raises", rank, *arguments, succeeds=False)
    assert time.monotonic() - began < 120  # 6 on an idle machine; the timeout is 600
    assert done.stderr.count(f"Rank {rank} failed, which ends the run:\nTraceback") == 1
    assert done.stderr.count("RuntimeError: planted") == 1
    assert f"Rank {1 - rank} failed" not in done.stderr


def raised_over(first: type[BaseException]) -> RuntimeError:
    """As torch.save does where it is interrupted."""
    try:
        try:
            raise first
        finally:
            raise RuntimeError("unexpected pos 918400")
    except RuntimeError as error:
        return error


INTERRUPTED = r"^\nInterrupted\. No epoch was completed"


@pytest.mark.parametrize(
    ("error", "ended", "status", "told"),
    (
        (lambda launch: raised_over(KeyboardInterrupt), "", 130, INTERRUPTED),
        (lambda launch: launch.Terminated(), "", 130, INTERRUPTED),
        (lambda launch: launch.Terminated(), "interrupted 1", 130, INTERRUPTED),
        (lambda launch: launch.Terminated(), "failed 1", 1, "^$"),
        (
            lambda launch: RuntimeError("pair.cc: Connection closed by peer [::1]:5"),
            "",
            1,
            "^error: another rank was killed, or its machine. No epoch was completed",
        ),
        (lambda launch: RuntimeError("planted"), "", 1, "^\nRank 0 failed, which ends the run:\n"),
    ),
    ids=("interrupted", "terminated", "both", "by torchrun", "lost", "failed"),
)
def test_why_a_run_ends_is_told_by_the_rank_that_knows(
    error, ended, status, told, monkeypatch, capsys
) -> None:
    launch = example("segmentation.launch")
    store = torch.distributed.HashStore()
    if ended:
        store.set("end", ended)
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.setattr(multiprocessing, "active_children", list)  # those of the tests
    launch._leave(launch.World(0, 1, torch.device("cpu"), store), error(launch))
    assert left == [status]
    assert re.search(told, capsys.readouterr().err)


def test_groups_that_do_not_divide_the_ranks_are_refused(tmp_path) -> None:
    done = run(*torchrun(2), RECIPE, "--sync-bn", "group:3", "--out", tmp_path, succeeds=False)
    told = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(told) == 1
    assert told[0].startswith("error: --sync-bn group:3: sync_groups(3): expected a size from 1")
