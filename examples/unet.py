"""A small U-Net (Ronneberger et al. 2015) with a plain BatchNorm2d after every convolution."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def block(*channels: int) -> nn.Sequential:
    """Convolutions of 3 x 3 from each number of channels to the next, with batch norm and ReLU."""
    layers: list[nn.Module] = []
    for channels_in, channels_out in pairwise(channels):
        layers += [
            # No bias: the batch norm would subtract it again.
            nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Labels every pixel of a page.

    Args:
        classes: how many classes a pixel may have.
        widths: channels at full, half and quarter resolution.
        channels: of the images, 1 where they are grey.

    Shape:
        - Input: ``(N, channels, H, W)``, H and W multiples of 4.
        - Output: ``(N, classes, H, W)``, the logits.
    """

    #: Of what the sides of an image have to be multiples, to be halved twice.
    multiple = 4

    def __init__(
        self, classes: int, widths: tuple[int, int, int] = (16, 32, 64), *, channels: int = 1
    ) -> None:
        super().__init__()
        full, half, quarter = widths
        self.down_full = block(channels, full, full)
        self.down_half = block(full, half, half)
        self.quarter = block(half, quarter, quarter)
        self.up_half = block(quarter + half, half)
        self.up_full = block(half + full, full)
        self.head = nn.Conv2d(full, classes, kernel_size=1)

    def forward(self, images: Tensor) -> Tensor:
        full = self.down_full(images)
        half = self.down_half(F.max_pool2d(full, 2))
        quarter = self.quarter(F.max_pool2d(half, 2))
        half = self.up_half(torch.cat([F.interpolate(quarter, scale_factor=2.0), half], dim=1))
        full = self.up_full(torch.cat([F.interpolate(half, scale_factor=2.0), full], dim=1))
        return self.head(full)
