"""The process group that a question is asked in."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


def rank() -> int:
    """This process among those that torchrun started; 0 without it."""
    return int(os.environ.get("RANK", 0))


def ranks() -> int:
    """How many processes torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", 1))


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """The group of torchrun, or of this process alone: NCCL on CUDA, Gloo on the CPU."""
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if device.type == "cuda":
        dist.init_process_group("nccl", device_id=device, **alone)
    else:
        dist.init_process_group("gloo", **alone)
    try:
        yield
    finally:
        gc.collect()  # DistributedDataParallel, in cycles, keeps Gloo's threads beyond Python's end
        dist.destroy_process_group()
