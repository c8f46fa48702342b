"""The recipe with a fault in one rank: recipe_faults.py FAULT RANK ARGUMENTS..."""

from __future__ import annotations

import itertools
import os
import sys
import time
from pathlib import Path

from scripts import example

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


def in_the_second_step(fault) -> None:
    forwards = itertools.count(1)  # of which the first two try the net out and warm up

    def second(*_) -> None:
        if next(forwards) == 5:
            fault()

    before(recipe.UNet, "forward", second)


def raises() -> None:
    """While the others are in the midst of a step."""

    def fail() -> None:
        raise RuntimeError("planted")

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
    _, fault, rank, *arguments = sys.argv
    if rank == os.environ.get("RANK", "0"):
        globals()[fault]()
    sys.argv = ["train_segmentation.py", *arguments]
    recipe.main()
