"""Strides and shapes that went wrong elsewhere: they never change values, in any mode."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import reference
import torch
from inputs import DENSE, DTYPES, LAYOUTS, assert_close, numpy, random
from test_distributed import assert_is_global, train_batches
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
    "every other sample": lambda x: x.repeat_interleave(2, 0)[::2],
    "every other column": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "half of the channels": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "one sample for all": lambda x: x[:1].expand_as(x),
}


def step_of(x, dy, training):
    layer = FastSyncBatchNorm(x.shape[1]).train(training)
    y, dx = train_once(layer, x, dy)
    return {"y": y, "dx": dx, "dw": layer.weight.grad, "db": layer.bias.grad, **layer.state_dict()}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(7, 4, 5), (3, 4, 5, 6), (2, 4, 3, 2, 5)], ids=str)
def test_strides_change_no_value(shape, dtype, training):
    for view in (*VIEWS, *itertools.permutations(range(len(shape)))):
        drawn = [random(shape, dtype) for _ in range(2)]
        pairs = [VIEWS[view](x) if view in VIEWS else in_order(x, view) for x in drawn]
        x, dy = ((strided, strided.contiguous().clone()) for strided in pairs)
        expected = step_of(x[1], dy[1], training)
        for which in ((0, 0), (0, 1), (1, 0)):
            ours = step_of(x[which[0]], dy[which[1]], training)
            torch.testing.assert_close(ours, expected)


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
    exact = x.detach().double().requires_grad_(grad)
    y, expected = layer.eval()(x), plain.eval()(exact)
    assert y.dtype == dtype and y.requires_grad == (grad or affine)
    if layout in DENSE and len(shape) > 3:  # of other inputs torch makes a contiguous output
        assert y.stride() == x.stride()
    assert_close(y, numpy(expected), dtype)
    if not y.requires_grad:
        return
    dy = LAYOUTS[layout](random(shape, dtype))
    y.backward(dy)
    expected.backward(dy.double())
    if grad:
        assert x.grad.dtype == dtype
        assert_close(x.grad, numpy(exact.grad), dtype)
    scale = float(np.abs(numpy(dy)).sum()) / 4
    # The sums are of torch's own operator, for strided bfloat16 only as precise as the input.
    kind = dtype if dtype == torch.bfloat16 else torch.float32
    for ours, theirs in zip(layer.parameters(), plain.parameters(), strict=True):
        assert ours.grad.dtype == ours.dtype
        assert_close(ours.grad, numpy(theirs.grad), kind, scale=scale)


CHANNELS = [1, 2, 3, 63, 64, 65, 1000]


def apart(count, channels):
    """Draws vectors apart from one another, and a small gradient.

    Of two values, the gradient of the input is what rounding leaves of its terms.
    """
    x = random((count, channels), std=0.05) + torch.arange(count)[:, None]
    return x, random((count, channels), std=0.1)


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_a_batch_of_vectors(count, channels):
    check_training_step(*apart(count, channels))


@pytest.mark.parametrize("count", [2, 3])
def test_a_vector_on_each_rank(run, count):
    batches = []
    for channels in CHANNELS:
        x, dy = apart(count, channels)
        batches.append([*zip(x.split(1), dy.split(1), strict=True)])
    for pieces, ranks in zip(batches, train_batches(run, batches), strict=True):
        assert_is_global(ranks, pieces, torch.float32)
