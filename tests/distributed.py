"""Starts ranks for a test: ``run(world_size, function, *args)`` calls function(rank, *args).

The ranks are processes with a process group; what they return comes back as a list by rank. A rank
that raises, or that is not done in time (a hang), fails the test with every rank's traceback, and
so does one that does not end by itself. Tests take ``run`` as a fixture, so that the same test also
runs over another backend or device.
"""

from __future__ import annotations

import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map_only

TIMEOUT = 120.0
#: Seconds that a rank has to end once it has answered.
GRACE = 30.0


def _rank_main(
    rank: int,
    world_size: int,
    backend: str,
    store: str,
    setup: Callable[[int], object] | None,
    patience: float,
    together: bool,
    results: Any,
    function: Callable,
    args: Any,
) -> None:
    torch.set_num_threads(1)
    try:
        if setup is not None:
            setup(rank)
        device = torch.get_default_device()
        args = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), args)
        dist.init_process_group(
            backend,
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=patience),
        )
        results.put((rank, True, function(rank, *args)))
        if together:
            dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, False, traceback.format_exc()))


def run(
    world_size: int,
    function: Callable,
    *args: Any,
    backend: str = "gloo",
    setup: Callable[[int], object] | None = None,
    timeout: float = TIMEOUT,
    patience: float = 60.0,
    casualties: Collection[int] = (),
) -> list[Any]:
    """Runs a module-level function on every rank; returns what they return, by rank.

    ``setup(rank)`` comes first on each rank, even before the process group. If it sets a default
    device, tensors among the arguments arrive there; they travel in memory of the CPU.

    ``patience`` is the timeout of the process group in seconds. ``casualties`` are ranks that are
    meant to raise, die or stall: the answer of one that raises is its traceback, that of the others
    None. No rank then waits for another one at the end.
    """
    args = tree_map_only(torch.Tensor, torch.Tensor.cpu, args)
    # Forks of a server that has imported what ranks need and run nothing: quick, and free of the
    # CUDA context and the autograd threads that this process may have by now.
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["numpy", "pytest", "torch.distributed", "syncbn_cuda"])
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        ranks = [
            context.Process(
                target=_rank_main,
                args=(rank, world_size, backend, store, setup, patience, not casualties)
                + (results, function, args),
                daemon=False,  # or they could start none of their own, such as a DataLoader's
            )
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        try:
            answers = _collect(results, ranks, casualties, time.monotonic() + timeout)
            deadline = time.monotonic() + GRACE
            for rank in _others(ranks, casualties):
                ranks[rank].join(max(0.0, deadline - time.monotonic()))
                assert ranks[rank].exitcode == 0, f"rank {rank} ends with {ranks[rank].exitcode}"
            return answers
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _others(ranks: list[Any], casualties: Collection[int]) -> list[int]:
    return [rank for rank in range(len(ranks)) if rank not in casualties]


def _collect(
    results: Any, ranks: list[Any], casualties: Collection[int], deadline: float
) -> list[Any]:
    answers: dict[int, Any] = {}
    while missing := set(_others(ranks, casualties)) - set(answers):
        try:
            rank, succeeded, answer = results.get(timeout=0.5)
        except queue.Empty:
            dead = {r for r, p in enumerate(ranks) if p.exitcode not in (None, 0)}
            assert time.monotonic() < deadline, f"ranks {sorted(missing)} hang"
            assert not dead & missing, f"ranks {sorted(dead)} died without a word"
            continue
        assert succeeded or rank in casualties, f"rank {rank} raised:\n{answer}"
        answers[rank] = answer
    return [answers.get(rank) for rank in range(len(ranks))]


@contextmanager
def fake_world(size: int) -> Iterator[None]:
    """Makes this process rank 0 of a world of some size, whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
