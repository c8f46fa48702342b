"""What is right for a drawn case, in float64, and how far from it rounding may lead."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import reference
import torch
from inputs import ROUNDING, numpy
from properties import Case, batches_before, factor_of, layer_of
from torch import Tensor

ULPS = 8.0
#: So many float64 values may be added up one after the other in float64 itself. Each addition
#: rounds by up to half a unit, up as often as down, which ULPS is for; but where they recur, or lie
#: on a grid, to the same side. (Of narrower types, sums of a few values are added up in float64.)
CHAIN = 256
#: Of mean^2, what the message may lose of a variance; of the mean, what is lost of a pair.
LOST = 2.0**-70
PAIR = 2.0**-46


class Near(NamedTuple):
    """Values, and how far others may be from them."""

    values: np.ndarray
    slack: np.ndarray


def by_channel(x: Tensor) -> np.ndarray:
    """Returns (N, C, *) as float64 of (values, C)."""
    return numpy(x.movedim(1, -1).reshape(-1, x.shape[1]))


def stored(values: np.ndarray, dtype: torch.dtype, slack: np.ndarray) -> Near:
    """Adds what storing values in a type takes from them, also next to zero."""
    info = torch.finfo(dtype)
    return Near(values, info.eps * np.abs(values) + info.smallest_normal * info.eps + slack)


def exact(case: Case, pieces: list[tuple[Tensor, Tensor]]) -> list[dict[str, Near]]:
    """Returns what each rank should get of a step on the pieces.

    The slack of a result follows from its terms, channel by channel: a few roundings of the type
    that sums are taken in (float32; float64 for float64), and one of the type it is stored in.
    """
    layer = layer_of(case)
    dtype, wide = case.dtype, case.wide
    inputs, slopes = ([by_channel(piece[i]) for piece in pieces] for i in range(2))
    alike = case.grid != 0 or case.repeats or "expanded" in case.strides
    chain = CHAIN if alike and dtype == torch.float64 else 0
    ulps = ULPS + min(sum(map(len, inputs)), chain) / 2
    few = ulps * (ROUNDING[torch.float64] if dtype == torch.float64 else ROUNDING[torch.float32])
    x, dy = np.concatenate(inputs), np.concatenate(slopes)
    if not len(x):
        x = dy = np.zeros((2, case.shape[1]))  # any values: no rank holds one
    weight = np.ones(x.shape[1]) if layer.weight is None else numpy(layer.weight)
    bias = np.zeros(x.shape[1]) if layer.bias is None else numpy(layer.bias)
    origin = x[0]  # or the float64 of the reference loses digits that the kernels keep
    x = x - origin
    of_all = reference.forward(x, weight, bias, case.eps)
    grads = reference.backward(dy, x, weight, case.eps)
    centre, var = of_all.mean, of_all.var
    of_all = of_all._replace(mean=centre + origin)
    sigma = np.sqrt(var + case.eps)
    z = (x - centre) / sigma
    largest, steepest = np.abs(z).max(0), np.abs(dy).max(0)
    scale = np.abs(weight) / sigma
    loses = LOST * (of_all.mean / sigma) ** 2  # of the variance, and so of invstd
    off = (few + loses) * largest + PAIR * np.abs(of_all.mean) / sigma  # how far z may be off
    y = stored(of_all.output, dtype, np.abs(weight) * off + few * np.abs(bias))
    terms = scale * steepest * (1 + largest)
    dx = stored(grads.input, dtype, terms * (2 * few + loses + off))
    buffers = _buffers(case, of_all, largest * sigma, few)
    ranks, begin = [], 0
    for slope in slopes:
        rows = slice(begin, begin + len(slope))
        begin += len(slope)
        total = np.abs(slope).sum(0)
        rank = {name: Near(*(a[rows] for a in near)) for name, near in (("y", y), ("dx", dx))}
        if case.affine:
            own = (slope * z[rows]).sum(0)
            rank["grad weight"] = stored(own, wide, total * (off + few * largest))
            if case.bias:
                rank["grad bias"] = stored(slope.sum(0), wide, few * total)
        ranks.append(rank | buffers)
    return ranks


def _buffers(
    case: Case, of_all: reference.Forward, furthest: np.ndarray, few: float
) -> dict[str, Near]:
    """Where the running buffers should have moved: the same on every rank."""
    if not case.track:
        return {}
    layer, factor = layer_of(case), factor_of(case)
    inner = 4 * ROUNDING[torch.float64 if case.wide == torch.float64 else torch.float32]
    start = numpy(layer.running_mean), numpy(layer.running_var)
    moved = reference.running(*start, of_all, factor)
    unbiased = of_all.count / (of_all.count - 1)
    mean, var = np.abs(of_all.mean), of_all.var
    terms = (
        (mean, few * furthest + PAIR * mean),
        (unbiased * var, unbiased * (few * var + LOST * mean**2)),
    )
    near = {
        name: stored(
            values,
            case.wide,
            inner * (abs(1 - factor) * np.abs(old) + factor * term) + factor * slack,
        )
        for name, values, old, (term, slack) in zip(
            ("running_mean", "running_var"), moved, start, terms, strict=True
        )
    }
    count = np.array(float(batches_before(case) + (case.shape[0] > 0)))
    return near | {"num_batches_tracked": Near(count, np.zeros(()))}


def whole(ranks: list[dict[str, Near]]) -> dict[str, Near]:
    """Joins what is right on each rank to what is right of the whole batch."""
    joined = dict(ranks[0])
    for name in ("y", "dx"):
        joined[name] = Near(*(np.concatenate([rank[name][i] for rank in ranks]) for i in range(2)))
    for name in ("grad weight", "grad bias"):
        if name in joined:
            joined[name] = Near(*(np.sum([rank[name][i] for rank in ranks], 0) for i in range(2)))
    return joined


def found(result: dict[str, Tensor]) -> dict[str, Near]:
    """Returns a rank's results in the form of what is right."""
    values = {n: by_channel(t) if n in ("y", "dx") else numpy(t) for n, t in result.items()}
    return {name: Near(array, np.zeros_like(array)) for name, array in values.items()}


def assert_near(actual: dict[str, Near], expected: dict[str, Near]) -> None:
    """Asserts that all results are within what rounding explains."""
    assert actual.keys() == expected.keys(), (actual.keys(), expected.keys())
    for name, near in expected.items():
        values = actual[name].values
        assert values.shape == near.values.shape, (name, values.shape, near.values.shape)
        assert np.isfinite(values).all(), f"{name}: not finite, or never written"
        off, most = np.abs(values - near.values), near.slack
        worst = float((off / np.where(off > most, most, np.inf)).max(initial=0.0))
        assert not worst, f"{name} is {worst:.3g} times as far off as rounding explains"
