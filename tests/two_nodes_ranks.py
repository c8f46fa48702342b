"""A small training on digits: two_nodes_ranks.py FOLDER TIMEOUT [waits]

Each rank leaves in the folder what it has learned, or the error that it ended with. One that
``waits`` does so in the midst of a forward, until it is told there to go on.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from syncbn_cuda import FastSyncBatchNorm

STEPS, BATCH, CHANNELS = 8, 32, 8


def train(wrap: Callable[[nn.Module], nn.Module], mine: slice) -> dict[str, Tensor]:
    """Trains on this process's part of each batch, in float64; returns the net's state."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, CHANNELS, 3, padding=1),
        FastSyncBatchNorm(CHANNELS),
        nn.ReLU(),
        nn.Conv2d(CHANNELS, CHANNELS, 3, stride=2),
        FastSyncBatchNorm(CHANNELS),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(9 * CHANNELS, 10),
    ).double()
    model = wrap(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scans, values = map(torch.from_numpy, load_digits(return_X_y=True))
    for step in range(STEPS):
        batch = slice(step * BATCH, (step + 1) * BATCH)
        images = scans[batch][mine].view(-1, 1, 8, 8) / 16
        loss = nn.functional.cross_entropy(model(images), values[batch][mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return net.state_dict()


def wait_for(*files: Path, limit_s: float) -> None:
    """Waits until files are there, or for as long as it may take."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and not all(file.exists() for file in files):
        time.sleep(0.02)


def main(folder: Path, timeout: float, waits: bool) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    rank, size = dist.get_rank(), dist.get_world_size()

    def wrap(net: nn.Module) -> nn.Module:
        forwards = iter(range(STEPS))

        def wait(*_: object) -> None:
            if next(forwards) == STEPS // 2:
                (folder / f"waits {rank}").touch()
                wait_for(folder / "go on", limit_s=60)

        if waits:
            net[4].register_forward_pre_hook(wait)
        return DistributedDataParallel(net)

    try:
        torch.save(train(wrap, slice(rank, None, size)), folder / f"net {rank}")
        dist.barrier()
    except RuntimeError as error:
        (folder / f"error {rank}").write_text(str(error))
        # Or torchrun would end the others before they have told theirs.
        wait_for(*(folder / f"error {rank}" for rank in range(size)), limit_s=timeout)
        raise
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), "waits" in sys.argv)
