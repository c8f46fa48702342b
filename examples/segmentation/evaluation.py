"""Evaluation: a confusion matrix, and the mean over classes of intersection over union."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from segmentation.data import IGNORED, batches_of
from segmentation.launch import Refusal, World
from segmentation.step import Autocast, check_logits


def share(count: int, world: World) -> range:
    """The samples of one rank: each sample on one rank, whether or not the ranks divide them.

    (A DistributedSampler repeats samples until all ranks have as many, and they count twice.)
    """
    return range(world.rank, count, world.size)


@torch.no_grad()
def evaluate(
    net: nn.Module,
    dataset: Dataset,
    which: Sequence[int],
    *,
    classes: int,
    device: torch.device,
    autocast: Autocast = nullcontext,
    workers: int = 0,
) -> tuple[Tensor, list[Tensor]]:
    """Labels some samples of a dataset; talks to no other rank.

    Args:
        net: without the DistributedDataParallel around it. In its forward that broadcasts the
            buffers from rank 0, and waits where another rank makes fewer forwards or none.
        which: their numbers. One at a time is labelled, as pictures have sizes of their own; so
            the result of one depends on no other.

    Returns:
        How many pixels of each true class (row) were given which class (column), int64, and the
        classes of all pixels of each sample, uint8 ``(H, W)``, on the CPU.
    """
    confusion = torch.zeros(classes * classes, dtype=torch.int64, device=device)
    predictions = []
    was_training = net.training
    net.eval()
    loader: DataLoader = DataLoader(Subset(dataset, which), batch_size=None, num_workers=workers)
    for image, mask, (height, width) in batches_of(loader):
        images = image[None].to(device)
        try:
            with autocast():
                logits = net(images)
        except RuntimeError as error:
            raise RuntimeError(
                f"the net failed on images {tuple(images.shape)}: if H and W are why, say in "
                "Net.multiple of what they have to be multiples"
            ) from error
        check_logits(logits, images, classes)
        predicted = logits[0].argmax(0)
        mask = mask.to(device)
        valid = mask != IGNORED
        pairs = mask[valid] * classes + predicted[valid]
        confusion += torch.bincount(pairs, minlength=classes * classes)
        predictions.append(predicted[:height, :width].to("cpu", torch.uint8))
    net.train(was_training)
    return confusion.view(classes, classes), predictions


def class_ious(confusion: Tensor) -> list[float | None]:
    """Intersection over union of each class; None of one that neither occurs nor is predicted."""
    both = confusion.diagonal().double()
    union = confusion.sum(0) + confusion.sum(1) - both
    if not union.any():
        raise Refusal("no pixel of the images to evaluate on has a class")
    ratios = zip(both.tolist(), union.tolist(), strict=True)
    return [one / other if other else None for one, other in ratios]


def mean_iou(ious: Sequence[float | None]) -> float:
    """The mean over the classes that occur or are predicted."""
    found = [iou for iou in ious if iou is not None]
    return sum(found) / len(found)


def share_buffers(net: nn.Module) -> None:
    """Gives all ranks the buffers of rank 0, which are what the checkpoint holds.

    Synchronised over all ranks they are equal anyway. Else each rank has the running statistics
    of its own batches since the last forward, and the shards would be labelled by different nets.
    """
    for buffer in net.buffers():
        dist.broadcast(buffer, src=0)


def gather_predictions(mine: list[Tensor], world: World) -> list[Tensor] | None:
    """Gathers on rank 0, in the order of the dataset, what the ranks predicted for their shares.

    For a metric that is no sum over samples, or needs them all. The ranks may have unequally many,
    of any sizes. Returns None on the other ranks.
    """
    parts: list | None = [None] * world.size if world.leads else None
    dist.gather_object([each.numpy() for each in mine], parts, dst=0)
    if parts is None:
        return None
    ordered: list = [None] * sum(map(len, parts))
    for rank, part in enumerate(parts):
        ordered[rank :: world.size] = [torch.from_numpy(each) for each in part]
    return ordered
