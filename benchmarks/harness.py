"""Timing that a busy machine does not turn into luck, and the machine it was done on.

Candidates take turns (A, B, A, B, ...), so that a machine that slows down slows all of them, and
the ratio of two candidates is taken turn by turn. Times are medians with the 20th and the 80th
percentile, because a shared machine has a long tail on one side.
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

#: More than the second-level cache of any GPU holds: written before each timed call, so that the
#: input comes from memory, as it does in a net whose other layers ran in between.
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
    candidates: dict[str, Callable[[], Any]], device: torch.device, turns: int, warm_up: int = 3
) -> dict[str, np.ndarray]:
    """Times candidates in turn.

    In a process group every rank must call it with the same candidates: their calls may be
    collective, so all ranks repeat a call equally often.

    Args:
        candidates: what to call, by name.
        device: where the calls work.
        turns: how often each candidate has its turn.
        warm_up: how many calls of each come before, untimed.

    Returns:
        Microseconds a call, ``(turns,)`` for each candidate; the same index is the same round.
    """
    for call in candidates.values():
        for _ in range(warm_up):
            call()
    timed = _interleave_cuda if device.type == "cuda" else _interleave_cpu
    return timed(candidates, device, turns)


def _interleave_cpu(
    candidates: dict[str, Callable[[], Any]], device: torch.device, turns: int
) -> dict[str, np.ndarray]:
    repeats = {}
    for name, call in candidates.items():
        began = time.perf_counter()
        call()
        took = time.perf_counter() - began
        repeats[name] = _agree(max(1, min(1000, int(CPU_TURN_S / took))))
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(turns):
        for name, call in candidates.items():
            began = time.perf_counter()
            for _ in range(repeats[name]):
                call()
            times[name].append((time.perf_counter() - began) / repeats[name])
    return {name: 1e6 * np.array(each) for name, each in times.items()}


def _agree(repeats: int) -> int:
    """Makes the number of rank 0 that of all ranks."""
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return repeats
    agreed = torch.tensor(repeats)
    dist.broadcast(agreed, src=0)
    return int(agreed)


def _interleave_cuda(
    candidates: dict[str, Callable[[], Any]], device: torch.device, turns: int
) -> dict[str, np.ndarray]:
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
    events: dict[str, list[Any]] = {name: [] for name in candidates}
    for _ in range(turns):
        for name, call in candidates.items():
            # While the GPU is busy with this, the host launches what is timed. So the time is that
            # of the GPU, plus what the host still needs: for many launches, or for waiting.
            flush.zero_()
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


def machine(device: torch.device) -> dict[str, Any]:
    """Says what a row was measured on; goes into each row, so that rows can be moved about."""
    cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        cores = len(os.sched_getaffinity(0))
    gpu = driver = None
    if device.type == "cuda":
        gpu = torch.cuda.get_device_name(device)
        driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "cpu": _cpu_model(),
        "cores": cores,
        "threads": torch.get_num_threads(),
        "ranks": dist.get_world_size() if dist.is_initialized() else 1,
        "gpu": gpu,
        "driver": driver.splitlines()[0] if driver else None,
        "cuda": torch.version.cuda if gpu else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "commit": _commit(),
    }


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit() -> str:
    here = str(Path(__file__).parent)
    commit = _output("git", "-C", here, "rev-parse", "--short=12", "HEAD")
    if commit is None:
        return "unknown"
    return commit + ("+changes" if _output("git", "-C", here, "status", "--porcelain") else "")


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
