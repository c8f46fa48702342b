"""A model under DistributedDataParallel is one process with the global batch, however it is set up.

All in float64, so that a sample too many or a sum too few cannot hide in a rounding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import test_groups
import torch
from inputs import numpy, random
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from syncbn_cuda import convert_sync_batchnorm

STEPS = 3


class Net(test_groups.Net):
    """A net that may have a layer before it, and more between its features and its head."""

    def __init__(self, stem=()):
        super().__init__()
        self.features = nn.Sequential(*stem, *self.features)

    def forward(self, x, rows):
        return self.head(self.branch(self.features(x).mean((2, 3)), rows))

    def branch(self, h, rows):
        return h


class Branched(Net):
    """Its first rows take a branch besides; None for no branch at all."""

    def __init__(self, *layers):
        super().__init__()
        self.side = nn.Sequential(nn.Linear(8, 8), *layers)

    def branch(self, h, rows):
        return h if rows is None else torch.cat([h[:rows] + self.side(h[:rows]), h[rows:]])


class Twice(Net):
    """Normalises by the same layer in two places."""

    def branch(self, h, rows):
        return self.features[-1](h[..., None, None]).flatten(1)


def norm_first():
    return Net(stem=[nn.BatchNorm2d(3)])


def branch_that_normalises():
    return Branched(nn.BatchNorm1d(8))


def freeze_weight(net):
    net.features[1].weight.requires_grad_(False)


def evaluate_one(net):
    net.features[1].eval()


def freeze_all(net):
    for layer in net.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.eval().requires_grad_(False)


@dataclass(frozen=True)
class Setup:
    """How a net is made and wrapped, and what each rank feeds it."""

    net: Callable[[], nn.Module] = Net
    prepare: Callable[[nn.Module], None] = lambda net: None
    ddp: dict = field(default_factory=dict)
    counts: tuple[int, int] = (2, 2)
    rows: tuple[int | None, int | None] = (None, None)
    micro_batches: int = 1
    convert_first: bool = True
    hook: Callable | None = None


UNUSED = {"find_unused_parameters": True}

SETUPS = {
    "accumulation with no_sync": Setup(micro_batches=3),
    "accumulation of views": Setup(micro_batches=2, ddp={"gradient_as_bucket_view": True}),
    "a branch that no rank takes": Setup(branch_that_normalises, ddp=UNUSED),
    "a branch that one rank takes": Setup(Branched, ddp=UNUSED, rows=(2, None)),
    "a branch that one rank takes with nothing": Setup(branch_that_normalises, rows=(2, 0)),
    "static graph": Setup(ddp={"static_graph": True}),
    "static graph, layer used twice": Setup(Twice, ddp={"static_graph": True}),
    "layer used twice": Setup(Twice),
    "buffers not broadcast": Setup(ddp={"broadcast_buffers": False}),
    "layer used twice, buffers not broadcast": Setup(Twice, ddp={"broadcast_buffers": False}),
    "weight without grad": Setup(prepare=freeze_weight),
    "one layer in eval": Setup(prepare=evaluate_one),
    "all layers frozen": Setup(prepare=freeze_all),
    "input of the layer needs no grad": Setup(norm_first),
    "gradients are views": Setup(ddp={"gradient_as_bucket_view": True}),
    "one bucket a parameter": Setup(ddp={"bucket_cap_mb": 1e-5}),
    "unequal batches": Setup(counts=(3, 1)),
    "unequal batches, accumulated": Setup(counts=(3, 1), micro_batches=2),
    "an empty rank": Setup(counts=(0, 4)),
    "an empty rank that is the first": Setup(counts=(4, 0), ddp={"broadcast_buffers": False}),
    "converted after wrapping": Setup(convert_first=False),
    "a communication hook": Setup(hook=allreduce_hook),
}


def train(net, setup, rank=None):
    """Trains on the batches of one rank, or (None) on those of all ranks together."""
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.1, 0.9)
    torch.manual_seed(5)
    rows = setup.rows[0 if rank is None else rank]
    for _ in range(STEPS):
        optimizer.zero_grad()
        for micro_batch in range(setup.micro_batches):
            pieces = [random((n, 3, 8, 8), torch.float64, mean=0.2) for n in setup.counts]
            x = torch.cat(pieces) if rank is None else pieces[rank]
            last = micro_batch == setup.micro_batches - 1
            with contextlib.nullcontext() if rank is None or last else net.no_sync():
                # Each rank's share of the mean over all samples; DDP will divide by the ranks.
                share = net(x, rows).pow(3).sum() / sum(setup.counts)
                (share * (1 if rank is None else 2)).backward()
        optimizer.step()


def train_rank(rank):
    """Trains every setup in turn: starting ranks takes longer than training does."""
    states = {}
    for name, setup in SETUPS.items():
        net = setup.net().double()
        setup.prepare(net)
        if setup.convert_first:
            convert_sync_batchnorm(net)
        ddp = DistributedDataParallel(net, **setup.ddp)
        if setup.hook is not None:
            ddp.register_comm_hook(None, setup.hook)
        if not setup.convert_first:
            convert_sync_batchnorm(ddp)
        try:
            train(ddp, setup, rank)
        except Exception as error:
            raise AssertionError(f"the setup with {name}") from error
        states[name] = {key: numpy(value) for key, value in net.state_dict().items()}
    return states


@pytest.fixture(scope="module")
def ranks(run):
    return run(2, train_rank)


@pytest.mark.parametrize("name", SETUPS)
def test_ddp_is_one_process_with_the_global_batch(ranks, name):
    setup = SETUPS[name]
    net = setup.net().double()
    setup.prepare(net)
    train(net, setup)
    first, second = (states[name] for states in ranks)
    for key, value in net.state_dict().items():
        np.testing.assert_allclose(first[key], numpy(value), rtol=1e-9, atol=1e-11, err_msg=key)
        assert first[key].tobytes() == second[key].tobytes(), f"{key} differs in its bits"


def join_rank(rank):
    net = DistributedDataParallel(convert_sync_batchnorm(Net().double()))
    steps = 0
    try:
        with net.join(throw_on_early_termination=True):
            for _ in range((STEPS, STEPS - 1)[rank]):
                net(random((2, 3, 8, 8), torch.float64), None).pow(3).mean().backward()
                steps += 1
    except RuntimeError as error:
        return steps, str(error)
    return steps, None


def test_a_rank_with_fewer_batches_raises_on_all_ranks_under_join(run):
    for steps, message in run(2, join_rank):
        assert steps == STEPS - 1 and "exhausted" in message
