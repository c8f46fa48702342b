"""reduce_running_stats: the buffers of all ranks become their weighted mean."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from inputs import assert_close, numpy
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from syncbn_cuda import FastSyncBatchNorm, reduce_running_stats, sync_groups

CHANNELS = (3, 5)


class Activated(nn.BatchNorm2d):
    """A subclass that conversion would leave."""


def model(counted=True, dtype=torch.float32):
    net = nn.Sequential(
        nn.BatchNorm1d(CHANNELS[0], momentum=None),
        nn.BatchNorm2d(4, track_running_stats=False),
        nn.Sequential(nn.Conv2d(3, 5, 1), FastSyncBatchNorm(CHANNELS[1]), Activated(CHANNELS[1])),
    )
    net.append(net[0])  # shared
    for layer in (net[0], *net[2][1:]):
        layer.to(dtype)
        if not counted:
            layer.num_batches_tracked = None
    return net.eval()


def tracking(net):
    return [net[0], *net[2][1:]]


def drawn(rank, net, counters):
    """Gives the layers buffers of this rank, those of a rank without batches NaN."""
    generator = torch.Generator().manual_seed(rank)
    for layer, counter in zip(tracking(net), counters, strict=True):
        for buffer in (layer.running_mean, layer.running_var):
            values = torch.randn(buffer.shape, generator=generator, dtype=torch.float64).exp()
            buffer.copy_(values if counter else torch.nan)
        if layer.num_batches_tracked is not None:
            layer.num_batches_tracked.fill_(counter)
    return net


def state(net):
    buffers = net.named_buffers()
    return {name: numpy(buffer) for name, buffer in buffers if not is_lazy(buffer)}


def reduced_rank(rank, counters, dtype, counted, count, wrap, group_size):
    net = model(counted, dtype)
    wrapped = DistributedDataParallel(net) if wrap else net
    before = state(drawn(rank, net, counters[rank]))
    types = [buffer.dtype for buffer in net.buffers()]
    group = sync_groups(group_size) if group_size else None
    count = None if count is None else count[rank]
    assert reduce_running_stats(wrapped, group, count=count) is None
    assert not net.training and [buffer.dtype for buffer in net.buffers()] == types
    return before, state(net)


def check_mean(ranks, weights, dtype):
    """Compares what ranks hold with the mean of what they held; weights by rank and layer."""
    weights = np.asarray(weights, np.float64)
    befores, afters = zip(*ranks, strict=True)
    for layer, name in enumerate(("0", "2.1", "2.2")):
        own = weights[:, layer]
        for kind in ("running_mean", "running_var"):
            key = f"{name}.{kind}"
            terms = [w * b[key] for w, b in zip(own, befores, strict=True) if w]
            # One rounding to the type of the buffer, half a unit; in float64 each term has its own.
            assert_close(afters[0][key], sum(terms) / own.sum(), dtype, ulps=1)
            assert all(np.array_equal(after[key], afters[0][key]) for after in afters)
        counter = f"{name}.num_batches_tracked"
        if counter in befores[0]:
            largest = max(before[counter].item() for before in befores)
            assert all(after[counter].item() == largest for after in afters)


#: The batches that each layer has seen, by rank.
UNEQUAL = [(7, 2, 1), (1, 5, 0), (3, 0, 0), (0, 1, 9)]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_buffers_become_the_mean_weighted_by_each_layers_batches(run, world, dtype):
    counters = UNEQUAL[:world]
    ranks = run(world, reduced_rank, counters, dtype, True, None, world == 2, None)
    check_mean(ranks, counters, dtype)


def test_without_counters_ranks_count_alike(run):
    ranks = run(4, reduced_rank, [(1, 1, 1)] * 4, torch.float32, False, None, False, None)
    check_mean(ranks, [(1, 1, 1)] * 4, torch.float32)


def test_a_rank_is_weighted_by_the_count_it_gives(run):
    count = (100, 28.5)
    ranks = run(2, reduced_rank, UNEQUAL[:1] * 2, torch.float32, True, count, False, None)
    check_mean(ranks, [(n,) * 3 for n in count], torch.float32)


def test_groups_average_among_themselves(run):
    count = (1, 2, 3, 4)
    ranks = run(4, reduced_rank, [(1, 1, 1)] * 4, torch.float32, True, count, False, 2)
    for pair in (slice(0, 2), slice(2, 4)):
        check_mean(ranks[pair], [(n,) * 3 for n in count[pair]], torch.float32)


def test_where_no_rank_has_any_weight_buffers_stay(run):
    counters = [(0, 1, 0)] * 2
    for before, after in run(2, reduced_rank, counters, torch.float32, True, None, False, None):
        for name in before:
            stays = not name.startswith("2.1.running")
            same = np.array_equal(before[name], after[name], equal_nan=True)
            assert same == stays, name


def message_rank(rank):
    """How many messages of which size and type go over the ranks."""
    sent = []
    world = dist.group.WORLD

    class Counting:
        def allreduce(self, tensors, options):
            sent.append((tensors[0].numel(), tensors[0].dtype))
            return world.allreduce(tensors, options)

        def __getattr__(self, name):
            return getattr(world, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("syncbn_cuda.running.resolve_group", lambda held: Counting())
        reduce_running_stats(drawn(rank, model(), (1, 1, 1)))
    return sent


def test_all_layers_go_in_one_message_of_float64(run):
    assert run(2, message_rank) == [[(2 * (3 + 5 + 5), torch.float64)]] * 2


def more(net):
    net.append(nn.BatchNorm1d(2))


def wider(net):
    net[0] = nn.BatchNorm1d(4)


def uncounted(net):
    net[0].num_batches_tracked = None


def lazy(net):
    net[0] = nn.LazyBatchNorm1d()


def refused_rank(rank, change, counts):
    net = drawn(rank, model(), (2, 2, 2))
    if rank == 1 and change is not None:
        change(net)
    before = state(net)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        reduce_running_stats(net, count=counts[rank])
    assert all(np.array_equal(value, before[name]) for name, value in state(net).items())
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "counts", "text"),
    [
        (more, (None,) * 2, "got no more on rank 0 and '4' of 2 channels with a counter on rank 1"),
        (
            wider,
            (None,) * 2,
            "got '0' of 3 channels with a counter on rank 0 and '0' of 4 channels",
        ),
        (uncounted, (None,) * 2, "and '0' of 3 channels without a counter on rank 1"),
        (lazy, (None,) * 2, "expected '0' to know its shapes, got LazyBatchNorm1d: run one batch"),
        (None, (1, None), "expected count on every rank or on none, got [1.0, None]"),
        (None, (1, -1), "expected count to be finite and at least 0, got -1"),
        (None, (1, float("nan")), "expected count to be finite and at least 0, got nan"),
    ],
)
def test_what_does_not_fit_is_one_error_on_every_rank(run, change, counts, text):
    for answer in run(2, refused_rank, change, counts):
        assert answer.startswith("reduce_running_stats: ") and text in answer


def test_alone_there_is_nothing_to_do():
    net = drawn(0, model(), (1, 2, 3))
    before = state(net)
    reduce_running_stats(net, count=0)
    assert all(np.array_equal(value, before[name]) for name, value in state(net).items())
