"""The recipe with a fault in one rank: recipe_faults.py FAULT[,FAULT...] RANK ARGUMENTS...

Of several faults there is one each time that torchrun starts the ranks.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from pathlib import Path

from scripts import example

from syncbn_cuda import FastSyncBatchNorm, functional

recipe = example("train_segmentation")
data = example("segmentation.data")


def before(owner: type, method: str, fault) -> None:
    """Makes a method do something else first."""
    original = getattr(owner, method)

    def faulty(self, *args):
        fault(*args)
        return original(self, *args)

    setattr(owner, method, faulty)


def dies() -> None:
    """In the second epoch, without a word."""

    def die(epoch: int) -> None:
        if epoch == 1:
            os._exit(9)

    before(recipe.Recipe, "train_epoch", die)


def in_the_second_epoch(fault, owner: type, method: str) -> None:
    """At a call in its midst."""
    calls = itertools.count(1)

    def arm(epoch: int) -> None:
        if epoch == 1:
            before(owner, method, lambda *_: fault() if next(calls) == 8 else None)

    before(recipe.Recipe, "train_epoch", arm)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise RuntimeError("planted")


def killed_in_forward() -> None:
    in_the_second_epoch(kill, FastSyncBatchNorm, "forward")


def killed_in_backward() -> None:
    in_the_second_epoch(kill, functional._SyncBatchNorm, "backward")


def killed_between() -> None:
    in_the_second_epoch(kill, recipe.UNet, "forward")


def raises_in_forward() -> None:
    in_the_second_epoch(fail, FastSyncBatchNorm, "forward")


def in_the_second_step(fault) -> None:
    forwards = itertools.count(1)  # of which the first two try the net out and warm up

    def second(*_) -> None:
        if next(forwards) == 5:
            fault()

    before(recipe.UNet, "forward", second)


def raises() -> None:
    """While the others are in the midst of a step."""
    in_the_second_step(fail)


def stalls() -> None:
    """In the second step, for good; the others wait for it in a collective."""

    def stall() -> None:
        Path(os.environ["STALLED"]).touch()
        time.sleep(1000)

    in_the_second_step(stall)


def computes_slowly() -> None:
    before(recipe.UNet, "forward", lambda *_: time.sleep(0.2))


def reads_slowly() -> None:
    before(data.Crops, "__getitem__", lambda *_: time.sleep(0.05))


def evaluates_slowly() -> None:
    """All that is held out, and not the one image that the net is tried out on."""
    before(recipe.Recipe, "label", lambda which: time.sleep(8 if len(which) > 1 else 0))


if __name__ == "__main__":
    _, faults, rank, *arguments = sys.argv
    start = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    for fault in faults.split(",")[start : start + 1]:
        if rank == os.environ.get("RANK", "0"):
            globals()[fault]()
    sys.argv = ["train_segmentation.py", *arguments]
    recipe.main()
