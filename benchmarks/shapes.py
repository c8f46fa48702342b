"""Inputs of real layers, shared by benchmarks and tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """The input of one batch norm layer.

    Args:
        name: what the layer is part of.
        size: ``(N, C, *)``.
        channels_last: whether the channels lie side by side in memory.
        offset: elements between an allocation, which is aligned, and the tensor in it.
    """

    name: str
    size: tuple[int, ...]
    channels_last: bool = False
    offset: int = 0

    def __str__(self) -> str:
        words = [self.name, "x".join(map(str, self.size)), self.layout]
        return " ".join(words + [f"offset {self.offset}"] * (self.offset > 0))

    @property
    def channels(self) -> int:
        return self.size[1]

    @property
    def layout(self) -> str:
        """As NCHW or NHWC, with as many dimensions as there are."""
        place = "DHW"[5 - len(self.size) :] if len(self.size) > 2 else ""
        return f"N{place}C" if self.channels_last else f"NC{place}"

    def bytes(self, dtype: torch.dtype) -> int:
        """What one pass over the input moves."""
        return torch.Size(self.size).numel() * dtype.itemsize

    def random(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
        """Draws an input as layers see it: a mean and a spread of its own for each channel."""
        generator = torch.Generator(device).manual_seed(seed)
        per_channel = (1, self.channels, *(1,) * (len(self.size) - 2))
        mean = torch.randn(per_channel, generator=generator, device=device)
        std = 0.5 + torch.rand(per_channel, generator=generator, device=device)
        values = torch.randn(self.size, generator=generator, device=device)
        return self.laid_out(values.mul_(std).add_(mean).to(dtype))

    def random_gradient(self, dtype: torch.dtype, device: torch.device, seed: int = 1) -> Tensor:
        """Draws a gradient of the output."""
        generator = torch.Generator(device).manual_seed(seed)
        values = torch.randn(self.size, generator=generator, device=device)
        return self.laid_out(values.to(dtype))

    def laid_out(self, values: Tensor) -> Tensor:
        """Copies values into memory of their own, laid out as this shape is."""
        n, c, *place = self.size
        stored = (n, *place, c) if self.channels_last else self.size
        room = values.new_empty(values.numel() + self.offset)[self.offset :].view(stored)
        return (room.movedim(-1, 1) if self.channels_last else room).copy_(values)


def in_both_layouts(name: str, batch: int, *layers: tuple[int, ...]) -> tuple[Shape, ...]:
    """Each layer, given as C and what follows it, contiguous and channels-last."""
    return tuple(
        Shape(name, (batch, *layer), channels_last)
        for channels_last in (False, True)
        for layer in layers
    )


def resnet50(batch: int) -> tuple[Shape, ...]:
    """Every distinct input of a batch norm in ResNet-50 on images of 224 x 224."""
    squares = (
        *((64, 112), (64, 56), (256, 56), (128, 56), (128, 28), (512, 28)),
        *((256, 28), (256, 14), (1024, 14), (512, 14), (512, 7), (2048, 7)),
    )
    return in_both_layouts("resnet50", batch, *((c, side, side) for c, side in squares))


def unet(batch: int) -> tuple[Shape, ...]:
    """Every distinct input of a batch norm in a U-Net on images of 512 x 512."""
    levels = ((64, 512), (128, 256), (256, 128), (512, 64), (1024, 32))
    return in_both_layouts("unet", batch, *((c, side, side) for c, side in levels))


def unet3d(batch: int) -> tuple[Shape, ...]:
    """Every distinct input of a batch norm in a 3-D U-Net on volumes of 128 x 128 x 128."""
    levels = ((32, 128), (64, 64), (128, 32), (256, 16), (320, 8))
    return in_both_layouts("unet3d", batch, *((c, side, side, side) for c, side in levels))


#: Heads, few channels, sizes that no vector divides, and tensors that no vector is aligned to.
CORNERS = (
    Shape("head", (256, 2048)),
    Shape("head", (64, 512)),
    *in_both_layouts("image", 8, (3, 224, 224)),
    *in_both_layouts("odd", 2, (65, 317, 211)),
    *in_both_layouts("odd", 3, (37, 29, 31)),
    Shape("misaligned", (2, 256, 56, 56), offset=1),
    Shape("misaligned", (2, 256, 56, 56), channels_last=True, offset=1),
)

SHAPES = (*resnet50(2), *resnet50(8), *resnet50(32), *unet(2), *unet3d(2), *CORNERS)

#: Of each kind one, small enough for two cores of a CPU.
QUICK_CPU = (
    Shape("resnet50", (2, 64, 112, 112)),
    *in_both_layouts("resnet50", 2, (256, 56, 56), (512, 28, 28), (2048, 7, 7)),
    *in_both_layouts("unet", 2, (512, 64, 64)),
    *in_both_layouts("unet3d", 2, (256, 16, 16, 16)),
    Shape("head", (256, 2048)),
    Shape("head", (64, 512)),
    *in_both_layouts("image", 8, (3, 224, 224)),
    *in_both_layouts("odd", 3, (37, 29, 31)),
    Shape("misaligned", (2, 256, 56, 56), offset=1),
)

#: Of each kind one, from what is over in microseconds to what fills a GPU for a millisecond.
QUICK_CUDA = (
    *in_both_layouts("resnet50", 32, (64, 112, 112), (256, 56, 56), (2048, 7, 7)),
    *in_both_layouts("resnet50", 2, (2048, 7, 7)),
    *in_both_layouts("unet", 2, (64, 512, 512)),
    Shape("unet3d", (2, 32, 128, 128, 128)),
    Shape("head", (256, 2048)),
    Shape("image", (8, 3, 224, 224)),
    Shape("odd", (2, 65, 317, 211)),
    Shape("misaligned", (2, 256, 56, 56), offset=1),
)


def shapes(device: torch.device, quick: bool = False, match: str = "") -> list[Shape]:
    """What to measure on a device, of that what has a text in its name."""
    if quick:
        chosen = QUICK_CUDA if device.type == "cuda" else QUICK_CPU
    else:
        chosen = SHAPES
    return [shape for shape in chosen if match in str(shape)]
