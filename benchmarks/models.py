"""Nets to train a step of: the ResNet-50 that is installed, and a U-Net in two or three dimensions.

Reference:
    Ronneberger et al., U-Net, 2015, https://arxiv.org/abs/1505.04597 (with batch norm and padding,
    as it is trained today); Cicek et al., 3D U-Net, 2016, https://arxiv.org/abs/1606.06650
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Task:
    """A net and the size of what it is trained on.

    Args:
        name: of the net.
        make: returns a new one, or None where it is not installed.
        size: of a batch, ``(N, C, *)``.
        classes: how many it tells apart.
        dense: whether it does so at each pixel.
    """

    name: str
    make: Callable[[], nn.Module | None]
    size: tuple[int, ...]
    classes: int
    dense: bool

    def __str__(self) -> str:
        return f"{self.name} {'x'.join(map(str, self.size))}"

    def batch(self, device: torch.device, channels_last: bool, seed: int) -> tuple[Tensor, Tensor]:
        """Draws images and their classes, ``(N,)`` or ``(N, *)``."""
        generator = torch.Generator().manual_seed(seed)
        images = torch.randn(self.size, generator=generator).to(device)
        shape = (self.size[0], *self.size[2:]) if self.dense else self.size[:1]
        classes = torch.randint(self.classes, shape, generator=generator).to(device)
        return images.to(memory_format=memory_format(images.dim(), channels_last)), classes


def memory_format(dimensions: int, channels_last: bool) -> torch.memory_format:
    """The format of a tensor of so many dimensions."""
    if not channels_last:
        return torch.contiguous_format
    return torch.channels_last if dimensions == 4 else torch.channels_last_3d


def resnet50() -> nn.Module | None:
    """A new ResNet-50, of whichever package is installed for this torch, or None."""
    makers = (
        lambda: importlib.import_module("torchvision.models").resnet50(),
        lambda: importlib.import_module("timm").create_model("resnet50"),
    )
    for make in makers:
        try:
            return make()
        except (ImportError, RuntimeError):  # the latter from a torchvision for another torch
            continue
    return None


class UNet(nn.Module):
    """A U-Net whose blocks are two convolutions, each with a batch norm and a ReLU.

    Args:
        dimensions: 2 or 3.
        channels: of the input.
        classes: of the output, ``(N, classes, *)``.
        width: channels of the first level; each level below has twice as many.
        depth: how often the maps are halved; the input's sides are multiples of ``2**depth``.
    """

    def __init__(self, dimensions: int, channels: int, classes: int, width: int, depth: int):
        super().__init__()
        convolution, transposed, norm, pool = {
            2: (nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d, nn.MaxPool2d),
            3: (nn.Conv3d, nn.ConvTranspose3d, nn.BatchNorm3d, nn.MaxPool3d),
        }[dimensions]

        def block(inputs: int, outputs: int) -> nn.Module:
            layers: list[nn.Module] = []
            for features in (inputs, outputs):
                layers += [convolution(features, outputs, 3, padding=1, bias=False), norm(outputs)]
                layers += [nn.ReLU(inplace=True)]
            return nn.Sequential(*layers)

        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(
            block(above, here) for above, here in zip([channels, *widths], widths, strict=False)
        )
        self.pool = pool(2)
        self.up = nn.ModuleList(transposed(2 * here, here, 2, stride=2) for here in widths[-2::-1])
        self.join = nn.ModuleList(block(2 * here, here) for here in widths[-2::-1])
        self.head = convolution(width, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Returns the logits of each class at each pixel."""
        features = self.down[0](images)
        skipped = []
        for block in self.down[1:]:
            skipped.append(features)
            features = block(self.pool(features))
        for up, join in zip(self.up, self.join, strict=True):
            features = join(torch.cat([skipped.pop(), up(features)], dim=1))
        return self.head(features)
