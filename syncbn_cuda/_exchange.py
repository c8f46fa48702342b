"""Objects from every rank to every rank, outside of training: slow, and sure to arrive."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist

from syncbn_cuda._collective import serves_cpu

Value = TypeVar("Value")


def is_distributed() -> bool:
    """Whether this process has a world of ranks, be it of one."""
    return dist.is_available() and dist.is_initialized()


def gather(value: Value) -> list[Value]:
    """Returns what every rank of the world gives, by rank; that of this process where it is alone.

    A collective. It goes over the CPU, by a group of its own where the world has no backend there:
    ranks whose devices are in disorder (two on one GPU, say) can still talk.

    Args:
        value: anything that can be pickled.
    """
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    if serves_cpu(dist.group.WORLD):
        dist.all_gather_object(values, value)
        return values
    group: Any = dist.new_group(backend="gloo")
    try:
        dist.all_gather_object(values, value, group=group)
    finally:
        dist.destroy_process_group(group)
    return values
