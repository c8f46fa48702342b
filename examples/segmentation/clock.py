"""Where the time of a step goes: data, computing, waiting for the slowest rank, the rest.

A rank that waits inside a collective cannot tell a slow network from a slow neighbour, and with
synchronised batch norm the ranks wait for each other at every layer. So two things are measured on
each rank, and the others follow:

    step        of wall clock, the mean since the last report; equal on all ranks, as they meet
                in every step
    data        of it, how long this rank's next batch was not there yet
    compute     how long this rank takes for one step by itself: it is made on a copy of the net and
                the optimizer, without collectives, on all ranks at once (the faster of two)
    waiting     what this rank has less to do than the slowest: data + compute of the slowest rank,
                minus its own
    collective  what remains of the step even for the slowest: messages under way, as far as nothing
                is computed meanwhile, and waits for a rank that is slow now and then only

Their sum is the step. What is reported is the mean over the ranks. A report costs two steps, which
are thrown away, and the memory of the copy. As "compute" is of one step and the others are means of
many, "collective" has the noise of one step too, and may come out a little below zero.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from segmentation.launch import World

T = TypeVar("T")


@dataclass
class Split:
    """Milliseconds of a step, and the rank with most to do."""

    step: float
    data: float
    compute: float
    waiting: float
    collective: float
    slowest: int

    def __str__(self) -> str:
        return (
            f"{self.step:.0f} ms a step: data {self.data:.0f}, compute {self.compute:.0f}, "
            f"waiting for rank {self.slowest} {self.waiting:.0f}, collective {self.collective:.0f}"
        )

    def numbers(self) -> dict[str, float]:
        return asdict(self)


def split(steps: list[float], data: list[float], compute: list[float]) -> Split:
    """Divides a step, given what each rank measured, in milliseconds."""
    busy = [mine + own for mine, own in zip(data, compute, strict=True)]
    step, slowest = max(steps), max(busy)
    ranks = len(busy)
    return Split(
        step=step,
        data=sum(data) / ranks,
        compute=sum(compute) / ranks,
        waiting=slowest - sum(busy) / ranks,
        collective=step - slowest,
        slowest=busy.index(slowest),
    )


class Clock:
    """Measures the steps of one rank."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.restart()

    def restart(self) -> None:
        self._synchronize()
        self.began, self.waited = time.perf_counter(), 0.0
        self.steps = self.batches = 0

    def waiting_for(self, batches: Iterator[T]) -> Iterator[T]:
        """Passes batches on, and counts how long each was waited for."""
        while True:
            began = time.perf_counter()
            batch = next(batches, None)
            self.waited += time.perf_counter() - began
            if batch is None:
                return
            self.batches += 1
            yield batch

    def report(
        self, prepare: Callable[[], Callable[[], None]], batches: int, loss: torch.Tensor
    ) -> tuple[Split, float]:
        """Divides the mean step since the last report, and sums a loss over ranks. A collective.

        Args:
            prepare: returns a function that makes a step without any collective or lasting effect.
            batches: how many such a step has. The last of an epoch may have fewer than the others.
            loss: of this rank.
        """
        self._synchronize()
        step = (time.perf_counter() - self.began) / self.steps
        step_alone = prepare()
        alone = min(self._time(step_alone) for _ in range(2))
        compute = alone * self.batches / self.steps / batches
        mine = torch.tensor(
            [step, self.waited / self.steps, compute, float(loss)], dtype=torch.float64
        )
        told = [torch.empty_like(mine) for _ in range(self.world.size)]
        dist.all_gather(told, mine)
        steps, data, compute_all, losses = torch.stack(told).T
        self.restart()
        found = split(*((1e3 * times).tolist() for times in (steps, data, compute_all)))
        return found, losses.sum().item()

    def _time(self, step_alone: Callable[[], None]) -> float:
        self._synchronize()
        dist.barrier()  # so that ranks that share a machine share it during this step as well
        began = time.perf_counter()
        step_alone()
        self._synchronize()
        return time.perf_counter() - began

    def _synchronize(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
