"""What the autograd functions do to tensors around the kernels: layout and allocation."""

from __future__ import annotations

import torch
from torch import Tensor


def dense(input: Tensor) -> Tensor:
    """Returns what is not contiguous in a layout that the kernels walk, copied if need be."""
    if input.movedim(1, -1).is_contiguous():
        return input
    # Of a slice, the copy keeps the order of the dimensions: channels-last stays channels-last.
    if input.stride(1) == min(input.stride()):
        return input.movedim(1, -1).contiguous().movedim(-1, 1)
    return input.contiguous()


def allocate_again(input: Tensor) -> None:
    """Repeats the allocation of an output, so that torch raises its own OutOfMemoryError.

    Inside a compiled operator that error arrives as a bare RuntimeError, as all errors do.
    """
    torch.empty_like(input)
