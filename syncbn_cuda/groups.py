"""Process groups for layers that synchronise over a part of the ranks."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from syncbn_cuda._exchange import gather_or_raise, is_distributed


def sync_groups(size: int | str, *, ragged: bool = False, timeout: timedelta | None = None) -> Any:
    """Divides the world into groups to normalise over; returns the one that holds this rank.

    A collective: every rank calls it once, with the same arguments, after ``init_process_group``
    and before training. What it returns goes to ``convert_sync_batchnorm(model, group)``, to
    ``FastSyncBatchNorm(..., process_group=group)`` or to ``layer.process_group``. All of them take
    a dimension of a ``DeviceMesh`` as well, ``mesh["data"]``.

    Args:
        size: the number of consecutive ranks in a group: with 4, ranks 0 to 3 are one group and 4
            to 7 the next. Or ``"node"``: a group for each machine, by its host name, wherever its
            ranks stand.
        ragged: whether the last group may be smaller where ``size`` does not divide the world.
        timeout: how long a rank waits in a group for the others, as of ``init_process_group``; None
            for torch's default, whatever the world was given.

    Returns:
        A ``torch.distributed`` process group, with the backends of the world.

    Raises:
        ValueError: ``size`` is neither ``"node"`` nor a number from 1 to the size of the world,
            does not divide the world, or the arguments differ between ranks (then on all of them).
        TypeError: ``size`` is of another type.
        RuntimeError: ``torch.distributed`` is not initialised, or another rank raised one of these.

    Note:
        In a small group fewer ranks wait for each other, and fewer images make the statistics.

    Example::

        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> layer = FastSyncBatchNorm(16, process_group=sync_groups("node"))
        >>> dist.get_process_group_ranks(layer.process_group)
        [0]
        >>> dist.destroy_process_group()
    """
    if not is_distributed():
        raise RuntimeError(
            f"sync_groups({size!r}): expected torch.distributed to be initialised, as a group is a "
            "part of its world: call torch.distributed.init_process_group first"
        )
    world = dist.get_world_size()

    def declare() -> tuple[tuple[int | str, bool], str]:
        _check(size, ragged, world)
        return (size, ragged), socket.gethostname()

    told = list(gather_or_raise("sync_groups", declare).values())
    arguments = [arguments for arguments, _ in told]
    if arguments.count(arguments[0]) < world:
        shown = ", ".join(
            f"({size!r}, ragged={ragged}) on rank {rank}"
            for rank, (size, ragged) in enumerate(arguments)
        )
        raise ValueError(f"sync_groups: expected the same arguments on every rank, got {shown}")
    if isinstance(size, str):
        hosts = [host for _, host in told]
        parts = [
            [rank for rank in range(world) if hosts[rank] == host] for host in dict.fromkeys(hosts)
        ]
    else:
        parts = [list(range(first, min(first + size, world))) for first in range(0, world, size)]
    # Every rank takes part in the making of every group.
    groups = [dist.new_group(ranks, timeout=timeout) for ranks in parts]
    own = dist.get_rank()
    return next(group for ranks, group in zip(parts, groups, strict=True) if own in ranks)


def _check(size: object, ragged: bool, world: int) -> None:
    called = f"sync_groups({size!r})"
    if isinstance(size, str):
        if size != "node":
            raise ValueError(f'{called}: expected a number of ranks or "node"')
        return
    if not isinstance(size, int) or isinstance(size, bool):
        raise TypeError(
            f'{called}: expected a number of ranks or "node", got {type(size).__name__}'
        )
    if not 1 <= size <= world:
        raise ValueError(f"{called}: expected a size from 1 to the {world} ranks of the world")
    if world % size and not ragged:
        divisors = ", ".join(str(n) for n in range(1, world + 1) if world % n == 0)
        raise ValueError(
            f"{called}: {world} ranks do not divide into groups of {size}: give one of {divisors}, "
            f"or ragged=True for a last group of {world % size}"
        )
