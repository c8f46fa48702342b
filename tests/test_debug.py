"""In debug mode, ranks that are not about to do the same all raise the same text, and go on."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from syncbn_cuda import FastSyncBatchNorm, set_debug
from syncbn_cuda.functional import sync_batch_norm

LONG = 100.0  # for what has to come before any timeout
SHORT = 4.0  # for what comes at the timeout


class Net(nn.Module):
    def __init__(self, channels=2, group=None):
        super().__init__()
        self.bn1 = FastSyncBatchNorm(channels, process_group=group)
        self.bn2 = FastSyncBatchNorm(channels, process_group=group)

    def forward(self, x):
        return self.bn2(self.bn1(x))


def batch(channels=2):
    return torch.randn(4, channels)


def step(net, x):
    net(x).sum().backward()


# What one rank, the odd one, does otherwise: (net, x, whether this rank is the odd one).


def skips_a_layer(net, x, odd):
    step(net.bn2 if odd else net, x)


def has_another_order(net, x, odd):
    step(lambda x: net.bn1(net.bn2(x)) if odd else net(x), x)


def goes_back_in_another_order(net, x, odd):
    losses = [net.bn1(x).sum(), net.bn2(x).sum()]
    for loss in reversed(losses) if odd else losses:
        loss.backward()


def has_an_input_of_other_channels(net, x, odd):
    step(net, batch(3) if odd else x)


def has_layers_of_other_channels(net, x, odd):
    step(Net(3), batch(3)) if odd else step(net, x)


def evaluates_a_layer(net, x, odd):
    net.bn1.train(not odd)
    step(net, x)


def records_no_gradients(net, x, odd):
    with torch.set_grad_enabled(not odd):
        net(x)


def swaps(modules, x, odd):
    """Comes to modules that it has been in before in another order."""
    for direction in 1, -1 if odd else 1:
        for module in modules[::direction]:
            module(x)


def swaps_models(net, x, odd):
    swaps([net, Net()], x, odd)


def swaps_layers_of_no_model(net, x, odd):
    swaps([FastSyncBatchNorm(2), FastSyncBatchNorm(2)], x, odd)


def calls_the_function(net, x, odd):
    if odd:
        sync_batch_norm(x, None, None, training=True)
    step(net, x)


def differentiates_twice(net, x, odd):
    torch.autograd.grad(net.bn1(x).sum(), net.bn1.weight, create_graph=odd)


FORWARD = "ranks {all} of a group disagree at its collective {n}: {them}: forward of "
BACKWARD = FORWARD.replace("forward", "backward")
BN1 = FORWARD + "'bn1' of Net (2 channels, float32), step 1; {odd}: "
SKIPPED = ". One of them skipped a layer or has another order of layers, or has a layer in "
DISAGREE = [
    (2, skips_a_layer, 1, BN1 + "forward of 'bn2' of Net (2 channels, float32), step 1" + SKIPPED),
    (
        3,
        has_another_order,
        1,
        BN1 + "forward of 'bn2' of Net (2 channels, float32), step 1" + SKIPPED,
    ),
    (
        4,
        goes_back_in_another_order,
        3,
        BACKWARD
        + "'bn1' of Net (2 channels, float32), step 1; {odd}: backward of 'bn2' of Net (2 ch",
    ),
    (
        2,
        has_an_input_of_other_channels,
        1,
        BN1
        + "forward of 'bn1' of Net raised ValueError: FastSyncBatchNorm(2): expected input with 2 "
        "channels in dim 1, got [4, 3]",
    ),
    (
        4,
        has_an_input_of_other_channels,
        1,
        BN1 + "forward of 'bn1' of Net raised ValueError: FastSync",
    ),
    (
        3,
        has_layers_of_other_channels,
        1,
        BN1 + "forward of 'bn1' of Net (3 channels, float32), step 1. ",
    ),
    (
        3,
        evaluates_a_layer,
        1,
        BN1 + "forward of 'bn2' of Net (2 channels, float32), step 1" + SKIPPED,
    ),
    (
        4,
        records_no_gradients,
        1,
        BN1 + "forward of 'bn1' of Net (2 channels, float32), step 1, recording no gradients. "
        "Those that record gradients would wait in backward",
    ),
    (
        2,
        swaps_models,
        5,
        FORWARD + "'bn1' of Net (2 channels, float32), step 2; {odd}: forward of 'bn1' of Net no. 2"
        " (2 channels, float32), step 2" + SKIPPED,
    ),
    (
        3,
        swaps_layers_of_no_model,
        3,
        FORWARD + "FastSyncBatchNorm(2) (2 channels, float32), step 2; {odd}: forward of "
        "FastSyncBatchNorm(2) no. 2 (2 channels, float32), step 2" + SKIPPED,
    ),
    (2, calls_the_function, 1, BN1 + "forward of sync_batch_norm (2 channels, float32), step 1"),
    (
        2,
        differentiates_twice,
        2,
        BACKWARD
        + "'bn1' of Net (2 channels, float32), step 1; {odd}: backward with create_graph=True "
        "of 'bn1' of Net (",
    ),
]


def told_rank(rank, way):
    """What this rank is told, by which error; after it, all ranks train on."""
    odd = rank == dist.get_world_size() - 1
    set_debug(True, LONG)
    told = None
    try:
        way(Net(), batch(), odd)
    except (RuntimeError, ValueError) as error:
        told = type(error), str(error)
    set_debug(True, LONG)
    step(Net(), batch())
    return told


def expected(text, world, number):
    them = {2: "rank 0", 3: "ranks 0, 1", 4: "ranks 0-2"}[world]
    everyone = {2: "0, 1", 3: "0-2", 4: "0-3"}[world]
    return "FastSyncBatchNorm debug: " + text.format(
        all=everyone, n=number, them=them, odd=f"rank {world - 1}"
    )


@pytest.mark.parametrize(
    ("world", "way", "number", "text"),
    [pytest.param(*case, id=f"{case[1].__name__} {case[0]}") for case in DISAGREE],
)
def test_where_one_rank_differs_all_raise_the_same_at_once(run, world, way, number, text):
    *others, odd = run(world, told_rank, way)
    kind, told = others[0]
    assert others == [others[0]] * (world - 1) and kind is RuntimeError
    assert told.startswith(expected(text, world, number)), told
    if way is has_an_input_of_other_channels:  # the odd one raises its own
        assert odd[0] is ValueError and f"raised ValueError: {odd[1]}" in told
    else:
        assert odd == others[0]


# What the odd one does instead of coming to its second step; once the others gave up, it comes.


def is_in_another_collective(net, x):
    pass


def evaluates(net, x):
    net.eval()(x)
    net.train()


def late_rank(rank, way):
    def late(net, x, odd):
        step(net, x)
        dist.barrier()
        set_debug(True, SHORT)
        if odd:
            way(net, x)
            dist.barrier()
        try:
            step(net, x)
        finally:
            if not odd:
                dist.barrier()

    return told_rank(rank, late)


@pytest.mark.parametrize(
    ("world", "way", "odd"),
    [
        (2, is_in_another_collective, ""),
        (3, evaluates, "; {odd}: evaluation of 'bn2', which is no collective"),
        (4, is_in_another_collective, ""),
    ],
)
def test_where_one_rank_does_not_come_all_raise_the_same(run, world, way, odd):
    told = run(world, late_rank, way)
    text = (
        "{odd} did not come to collective {n} of the group of ranks {all} within 4 s: {them}: "
        "forward of 'bn1' of Net (2 channels, float32), step 2"
        + odd
        + ". Who did not come may wait in "
    )
    assert told == [told[0]] * world and told[0][0] is RuntimeError
    assert told[0][1].startswith(expected(text, world, 5)), told[0][1]


def unaware_rank(rank):
    group = dist.new_group(timeout=timedelta(seconds=2 * SHORT))
    if rank == 0:
        set_debug(True, SHORT)
    with pytest.raises(RuntimeError) as caught:
        step(Net(group=group), batch())
    return str(caught.value)


def test_a_rank_without_debug_mode_is_missed(run):
    aware, unaware = run(2, unaware_rank)
    assert re.match("FastSyncBatchNorm debug: rank 1 did not come .* without debug mode", aware)
    assert re.match(r"FastSyncBatchNorm\(2\) at 'bn1': the all_reduce of its forward", unaware)


def pair_rank(rank):
    """What the ranks of two pairs are told where those of the second disagree."""
    pairs = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    set_debug(True, LONG)
    net = Net(group=pairs[rank % 2])
    step(net, batch())
    try:
        skips_a_layer(net, batch(), rank == 3)
    except RuntimeError as error:
        return str(error)
    return ""


def test_the_ranks_of_another_group_are_not_concerned(run):
    told = run(4, pair_rank)
    assert told[0] == told[2] == "" and told[1] == told[3]
    begin = "FastSyncBatchNorm debug: ranks 1, 3 of a group disagree at its collective 5: rank 1: f"
    assert told[1].startswith(begin), told[1]
