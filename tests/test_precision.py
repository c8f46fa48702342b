"""Mixed and low precision in training: types are those that nn.BatchNorm gives, and so is accuracy.

What is right of one layer in every type is in test_module.py; here are whole steps.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist
from inputs import DTYPES, ROUNDING, numpy, random
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only
from training import train_once

from syncbn_cuda import FastSyncBatchNorm, convert_sync_batchnorm

HALVES = [torch.float16, torch.bfloat16]


def types_of(kind, training, affine, autocast, dtype, parameters, buffers):
    """The types of all that a step makes, or None where the mixture is refused."""
    layer = kind(3, affine=affine).to(parameters).train(training)
    layer.running_mean, layer.running_var = (b.to(buffers) for b in list(layer.buffers())[:2])
    try:
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            results = train_once(layer, *(random((4, 3, 5, 5), dtype) for _ in range(2)))
    except (RuntimeError, TypeError):
        return None
    grads = [parameter.grad for parameter in layer.parameters()]
    return [tensor.dtype for tensor in (*results, *grads, *layer.buffers())]


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("autocast", [None, *HALVES], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_where_batch_norm_runs_a_mixture_ours_gives_the_same_types(
    training, dtype, autocast, affine
):
    run_by_torch = 0
    for parameters in DTYPES:
        for buffers in (parameters, torch.float32):
            call = (training, affine, autocast, dtype, parameters, buffers)
            expected = types_of(nn.BatchNorm2d, *call)
            if expected is not None:
                run_by_torch += 1
                assert types_of(FastSyncBatchNorm, *call) == expected, call
    assert run_by_torch, "nothing was compared"


@dataclass(frozen=True)
class Precision:
    """The type that a model and its input are cast to, and that of its autocast."""

    cast: str = "float"
    autocast: torch.dtype | None = None
    cast_first: bool = True

    def nets(self):
        """Returns the model with our layers, with torch's, and with torch's in float64."""
        torch.manual_seed(3)
        plain = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.Conv2d(8, 4, 3, bias=False), nn.BatchNorm2d(4)),
        )
        ours, cast = copy.deepcopy(plain), getattr(nn.Module, self.cast)
        for change in (cast, convert_sync_batchnorm)[:: 1 if self.cast_first else -1]:
            change(ours)
        cast(plain)
        return ours, plain, copy.deepcopy(plain).double()

    def batches(self):
        """Returns the input and the gradient of the output, of values that their types hold."""
        torch.manual_seed(4)
        dtype = getattr(torch, self.cast)
        return random((6, 3, 9, 9), dtype, 0.3), random((6, 4, 5, 5), self.autocast or dtype)

    def step(self, net, x, dy):
        """Returns all tensors that a step of training makes."""
        with torch.autocast("cpu", self.autocast, enabled=self.autocast is not None):
            y, dx = train_once(net, x, dy)
        grads = {f"{name}.grad": parameter.grad for name, parameter in net.named_parameters()}
        return {"y": y, "dx": dx, **grads, **dict(net.named_buffers())}


PRECISIONS = {
    **{f"autocast {dtype}": Precision(autocast=dtype) for dtype in HALVES},
    **{
        f"{cast}() {'before' if first else 'after'} conversion": Precision(cast, None, first)
        for cast in ("half", "bfloat16", "double")
        for first in (True, False)
    },
}


def steps_rank(rank):
    """Takes the step of every precision on this rank's samples: every second one."""
    world = dist.get_world_size()
    results = {}
    for name, precision in PRECISIONS.items():
        x, dy = (batch[rank::world] for batch in precision.batches())
        results[name] = precision.step(precision.nets()[0], x, dy)
    return tree_map_only(torch.Tensor, lambda t: (t.dtype, numpy(t)), results)


@pytest.fixture(scope="module")
def ranks(run):
    return {world: run(world, steps_rank) for world in (1, 2)}


def global_value(key, shares):
    """Puts together what the ranks hold of one tensor of the global batch."""
    if key in ("y", "dx"):
        return np.stack(shares, axis=1).reshape(-1, *shares[0].shape[1:])
    if key.endswith(".grad"):
        return sum(shares)
    assert all(share.tobytes() == shares[0].tobytes() for share in shares), key
    return shares[0]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", PRECISIONS)
def test_a_step_has_the_types_and_the_accuracy_of_batch_norm(ranks, name, world_size):
    precision = PRECISIONS[name]
    _, plain, exact = precision.nets()
    x, dy = precision.batches()
    theirs = precision.step(plain, x, dy)
    right = Precision("double").step(exact, x.double(), dy.double())
    results = [states[name] for states in ranks[world_size]]
    assert results[0].keys() == theirs.keys()
    for key, their in theirs.items():
        assert {state[key][0] for state in results} == {their.dtype}, key
        value, expected = global_value(key, [s[key][1] for s in results]), numpy(right[key])
        # A step is as accurate as torch's own, whose error is a draw too, and a rounding a rank.
        rounding = ROUNDING[dy.dtype] * float(np.abs(expected).max())
        own = float(np.abs(numpy(their) - expected).max())
        if their.dtype == torch.float64:  # what is right is no more exact than it
            own = max(own, 4 * rounding)
        assert np.abs(value - expected).max() <= 2 * own + (1 + world_size) * rounding, key


def scaled_steps(net, batches, scale):
    """Trains with a scaler; returns the state, the scale, and which steps moved the parameters."""
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    moved = []
    for x in batches:
        before = [parameter.detach().clone() for parameter in net.parameters()]
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = net(x).float().pow(2).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        moved.append(not all(map(torch.equal, before, net.parameters())))
    buffers = {name: numpy(buffer) for name, buffer in net.named_buffers()}
    return buffers, scaler.get_scale(), moved


def scaler_batches(value):
    """The first batch holds a value in a sample that is of the second rank, where there is one."""
    torch.manual_seed(6)
    batches = [random((4, 3, 9, 9)) for _ in range(3)]
    batches[0][1, 0, 4, 4] = value
    return batches


def scaler_rank(rank, value, scale):
    ddp = DistributedDataParallel(Precision().nets()[0])
    return scaled_steps(ddp, [x[rank::2] for x in scaler_batches(value)], scale)


@pytest.mark.parametrize(
    ("value", "scale"), [(float("inf"), 2.0**6), (1.0, 2.0**40)], ids=["input", "gradient"]
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_that_the_scaler_skips_leaves_the_buffers_of_batch_norm(
    run, world_size, value, scale
):
    _, plain, _ = Precision().nets()
    expected, its_scale, its_moves = scaled_steps(plain, scaler_batches(value), scale)
    assert not its_moves[0] and expected["1.num_batches_tracked"] == 3
    assert np.isfinite(expected["1.running_mean"]).all() == np.isfinite(value)
    if world_size == 1:
        ours = [scaled_steps(Precision().nets()[0], scaler_batches(value), scale)]
    else:
        ours = run(2, scaler_rank, value, scale)
    for buffers, its, moves in ours:
        assert (its, moves) == (its_scale, its_moves)
        for key, buffer in buffers.items():
            # The convolutions before compute in half precision, and its error is that of a batch.
            np.testing.assert_allclose(
                buffer, expected[key.removeprefix("module.")], rtol=2e-3, atol=2e-3
            )
