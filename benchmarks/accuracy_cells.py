"""The cells of the accuracy study: what the values of a channel are, and how ranks share them.

A base cell is varied along each axis, and pairs of axes where they matter together: a large mean
with the number of values and of ranks; constant channels with a number of values that is no power
of two.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor

#: Values of all channels of a cell, and most channels: enough that a lucky one does not decide.
VALUES, CHANNELS = 2**18, 16

#: What a channel may have that makes it not finite; two of them in the last.
NOT_FINITE = {
    "NaN": [math.nan],
    "Inf": [math.inf],
    "-Inf": [-math.inf],
    "Inf and -Inf": [math.inf, -math.inf],
}

#: The channel that has them.
POISONED = 3

MEANS = (0.0, *(base * 10.0**exponent for exponent in range(6) for base in (1, 3)), 1e6)
DECADES = (0.0, *(10.0**exponent for exponent in range(7)))
STDS = tuple(10.0**exponent for exponent in range(-8, 9, 2))


@dataclass(frozen=True)
class Cell:
    """One batch, in some ranks.

    Args:
        axis: the question that it is part of.
        dtype: the type of the input.
        mean: of a channel, in units of ``std``; of a constant channel its value.
        std: of a channel.
        values: a channel has in all ranks together.
        ranks: that share them.
        split: how: in equal parts; unequal ones of 1 : 2 : 3 ...; with every second rank empty;
            one against many, in the first and the last rank, with empty ones between; or sorted by
            value, so that each rank has another mean.
        kind: of values: normal; constant, which each channel has another of; outlier, one of
            ``mean`` stds among normal ones; largest, all over the type's range; near the largest;
            denormal; or one of :data:`NOT_FINITE`, among normal ones of one channel.
        gradient: random; slope, most of it along the input; or shift, with a mean of 100 stds.
        layout: planes, where a sample has all values of a rank; rows, where it has one a channel.
    """

    axis: str
    dtype: str = "float32"
    mean: float = 0.0
    std: float = 1.0
    values: int = 4000
    ranks: int = 8
    split: str = "equal"
    kind: str = "normal"
    gradient: str = "random"
    layout: str = "planes"

    @property
    def channels(self) -> int:
        return max(1, min(CHANNELS, VALUES // self.values))

    @property
    def type(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def parameters(self) -> torch.dtype:
        """The type of weight, bias and buffers."""
        return torch.float64 if self.type == torch.float64 else torch.float32

    @property
    def demanded(self) -> bool:
        """Whether it is bounded by what the others reach."""
        limit = 1e4 if self.kind == "constant" else 1e5
        return self.type != torch.float64 and (self.kind == "outlier" or self.mean <= limit)

    def __str__(self) -> str:
        what = {
            "normal": f"mean/std {self.mean:g}, std {self.std:g}",
            "constant": f"constant {self.mean:g}",
            "outlier": f"outlier of {self.mean:g} std",
        }.get(self.kind, self.kind)
        text = f"{what}, N {self.values}, {self.ranks} ranks, {self.dtype}"
        for name in ("split", "gradient", "layout"):
            if (value := getattr(self, name)) != getattr(Cell, name):
                text += f", {name} {value}"
        return text

    def counts(self) -> list[int]:
        """How many values a channel each rank has."""
        shares = {
            "unequal": [float(rank + 1) for rank in range(self.ranks)],
            "half empty": [float((rank + self.ranks) % 2) for rank in range(self.ranks)],
            "one against many": [0.0] * (self.ranks - 1) + [1.0],
        }.get(self.split, [1.0] * self.ranks)
        total, ends = sum(shares), []
        for rank in range(self.ranks):
            ends.append(round(self.values * sum(shares[: rank + 1]) / total))
        if self.split == "one against many":
            ends[:-1] = [1] * (self.ranks - 1)
        return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]

    def draw(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns input and gradient (C, values), weight and bias (C), the same at each call."""
        draws = torch.Generator().manual_seed(zlib.crc32(str(self).encode()))
        size, wide = (self.channels, self.values), torch.float64
        normal = torch.randn(size, generator=draws, dtype=wide)
        x = self._values(normal, draws).to(self.type)
        if self.split == "sorted":
            x = x.sort(dim=1).values
        dy = torch.randn(size, generator=draws, dtype=wide)
        if self.gradient == "slope":
            centred = x.double() - x.double().mean(1, keepdim=True)
            dy = 0.1 * dy + centred / centred.std(1, keepdim=True).clamp(min=1e-300)
        elif self.gradient == "shift":
            dy += 100
        weight = 0.5 + torch.rand(self.channels, generator=draws, dtype=wide)
        # Only where there is nothing else in the output: it would hide errors of small outputs.
        bias = torch.randn(self.channels, generator=draws, dtype=wide) * (self.kind == "constant")
        return x, dy.to(self.type), weight.to(self.parameters), bias.to(self.parameters)

    def _values(self, normal: Tensor, draws: torch.Generator) -> Tensor:
        info = torch.finfo(self.type)
        if self.kind == "constant":
            # Each channel its own, so that none has few digits by chance.
            each = self.mean * (1 + torch.rand(self.channels, 1, generator=draws))
            return each.expand_as(normal)
        if self.kind == "largest":
            return info.max * (2 * torch.rand(normal.shape, generator=draws) - 1)
        if self.kind == "near the largest":
            return info.max * (1 - 0.01 * torch.rand(normal.shape, generator=draws))
        if self.kind == "denormal":
            return info.tiny * torch.rand(normal.shape, generator=draws, dtype=torch.float64)
        if self.kind == "outlier":
            normal[:, self.values // 3] = self.mean
            return self.std * normal
        for place, value in enumerate(NOT_FINITE.get(self.kind, ())):
            normal[POISONED, (1 + place) * self.values // 3] = value
        return self.std * (self.mean + normal)


def every() -> list[Cell]:
    """The cells of the whole study."""
    base = Cell("mean / std")
    cells = [replace(base, mean=mean) for mean in MEANS]
    cells += [
        Cell("mean / std, N and ranks", mean=mean, values=values, ranks=ranks)
        for mean in (0.0, 1e2, 1e4, 3e4, 1e5, 1e6)
        for values in (2, 63, 1000, 2**16)
        for ranks in (1, 2, 8, 64)
    ]
    cells += [
        Cell("std", mean=mean, std=std, layout=layout)
        for mean, layout in ((0.0, "planes"), (1e3, "rows"))
        for std in STDS
    ]
    cells += [
        Cell("type", dtype=dtype, mean=mean, std=std)
        for dtype, std in (("float16", 1e-2), ("bfloat16", 1.0), ("float64", 1.0))
        for mean in DECADES
    ]
    cells += [
        Cell("largest", dtype="float16", kind=kind, values=values)
        for kind in ("largest", "near the largest")
        for values in (3, 4000)
    ]
    cells += [
        Cell("outlier", dtype=dtype, kind="outlier", mean=mean, ranks=ranks)
        for dtype, mean in (
            *(("float32", 10.0**exponent) for exponent in (2, 4, 6, 8)),
            ("float16", 6e4),
            ("bfloat16", 1e6),
        )
        for ranks in (1, 8)
    ]
    cells += [
        Cell("constant", kind="constant", mean=10.0**exponent, values=values, ranks=ranks)
        for exponent in range(11)
        for values, ranks in ((3, 1), (1000, 8), (4096, 1), (65537, 2))
    ]
    cells += [
        Cell("constant", kind="constant", dtype=dtype, mean=mean, values=1000)
        for dtype in ("float16", "bfloat16", "float64")
        for mean in (1.0, 1e2, 1e4)
    ]
    cells += [
        Cell("denormal", dtype=dtype, kind="denormal")
        for dtype in ("float32", "float16", "bfloat16", "float64")
    ]
    cells += [
        Cell("N", mean=1e2, values=values, ranks=1, layout=layout)
        for values in (2, 3, 5, 17, 100, 10**3, 10**4, 10**5, 10**6)
        for layout in ("planes", "rows")
    ]
    cells += [Cell("N", mean=mean, values=10**7, ranks=1) for mean in (1.0, 1e4)]
    cells += [
        Cell("ranks", mean=mean, ranks=ranks, layout="rows")
        for mean in (1.0, 1e3, 1e5)
        for ranks in (1, 2, 3, 8, 16, 64)
    ]
    cells += [
        Cell("counts", mean=mean, split=split, layout=layout)
        for mean in (1.0, 1e4)
        for split in ("unequal", "half empty", "one against many", "sorted")
        for layout in ("planes", "rows")
    ]
    cells += [
        Cell("gradient", mean=mean, gradient=gradient, dtype=dtype)
        for gradient in ("slope", "shift")
        for dtype in ("float32", "bfloat16")
        for mean in (0.0, 1e2, 1e4)
    ]
    cells += [
        Cell("not finite", kind=kind, dtype=dtype, mean=1.0, ranks=ranks, layout=layout)
        for kind in NOT_FINITE
        for dtype in ("float32", "float16", "bfloat16", "float64")
        for ranks, layout in ((1, "rows"), (8, "planes"))
    ]
    return cells


def quick() -> list[Cell]:
    """Some of each axis, of few values."""
    axes: dict[str, list[Cell]] = {}
    for cell in every():
        if cell.values <= 4096:
            axes.setdefault(cell.axis, []).append(cell)
    # An odd step, so that what alternates in an axis does in here.
    return [cell for cells in axes.values() for cell in cells[:: len(cells) // 8 | 1]]
