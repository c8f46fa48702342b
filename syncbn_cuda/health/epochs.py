"""Sees whether a shuffling ``DistributedSampler`` gives the same order in every epoch.

Such a sampler reads its epoch once for each order that it makes, in ``seed + epoch``. The number
that is put there counts how often that happened. ``set_epoch`` puts another in its place, and with
it the watch is gone; the sampler's class and its other attributes are left alone.
"""

from __future__ import annotations

import warnings
from typing import Any

from syncbn_cuda._exchange import own_rank

REMEDY = "call sampler.set_epoch(epoch) before each epoch"


class WatchedEpoch(int):
    """The number of an epoch, which counts the orders that were made with it."""

    orders = 0

    def __radd__(self, seed: int) -> int:
        self.orders += 1
        if self.orders == 2 and own_rank() == 0:
            warnings.warn(
                f"DistributedSampler: the second epoch has the order of the first: {REMEDY}",
                stacklevel=2,
            )
        return seed + int(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int(self),)  # copies and pickles are plain numbers


def watch(sampler: Any) -> None:
    """Begins to count the orders that a sampler makes, where it shuffles by its epoch."""
    own = vars(sampler)
    if own.get("shuffle") and type(own.get("epoch")) is int:
        own["epoch"] = WatchedEpoch(own["epoch"])


def repeats(sampler: Any) -> bool:
    """Whether a watched sampler has made the same order for two epochs."""
    epoch = getattr(sampler, "epoch", None)
    return isinstance(epoch, WatchedEpoch) and epoch.orders >= 2
