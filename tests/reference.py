"""Batch norm over a global batch in NumPy float64, forward and backward: what is right."""

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


def forward(x, weight=None, bias=None, eps=1e-5) -> Forward:
    """Normalises x (N, C, *) with its own statistics, two passes in float64."""
    x = np.asarray(x, np.float64)
    mean = x.mean(_dims(x))
    centred = x - _spread(mean, x)
    var = (centred**2).mean(_dims(x))
    y = centred / np.sqrt(_spread(var, x) + eps)
    if weight is not None:
        y = y * _spread(np.asarray(weight, np.float64), x)
    if bias is not None:
        y = y + _spread(np.asarray(bias, np.float64), x)
    return Forward(y, mean, var, x.size // x.shape[1])


def backward(dy, x, weight=None, eps=1e-5) -> Backward:
    """Differentiates :func:`forward` at x, for the gradient dy of its output."""
    dy, x = np.asarray(dy, np.float64), np.asarray(x, np.float64)
    _, mean, var, count = forward(x, eps=eps)
    centred = x - _spread(mean, x)
    invstd = 1 / np.sqrt(var + eps)
    sum_dy = dy.sum(_dims(x))
    sum_dy_xmu = (dy * centred).sum(_dims(x))
    slope = _spread(sum_dy_xmu / count * invstd**2, x)
    scale = invstd if weight is None else invstd * np.asarray(weight, np.float64)
    dx = (dy - _spread(sum_dy / count, x) - centred * slope) * _spread(scale, x)
    return Backward(dx, sum_dy_xmu * invstd, sum_dy, sum_dy, sum_dy_xmu)


def running(old_mean, old_var, batch: Forward, factor: float) -> tuple[np.ndarray, np.ndarray]:
    """Moves running mean and variance by one batch (the variance unbiased)."""
    unbiased = batch.var * batch.count / max(batch.count - 1, 1)
    return (
        (1 - factor) * np.asarray(old_mean, np.float64) + factor * batch.mean,
        (1 - factor) * np.asarray(old_var, np.float64) + factor * unbiased,
    )


def message(values: np.ndarray) -> np.ndarray:
    """Returns the message of values [C, count]: their sums, all in the high parts."""
    sums = np.array([*values.sum(1), *(values**2).sum(1)])
    return np.array([*sums, *np.zeros_like(sums), values.shape[1]])


def split_message(stats: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the sums and the sums of squares of a message, [C] each, and its count."""
    high, low = np.split(stats[:-1], 2)
    sums, squares = np.split(high + low, 2)
    return sums, squares, stats[-1]
