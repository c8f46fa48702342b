"""How to weight the loss where ranks hold different numbers of samples.

DistributedDataParallel averages the gradients of the ranks. If each rank's loss is the mean over
its own batch, a sample of a small batch weighs more than one of a large batch, and the step is not
that of one process with all samples. Exact is the sum over the rank's samples, divided by the mean
number of samples a rank. (With equal batches both are the same. The learning rate is that of one
process with the global batch: synchronised statistics change nothing about it.)

    torchrun --standalone --nproc-per-node 4 examples/unequal_batches.py

trains one step on the handwritten digits of scikit-learn with 8, 16, 24, ... samples on the ranks,
and prints how far the gradients are from those of one process with all of them.
"""

from __future__ import annotations

import copy
import gc
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from syncbn_cuda import convert_sync_batchnorm


def digits() -> tuple[Tensor, Tensor]:
    """Returns the scans (1797, 64) in [0, 1] and their classes."""
    scans, classes = load_digits(return_X_y=True)
    return torch.tensor(scans, dtype=torch.float64) / 16, torch.tensor(classes)


def classifier() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
    return nn.Sequential(*layers).double()


def mean_loss(logits: Tensor, classes: Tensor) -> Tensor:
    """The mean over the rank's own samples: exact where all ranks have as many."""
    return F.cross_entropy(logits, classes)


def weighted_loss(logits: Tensor, classes: Tensor) -> Tensor:
    """The sum over the rank's own samples, by the mean number of samples a rank: exact."""
    samples = torch.tensor(float(len(classes)), device=logits.device)
    dist.all_reduce(samples)
    return F.cross_entropy(logits, classes, reduction="sum") * dist.get_world_size() / samples


def compare() -> None:
    """Prints how far each loss leads from the gradients of one process."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    counts = [8 * (other + 1) for other in range(ranks)]
    x, classes = (data[: sum(counts)] for data in digits())
    own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))

    plain = classifier()
    F.cross_entropy(plain(x), classes).backward()
    expected = torch.cat([p.grad.flatten() for p in plain.parameters()])

    if rank == 0:
        print(f"samples on the ranks: {counts}; gradients against one process with all of them")
    for loss in (mean_loss, weighted_loss):
        model = copy.deepcopy(plain)
        model.zero_grad()
        model = DistributedDataParallel(convert_sync_batchnorm(model))
        loss(model(x[own]), classes[own]).backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        error = (gradient - expected).norm() / expected.norm()
        if rank == 0:
            print(f"{loss.__name__:14} relative difference {error:.1e}")


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit("start it by torchrun --standalone --nproc-per-node 4 examples/unequal_batches.py")
    dist.init_process_group("gloo")
    compare()
    # DistributedDataParallel lives on in reference cycles, and with it Gloo's threads: one of them
    # still at work when Python ends would abort the process.
    gc.collect()
    dist.destroy_process_group()
