"""Starts ranks for a test: ``run(world_size, function, *args)`` calls function(rank, *args).

The ranks are processes with a process group; what they return comes back as a list by rank. A rank
that raises, or that is not done in time (a hang), fails the test with every rank's traceback. Tests
take ``run`` as a fixture, so that the same test also runs over another backend or device.
"""

from __future__ import annotations

import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map_only

TIMEOUT = 120.0


def _rank_main(
    rank: int,
    world_size: int,
    backend: str,
    store: str,
    setup: Callable[[int], object] | None,
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
            timeout=timedelta(seconds=60),
        )
        results.put((rank, True, function(rank, *args)))
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
) -> list[Any]:
    """Runs a module-level function on every rank; returns what they return, by rank.

    ``setup(rank)`` comes first on each rank, even before the process group. If it sets a default
    device, tensors among the arguments arrive there; they travel in memory of the CPU.
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
                args=(rank, world_size, backend, store, setup, results, function, args),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        try:
            answers = _collect(results, ranks, time.monotonic() + timeout)
            for process in ranks:
                process.join(30)
            return answers
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _collect(results: Any, ranks: list[Any], deadline: float) -> list[Any]:
    answers: dict[int, Any] = {}
    while len(answers) < len(ranks):
        try:
            rank, succeeded, answer = results.get(timeout=0.5)
        except queue.Empty:
            dead = [r for r, p in enumerate(ranks) if p.exitcode not in (None, 0)]
            missing = sorted(set(range(len(ranks))) - set(answers))
            assert time.monotonic() < deadline, f"ranks {missing} hang"
            assert not set(dead) & set(missing), f"ranks {dead} died without a word"
            continue
        assert succeeded, f"rank {rank} raised:\n{answer}"
        answers[rank] = answer
    return [answers[rank] for rank in range(len(ranks))]


@contextmanager
def fake_world(size: int) -> Iterator[None]:
    """Makes this process rank 0 of a world of some size, whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
