"""Numbers that went wrong elsewhere: constants, large means, tiny spreads, Inf, few values."""

from __future__ import annotations

import numpy as np
import pytest
import reference
import torch
from inputs import DTYPES, assert_close, numpy, random
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from syncbn_cuda import FastSyncBatchNorm, convert_sync_batchnorm

CHANNELS = 5


def step_rank(rank, pieces, dtype):
    layer = FastSyncBatchNorm(pieces[rank].shape[1]).to(dtype)
    x = pieces[rank].requires_grad_()
    y = layer(x)
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y))
    return numpy(y), numpy(x.grad), numpy(layer.running_mean), numpy(layer.running_var)


@pytest.mark.parametrize("counts", [(4, 4), (13, 0), (6, 7)], ids=str)
def test_constant_channels_become_zero_over_ranks(run, counts):
    values = 10.0 ** torch.arange(11) * torch.tensor([1.0, 1 / 3])[:, None]
    values = values.flatten()[None, :, None]
    pieces = [values.repeat(count, 1, 15) for count in counts]
    for y, dx, mean, var in run(2, step_rank, pieces, torch.float32):
        assert (np.abs(y) < 1e-2).all() and np.isfinite(dx).all()
        assert np.isfinite(mean).all() and (var >= 0).all()


@pytest.mark.parametrize("mean", [5.0, 1e2, 1e3, 1e4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_large_mean_with_a_small_spread(run, dtype, mean):
    """Each rank has its own mean, large beside the spread; what the type can hold of it counts."""
    pieces = [
        random((8, CHANNELS, 6, 6), mean=mean * (1 + rank / 8), std=0.1).to(dtype)
        for rank in range(2)
    ]
    batch = reference.forward(np.concatenate([numpy(x) for x in pieces]))
    ranks = run(2, step_rank, pieces, torch.float32 if dtype != torch.float64 else dtype)
    assert_close(np.concatenate([rank[0] for rank in ranks]), batch.output, dtype)
    _, var = reference.running(np.zeros(CHANNELS), np.ones(CHANNELS), batch, 0.1)
    np.testing.assert_allclose(ranks[0][3], var, rtol=1e-6)


def test_no_variance_is_negative_or_far_off():
    """10,000 channels, each with a mean and a spread of its own, up to mean / std of 1e5."""
    channels = 10_000
    mean = 10 ** (torch.rand(channels, dtype=torch.float64) * 7 - 3)
    std = mean * 10 ** -(torch.rand(channels, dtype=torch.float64) * 5)
    x = (mean + std * torch.randn(64, channels, dtype=torch.float64)).float()
    layer = FastSyncBatchNorm(channels, momentum=1.0)
    assert layer(x).isfinite().all()
    expected = numpy(x).var(0, ddof=1)
    assert (numpy(layer.running_var) >= 0).all()
    np.testing.assert_allclose(numpy(layer.running_var), expected, rtol=1e-3)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_batch_that_is_not_finite_does_what_it_does_to_batch_norm(run, bad):
    pieces = [random((4, CHANNELS, 6)) for _ in range(2)]
    pieces[1][2, 3, 1] = bad
    plain = nn.BatchNorm1d(CHANNELS)
    y = numpy(plain(torch.cat(pieces)))
    ranks = run(2, step_rank, pieces, torch.float32)
    got = np.concatenate([rank[0] for rank in ranks])
    assert (np.isfinite(got) == np.isfinite(y)).all() and not np.isfinite(got[:, 3]).any()
    for buffer, theirs in ((2, plain.running_mean), (3, plain.running_var)):
        ours = ranks[0][buffer]
        assert (np.isfinite(ours) == np.isfinite(numpy(theirs))).all()
        assert ours.tobytes() == ranks[1][buffer].tobytes()


def test_the_buffer_of_two_values_is_their_unbiased_variance(run):
    pieces = [torch.full((1, CHANNELS, 1, 1), value) for value in (1.0, 4.0)]
    for y, _, mean, var in run(2, step_rank, pieces, torch.float32):
        np.testing.assert_allclose(np.abs(y), 1, rtol=1e-5)  # biased where it normalises
        np.testing.assert_allclose(mean, 0.1 * 2.5, rtol=1e-6)
        np.testing.assert_allclose(var, 0.9 + 0.1 * (1.5**2 * 2) / 1, rtol=1e-6)


def classify(net, x, classes, scale=1.0):
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    loss = nn.functional.cross_entropy(net(x), classes)
    (loss * scale).backward()
    optimizer.step()
    return [numpy(p) for p in net.parameters()]


def classifier(dtype):
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3 * 6 * 6, 10)).to(dtype)


def classify_rank(rank, x, classes, dtype):
    net = DistributedDataParallel(convert_sync_batchnorm(classifier(dtype)))
    return classify(net, x[rank::2], classes[rank::2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_step_of_two_ranks_is_that_of_one_process(run, dtype):
    x, classes = random((8, 3, 6, 6), dtype, mean=2.0), torch.randint(10, (8,))
    expected = classify(classifier(dtype), x, classes)
    for parameters in run(2, classify_rank, x, classes, dtype):
        for ours, theirs in zip(parameters, expected, strict=True):
            assert_close(ours, theirs, dtype)
