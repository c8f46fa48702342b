"""The recipe with a fault in one rank: recipe_faults.py FAULT RANK ARGUMENTS..."""

from __future__ import annotations

import os
import sys
import time

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


def raises() -> None:
    """In the second step; the others are in the midst of it."""
    steps = []

    def fail(*_) -> None:
        steps.append(None)
        if len(steps) == 4:  # after the warm-up
            raise RuntimeError("planted")

    before(recipe.UNet, "forward", fail)


def computes_slowly() -> None:
    before(recipe.UNet, "forward", lambda *_: time.sleep(0.2))


def reads_slowly() -> None:
    before(data.Crops, "__getitem__", lambda *_: time.sleep(0.05))


def evaluates_slowly() -> None:
    before(recipe.Recipe, "label", lambda *_: time.sleep(8))


if __name__ == "__main__":
    _, fault, rank, *arguments = sys.argv
    if rank == os.environ.get("RANK", "0"):
        globals()[fault]()
    sys.argv = ["train_segmentation.py", *arguments]
    recipe.main()
