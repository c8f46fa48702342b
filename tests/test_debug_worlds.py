"""Debug mode where ranks may differ, in forks and threads, in a second world, without a store."""

from __future__ import annotations

import copy
import gc
import os
import signal
import threading
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from test_debug import LONG, SHORT, Net, batch, skips_a_layer, step
from test_debug_runs import exchanges, keys
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from syncbn_cuda import FastSyncBatchNorm, set_debug

# What one rank does with the model for itself, before a step and between two.


def keeps_a_copy_beside_it(net, kept):
    kept.append(nn.ModuleDict({"online": net, "average": copy.deepcopy(net)}))


def keeps_a_part_of_it(net, kept):
    kept.append(nn.Sequential(*net.children()).eval())
    net.train()


def evaluates_it(net, kept):
    net.eval()(batch())
    net.train()


def evaluates_a_copy(net, kept):
    keeps_a_copy_beside_it(net, kept)
    kept[-1]["average"].eval()(batch())


class Wrapper(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.model = net

    def forward(self, x):
        return self.model(x)


def train_otherwise(rank, way, wraps):
    """Returns how many exchanges two steps have, before each of which a rank does otherwise."""
    set_debug(True, LONG)
    net, kept = Net(), []
    model = net
    for _ in range(2):
        if rank == 0:
            way(net, kept)
        if wraps and model is net:
            model = DistributedDataParallel(Wrapper(net))
        step(model, batch())
    return exchanges()


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize(
    "way", [keeps_a_copy_beside_it, keeps_a_part_of_it, evaluates_it, evaluates_a_copy]
)
def test_what_else_a_rank_does_with_its_model_is_no_disagreement(run, way, wraps):
    assert run(2, train_otherwise, way, wraps) == [8] * 2


class Head(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.heads = nn.ModuleDict({name: nn.Sequential(nn.Linear(2, 2), FastSyncBatchNorm(2))})

    def forward(self, x):
        (head,) = self.heads.values()
        return head(x)


def train_unlike(rank, unlike):
    """Returns how many exchanges two steps have where ranks differ in types, or in names."""
    set_debug(True, LONG)
    model = Head(f"head_{rank}" if unlike == "names" else "head")
    ((_, layer),) = model.heads.values()
    with torch.autocast("cpu", torch.bfloat16, enabled=unlike == "types" and rank == 0):
        step(model, batch())  # in which the layer is found
        step(layer, batch())  # among all modules
    return exchanges()


@pytest.mark.parametrize("unlike", ["types", "names"])
def test_input_types_and_names_may_differ_by_rank(run, unlike):
    assert run(2, train_unlike, unlike) == [4] * 2


def forking_rank(rank):
    """What the store and the peers hear of layers in a fork of the last rank."""
    set_debug(True, LONG)
    net = Net()
    step(net, batch())
    before = keys()
    if rank == 1:
        child = os.fork()
        if child == 0:
            net.eval()(batch())
            try:
                net.train()(batch())
            except RuntimeError as error:
                os._exit(7 if "forked from a rank" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert keys() == before
    step(net, batch())
    return exchanges()


def test_a_fork_of_a_rank_tells_nobody(run):
    assert run(2, forking_rank) == [8] * 2


def in_two_threads(rank):
    """Trains in two threads, each over a group of its own that all ranks are in."""
    nets = [Net(group=dist.new_group()) for _ in range(2)]
    results: dict[int, list[torch.Tensor]] = {}
    begun = [threading.Event(), threading.Event()]

    def train_in_thread(i):
        if i != rank % 2:  # each rank begins with another of the two, which waits for its peers
            begun[1 - i].wait()
        begun[i].set()
        for seed in range(20):
            x = torch.randn(4, 2, generator=torch.Generator().manual_seed(10 * seed + rank))
            step(nets[i], x)
        results[i] = [*(p.grad for p in nets[i].parameters()), *nets[i].buffers()]

    threads = [threading.Thread(target=train_in_thread, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for a, b in zip(results[0], results[1], strict=True):
        assert torch.equal(a, b)
    return [exchanges(net.bn1.process_group) for net in nets]


def tcp_world(rank):
    """Makes another world, over a store that the first rank keeps; returns that."""
    server = dist.TCPStore("localhost", 0, 2, True, wait_for_workers=False) if rank == 0 else None
    port = [None if server is None else server.port]
    dist.broadcast_object_list(port)
    dist.barrier()
    dist.destroy_process_group()
    store = server or dist.TCPStore("localhost", port[0], 2, False)
    dist.init_process_group(
        *("gloo", None, timedelta(seconds=60)), rank=rank, world_size=2, store=store
    )
    return store


def again_rank(rank):
    """What this rank is told in a second world, over another kind of store, after a first one."""
    set_debug(True, LONG)
    assert in_two_threads(rank) == [80, 80]
    step(Net(), batch())
    first = weakref.ref(dist.group.WORLD)
    tcp_world(rank)
    gc.collect()
    assert first() is None
    assert in_two_threads(rank) == [80, 80]
    step(Net(), batch())
    with pytest.raises(RuntimeError) as caught:
        skips_a_layer(Net(), batch(), rank == 1)
    return str(caught.value)


def test_threads_with_groups_of_their_own_and_a_second_world(run):
    told = run(2, again_rank)
    assert told[0] == told[1] and "at its collective 5: rank 0: forward of 'bn1'" in told[0]


def same_store_rank(rank):
    """Goes on in a second world that finds what the first has left in their store."""
    set_debug(True, LONG)
    step(Net(), batch())
    with pytest.raises(RuntimeError, match="at its collective 5"):
        skips_a_layer(Net(), batch(), rank == 1)
    backend, store = dist.distributed_c10d._world.pg_map[dist.group.WORLD]
    # The backend itself would meet addresses of the first world there, and has a store of its own.
    other = tcp_world(rank)
    dist.distributed_c10d._world.pg_map[dist.group.WORLD] = backend, store
    for _ in range(2):
        step(Net(), batch())
    dist.barrier()
    del other
    return exchanges()


def test_a_second_world_over_the_same_store_starts_anew(run):
    assert run(2, same_store_rank) == [8] * 2


def stalled_rank(rank):
    tcp_world(rank)
    set_debug(True, SHORT)
    net = Net()
    step(net, batch())
    dist.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    with pytest.raises(RuntimeError) as caught:
        step(net, batch())
    net.eval()(batch())
    return str(caught.value)


def test_a_store_whose_rank_hangs_is_given_up(run):
    told = run(2, stalled_rank, casualties=[0], timeout=60)[1]
    begin = "FastSyncBatchNorm debug: before the forward of 'bn1' the store of the process group "
    assert told.startswith(begin) and told.endswith("the store did not answer within 9 s"), told
