"""Threads and forks: layers do not get into each other's way, and a fork knows what it may do."""

from __future__ import annotations

import copy
import os
import re
import signal
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from inputs import random
from torch import nn
from torch.utils.data import DataLoader, Dataset
from training import train_once

from syncbn_cuda import FastSyncBatchNorm

#: Enough values for the kernels to share them out over threads.
SHAPE = (16, 32, 16, 16)
LIMIT_S = 60


def trained(seed, group=None, steps=4):
    """Trains a net of its own; returns all that comes of it."""
    draws = torch.Generator().manual_seed(seed)  # torch's own is shared by threads
    layers = [FastSyncBatchNorm(SHAPE[1], process_group=group) for _ in range(3)]
    net = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    results = []
    for _ in range(steps):
        x, dy = (torch.randn(SHAPE, generator=draws) for _ in range(2))
        results += train_once(net, x, dy)
    results += [p.grad for p in net.parameters()]
    return results + list(net.buffers())


def at_once(*functions):
    """Runs functions in threads that begin together; returns what they return."""
    together = threading.Barrier(len(functions))
    results = [None] * len(functions)

    def call(which):
        together.wait()
        try:
            results[which] = functions[which]()
        except BaseException as error:
            results[which] = error

    threads = [threading.Thread(target=call, args=(i,), daemon=True) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive(), "a thread hangs"
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def same(results, expected):
    return all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def two_groups_rank(rank):
    """Whether nets of two groups, trained at once, are what each is by itself."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    jobs = [partial(trained, 2 * i + rank, group) for i, group in enumerate(groups)]
    expected = [job() for job in jobs]
    return [same(*pair) for _ in range(2) for pair in zip(at_once(*jobs), expected, strict=True)]


def test_two_models_with_groups_of_their_own_train_in_two_threads(run):
    assert run(2, two_groups_rank) == [[True] * 4] * 2


def handed_over_rank(rank):
    """Whether a backward in another thread than the forward changes anything."""
    results = []
    for backward_in in (lambda backward: backward(), at_once):
        torch.manual_seed(rank)
        layer = FastSyncBatchNorm(SHAPE[1])
        x = random(SHAPE).requires_grad_()
        (y,) = at_once(partial(layer, x))
        backward_in(partial(y.backward, random(SHAPE)))
        results.append([y, x.grad, *(p.grad for p in layer.parameters()), *layer.buffers()])
    return same(*results)


def test_a_backward_may_be_in_another_thread_than_its_forward(run):
    assert run(2, handed_over_rank) == [True, True]


def first_calls_rank(rank, threads):
    """Whether many threads may make the first calls of a process, in which nothing has run."""
    torch.set_num_threads(threads)
    jobs = [partial(trained, seed, steps=1) for seed in range(16)]
    return [same(results, job()) for results, job in zip(at_once(*jobs), jobs, strict=True)]


@pytest.mark.parametrize("threads", [1, 2])
def test_many_threads_may_make_the_first_calls_of_a_process(threads, run):
    assert run(1, first_calls_rank, threads) == [[True] * 16]


def in_a_fork(job):
    """Returns what a job returns, or the text of its error, in a fork of this process."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer")
        child = os.fork()
        if child == 0:
            try:
                torch.set_num_threads(1)  # OpenMP's own do not live on in a fork, for any operator
                try:
                    result = job()
                except RuntimeError as error:
                    result = str(error)
                torch.save(result, answer)
            finally:
                os._exit(0)
        deadline = time.monotonic() + LIMIT_S
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                raise AssertionError("a fork hangs")
            time.sleep(0.02)
        return torch.load(answer)


def forking_rank(rank, has_run):
    """Whether a fork computes what its parent does, which has run before or not."""
    torch.set_num_threads(2)
    if has_run:
        trained(1)
    forked = in_a_fork(partial(trained, 0))
    return same(forked, trained(0))


@pytest.mark.parametrize("has_run", [False, True])
def test_a_fork_trains(has_run, run):
    assert run(1, forking_rank, has_run) == [True]


def forking_from_ranks(rank):
    """What a fork of a rank is told, whether it may evaluate, and whether the rank trains on."""
    torch.manual_seed(rank)
    net = nn.Sequential(FastSyncBatchNorm(SHAPE[1]))
    steps = [random(SHAPE) for _ in range(2)]
    expected = [copy.deepcopy(net).train()]
    for x in steps:
        expected[0](x)
    net(steps[0])
    evaluated = copy.deepcopy(net).eval()(steps[0])
    told = in_a_fork(lambda: net(100 * steps[0]))  # would be seen in the sums of the rank
    may = same([in_a_fork(lambda: net.eval()(steps[0]))], [evaluated])
    net(steps[1])
    return told, may, same(net.buffers(), expected[0].buffers())


def test_a_fork_of_a_rank_may_evaluate_and_is_refused_its_group(run):
    for told, may_evaluate, goes_on in run(2, forking_from_ranks):
        assert re.match(
            r"FastSyncBatchNorm\(32\) at '0': the all_reduce of its forward over ranks 0, 1 "
            r"\(.*gloo.*\) failed: this process was forked from a rank.* call model\.eval\(\)",
            told,
        )
        assert may_evaluate and goes_on


class Normalised(Dataset):
    """Batches that come out of a layer."""

    def __init__(self, training):
        self.layer = FastSyncBatchNorm(SHAPE[1]).train(training)

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return self.layer(torch.full(SHAPE, 1.0 + i)).detach()


def loader_rank(rank, training):
    """Whether forked workers of a DataLoader change what a net learns from it."""
    torch.set_num_threads(2)
    results = []
    for workers in (0, 2):
        torch.manual_seed(rank)
        layer, learned = FastSyncBatchNorm(SHAPE[1]), []
        context = "fork" if workers else None
        for _ in range(2):
            loader = DataLoader(
                Normalised(training), None, num_workers=workers, multiprocessing_context=context
            )
            for batch in loader:
                learned += train_once(layer, random(SHAPE) + batch, random(SHAPE))
        results.append([*learned, *layer.buffers()])
    return same(*results)


@pytest.mark.parametrize(("world", "training"), [(1, True), (2, False)])
def test_workers_of_a_loader_may_run_layers_while_a_net_trains(world, training, run):
    assert run(world, loader_rank, training) == [True] * world
