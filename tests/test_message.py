"""What the message of forward keeps of its sums, whoever wrote it and however ranks differ."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from emulator import operators
from inputs import DTYPES

from syncbn_cuda import _composite, _library

KERNELS = ["compiled", "composite", "emulated"]

#: How many values the ranks have.
COUNTS = {
    "alike": [64] * 4,
    "any": [13, 195, 1, 0, 7],
    "one against many": [1, 50_000],
    "many with little": [1, 2, 3] * 40,
}

every_type = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def kernels_of(name):
    if name == "emulated":
        return operators.kernels()
    return _library._available.compiled if name == "compiled" else _composite


@pytest.fixture(params=KERNELS)
def kernels(request):
    return kernels_of(request.param)


def statistics(kernels, message):
    """Returns what a float64 layer's buffers become: mean and biased variance of a channel."""
    channels = len(message) // 4
    mean, var = torch.zeros(2, channels, dtype=torch.float64)
    nothing = torch.empty(0, channels, dtype=torch.float64)
    kernels.batch_norm_elemt_running(nothing, message, None, None, 1e-5, mean, var, None, 1.0)
    count = message[-1].item()
    return mean.numpy(), var.numpy() * ((count - 1) / count)


def expected(pieces):
    values = torch.cat(pieces).double().numpy().astype(np.longdouble)
    mean = values.mean(0)
    return mean, ((values - mean) ** 2).mean(0)


def levels(dtype, counts):
    """Each rank's values are alike, a step from the next rank's: all variance is between ranks."""
    means = torch.tensor([1e5, -1e5, 1e5 / 3, 3e-2, 7e11]).to(dtype).double()
    steps = means.abs() * 2.0**-17
    return [
        (means + rank % 3 * steps).to(dtype).expand(count, 5).contiguous()
        for rank, count in enumerate(counts)
    ]


def assert_kept(kernels, message, pieces):
    """Asserts that mean and variance are right but for a few roundings of float64."""
    mean, var = expected(pieces)
    got_mean, got_var = statistics(kernels, message)
    few = 8 * 2.0**-52
    assert (np.abs(got_mean - mean) <= 1.01 * 2.0**-53 * np.abs(mean)).all()  # rounded once
    lost = (len(pieces) + 8) * 2.0**-73 * mean**2
    assert (np.abs(got_var - var) <= few * var + lost).all(), got_var / var - 1


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@every_type
def test_a_variance_between_ranks_keeps_its_digits(kernels, dtype, counts):
    pieces = levels(dtype, counts)
    assert_kept(kernels, sum(kernels.batch_norm_stats(piece) for piece in pieces), pieces)


@every_type
def test_whoever_writes_a_message_any_may_read_it(kernels, dtype):
    pieces = levels(dtype, [5, 300, 17])
    written = zip(pieces, map(kernels_of, KERNELS), strict=True)
    assert_kept(kernels, sum(by.batch_norm_stats(piece) for piece, by in written), pieces)


@pytest.mark.parametrize("sample", [0, -1])
@pytest.mark.parametrize("size", [20, 30, 47, 100, 144, 169, 196, 225, 250])
def test_a_lone_outlier_anywhere_in_a_plane_costs_no_digit(kernels, size, sample):
    """Each channel has one at another place: whether a lane has few rows of a plane or many."""
    x = torch.full((40, size, size), 3.3)
    x[sample].diagonal().add_(142.86)
    for got, right in zip(
        statistics(kernels, kernels.batch_norm_stats(x)),
        expected([x.movedim(1, -1).flatten(0, 1)]),
        strict=True,
    ):
        assert np.abs(got / right - 1).max() <= torch.finfo(torch.float32).eps


@pytest.mark.parametrize("counts", [[13, 195], [7, 1, 100], [2]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_constant_has_no_variance(kernels, dtype, counts):
    values = torch.tensor([1.0, -1e3 / 3, 6e4 / 7, 1e-3 / 3, 0.0]).to(dtype)
    pieces = [values.expand(count, 5).contiguous() for count in counts]
    mean, var = statistics(kernels, sum(kernels.batch_norm_stats(piece) for piece in pieces))
    assert (mean == values.double().numpy()).all()
    assert (var <= 2.0**-100 * mean**2).all(), var


@every_type
def test_only_what_is_not_finite_is_lost(kernels, dtype):
    x = torch.ones(6, 4, dtype=dtype)
    x[3, 1], x[4, 2] = torch.inf, torch.nan
    message = kernels.batch_norm_stats(x) + kernels.batch_norm_stats(torch.ones_like(x))
    mean, var = statistics(kernels, message)
    assert mean[0] == mean[3] == 1 and mean[1] == np.inf and np.isnan(mean[2])
    assert var[0] == var[3] == 0 and np.isnan(var[1:3]).all()
