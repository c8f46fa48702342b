"""Inputs of real layers, shared by benchmarks and tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """The input of one batch norm layer.

    Args:
        name: the layer.
        size: ``(N, C)`` or ``(N, C, H, W)``.
        channels_last: whether the channels lie side by side in memory.
    """

    name: str
    size: tuple[int, ...]
    channels_last: bool = False

    def __str__(self) -> str:
        return f"{self.name} {'x'.join(map(str, self.size))}{' nhwc' * self.channels_last}"

    @property
    def channels(self) -> int:
        return self.size[1]

    def random(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
        """Draws an input as layers see it: a mean and a spread of its own for each channel."""
        generator = torch.Generator().manual_seed(seed)
        per_channel = (1, self.channels, *(1,) * (len(self.size) - 2))
        mean = torch.randn(per_channel, generator=generator)
        std = 0.5 + torch.rand(per_channel, generator=generator)
        values = torch.randn(self.size, generator=generator) * std + mean
        return self._laid_out(values, dtype, device)

    def random_gradient(self, dtype: torch.dtype, device: torch.device, seed: int = 1) -> Tensor:
        """Draws a gradient of the output."""
        generator = torch.Generator().manual_seed(seed)
        return self._laid_out(torch.randn(self.size, generator=generator), dtype, device)

    def _laid_out(self, values: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        return values.to(device=device, dtype=dtype).contiguous(memory_format=layout)


#: ResNet-50 at 224 x 224, a U-Net, detection and self-supervised heads, and sizes that do not
#: divide by a vector.
SHAPES = (
    Shape("resnet50.stem", (2, 64, 112, 112)),
    Shape("resnet50.layer1", (2, 256, 56, 56)),
    Shape("resnet50.layer2", (2, 512, 28, 28)),
    Shape("resnet50.layer3", (2, 1024, 14, 14)),
    Shape("resnet50.layer4", (2, 2048, 7, 7)),
    Shape("resnet50.stem", (2, 64, 112, 112), channels_last=True),
    Shape("resnet50.layer2", (2, 512, 28, 28), channels_last=True),
    Shape("resnet50.layer4", (2, 2048, 7, 7), channels_last=True),
    Shape("unet.full", (2, 64, 256, 256)),
    Shape("unet.full", (2, 64, 256, 256), channels_last=True),
    Shape("unet.bottom", (2, 1024, 16, 16)),
    Shape("fpn.level", (2, 256, 100, 152)),
    Shape("image", (8, 3, 224, 224)),
    Shape("image", (8, 3, 224, 224), channels_last=True),
    Shape("odd", (3, 37, 29, 31)),
    Shape("odd", (3, 37, 29, 31), channels_last=True),
    Shape("projector", (256, 2048)),
    Shape("classifier", (64, 512)),
)

#: What a quick look takes: one of each kind.
QUICK = (
    Shape("resnet50.layer3", (2, 1024, 14, 14)),
    Shape("resnet50.layer4", (2, 2048, 7, 7), channels_last=True),
    Shape("odd", (3, 37, 29, 31)),
    Shape("classifier", (64, 512)),
)
