"""Strides and shapes that went wrong elsewhere: they never change values, in any mode."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import reference
import torch
from inputs import DTYPES, LAYOUTS, assert_close, numpy, random
from torch import nn
from training import check_training_step, train_once

from syncbn_cuda import FastSyncBatchNorm


@pytest.mark.parametrize("size", [(100,), (31, 17), (112, 112)], ids=str)
@pytest.mark.parametrize("channels", [1, 3, 63, 64, 65, 127, 129, 255, 257, 513, 1023])
def test_every_channel_of_every_layout(channels, size):
    """Numbers of channels about those of a launch, on one block a channel and on several."""
    count = max(2, 40_000 // (channels * int(np.prod(size))))
    x, dy = (random((count, channels, *size)) for _ in range(2))
    results = []
    for layout in ("contiguous", "channels_last"):
        layer = FastSyncBatchNorm(channels)
        y, dx = train_once(layer, LAYOUTS[layout](x), LAYOUTS[layout](dy))
        results.append((y, dx, layer.weight.grad, layer.bias.grad, layer.running_var))
    batch = reference.forward(numpy(x))
    assert_close(results[0][0], batch.output, torch.float32)
    scale = float(np.abs(numpy(dy)).sum() / channels)
    for first, last in zip(*results, strict=True):
        assert_close(last, numpy(first), torch.float32, scale=scale if first.ndim == 1 else 0.0)


def in_order(x, order):
    """Returns the values of x with its dimensions in another order in memory."""
    back = [order.index(dim) for dim in range(x.ndim)]
    return x.permute(order).contiguous().permute(back)


VIEWS = {
    **{str(order): order for order in itertools.permutations(range(4))},
    "every other sample": lambda x: x.repeat_interleave(2, 0)[::2],
    "every other column": lambda x: x.repeat_interleave(2, 3)[..., ::2],
    "half of the channels": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "reversed twice": lambda x: x.flip(2).flip(2),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("view", VIEWS)
def test_strides_change_no_value(view, training):
    make = VIEWS[view]
    x, dy = random((3, 4, 5, 6)), random((3, 4, 5, 6))
    strided = make(x) if callable(make) else in_order(x, make)
    assert torch.equal(strided, x)
    layers = [FastSyncBatchNorm(4).train(training) for _ in range(2)]
    for ours, expected in zip(
        train_once(layers[0], strided, dy), train_once(layers[1], x, dy), strict=True
    ):
        torch.testing.assert_close(ours, expected)
    for key, value in layers[1].state_dict().items():
        torch.testing.assert_close(layers[0].state_dict()[key], value)


@pytest.mark.parametrize("dims", [(0,), (1,), (2, 3), (0, 1, 2, 3)], ids=str)
def test_an_expanded_input(dims):
    whole = random((3, 4, 5, 6))
    narrow = whole[tuple(slice(1) if dim in dims else slice(None) for dim in range(4))]
    check_training_step(narrow.expand(whole.shape), random(whole.shape))


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("track", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(5, 4), (3, 4, 7), (3, 4, 5, 6), (2, 4, 3, 5, 2)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_evaluation_is_that_of_batch_norm(dtype, shape, layout, affine, track, grad):
    layer = FastSyncBatchNorm(4, affine=affine, track_running_stats=track)
    if track:
        layer(random(shape, mean=2.0))
    plain = nn.BatchNorm2d(4, affine=affine, track_running_stats=track, dtype=torch.float64)
    plain._check_input_dim = lambda input: None
    plain.load_state_dict(layer.state_dict())
    x = LAYOUTS[layout](random(shape, dtype, mean=2.0)).requires_grad_(grad)
    y, expected = layer.eval()(x), plain.eval()(x.detach().double())
    assert y.dtype == dtype and y.requires_grad == (grad or affine)
    assert_close(y, numpy(expected), dtype)


@pytest.mark.parametrize("channels", [1, 2, 3, 63, 64, 65, 1000])
@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_a_batch_of_vectors(count, channels):
    # Apart from one another, and small dy: of two values, dx is what rounding leaves of the terms.
    x = random((count, channels), std=0.05) + torch.arange(count)[:, None]
    check_training_step(x, random((count, channels), std=0.1))


def vectors_rank(rank, x):
    return numpy(FastSyncBatchNorm(x.shape[1])(x[rank : rank + 1]))


def test_a_vector_on_each_rank(run):
    x = random((2, 65))
    y = np.concatenate(run(2, vectors_rank, x))
    assert_close(y, reference.forward(numpy(x)).output, torch.float32)
