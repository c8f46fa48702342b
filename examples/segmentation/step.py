"""One step of a training: gradients of several micro-batches, weighted exactly, and the rate."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from segmentation.data import IGNORED
from segmentation.launch import Refusal
from syncbn_cuda import is_synchronized

T = TypeVar("T")
Batch = tuple[Tensor, Tensor]

Autocast = Callable[[], AbstractContextManager]


def scaled_rate(rate: float, rule: str, batch: int, base_batch: int) -> float:
    """The learning rate for a global batch, given the one that suits a batch of ``base_batch``.

    ``linear`` (Goyal et al. 2017) is for SGD; ``sqrt`` (Malladi et al. 2022) for Adam and its like,
    whose steps do not grow with the gradient. What counts is the batch of a step over all ranks
    and micro-batches; synchronised batch norm has no part in it.
    """
    exponent = {"linear": 1.0, "sqrt": 0.5, "none": 0.0}[rule]
    return rate * (batch / base_batch) ** exponent


def rate_schedule(steps: int, warmup: int, decay: str) -> Callable[[int], float]:
    """The factor of the learning rate at a step: up in a line, then down to nothing."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        left = max(0.0, 1 - (step - warmup) / max(1, steps - warmup))
        return left**0.9 if decay == "poly" else (1 - math.cos(math.pi * left)) / 2

    return factor


def in_groups(items: Iterator[T], size: int) -> Iterator[list[T]]:
    """Divides into lists of some size; the last has what is left over."""
    while group := list(islice(items, size)):
        yield group


def count_pixels(batches: Sequence[Batch], device: torch.device) -> Tensor:
    """How many pixels of a step have a class, on all ranks. A collective; nothing is read back."""
    own = sum(int((mask != IGNORED).sum()) for _, mask in batches)
    pixels = torch.tensor(float(own), device=device)
    dist.all_reduce(pixels)
    return pixels.clamp(min=1)


def check_logits(logits: object, images: Tensor, classes: int) -> None:
    """Refuses a net whose output does not label every pixel of its input."""
    count, _, height, width = images.shape
    found = tuple(logits.shape) if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
    expected = (count, classes, height, width)
    if found != expected:
        raise Refusal(
            f"the net makes {found} of images {tuple(images.shape)}: expected its logits to be "
            f"(N, classes, H, W), H and W of the images, here {expected}"
        )


def backward(
    model: nn.Module,
    batches: Sequence[Batch],
    pixels: Tensor,
    ranks: int,
    *,
    device: torch.device,
    autocast: Autocast = nullcontext,
    scaler: torch.amp.GradScaler | None = None,
) -> Tensor:
    """Adds the gradients of some micro-batches; returns this rank's share of the loss.

    The loss is the mean over all pixels that have a class, of all micro-batches of all ranks: each
    micro-batch contributes its sum divided by their number. The mean of means, the usual, gives a
    pixel of a mask that is mostly ignored more weight than another. DistributedDataParallel divides
    gradients by the number of ranks, so that is multiplied in.

    Args:
        model: DistributedDataParallel, which exchanges gradients with the last micro-batch only; or
            a plain net, with ``ranks=1``.
        pixels: their number, from ``count_pixels``.
    """
    total = torch.zeros((), device=device)
    for number, (images, masks) in enumerate(batches, start=1):
        waits = number < len(batches) and isinstance(model, DistributedDataParallel)
        with model.no_sync() if waits else nullcontext():  # around the forward as well
            with autocast():
                logits = model(images.to(device, non_blocking=True))
                targets = masks.to(device, non_blocking=True)
            # In float32, and over rows of classes: deterministic on GPUs, as the 2D kernel is not.
            rows = logits.float().movedim(1, -1).flatten(0, -2)
            loss = F.cross_entropy(
                rows, targets.flatten(), ignore_index=IGNORED, reduction="sum"
            ) * (ranks / pixels)
            (scaler.scale(loss) if scaler else loss).backward()
        total += loss.detach() / ranks
    return total


def _keeping_random_numbers(device: torch.device) -> AbstractContextManager:
    """Brings the generators back that a step may draw from which is thrown away."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def step_alone(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    alone: dist.ProcessGroup,
    batches: Sequence[Batch],
    *,
    device: torch.device,
    autocast: Autocast,
) -> Callable[[], None]:
    """Prepares a step on copies of net and optimizer, which changes nothing else.

    Args:
        alone: the group of this rank by itself, for synchronised batch norm.
    """
    net, optimizer = copy.deepcopy((net, optimizer))  # together: the copy's own parameters
    for layer in filter(is_synchronized, net.modules()):
        layer.process_group = alone
    pixels = torch.ones((), device=device)  # their number has no part in how long it takes

    def step() -> None:
        with _keeping_random_numbers(device):
            backward(net, batches, pixels, 1, device=device, autocast=autocast)
        optimizer.step()

    return step


def warm_up(
    model: DistributedDataParallel,
    shape: tuple[int, int, int, int],
    *,
    device: torch.device,
    autocast: Autocast,
) -> None:
    """Makes a first forward and backward on blank images, and undoes what they change.

    After its first backward DistributedDataParallel divides the gradients into other buckets, in
    the order in which they came. The place in a bucket decides in which order three or more ranks
    are summed, hence how the sum is rounded. With this step thrown away, all steps of a run have
    the same buckets, also the first after a checkpoint; else no resumed run would be bit for bit
    the undisturbed one.
    """
    buffers = [buffer.clone() for buffer in model.buffers()]
    blank = torch.zeros(shape), torch.zeros(shape[0], *shape[2:], dtype=torch.int64)
    pixels = torch.ones((), device=device)
    with _keeping_random_numbers(device):
        backward(model, [blank], pixels, 1, device=device, autocast=autocast)
    model.zero_grad()
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
