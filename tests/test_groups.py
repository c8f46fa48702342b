"""Who talks to whom: groups, evaluation, what needs a gradient, DDP, and the number of messages."""

from __future__ import annotations

import itertools
import time

import distributed
import numpy as np
import pytest
import reference
import torch
import torch.distributed as dist
from inputs import assert_close, numpy, random
from test_distributed import assert_is_global, shards, train_layer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from syncbn_cuda import FastSyncBatchNorm, convert_sync_batchnorm, functional
from syncbn_cuda.functional import sync_batch_norm

CHANNELS = 5


def group_rank(rank, pieces):
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    connected, layer = (FastSyncBatchNorm(CHANNELS, process_group=group) for _ in range(2))
    train_layer(connected, *pieces[rank])  # the first call also connects the ranks
    dist.barrier()
    if rank >= 2:
        time.sleep(3)
    start = time.monotonic()
    step = train_layer(layer, *pieces[rank])
    elapsed = time.monotonic() - start
    foreign = FastSyncBatchNorm(CHANNELS, process_group=dist.GroupMember.NON_GROUP_MEMBER)
    with pytest.raises(ValueError, match="not a member of the group"):
        foreign(torch.randn(2, CHANNELS))
    return step, elapsed


def test_groups_talk_among_themselves(run):
    pieces = shards((2, 3, 1, 4), tail=(4,))
    steps, seconds = zip(*run(4, group_rank, pieces), strict=True)
    for pair in (slice(0, 2), slice(2, 4)):
        assert_is_global(steps[pair], pieces[pair], torch.float32)
    assert max(seconds[:2]) < 2, "a rank waited for another group"


def alone_rank(rank):
    """Evaluation, frozen layers and eval without buffers make no collective: rank 1 stays away."""
    if rank == 1:
        return True
    start = time.monotonic()
    for track in (True, False):
        layer = FastSyncBatchNorm(CHANNELS, track_running_stats=track).eval()
        x = random((2, CHANNELS, 4)).requires_grad_()
        layer(x).sum().backward()
    return time.monotonic() - start < 10  # a collective would wait for a minute


def test_evaluation_makes_no_collective(run):
    assert run(2, alone_rank) == [True, True]


#: What a rank may need gradients of: at least something, or it would have no backward.
NEEDS = [needs for needs in itertools.product([True, False], repeat=3) if any(needs)]


def uneven_rank(rank, pieces):
    """Steps for every two sets of gradients that two ranks may need; None where none was asked."""
    x, dy = pieces[rank]
    steps = []
    for pair in itertools.product(NEEDS, repeat=2):
        layer = FastSyncBatchNorm(CHANNELS, dtype=torch.float64)
        leaves = (x.detach().clone(), layer.weight, layer.bias)
        for leaf, needed in zip(leaves, pair[rank], strict=True):
            leaf.requires_grad_(needed)
        layer(leaves[0]).backward(dy)
        steps.append([None if leaf.grad is None else numpy(leaf.grad) for leaf in leaves])
    return steps


@pytest.mark.parametrize("counts", [(2, 3), (4, 0)], ids=str)
def test_ranks_that_need_different_gradients_do_not_hang(run, counts):
    pieces = shards(counts, torch.float64, tail=(4,))
    x, dy = (np.concatenate([numpy(piece[i]) for piece in pieces]) for i in range(2))
    output, grads = reference.forward(x).output, reference.backward(dy, x)
    samples = np.split(np.arange(sum(counts)), [counts[0]])
    for rank, steps in enumerate(run(2, uneven_rank, pieces)):
        own = dy[samples[rank]]
        weight = (own * output[samples[rank]]).sum((0, 2))
        expected = (grads.input[samples[rank]], weight, own.sum((0, 2)))
        for pair, got in zip(itertools.product(NEEDS, repeat=2), steps, strict=True):
            assert [grad is not None for grad in got] == [*pair[rank]]
            for grad, right in zip(got, expected, strict=True):
                if grad is not None:
                    assert_close(grad, right, torch.float64, scale=float(np.abs(dy).sum()))


def count_rank(rank):
    calls = []
    world = dist.group.WORLD

    class Counting:
        """Stands for the world and counts what it is asked."""

        def allreduce(self, tensors, options):
            calls.append(tensors[0].numel())
            return world.allreduce(tensors, options)

        def __getattr__(self, name):
            return getattr(world, name)

    functional.resolve_group, before = (lambda _: Counting()), functional.resolve_group
    x = random((2, CHANNELS, 4)).requires_grad_()
    for twice in (False, True):
        y = sync_batch_norm(x, None, None, training=True)
        (g,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=twice)
    g.sum().backward()
    functional.resolve_group = before
    return calls


def test_how_many_messages_a_step_sends(run):
    stats, sums = 4 * CHANNELS + 1, 2 * CHANNELS
    once, twice = [stats, sums], [stats, *(stats, sums), *(sums, stats, sums)]
    assert run(2, count_rank) == [once + twice] * 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)),
        )
        self.head = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))

    def forward(self, x):
        return self.head(self.features(x).mean((2, 3)))


def train_net(net, x, steps=3):
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        net(x).pow(3).mean().backward()
        optimizer.step()


def ddp_rank(rank, x):
    net = convert_sync_batchnorm(Net().double())
    train_net(DistributedDataParallel(net), x[rank::2])
    return {k: v.cpu().numpy().copy() for k, v in net.state_dict().items()}


def test_ddp_trains_as_one_process_does(run):
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    net = Net().double()
    train_net(net, x)
    for state in run(2, ddp_rank, x):
        for key, value in net.state_dict().items():
            np.testing.assert_allclose(state[key], value.cpu().numpy(), rtol=1e-9, atol=1e-11)


def empty_roi_rank(rank):
    net = DistributedDataParallel(
        nn.Sequential(nn.Linear(4, CHANNELS), FastSyncBatchNorm(CHANNELS))
    )
    net(torch.randn((0, 3)[rank], 4)).sum().backward()
    return all(p.grad is not None for p in net.parameters())


def test_an_empty_head_under_ddp(run):
    assert run(2, empty_roi_rank) == [True, True]


def lifecycle_rank(rank, pieces, folder, compiled):
    """Trains alone, in a world, alone, in another world; with layers made then or any time before.

    Returns the steps of each such time.
    """
    dist.barrier()
    dist.destroy_process_group()
    torch._dynamo.config.recompile_limit = 64  # the layers share their code
    layers, times = [], []
    for world in (None, "first", None, "second"):
        if world is not None:
            store = dist.FileStore(f"{folder}/{world}", 2)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        layers.append(FastSyncBatchNorm(CHANNELS))
        if compiled:
            layers[-1].compile(backend="aot_eager", fullgraph=True)
        for layer in layers:
            layer.zero_grad()
            layer.reset_running_stats()
        times.append([train_layer(layer, *pieces[rank]) for layer in layers])
        if world == "first":
            dist.barrier()
            dist.destroy_process_group()
    return times


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_group_is_looked_up_at_each_forward(run, tmp_path, compiled):
    pieces = shards((2, 3), tail=(4,))
    ranks = run(2, lifecycle_rank, pieces, str(tmp_path), compiled)
    for index, time_of_both in enumerate(zip(*ranks, strict=True)):
        for steps in zip(*time_of_both, strict=True):
            if index % 2:
                assert_is_global(steps, pieces, torch.float32)
            else:
                for step, piece in zip(steps, pieces, strict=True):
                    assert_is_global([step], [piece], torch.float32)


def absent_rank(rank):
    """Rank 1 has nothing for the layer, and takes part with an empty batch."""
    net = DistributedDataParallel(
        nn.Sequential(nn.Linear(4, CHANNELS), FastSyncBatchNorm(CHANNELS))
    )
    x = torch.randn(3, 4)
    for _ in range(2):
        y = net(x if rank == 0 else x[:0])
        (y.pow(2).mean() if rank == 0 else y.sum() * 0).backward()
    return [numpy(p.grad) for p in net.parameters()], numpy(net.module[1].running_mean)


def test_a_rank_without_data_takes_part_with_nothing(run):
    (grads, mean), (other_grads, other_mean) = run(2, absent_rank)
    assert all(
        (g == o).all() and g.any() for g, o in zip(grads[-2:], other_grads[-2:], strict=True)
    )
    assert (mean == other_mean).all() and mean.any()


def batch_statistics_rank(rank):
    """Without running buffers: together in training, alone in evaluation."""
    x = random((3, CHANNELS, 4), mean=float(rank))
    layer = FastSyncBatchNorm(CHANNELS, track_running_stats=False)
    return numpy(x), numpy(layer(x)), numpy(layer.eval()(x))


def test_without_running_buffers(run):
    ranks = run(2, batch_statistics_rank)
    together = reference.forward(np.concatenate([x for x, _, _ in ranks])).output
    assert_close(np.concatenate([y for _, y, _ in ranks]), together, torch.float32)
    for x, _, evaluated in ranks:
        assert_close(evaluated, reference.forward(x).output, torch.float32)


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo"])
def test_a_sum_over_ranks_is_all_that_a_backend_needs(backend):
    """The group may offer nothing else: whatever else is asked of it raises."""
    first, second = distributed.run(2, sum_alone_rank, backend=backend)
    assert (first == second).all()


def sum_alone_rank(rank):
    world = dist.group.WORLD

    class SumAlone:
        allreduce = staticmethod(world.allreduce)
        size = staticmethod(world.size)
        name = staticmethod(world.name)
        _device_types = world._device_types

    layer = FastSyncBatchNorm(CHANNELS, process_group=SumAlone())
    layer(random((2, CHANNELS, 4), mean=float(rank)).requires_grad_()).pow(2).sum().backward()
    return numpy(layer.running_mean)
