"""The time of a collective apart from the wait for the slowest rank.

Each collective is preceded by two more, of a single value. The first ends when the last rank has
arrived; what it takes longer than the second usually does, which all ranks enter together, is the
wait. The collective itself then starts together too, up to how differently ranks leave the second.
That is less than the second one's time, which is given as the latency: no message takes less.

The local work before a collective also starts together, as it does in a net, where it begins when
the last layer's collective ends. On CUDA the times are between events on the stream, while the GPU
is kept busy for long enough that the host has launched all of it ahead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

#: Methods of a process group, those that its torch has: all that either SyncBatchNorm calls.
METHODS = ("allreduce", "allgather", "_allgather_base", "all_gather_single")

#: About a millisecond of a GPU, longer than a host needs to launch a layer's forward.
AHEAD_CYCLES = 2_000_000


#: Forward and backward of a step; backward takes what forward returns.
Halves = tuple[Callable[[], Any], Callable[[Any], Any]]


def time_collectives(
    steps: dict[str, Halves], device: torch.device, turns: int
) -> dict[str, dict[str, np.ndarray]]:
    """Times the collectives in steps that take turns, on all ranks at once.

    Args:
        steps: the same on every rank, by name.
        device: where they compute.
        turns: how often each has its turn.

    Returns:
        For each step ``collective``, ``wait`` and ``latency`` of this rank, in microseconds
        ``[turns, collectives of a step]``.
    """
    moments: dict[str, list[list[Any]]] = {name: [] for name in steps}
    with _observed(device) as (observed, align):
        for _ in range(turns):
            for name, (forward, backward) in steps.items():
                _start_together(device, align)
                output = forward()
                _start_together(device, align)
                backward(output)
                moments[name] += observed
                observed.clear()
    found = {}
    for name, each in moments.items():
        times = _microseconds(each, device).reshape(turns, len(each) // turns, 3)
        arrival, latency, itself = times.transpose(2, 0, 1)
        wait = arrival - np.median(latency, axis=0)
        found[name] = {"collective": itself, "wait": wait, "latency": latency}
    return found


def _start_together(device: torch.device, align: Callable[[], None]) -> None:
    if device.type == "cuda":
        torch.cuda._sleep(AHEAD_CYCLES)
    align()


@contextmanager
def _observed(device: torch.device) -> Iterator[tuple[list[list[Any]], Callable[[], None]]]:
    """Has all collectives preceded by two that align the ranks.

    Yields:
        A list that gets four moments of each collective: as this rank arrives, twice as all are
        aligned, and when it is done. And the function that aligns.
    """
    moments: list[list[Any]] = []
    originals = {
        name: getattr(dist.ProcessGroup, name)
        for name in METHODS
        if hasattr(dist.ProcessGroup, name)
    }
    value = torch.zeros(1, device=device)
    options = dist.AllreduceOptions()
    options.asyncOp = False  # as either SyncBatchNorm calls its own: on the current stream

    def align() -> None:
        work = originals["allreduce"](dist.group.WORLD, [value], options)
        if work is not None:
            work.wait()

    def observe(original: Callable) -> Callable:
        def collective(*arguments: Any) -> Any:
            marks = [_moment(device)]
            for _ in range(2):
                align()
                marks.append(_moment(device))
            work = original(*arguments)
            if work is not None:
                work.wait()
            moments.append([*marks, _moment(device)])
            return work

        return collective

    with ExitStack() as patches:
        for name, original in originals.items():
            patches.enter_context(mock.patch.object(dist.ProcessGroup, name, observe(original)))
        yield moments, align


def _moment(device: torch.device) -> Any:
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _microseconds(moments: list[list[Any]], device: torch.device) -> np.ndarray:
    """The times between the moments of each collective, ``[collectives, 3]``."""
    if not moments:
        return np.empty((0, 3))
    if device.type == "cpu":
        return 1e6 * np.diff(moments)
    torch.cuda.synchronize(device)
    # Not from a common first event: the difference of two long times is a rounded one.
    return 1e3 * np.array([[a.elapsed_time(b) for a, b in pairwise(marks)] for marks in moments])
