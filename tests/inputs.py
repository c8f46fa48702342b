"""Inputs that the tests share: shapes, types, memory layouts, and how near is near."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]

#: The unit of errors.
ROUNDING = {dtype: torch.finfo(dtype).eps for dtype in DTYPES}

#: Small and odd shapes: 2d to 5d, C from 1 to 65, S = 1, 7 x 7, odd and beyond one vector or tile.
SHAPES = [
    (5, 3),
    (4, 65),
    (64, 1),
    (2, 1, 1),
    (3, 7, 5),
    (2, 8, 49),
    (4, 16, 7, 7),
    (2, 3, 31, 17),
    (1, 65, 5, 9),
    (3, 64, 1, 1),
    (2, 5, 128, 130),
    (2, 6, 3, 4, 5),
    (1, 33, 2, 7, 3),
]


def _channels_first(x: Tensor) -> Tensor:
    return x.contiguous()


def _channels_last(x: Tensor) -> Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def _sliced(x: Tensor) -> Tensor:
    return torch.stack([x, torch.full_like(x, torch.nan)], dim=-1)[..., 0]


def _every_other_sample(x: Tensor) -> Tensor:
    doubled = torch.stack([x, torch.full_like(x, torch.nan)], dim=1).flatten(0, 1)
    return _channels_last(doubled)[::2]


def _permuted(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def _misaligned(x: Tensor) -> Tensor:
    room = torch.full((x.numel() + 1,), torch.nan, dtype=x.dtype, device=x.device)
    view = room[1:].view(x.shape)
    return view.copy_(x)


#: Layouts that the kernels walk as they are.
DENSE: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": _channels_first,
    "channels_last": _channels_last,
    "misaligned": _misaligned,
}

#: All layouts, with those that are made dense first.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    **DENSE,
    "sliced": _sliced,
    "every_other_sample": _every_other_sample,
    "permuted": _permuted,
}


def random(
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    mean: float = 0.0,
    std: float = 1.0,
) -> Tensor:
    """Draws values whose mean and spread differ between channels, so that a mix-up shows.

    They lie on torch's default device, the same values on every device.
    """
    channel = torch.arange(shape[1], dtype=torch.float64, device="cpu")
    channel = channel.view(1, -1, *[1] * (len(shape) - 2))
    draws = torch.randn(*shape, dtype=torch.float64, device="cpu")
    values = mean + std * (draws * (1 + channel % 5 / 3) + (channel % 7 - 3) / 2)
    return values.to(dtype).to(torch.get_default_device())


def unit_message(channels: int) -> Tensor:
    """Returns a message of mean 0 and variance 1."""
    parts = torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=torch.float64).repeat_interleave(channels)
    return torch.cat([parts, parts.new_ones(1)])


def numpy(x: Tensor) -> np.ndarray:
    """Returns a copy of the values in float64 (of every type exactly)."""
    return x.detach().cpu().double().numpy().copy()


def assert_close(
    actual: Tensor | np.ndarray,
    expected: np.ndarray,
    dtype: torch.dtype,
    ulps: float = 8.0,
    scale: float = 0.0,
) -> None:
    """Asserts that values are right to a few units of a type's rounding.

    The unit is taken at the largest expected value, at 1, or at ``scale``, whatever is largest: a
    sum of terms of both signs rounds in proportion to its terms, not to what they leave.
    """
    values = numpy(actual) if isinstance(actual, Tensor) else np.asarray(actual)
    assert values.shape == expected.shape, (values.shape, expected.shape)
    assert np.isfinite(values).all(), "not finite, or never written"
    if expected.size:
        scale = max(1.0, scale, float(np.abs(expected).max()))
        worst = float(np.abs(values - expected).max()) / scale
        assert worst <= ulps * ROUNDING[dtype], f"off by {worst / ROUNDING[dtype]:.1f} roundings"
