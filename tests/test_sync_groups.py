"""Groups for a part of the ranks: who is in them, what is refused, and that layers follow them."""

from __future__ import annotations

import re
import socket
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from syncbn_cuda import FastSyncBatchNorm, convert_sync_batchnorm, sync_groups

#: The host of each of four ranks; the ranks of "b" are not consecutive.
HOSTS = ["b", "a", "a", "b"]


def members_rank(rank, size, ragged):
    socket.gethostname = lambda: HOSTS[rank]
    return dist.get_process_group_ranks(sync_groups(size, ragged=ragged))


@pytest.mark.parametrize(
    ("size", "ragged", "parts"),
    [
        (1, False, [[0], [1], [2], [3]]),
        (2, False, [[0, 1], [0, 1], [2, 3], [2, 3]]),
        (4, False, [[0, 1, 2, 3]] * 4),
        (3, True, [[0, 1, 2]] * 3 + [[3]]),
        ("node", False, [[0, 3], [1, 2], [1, 2], [0, 3]]),
    ],
)
def test_each_rank_gets_the_group_that_holds_it(run, size, ragged, parts):
    assert run(4, members_rank, size, ragged) == parts


def by_mesh():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "data"))["data"]


def by_size():
    return sync_groups(2)


def statistics_rank(rank, make):
    """The running means of layers after a batch of constant `rank`, with momentum 1."""
    group = make()
    net = nn.Sequential(nn.BatchNorm1d(2, momentum=1.0), nn.Sequential(nn.BatchNorm1d(2)))
    layers = [
        convert_sync_batchnorm(net, group)[0],
        FastSyncBatchNorm(2, momentum=1.0, process_group=group),
        FastSyncBatchNorm(2, momentum=1.0),
    ]
    layers[2].process_group = group
    for layer in layers:
        layer(torch.full((3, 2), float(rank)))
    nested = net[1][0].process_group is layers[0].process_group
    return [layer.running_mean[0].item() for layer in layers], nested


@pytest.mark.parametrize("make", [by_size, by_mesh])
def test_layers_normalise_over_their_group(run, make):
    means = [0.5, 0.5, 2.5, 2.5]
    assert run(4, statistics_rank, make) == [([mean] * 3, True) for mean in means]


def deserted_rank(rank):
    group = sync_groups(2, timeout=timedelta(seconds=1))
    if rank == 0:
        with pytest.raises(RuntimeError):
            FastSyncBatchNorm(2, process_group=group)(torch.ones(3, 2))
    return True


def test_a_rank_waits_for_the_others_no_longer_than_the_timeout(run):
    begin = time.monotonic()
    assert run(2, deserted_rank) == [True] * 2
    assert time.monotonic() - begin < 45  # the world's is a minute, and torch's half an hour


def refused_rank(rank, sizes):
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        sync_groups(sizes[rank])
    return caught.type, str(caught.value)


@pytest.mark.parametrize(
    ("size", "error", "match"),
    [
        (3, ValueError, r"sync_groups\(3\): 4 ranks do not divide .*: give one of 1, 2, 4, or rag"),
        (5, ValueError, r"sync_groups\(5\): expected a size from 1 to the 4 ranks"),
        (0, ValueError, r"sync_groups\(0\): expected a size from 1"),
        ("rack", ValueError, r"sync_groups\('rack'\): expected a number of ranks or \"node\""),
        (2.0, TypeError, r"sync_groups\(2\.0\): .* got float"),
        (True, TypeError, r"sync_groups\(True\): .* got bool"),
    ],
)
def test_what_is_no_division_is_refused_on_all_ranks_though_one_asked(run, size, error, match):
    told = run(4, refused_rank, [2, 2, size, 2])
    assert told[2][0] is error and re.match(match, told[2][1])
    told[2] = RuntimeError, f"sync_groups: rank 2 raised {error.__name__}: {told[2][1]}"
    assert told == [told[2]] * 4


def test_without_a_world_there_is_no_part_of_it():
    with pytest.raises(RuntimeError, match=r"sync_groups\(2\): .*call torch.distributed.init"):
        sync_groups(2)


def test_ranks_that_ask_for_different_groups_all_hear_of_it(run):
    expected = (
        "sync_groups: expected the same arguments on every rank, got "
        "(1, ragged=False) on rank 0, (2, ragged=False) on rank 1"
    )
    assert run(2, refused_rank, [1, 2]) == [(ValueError, expected)] * 2
