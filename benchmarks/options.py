"""What a run of the benchmarks was asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class Options:
    """What every question is asked with.

    Args:
        device: where to measure, with its index on CUDA.
        quick: a subset that takes a minute or two.
        turns: how often each candidate has its turn.
        dtypes: the types of the inputs.
        match: measure only what has this text in its name.
        seconds: begin no further layer after them.
    """

    device: torch.device
    quick: bool = False
    turns: int = 50
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    match: str = ""
    seconds: float = math.inf


def name_of(dtype: torch.dtype) -> str:
    """The name of a type, without the ``torch.`` before it."""
    return str(dtype).removeprefix("torch.")
