"""What is right: batch norm over the whole batch in extended precision; and the unit of errors.

Two passes about a pivot taken from the data, in 64 bits of mantissa: the differences from it are
exact or nearly so, and a large mean cancels nothing, not even for float64 input.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

WIDE = np.longdouble


class Right(NamedTuple):
    """Results of a training step with momentum 1, and what errors of the statistics act on."""

    y: np.ndarray  # (C, values)
    dx: np.ndarray  # (C, values)
    running_mean: np.ndarray  # (C, 1)
    running_var: np.ndarray  # (C, 1), unbiased
    dweight: np.ndarray  # (C, 1)
    dbias: np.ndarray  # (C, 1)
    var: np.ndarray  # (C, 1), biased
    scale: np.ndarray  # (C, 1), 1 / sqrt(var + eps), times weight
    pull: np.ndarray  # (C, values), the part of dx that is along the input


#: What has a bound; and what is compared besides.
BOUNDED = ("y", "dx", "running_mean", "running_var")
RESULTS = (*BOUNDED, "dweight", "dbias")


def wide(values: Tensor) -> np.ndarray:
    """The values, exactly."""
    return values.detach().double().numpy().astype(WIDE)


def right(x: Tensor, dy: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Right:
    """Normalises and differentiates ``(C, values)``, as rounded to its type."""
    if np.finfo(WIDE).eps > 2.0**-63:
        raise SystemExit("accuracy: numpy's longdouble is no wider than float64 here")
    count = x.shape[1]
    values, grad = wide(x), wide(dy)
    gamma, beta = wide(weight)[:, None], wide(bias)[:, None]
    pivot = wide(x.double().median(dim=1).values)[:, None]
    values -= pivot
    mean = values.mean(1, keepdims=True)
    centred = values - mean
    left = centred.mean(1, keepdims=True)  # what the first pass has rounded away
    centred -= left
    var = np.square(centred).mean(1, keepdims=True)
    invstd = 1 / np.sqrt(var + WIDE(eps))
    dbias = grad.sum(1, keepdims=True)
    grad -= dbias / count
    sum_dy_xmu = (grad * centred).sum(1, keepdims=True)
    slope = sum_dy_xmu / count * invstd * invstd
    scale = invstd * gamma
    pull = centred * slope * scale
    return Right(
        y=centred * scale + beta,
        dx=grad * scale - pull,
        running_mean=pivot + (mean + left),
        running_var=var * count / max(count - 1, 1),
        dweight=sum_dy_xmu * invstd,
        dbias=dbias,
        var=var,
        scale=scale,
        pull=pull,
    )


def ulp(magnitude: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The distance of neighbouring numbers of a type at a magnitude; among denormals its least."""
    info = torch.finfo(dtype)
    _, exponent = np.frexp(np.maximum(magnitude, WIDE(info.tiny)))
    return WIDE(info.eps) * np.ldexp(WIDE(1), exponent - 1)


def scale_of(result: str, expected: Right, eps: float) -> np.ndarray:
    """Where errors of a result are measured: its largest magnitude in each channel, (C, 1).

    A mean is at least std / sqrt(values): one nearer to 0 is the rest of a cancellation, and half
    an ulp of each value, rounded to its type, moves it by as much. A channel that is 0 throughout
    has no magnitude of its own: eps for a variance, to which it is added, and 1 for all others.
    """
    largest = np.abs(getattr(expected, result)).max(1, keepdims=True)
    if result == "running_mean":
        largest = np.maximum(largest, np.sqrt(expected.var / expected.y.shape[1]))
    return np.where(largest == 0, WIDE(eps if result == "running_var" else 1), largest)


def error(got: np.ndarray, expected: np.ndarray, unit: np.ndarray) -> float:
    """The largest difference in units of each channel, (C, 1); infinite where one is not finite."""
    difference = np.abs(got - expected) / unit
    return float(np.where(np.isfinite(got), difference, np.inf).max())
