"""What is compared: ours, what people use instead, and a copy of the same bytes as the floor."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import syncbn_cuda
from benchmarks.shapes import Shape
from benchmarks.synchronised import OursSynchronised, TorchSynchronised

#: Reads or writes of a tensor of the input's size that a direction cannot do without.
PASSES = {"forward": 3, "backward": 5}

BOTH = "forward + backward"
FLOOR = "copy"


@dataclass(frozen=True)
class Candidate:
    """A layer, as a function, with the module that holds its weight and bias."""

    run: Callable[[Tensor], Tensor]
    module: nn.Module


def candidates(
    shape: Shape, dtype: torch.dtype, device: torch.device, synchronised: bool
) -> tuple[dict[str, Candidate], dict[str, str]]:
    """Makes the layers to compare, and says of which there are none, and why.

    Args:
        shape: their input.
        dtype: its type.
        device: where they work.
        synchronised: also those that synchronise, over the process group that there is.
    """
    ours, plain = syncbn_cuda.convert_sync_batchnorm(_plain(shape, device)), _plain(shape, device)
    made = {
        "ours": Candidate(ours, ours),
        "torch" if device.type == "cpu" else "cuDNN": Candidate(plain, plain),
    }
    if not synchronised:
        return made, {}
    for name, kind in SYNCHRONISED.items():
        layer = kind(shape.channels, device=device)
        made[name] = Candidate(layer, layer)
    absent = {}
    for name, make in OPTIONAL.items():
        try:
            importlib.import_module(name)
        except ImportError:
            absent[name] = "not installed"
            continue
        try:
            made[name] = _proven(make(shape, device), shape, dtype, device)
        except Exception as error:  # of somebody else's extension, whatever it may be
            absent[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return made, absent


def _plain(shape: Shape, device: torch.device) -> nn.Module:
    kind = {2: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(shape.size)]
    return kind(shape.channels, device=device)


def _apex(shape: Shape, device: torch.device) -> Candidate:
    parallel = importlib.import_module("apex.parallel")
    m = parallel.SyncBatchNorm(shape.channels, channel_last=shape.channels_last).to(device)
    if not shape.channels_last:
        return Candidate(m, m)
    # It takes the channels as the last dimension, rather than as the memory format.
    return Candidate(lambda input: m(input.movedim(1, -1)).movedim(-1, 1), m)


def _inplace_abn(shape: Shape, device: torch.device) -> Candidate:
    inplace_abn = importlib.import_module("inplace_abn")
    m = inplace_abn.InPlaceABNSync(shape.channels, activation="identity").to(device)
    # It writes its output over its input, which here must stay as it is.
    return Candidate(lambda input: m(input.clone()), m)


SYNCHRONISED = {"ours synchronised": OursSynchronised, "torch synchronised": TorchSynchronised}

#: Layers of packages that may be installed or not.
OPTIONAL = {"apex": _apex, "inplace_abn": _inplace_abn}


def _proven(
    candidate: Candidate, shape: Shape, dtype: torch.dtype, device: torch.device
) -> Candidate:
    """Runs a candidate once, forward and backward: some take neither each type nor each layout."""
    output = candidate.run(shape.random(dtype, device).requires_grad_())
    output.backward(torch.ones_like(output))
    return candidate


def copies(shape: Shape, dtype: torch.dtype, device: torch.device, direction: str) -> Callable:
    """A copy of as many bytes as a direction moves at least: half of them read, half written."""
    size = shape.bytes(dtype) * PASSES[direction] // 2
    # Written, as pages that never were are all one page, which is always in a cache.
    source = torch.ones(size // 4, dtype=torch.int32, device=device)
    destination = torch.zeros_like(source)
    return lambda: destination.copy_(source)
