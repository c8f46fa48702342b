"""What a call launches, and how often it waits: counted in the profiler's events."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

#: Calls of the CUDA runtime that wait for the device. (An asynchronous copy waits by one of these.)
SYNCS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")

#: Between two calls nothing runs for this long, so that the clocks of host and device, which agree
#: to some microseconds, leave no doubt whose a kernel is.
PAUSE_S = 2e-3


@dataclass(frozen=True)
class Counts:
    """What one call did on the device, and how often the host waited for the device in it."""

    kernels: int = 0
    memcpys: int = 0
    device_to_host: int = 0
    memsets: int = 0
    syncs: int = 0


def profiled(calls: dict[str, Callable[[], Any]], device: torch.device) -> dict[str, Counts]:
    """Makes each call once under the profiler."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, acc_events=True) as recorded:
        for name, call in calls.items():
            with record_function(name):
                call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            time.sleep(PAUSE_S)
    return count(recorded.events(), calls)


def count(events: Iterable[Any], names: Iterable[str]) -> dict[str, Counts]:
    """Assigns events to the named ranges on the host, in the order in which these ran.

    Args:
        events: ``FunctionEvent`` of torch; their times are in microseconds.
        names: those of the ranges.
    """
    events = list(events)
    names = set(names)
    ranges = sorted(
        (e for e in events if e.device_type == DeviceType.CPU and e.name in names),
        key=lambda e: e.time_range.start,
    )
    early = PAUSE_S * 1e6 / 2
    starts = [r.time_range.start - early for r in ranges] + [float("inf")]
    return {
        r.name: _count([e for e in events if start <= e.time_range.start < end], r.time_range.end)
        for r, start, end in zip(ranges, starts, starts[1:], strict=False)
    }


def _count(events: list[Any], returned: float) -> Counts:
    """Counts the events of one call, which returned to its caller at the time given."""
    on_device = [
        e.name for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation
    ]
    memcpys = [name for name in on_device if name.startswith("Memcpy")]
    memsets = [name for name in on_device if name.startswith("Memset")]
    syncs = [
        e
        for e in events
        if e.device_type == DeviceType.CPU and e.name in SYNCS and e.time_range.start < returned
    ]
    return Counts(
        kernels=len(on_device) - len(memcpys) - len(memsets),
        memcpys=len(memcpys),
        device_to_host=sum(name.startswith("Memcpy DtoH") for name in memcpys),
        memsets=len(memsets),
        syncs=len(syncs),
    )
