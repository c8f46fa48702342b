"""Drawn cases for the property tests: a layer, a batch, how it lies in memory and over ranks.

A ``Case`` holds all there is to know, values by their seed, so that it can be printed, sent to a
rank and changed (``case._replace``). :func:`search` draws cases until one fails, makes that one as
small as it can, and tells it with its seed. Two environment variables: ``PROPERTY_CASES``, how many
cases of each property, and ``PROPERTY_SEED``.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from inputs import DTYPES, LAYOUTS
from optional import optional
from test_layouts import VIEWS, in_order
from torch import Tensor
from training import train_once

from syncbn_cuda import FastSyncBatchNorm

hypothesis = optional("hypothesis")
strategies = optional("hypothesis.strategies")

CASES = int(os.environ.get("PROPERTY_CASES", "25"))
SEED = int(os.environ.get("PROPERTY_SEED", "0"))

#: By name; an order of the dimensions in memory (a tuple) is a layout as well.
STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    **LAYOUTS,
    "every other row": VIEWS["every other sample"],
    "every other column": VIEWS["every other column"],
    "half of the channels": VIEWS["half of the channels"],
    "expanded": lambda x: x[..., :1].expand_as(x),
}
MOST_VALUES = 2**14
CONSTANT = 1e4  # the largest value of a constant channel: 2^-52 of its square counts beside eps


class Case(NamedTuple):
    """One layer, one batch, and the ways to split it; what follows ``grid`` is for the checks."""

    shape: tuple[int, ...]  # of the whole batch
    dtype: torch.dtype
    narrow: bool  # parameters and buffers are of the input's type, not float32
    strides: tuple[Any, Any]  # of the input and of its gradient
    repeats: bool  # values are the same along the last dimension, as in an expanded tensor
    affine: bool
    bias: bool
    track: bool
    momentum: float | None
    eps: float
    std: float
    ratio: float  # mean / std
    constant: bool  # every third channel is
    cuts: tuple[tuple[int, ...], ...]  # the samples where a split over 1, 2, ... ranks cuts
    world: int
    factor: float  # a power of two of either sign, to multiply by
    seed: int
    grid: float  # rounds the values to what they can be once this is added
    gain: float = 1.0  # multiplies the values and what the running buffers start from
    shift: float = 0.0
    weight_gain: float = 1.0
    bias_gain: float = 1.0
    order: int = 0  # the seed of an order of the samples; 0 leaves them as they are

    @property
    def wide(self) -> torch.dtype:
        return self.dtype if self.narrow else torch.float32


def _generator(case: Case, stream: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(2 * case.seed + stream)


def order_of(case: Case) -> Tensor:
    """Returns the order of the samples, as indices."""
    if not case.order:
        return torch.arange(case.shape[0])
    return torch.randperm(case.shape[0], generator=torch.Generator("cpu").manual_seed(case.order))


def batch(case: Case) -> tuple[Tensor, Tensor]:
    """Returns the values of the input and of its gradient, contiguous, on the CPU."""
    draws = torch.randn(2, *case.shape, dtype=torch.float64, generator=_generator(case, 0))
    channel = torch.arange(case.shape[1]).double().view(-1, *[1] * (len(case.shape) - 2))
    mean = case.ratio * case.std * torch.cos(channel)
    x = mean + case.std * (1 + channel % 5 / 3) * draws[0]
    if case.constant:
        x[:, ::3] = mean[::3].clamp(-CONSTANT, CONSTANT)
    dy = draws[1] + channel % 3 / 3
    if case.repeats:
        x, dy = (values[..., :1].expand_as(values).clone() for values in (x, dy))
    x = (x.to(case.dtype).double() + case.grid).to(case.dtype).double() - case.grid
    exact = x * case.gain + case.shift
    x = exact.to(case.dtype)
    if case.gain != 1 or case.shift:
        assert torch.equal(x.double(), exact), (
            "the drawn values cannot be scaled or shifted exactly"
        )
    places = order_of(case)
    return x[places], dy[places].to(case.dtype)


def laid_out(x: Tensor, strides: Any) -> Tensor:
    x = x.to(torch.get_default_device())
    return in_order(x, strides) if isinstance(strides, tuple) else STRIDES[strides](x)


def pieces(case: Case) -> list[tuple[Tensor, Tensor]]:
    """Returns what each rank gets of the batch, input and gradient."""
    x, dy = batch(case)
    cuts = (0, *case.cuts[case.world - 1], case.shape[0])
    return [
        (laid_out(x[begin:end], case.strides[0]), laid_out(dy[begin:end], case.strides[1]))
        for begin, end in itertools.pairwise(cuts)
    ]


def batches_before(case: Case) -> int:
    return case.seed % 4


def layer_of(case: Case, group: Any | None = None) -> FastSyncBatchNorm:
    """Makes the layer as it is before the step; a few bits a value, which a gain leaves exact."""
    layer = FastSyncBatchNorm(
        *(case.shape[1], case.eps, case.momentum, case.affine, case.track, group),
        dtype=case.wide,
        bias=case.bias,
    )
    generator = _generator(case, 1)
    draws = torch.randint(-16, 17, (4, case.shape[1]), generator=generator).double() / 16
    start = {
        "weight": (draws[0].sign() + draws[0] / 2) * case.weight_gain,
        "bias": draws[1] * case.bias_gain,
        "running_mean": draws[2] * case.gain,
        "running_var": (1 + draws[3] / 2) * case.gain**2,
        "num_batches_tracked": torch.tensor(batches_before(case)),
    }
    for name, tensor in layer.state_dict().items():
        tensor.copy_(start[name])
    return layer


def factor_of(case: Case) -> float:
    """Returns the weight of the batch in the running buffers."""
    if not case.shape[0]:
        return 0.0
    return 1 / (batches_before(case) + 1) if case.momentum is None else case.momentum


def step(case: Case, x: Tensor, dy: Tensor, group: Any | None = None) -> dict[str, Tensor]:
    """Trains a rank's layer on its piece; returns all that comes of it, on the CPU."""
    layer = layer_of(case, group)
    y, dx = train_once(layer, x, dy)
    named = {"y": y, "dx": dx}
    named |= {f"grad {name}": parameter.grad for name, parameter in layer.named_parameters()}
    named |= dict(layer.named_buffers())
    return {name: tensor.detach().cpu() for name, tensor in named.items()}


def train_alone(case: Case) -> list[dict[str, Tensor]]:
    return [step(case, *pieces(case)[0])]


def _sizes(most: int, odd: Sequence[int]) -> Any:
    return strategies.one_of(
        strategies.integers(1, min(9, most)),
        strategies.integers(1, most),
        strategies.sampled_from(odd),
    )


def cases(worlds: int = 1) -> Any:
    """Returns the strategy that draws cases split over up to some number of ranks."""
    sampled, flags = strategies.sampled_from, strategies.booleans()

    @strategies.composite
    def drawn(draw: Callable[[Any], Any]) -> Case:
        dims = draw(strategies.integers(2, 5))
        most = {2: 1, 3: 300, 4: 17, 5: 7}[dims]
        tail = tuple(draw(_sizes(most, range(1, most + 1, 2))) for _ in range(dims - 2))
        channels = draw(_sizes(300, (15, 17, 31, 33, 63, 65, 127, 129, 255, 257)))
        values = math.prod(tail)
        samples = draw(strategies.integers(0, max(2, min(40, MOST_VALUES // (channels * values)))))
        if samples * values == 1:
            samples = 2  # one value a channel is refused
        dtype, narrow = draw(sampled(DTYPES)), draw(flags)
        ratio = draw(sampled([0.0, 1.0, 10.0, 100.0, 1000.0]))
        std = draw(sampled([1.0, 1e-4, 1e-3, 1e-2, 0.1, 10.0, 100.0, 1e3, 1e4]))
        coarse = dtype == torch.float32 and draw(flags)  # as those of images, or of narrower types
        if dtype == torch.float16:  # which ends at 65504: room for a gain, and for a variance
            std = min(std, 2048 / (ratio + 32), *([8.0] if narrow else []))
        strides = strategies.one_of(
            sampled([*STRIDES]), strategies.permutations(range(dims)).map(tuple)
        )
        chosen = (draw(strides), draw(strides))
        return Case(
            shape=(samples, channels, *tail),
            dtype=dtype,
            narrow=narrow,
            strides=chosen,
            repeats="expanded" in chosen,
            affine=draw(flags),
            bias=draw(flags),
            track=draw(flags),
            momentum=draw(sampled([0.1, None, 0.0, 0.375, 1.0])),
            eps=draw(sampled([1e-5, 1e-6, 1e-3, 0.1, 1.0])),
            std=std,
            ratio=ratio,
            constant=draw(flags),
            cuts=tuple(
                tuple(sorted(draw(strategies.integers(0, samples)) for _ in range(ranks)))
                for ranks in range(worlds)
            ),
            world=draw(strategies.integers(1, worlds)),
            factor=draw(sampled([2.0, -1.0, -2.0, 4.0, 16.0, -16.0])),
            seed=draw(strategies.integers(0, 2**31)),
            grid=2.0 ** math.ceil(math.log2(std * (ratio + 16)) + 14) if coarse else 0.0,
        )

    return drawn()


def search(
    check: Callable[..., None], *args: Any, worlds: int = 1, count: int = CASES, seed: int = SEED
) -> int:
    """Calls check(*args, case) with drawn cases; returns how many.

    Raises:
        AssertionError: one fails; with the smallest case that does, and how to see it again.
    """
    tried: list[Case] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
        suppress_health_check=[*hypothesis.HealthCheck],
    )
    @hypothesis.given(cases(worlds))
    def holds(case: Case) -> None:
        tried.append(case)
        check(*args, case)

    try:
        holds()
    except Exception as error:  # its last try is of the smallest case
        raise AssertionError(
            f"{check.__name__} fails: {type(error).__name__}: {error}\n{tried[-1]}\n"
            f"Seen again with PROPERTY_SEED={seed} PROPERTY_CASES={count}"
        ) from error
    return len(tried)
