"""Objects from every rank to every rank, outside of training: slow, and sure to arrive."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from syncbn_cuda._collective import serves_cpu

Value = TypeVar("Value")


def is_distributed() -> bool:
    """Whether this process has a world of ranks, be it of one."""
    return dist.is_available() and dist.is_initialized()


def own_rank() -> int:
    """This process's rank in the world; 0 where it is alone."""
    return dist.get_rank() if is_distributed() else 0


@contextmanager
def own_group() -> Iterator[Any]:
    """Makes a group of the whole world over the CPU, which no other message comes between."""
    group = dist.new_group(backend="gloo")
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def gather(value: Value, group: Any | None = None) -> list[Value]:
    """Returns what every rank gives, by rank; that of this process where it is alone.

    A collective. Over the world it goes over the CPU, by a group of its own where the world has no
    backend there: ranks whose devices are in disorder (two on one GPU, say) can still talk.

    Args:
        value: anything that can be pickled.
        group: the ranks that take part; None for the world.
    """
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    if group is not None or serves_cpu(dist.group.WORLD):
        dist.all_gather_object(values, value, group=group)
        return values
    with own_group() as group:
        dist.all_gather_object(values, value, group=group)
    return values


def gather_or_raise(
    caller: str, declare: Callable[[], Value], group: Any | None = None
) -> dict[int, Value]:
    """Returns what every rank declares, by its rank in the world; where one fails, all raise.

    Args:
        caller: the public function, for the error of the others.
        declare: gives what is to be gathered.
        group: as of :func:`gather`.
    """
    value, error = None, None
    try:
        value = declare()
    except Exception as raised:
        error = raised
    told = gather((own_rank(), value, shown(error)), group)
    raise_together(caller, error, [(rank, text) for rank, _, text in told])
    return {rank: value for rank, value, _ in told}  # type: ignore[misc]


def shown(error: Exception | None) -> str:
    """Returns an error as a peer is told of it; none is empty."""
    return "" if error is None else f"{type(error).__name__}: {error}"


def raise_together(caller: str, error: Exception | None, told: Sequence[tuple[int, str]]) -> None:
    """Raises what this rank ran into or else, in the caller's name, what a peer tells of."""
    if error is not None:
        raise error
    for rank, text in told:
        if text:
            raise RuntimeError(f"{caller}: rank {rank} raised {text}")
