"""The time of a GPU alone: CUDA graphs over rotating buffers, and what a call needs of memory.

Cold: a graph holds one call for each of several buffers, which together outgrow the second-level
cache twice, and that cache is flushed before: every input comes from memory, as in a net whose
other layers ran in between. Warm: a graph repeats a call on one buffer, right after itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import numpy as np
import torch

from benchmarks.harness import flush, interleave

#: Enough calls in one graph to make little of its launch.
MOST_BUFFERS = 16

#: Cycles of a GPU, about half a millisecond: time for the host to launch one eager call.
HOLD_CYCLES = 1_000_000

Call = Callable[[], Any]


def rotation(bytes: int, cache_bytes: int) -> int:
    """How many buffers of so many bytes outgrow a cache twice, or as many as a graph bears."""
    return min(MOST_BUFFERS, max(2, 2 * cache_bytes // bytes + 1))


def captured(calls: Sequence[Call], keep: bool) -> Call:
    """Captures calls in a row; returns their replay.

    Args:
        calls: already warmed up, on the current stream, which is not the default one.
        keep: gives each result memory of its own, where a graph would else write one over another.
    """
    graph = torch.cuda.CUDAGraph()
    results = []
    # Threads of NCCL may ask after their events meanwhile.
    with torch.cuda.graph(
        graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
    ):
        for call in calls:
            result = call()
            if keep:
                results.append(result)
            del result
    return graph.replay


def time_graphs(
    calls: dict[str, Sequence[Call]], device: torch.device, turns: int, cold: bool
) -> dict[str, np.ndarray]:
    """Times each candidate's calls, one for each buffer, by replays of a graph.

    Returns:
        Microseconds of the GPU for one call, ``(turns,)`` for each candidate.
    """
    graphs, size = {}, {}
    for name, each in calls.items():
        row = each if cold else [each[0]] * len(each)
        graphs[name] = captured(row, keep=cold)
        size[name] = len(row)
    before = flush(device) if cold else lambda call: call()
    times = interleave(graphs, device, turns, warm_up=1, before=before)
    return {name: each / size[name] for name, each in times.items()}


def time_eager(
    calls: dict[str, Sequence[Call]], device: torch.device, turns: int, cold: bool
) -> dict[str, np.ndarray]:
    """Times single eager calls that the host launches ahead; it shows where they wait for it."""

    def in_rotation(each: Sequence[Call]) -> Call:
        buffers = cycle(each if cold else each[:1])
        return lambda: next(buffers)()

    flushed = flush(device)

    def before(call: Call) -> None:
        flushed(call) if cold else call()
        torch.cuda._sleep(HOLD_CYCLES)

    rotating = {name: in_rotation(each) for name, each in calls.items()}
    return interleave(rotating, device, turns, warm_up=1, before=before)


def peak_bytes(call: Call, device: torch.device) -> int:
    """What a call needs beyond what was allocated before it."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
