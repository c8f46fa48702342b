"""Timing that a busy machine does not turn into luck.

Candidates take turns (A, B, A, B, ...), so that a machine that slows down slows all of them, and
the ratio of two candidates is taken turn by turn. Times are medians with the 20th and the 80th
percentile, because a shared machine has a long tail on one side.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

#: More than the second-level cache of any GPU holds.
FLUSH_BYTES = 256 * 2**20

#: A turn on the CPU repeats a call until it takes about this long, above the clock's grain.
CPU_TURN_S = 2e-3


@dataclass(frozen=True)
class Spread:
    """A median between the 20th and the 80th percentile."""

    p50: float
    p20: float
    p80: float

    @classmethod
    def of(cls, values: np.ndarray) -> Spread:
        p20, p50, p80 = np.percentile(values, (20, 50, 80))
        return cls(float(p50), float(p20), float(p80))

    def __str__(self) -> str:
        return f"{_short(self.p50)} [{_short(self.p20)}, {_short(self.p80)}]"


def _short(value: float) -> str:
    """Three digits that count, and never an exponent."""
    for limit, decimals in ((9.995, 2), (99.95, 1)):
        if abs(value) < limit:
            return f"{value:.{decimals}f}"
    return f"{value:.0f}"


def interleave(
    candidates: dict[str, Callable[[], Any]],
    device: torch.device,
    turns: int,
    warm_up: int = 3,
    before: Callable[[Callable[[], Any]], Any] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, np.ndarray]:
    """Times candidates in turn.

    In a process group every rank must call it with the same candidates: their calls may be
    collective, so all ranks repeat a call equally often.

    Args:
        candidates: what to call, by name.
        device: where the calls work.
        turns: how often each candidate has its turn.
        warm_up: how many calls of each come before, untimed.
        before: what comes before each timed call on CUDA, given that call: it keeps the GPU busy
            while the host launches what is timed. Default: more than the second-level cache holds
            is written, so that the input comes from memory.
        clock: what tells the seconds on the CPU.

    Returns:
        Microseconds a call, ``(turns,)`` for each candidate; the same index is the same round.
    """
    for call in candidates.values():
        for _ in range(warm_up):
            call()
    if device.type == "cpu":
        return _interleave_cpu(candidates, turns, clock)
    return _interleave_cuda(candidates, device, turns, before or flush(device))


def flush(device: torch.device) -> Callable[[Any], Any]:
    """Returns what writes over the GPU's second-level cache."""
    room = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
    return lambda _: room.zero_()


def _interleave_cpu(
    candidates: dict[str, Callable[[], Any]], turns: int, clock: Callable[[], float]
) -> dict[str, np.ndarray]:
    repeats = {}
    for name, call in candidates.items():
        took = min(_seconds(call) for _ in range(3))  # one alone may be interrupted
        repeats[name] = _agree(max(1, min(1000, int(CPU_TURN_S / took))))
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(turns):
        # Who comes after a copy, say, finds the caches full of it: an untimed call goes ahead of
        # each turn, and every second round is in the reverse order.
        for name, call in list(candidates.items())[:: -1 if turn % 2 else 1]:
            call()
            began = clock()
            for _ in range(repeats[name]):
                call()
            times[name].append((clock() - began) / repeats[name])
    return {name: 1e6 * np.array(each) for name, each in times.items()}


def _seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _agree(repeats: int) -> int:
    """Makes the number of rank 0 that of all ranks."""
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return repeats
    agreed = torch.tensor(repeats)
    dist.broadcast(agreed, src=0)
    return int(agreed)


def _interleave_cuda(
    candidates: dict[str, Callable[[], Any]],
    device: torch.device,
    turns: int,
    before: Callable[[Callable[[], Any]], Any],
) -> dict[str, np.ndarray]:
    events: dict[str, list[Any]] = {name: [] for name in candidates}
    for _ in range(turns):
        for name, call in candidates.items():
            # The time is that of the GPU, plus what the host still needs once the GPU is through
            # with this: for many launches, or for waiting.
            before(call)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize(device)
    return {
        name: 1e3 * np.array([start.elapsed_time(end) for start, end in each])
        for name, each in events.items()
    }


def ratio(times: dict[str, np.ndarray], ours: str, baseline: str) -> Spread:
    """How many times as fast as the baseline ours is, turn by turn: above 1, ours is faster."""
    return Spread.of(times[baseline] / times[ours])


def ratios(times: dict[str, np.ndarray], ours: str) -> dict[str, dict[str, float]]:
    """The ratio of each other candidate to ours, as rows store it; none where ours is missing."""
    others = [name for name in times if name != ours and ours in times]
    return {f"{name} / {ours}": asdict(ratio(times, ours, name)) for name in others}


def geometric_mean(ratios: Sequence[dict[str, float]]) -> Spread:
    """The geometric mean of ratios that are stored in rows: of medians, and of percentiles."""
    logs = np.log([[each[name] for name in ("p50", "p20", "p80")] for each in ratios])
    return Spread(*np.exp(logs.mean(axis=0)).tolist())


def progress(jobs: Iterable, unit: str = "layer") -> Any:
    """Shows how far a loop is: on rank 0, and where tqdm is installed."""
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        return jobs
    return tqdm(jobs, unit=unit, disable=int(os.environ.get("RANK", 0)) > 0)
