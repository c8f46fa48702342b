"""Batch norm over a global batch, forward and backward: what is right, rounded to float64.

In NumPy's extended precision, as float64 results are compared as well.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Forward(NamedTuple):
    """The output, and the statistics of a channel."""

    output: np.ndarray  # (N, C, *)
    mean: np.ndarray  # (C,)
    var: np.ndarray  # (C,), biased
    count: int  # values a channel


class Backward(NamedTuple):
    """The gradients of input, weight and bias, and the two sums of the backward message."""

    input: np.ndarray  # (N, C, *)
    weight: np.ndarray  # (C,)
    bias: np.ndarray  # (C,)
    sum_dy: np.ndarray  # (C,)
    sum_dy_xmu: np.ndarray  # (C,)


def _spread(vector: np.ndarray, like: np.ndarray) -> np.ndarray:
    return vector.reshape(1, -1, *[1] * (like.ndim - 2))


def _dims(x: np.ndarray) -> tuple[int, ...]:
    return (0, *range(2, x.ndim))


def _centre(x) -> tuple[np.ndarray, np.ndarray]:
    """Returns mean and x - mean in extended precision: in a second pass what the first one left."""
    wide = np.asarray(x).astype(np.longdouble)
    mean = wide.mean(_dims(wide))
    centred = wide - _spread(mean, wide)
    rest = centred.mean(_dims(wide))
    return mean + rest, centred - _spread(rest, wide)


def forward(x, weight=None, bias=None, eps=1e-5) -> Forward:
    """Normalises x (N, C, *) with its own statistics."""
    mean, centred = _centre(x)
    var = (centred**2).mean(_dims(centred))
    y = centred / np.sqrt(_spread(var, centred) + eps)
    if weight is not None:
        y = y * _spread(np.asarray(weight, np.float64), y)
    if bias is not None:
        y = y + _spread(np.asarray(bias, np.float64), y)
    return Forward(*(v.astype(np.float64) for v in (y, mean, var)), y.size // y.shape[1])


def backward(dy, x, weight=None, eps=1e-5) -> Backward:
    """Differentiates :func:`forward` at x, for the gradient dy of its output."""
    dy, centred = np.asarray(dy).astype(np.longdouble), _centre(x)[1]
    count = dy.size // dy.shape[1]
    invstd = 1 / np.sqrt((centred**2).mean(_dims(dy)) + eps)
    sum_dy = dy.sum(_dims(dy))
    sum_dy_xmu = (dy * centred).sum(_dims(dy))
    slope = _spread(sum_dy_xmu / count * invstd**2, dy)
    scale = invstd if weight is None else invstd * np.asarray(weight, np.float64)
    dx = (dy - _spread(sum_dy / count, dy) - centred * slope) * _spread(scale, dy)
    results = (dx, sum_dy_xmu * invstd, sum_dy, sum_dy, sum_dy_xmu)
    return Backward(*(v.astype(np.float64) for v in results))


def running(old_mean, old_var, batch: Forward, factor: float) -> tuple[np.ndarray, np.ndarray]:
    """Moves running mean and variance by one batch (the variance unbiased)."""
    unbiased = batch.var * batch.count / max(batch.count - 1, 1)
    return (
        (1 - factor) * np.asarray(old_mean, np.float64) + factor * batch.mean,
        (1 - factor) * np.asarray(old_var, np.float64) + factor * unbiased,
    )


def message(values: np.ndarray) -> np.ndarray:
    """Returns the message of values [C, count]: their sums, rounded, and what that leaves."""
    wide = values.astype(np.longdouble)
    sums = np.array([*wide.sum(1), *(wide**2).sum(1)])
    high = sums.astype(np.float64)
    return np.array([*high, *(sums - high), values.shape[1]], np.float64)


def split_message(stats: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the sums and the sums of squares of a message, [C] each, and its count."""
    high, low = np.split(stats[:-1], 2)
    sums, squares = np.split(high + low, 2)
    return sums, squares, stats[-1]
