"""Several ranks are one BatchNorm over the global batch: values, gradients, buffers, messages."""

from __future__ import annotations

import numpy as np
import pytest
import reference
import torch
import torch.distributed as dist
from inputs import DTYPES, LAYOUTS, assert_close, numpy, random
from torch import nn

from syncbn_cuda import FastSyncBatchNorm
from syncbn_cuda.functional import sync_batch_norm

CHANNELS = 5
#: Samples a rank holds: equal, unequal, and with empty ranks.
SPLITS = [(2, 2), (1, 1), (3, 1), (0, 4), (4, 0), (2, 2, 2, 2), (1, 4, 0, 3), (0, 0, 1, 1)]


def shards(counts, dtype=torch.float32, tail=(6, 7)):
    torch.manual_seed(1)
    return [
        (random((n, CHANNELS, *tail), dtype, mean=0.5 * rank), random((n, CHANNELS, *tail), dtype))
        for rank, n in enumerate(counts)
    ]


def train_rank(rank, pieces, layout, affine):
    x, dy = (LAYOUTS[layout](piece) for piece in pieces[rank])
    layer = FastSyncBatchNorm(CHANNELS, affine=affine)
    x.requires_grad_()
    y = layer(x)
    y.backward(dy)
    return {
        "y": numpy(y),
        "dx": numpy(x.grad),
        "grads": [numpy(p.grad) for p in layer.parameters()],
        "state": {k: v.cpu().numpy().copy() for k, v in layer.state_dict().items()},
    }


def assert_is_global(ranks, pieces, dtype):
    x = np.concatenate([numpy(x) for x, _ in pieces])
    dy = np.concatenate([numpy(dy) for _, dy in pieces])
    batch, grads = reference.forward(x), reference.backward(dy, x)
    assert_close(np.concatenate([r["y"] for r in ranks]), batch.output, dtype)
    assert_close(np.concatenate([r["dx"] for r in ranks]), grads.input, dtype)
    for index, expected in enumerate((grads.weight, grads.bias)):
        if ranks[0]["grads"]:
            total = sum(r["grads"][index] for r in ranks)
            assert_close(total, expected, torch.float32, scale=float(np.abs(dy).sum()) / CHANNELS)
    mean, var = reference.running(np.zeros(CHANNELS), np.ones(CHANNELS), batch, 0.1)
    assert_close(ranks[0]["state"]["running_mean"], mean, torch.float32)
    assert_close(ranks[0]["state"]["running_var"], var, torch.float32)
    for other in ranks:
        assert other["state"]["num_batches_tracked"] == 1
        for key, value in ranks[0]["state"].items():
            assert value.tobytes() == other["state"][key].tobytes(), f"{key} differs in its bits"


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("counts", SPLITS, ids=str)
def test_ranks_are_one_batch(run, counts, affine):
    pieces = shards(counts)
    ranks = run(len(counts), train_rank, pieces, "contiguous", affine)
    assert_is_global(ranks, pieces, torch.float32)


@pytest.mark.parametrize("layout", ["channels_last", "permuted"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ranks_are_one_batch_in_every_type(run, dtype, layout):
    pieces = shards((3, 1), dtype)
    assert_is_global(run(2, train_rank, pieces, layout, True), pieces, dtype)


def train_sizes(rank):
    torch.manual_seed(rank)
    x = random([(2, 3, 30, 30), (5, 3, 50, 41)][rank]).requires_grad_()
    layer = FastSyncBatchNorm(3)
    dy = torch.randn(x.shape)
    layer(x).backward(dy)
    return numpy(x), numpy(dy), numpy(x.grad), numpy(layer.running_mean), numpy(layer.running_var)


def test_image_sizes_may_differ_between_ranks(run):
    first, second = run(2, train_sizes)
    flat = [
        np.concatenate([np.moveaxis(a[i], 1, 0).reshape(3, -1) for a in (first, second)], axis=1).T
        for i in range(3)
    ]
    grads = reference.backward(flat[1], flat[0])
    assert_close(flat[2], grads.input, torch.float32)
    mean, var = reference.running(np.zeros(3), np.ones(3), reference.forward(flat[0]), 0.1)
    for rank in (first, second):
        assert_close(rank[3], mean, torch.float32)
        assert_close(rank[4], var, torch.float32)
    assert first[3].tobytes() == second[3].tobytes() and first[4].tobytes() == second[4].tobytes()


def train_empty(rank, shape):
    x = torch.empty(shape, requires_grad=True)
    layer = FastSyncBatchNorm(CHANNELS)
    y = layer(x)
    y.sum().backward()
    return (
        y.shape == x.shape == x.grad.shape,
        [numpy(p.grad) for p in layer.parameters()],
        {k: v.cpu().numpy().copy() for k, v in layer.state_dict().items()},
    )


@pytest.mark.parametrize("shape", [(0, 5), (0, 5, 4, 4), (3, 5, 0, 0)], ids=str)
def test_when_every_rank_is_empty(run, shape):
    for shapes_fit, grads, state in run(2, train_empty, shape):
        assert shapes_fit and not np.any(grads)
        assert not state["running_mean"].any() and (state["running_var"] == 1).all()
        assert state["num_batches_tracked"] == 0


class Subclass(torch.Tensor):
    """A tensor type of a user's own."""


def single_value(rank, counts, kind=torch.Tensor):
    layer = FastSyncBatchNorm(CHANNELS)
    try:
        layer(torch.randn(counts[rank], CHANNELS).as_subclass(kind))
    except ValueError as error:
        return str(error), layer.num_batches_tracked.item()
    return None, layer.num_batches_tracked.item()


@pytest.mark.parametrize("kind", [torch.Tensor, Subclass])
def test_one_value_a_channel_in_the_whole_group_raises_on_every_rank(run, kind):
    for message, batches in run(2, single_value, (1, 0), kind):
        assert "FastSyncBatchNorm(5): expected more than 1 value per channel" in message
        assert "in the whole process group" in message and batches == 0
    assert run(2, single_value, (1, 1), kind) == [(None, 1)] * 2


def gradcheck_rank(rank, counts):
    """Each rank in turn perturbs its own variables, while the peers take part in the collectives.

    What is differentiated is the sum of the losses of all ranks: an input moves all of them.
    """
    torch.manual_seed(7)
    weight, bias = (torch.rand(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    torch.manual_seed(rank)
    x = torch.randn(counts[rank], 3, 2, dtype=torch.float64, requires_grad=True)
    slope = torch.randn(counts[rank], 3, 2, dtype=torch.float64)
    variables = {"x": x, "weight": weight, "bias": bias}

    def loss(x, weight, bias):
        y = sync_batch_norm(x, None, None, weight, bias, training=True)
        return (y.pow(2) * slope).sum()

    @torch.no_grad()
    def loss_of_all(**moved):
        total = loss(**{**variables, **moved})
        dist.all_reduce(total)
        return total.item()

    analytic = torch.autograd.grad(loss(**variables), [*variables.values()])
    analytic = dict(zip(variables, analytic, strict=True))
    worst, step = 0.0, 1e-6
    for active, count in enumerate(counts):
        for name, size in (("x", count * 6), ("weight", 3), ("bias", 3)):
            for index in range(size):
                values = []
                for sign in (1, -1):
                    moved = variables[name].detach().clone()
                    if rank == active:
                        moved.view(-1)[index] += sign * step
                    values.append(loss_of_all(**{name: moved}))
                if rank == active:
                    numeric = (values[0] - values[1]) / (2 * step)
                    worst = max(worst, abs(numeric - analytic[name].view(-1)[index].item()))
    return worst


@pytest.mark.parametrize("counts", [(2, 2), (1, 3), (0, 2)], ids=str)
def test_gradcheck_over_ranks(run, counts):
    assert max(run(2, gradcheck_rank, counts)) < 1e-6


def uneven_penalty_rank(rank):
    x = random((4, CHANNELS, 2), torch.float64).requires_grad_(rank == 0)
    layer = FastSyncBatchNorm(CHANNELS, dtype=torch.float64)
    (g,) = torch.autograd.grad(layer(x).pow(3).sum(), layer.weight, create_graph=True)
    g.pow(2).sum().backward()
    return x.grad is None


def test_a_second_backward_does_not_hang_where_ranks_need_different_gradients(run):
    assert run(2, uneven_penalty_rank) == [False, True]


def penalty_rank(rank, pieces):
    x = pieces[rank].clone().requires_grad_()
    y = FastSyncBatchNorm(CHANNELS, dtype=torch.float64)(x)
    (g,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
    g.pow(2).sum().backward()
    return numpy(x.grad)


def test_the_second_derivative_crosses_ranks(run):
    pieces = [x for x, _ in shards((3, 2), torch.float64)]
    x = torch.cat(pieces).requires_grad_()
    y = nn.BatchNorm2d(CHANNELS, dtype=torch.float64)(x)
    (g,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
    g.pow(2).sum().backward()
    assert_close(np.concatenate(run(2, penalty_rank, pieces)), numpy(x.grad), torch.float64)
