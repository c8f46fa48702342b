"""What PyTorch's own tests expect of SyncBatchNorm on GPUs, expected of ours on the CPU over Gloo.

Cases are named after those in torch/testing/_internal/distributed/distributed_test.py. Two more are
elsewhere: that a rank out of batches raises on all (test_ddp.py), and that training talks while
evaluation does not (test_ddp_sync_bn_training_vs_eval; test_groups.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from inputs import assert_close, numpy, random
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import saved_and_loaded

from syncbn_cuda import FastSyncBatchNorm, convert_sync_batchnorm

STEPS = 5
#: A step goes on with the roundings of those before.
ROUNDINGS = 64.0


class Net(nn.Sequential):
    """Vectors in and out; three values a sample and channel in between, which are normalised."""

    def __init__(self, affine=True):
        super().__init__(
            *(nn.Linear(2, 12, bias=False), nn.Unflatten(1, (4, 3))),
            *(nn.BatchNorm1d(4, affine=affine), nn.Flatten(), nn.Linear(12, 2)),
        )


@dataclass(frozen=True)
class Case:
    """A model, the samples of each rank, and the shape and memory format of a sample."""

    model: Callable[[], nn.Module]
    counts: tuple[int, int] = (2, 2)
    sample: tuple[int, ...] = (2,)
    memory_format: torch.memory_format = torch.contiguous_format


PREFIX = "test_DistributedDataParallel_SyncBatchNorm"
LAST = {"2d": ((2, 4, 4), torch.channels_last), "3d": ((2, 4, 4, 4), torch.channels_last_3d)}

CASES = {
    PREFIX: Case(Net),
    f"{PREFIX}_No_Affine": Case(partial(Net, affine=False)),
    f"{PREFIX}_2D_Input": Case(partial(nn.BatchNorm1d, 2)),
    f"{PREFIX}_Single_Input_Per_Process": Case(partial(nn.BatchNorm1d, 2), counts=(1, 1)),
    f"{PREFIX}_Diff_Input_Sizes_gradient": Case(Net, counts=(2, 3)),
    f"{PREFIX}_Channels_Last 2d": Case(
        partial(nn.BatchNorm2d, 2, momentum=0.99), (2, 2), *LAST["2d"]
    ),
    f"{PREFIX}_Channels_Last 3d": Case(
        partial(nn.BatchNorm3d, 2, momentum=0.99), (2, 2), *LAST["3d"]
    ),
}


def train(net, case, rank=None):
    """Trains on the samples of one rank, or (None) of all; returns what should be the same."""
    torch.manual_seed(2)
    optimizer = torch.optim.SGD([*net.parameters()], 0.1)
    outputs = []
    for _ in range(STEPS):
        pieces = [random((2, n, *case.sample), torch.float64, mean=0.3) for n in case.counts]
        x, target = torch.cat(pieces, dim=1) if rank is None else pieces[rank]
        x = x.contiguous(memory_format=case.memory_format).requires_grad_()
        optimizer.zero_grad()
        y = net(x)
        share = (y - target).pow(2).flatten(1).mean(1).sum() / sum(case.counts)
        ranks = 1 if rank is None else 2
        (share * ranks).backward()  # DDP divides the gradients of parameters by the ranks
        optimizer.step()
        for tensor in (y, x.grad):
            assert tensor.is_contiguous(memory_format=case.memory_format)
        outputs += [numpy(y), numpy(x.grad / ranks)]
    state = {key: numpy(value) for key, value in net.state_dict().items()}
    return outputs, state, [numpy(p.grad) for p in net.parameters()]


def train_rank(rank):
    results = {}
    for name, case in CASES.items():
        torch.manual_seed(3)
        ddp = DistributedDataParallel(convert_sync_batchnorm(case.model().double()))
        results[name] = train(saved_and_loaded(ddp), case, rank)
    return results


@pytest.fixture(scope="module")
def ranks(run):
    return run(2, train_rank)


@pytest.mark.parametrize("name", CASES)
def test_a_loaded_ddp_model_trains_as_one_process_does(ranks, name):
    case = CASES[name]
    torch.manual_seed(3)
    outputs, state, grads = train(case.model().double(), case)
    for rank, results in enumerate(ranks):
        own_outputs, own_state, own_grads = results[name]
        own = slice(None, case.counts[0]) if rank == 0 else slice(case.counts[0], None)
        for actual, expected in zip(own_outputs, outputs, strict=True):
            assert_close(actual, expected[own], torch.float64, ROUNDINGS)
        for actual, expected in zip(own_grads, grads, strict=True):
            assert_close(actual, expected, torch.float64, ROUNDINGS)
        for key, expected in state.items():
            assert_close(own_state[f"module.{key}"], expected, torch.float64, ROUNDINGS)


def different_sizes(rank):
    """One constant a channel, another on each rank, and ten times as many of them on the second."""
    levels = torch.tensor([[10.0, 3.0], [1.0, 1.0]])[rank]
    return levels[:, None].expand(2, 2, 10 ** (rank + 1))


def running_value_rank(rank):
    layer = FastSyncBatchNorm(2, momentum=0.99)
    ddp = DistributedDataParallel(layer)
    for _ in range(20):  # until the first values, 0 and 1, weigh less than a rounding
        ddp(different_sizes(rank)).mean().backward()
    return numpy(layer.running_mean), numpy(layer.running_var)


def test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value(run):
    x = torch.cat([different_sizes(rank).transpose(0, 1).flatten(1) for rank in range(2)], dim=1)
    for mean, var in run(2, running_value_rank):
        assert_close(mean, numpy(x.double().mean(1)), torch.float32)
        assert_close(var, numpy(x.double().var(1)), torch.float32)


def half_rank(rank):
    ddp = DistributedDataParallel(convert_sync_batchnorm(Net().half()))
    y = ddp(random((2, 2), torch.float16))
    y.sum().backward()
    return {str(tensor.dtype) for tensor in (y, *(p.grad for p in ddp.parameters()))}


def test_DistributedDataParallel_SyncBatchNorm_half(run):
    assert run(2, half_rank) == [{"torch.float16"}] * 2


def process_group_rank(rank):
    """The second rank is no member, and converts as well; the first trains without it."""
    group = dist.new_group([0])
    net = convert_sync_batchnorm(nn.Sequential(Net(), nn.Sequential(nn.Sequential(Net()))), group)
    layers = [layer for layer in net.modules() if isinstance(layer, FastSyncBatchNorm)]
    if rank == 0:
        net(random((3, 2))).sum().backward()
    return len(layers), all(layer.process_group is group for layer in layers)


def test_SyncBatchNorm_process_group(run):
    assert run(2, process_group_rank) == [(2, True)] * 2


def inference_rank(rank):
    layer = FastSyncBatchNorm(2, track_running_stats=False)
    alone = copy.deepcopy(layer).eval()
    ddp = DistributedDataParallel(layer)
    x = random((10, 2, 4, 4))
    return rank == 1 or all(torch.equal(ddp.eval()(x), alone(x)) for _ in range(6))


def test_ddp_inference_on_one_rank(run):
    assert run(2, inference_rank) == [True, True]
