"""Numbers that went wrong elsewhere: constants, large means, tiny spreads, Inf, few values."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import reference
import torch
from inputs import DTYPES, assert_close, numpy, random
from test_distributed import assert_is_global, train_batches, train_layer, train_rank
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from syncbn_cuda import FastSyncBatchNorm, convert_sync_batchnorm

CHANNELS = 5


def with_slope(inputs):
    """Puts a gradient of both signs beside each rank's input."""
    slopes = (torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x) for x in inputs)
    return [*zip(inputs, slopes, strict=True)]


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_constant_channels_become_zero_over_ranks(run, dtype, layout):
    values = 10.0 ** torch.arange(11, dtype=dtype) * torch.tensor([1.0, 1 / 3, -1.0])[:, None]
    values = values.flatten()[None, :, None]
    batches = [
        with_slope([values.repeat(count, 1, 15) for count in counts])
        for counts in ((4, 4), (13, 0), (6, 7))
    ]
    for rank in itertools.chain(*train_batches(run, batches, layout=layout)):
        assert (np.abs(rank["y"]) < 1e-2).all()
        assert all(np.isfinite(array).all() for array in tree_leaves(rank))
        assert (rank["state"]["running_var"] >= 0).all()


@pytest.mark.parametrize("drift", [0.125, 0.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_large_mean_with_a_small_spread(run, dtype, drift):
    """Of either sign, the same on both ranks or not; what the type can hold of it counts."""
    signs = (-1.0) ** torch.arange(CHANNELS).view(-1, 1, 1)
    batches = []
    for mean in (5.0, 1e2, 1e3, 1e4):
        means = (mean, mean * (1 + drift))
        inputs = [signs * random((8, CHANNELS, 6, 6), mean=mean, std=0.1) for mean in means]
        batches.append(with_slope([x.to(dtype) for x in inputs]))
    parameters = torch.float64 if dtype == torch.float64 else torch.float32
    steps = train_batches(run, batches, dtype=parameters)
    for pieces, ranks in zip(batches, steps, strict=True):
        batch = reference.forward(np.concatenate([numpy(x) for x, _ in pieces]))
        assert_is_global(ranks, pieces, dtype, 8.0)
        _, var = reference.running(np.zeros(CHANNELS), np.ones(CHANNELS), batch, 0.1)
        np.testing.assert_allclose(ranks[0]["state"]["running_var"], var, rtol=1e-6)


def variance_rank(rank, pieces):
    x, dy = pieces[rank]
    return train_layer(FastSyncBatchNorm(x.shape[1], momentum=1.0), x, dy)


@pytest.mark.parametrize("counts", [(64,), (31, 33)], ids=str)
def test_no_variance_is_negative_or_far_off(run, counts):
    """10,000 channels, each with a mean and a spread of its own, up to mean / std of 1e5.

    Over ranks, their means are about a spread apart, too.
    """
    channels = 10_000
    wide = {"dtype": torch.float64}
    mean = 10 ** (torch.rand(channels, **wide) * 7 - 3)
    std = mean * 10 ** -(torch.rand(channels, **wide) * 5)
    inputs = [
        mean + std * (rank * torch.randn(channels, **wide) + torch.randn(count, channels, **wide))
        for rank, count in enumerate(counts)
    ]
    pieces = with_slope([x.float() for x in inputs])
    ranks = run(len(counts), variance_rank, pieces)
    expected = np.concatenate([numpy(x) for x, _ in pieces]).var(0, ddof=1)
    for rank in ranks:
        assert np.isfinite(rank["y"]).all() and np.isfinite(rank["dx"]).all()
        assert (rank["state"]["running_var"] >= 0).all()
        np.testing.assert_allclose(rank["state"]["running_var"], expected, rtol=1e-3)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_batch_that_is_not_finite_does_what_it_does_to_batch_norm(run, bad):
    inputs = [random((4, CHANNELS, 6)) for _ in range(2)]
    inputs[1][2, 3, 1] = bad
    pieces = with_slope(inputs)
    theirs = train_layer(nn.BatchNorm1d(CHANNELS), *map(torch.cat, zip(*pieces, strict=True)))
    ranks = run(2, train_rank, pieces)
    for name in ("y", "dx"):
        got = np.concatenate([rank[name] for rank in ranks])
        assert (np.isfinite(got) == np.isfinite(theirs[name])).all()
        assert (np.isfinite(got).all((0, 2)) == (np.arange(CHANNELS) != 3)).all()
        assert not np.isfinite(got[:, 3]).any()
    for rank in ranks:
        for ours, plain in zip(rank["grads"], theirs["grads"], strict=True):
            assert (np.isfinite(ours) == np.isfinite(plain)).all()
        for name in ("running_mean", "running_var"):
            ours = rank["state"][name]
            assert (np.isfinite(ours) == np.isfinite(theirs["state"][name])).all()
            assert ours.tobytes() == ranks[0]["state"][name].tobytes()


def test_the_buffer_of_two_values_is_their_unbiased_variance(run):
    pieces = with_slope([torch.full((1, CHANNELS, 1, 1), value) for value in (1.0, 4.0)])
    for rank in run(2, train_rank, pieces):
        # Biased where it normalises.
        np.testing.assert_allclose(np.abs(rank["y"]), 1, rtol=1e-5)
        np.testing.assert_allclose(rank["state"]["running_mean"], 0.1 * 2.5, rtol=1e-6)
        unbiased = 0.9 + 0.1 * (1.5**2 * 2) / 1
        np.testing.assert_allclose(rank["state"]["running_var"], unbiased, rtol=1e-6)


def classify(net, x, classes):
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    nn.functional.cross_entropy(net(x), classes).backward()
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
