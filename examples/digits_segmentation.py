"""Two images a rank: batch norm, synchronised batch norm, and one process with all the images.

A small U-Net labels every pixel of a page of handwritten digits. From the same seed and the same
pages it is trained three times:

  (a) BatchNorm          on all ranks, each normalising over its own 2 images;
  (b) FastSyncBatchNorm  on all ranks, normalising over the images of all;
  (c) BatchNorm          in one process, with the images of all ranks as its batch.

(b) computes what (c) computes, up to the rounding of float32. Run it with

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 examples/digits_segmentation.py

on GPUs with NCCL where there is one for each rank, else on the CPU with Gloo.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from syncbn_cuda import convert_sync_batchnorm

try:
    from digits import CLASSES, Pages
    from digits_report import Run, draw_figure, print_tables, write_numbers
    from tqdm import tqdm
    from unet import UNet
except ModuleNotFoundError as error:
    sys.exit(f"This example needs {error.name}: pip install scikit-learn matplotlib tqdm")

TEST_PAGES = 128
LEARNING_RATE = 0.01


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {number}")
    return number


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=positive, default=3, help="how many runs of each kind")
    parser.add_argument("--steps", type=positive, default=250, help="training steps of a run")
    parser.add_argument("--images-per-rank", type=positive, default=2)
    parser.add_argument(
        "--out",
        type=Path,
        help="the figure (default: digits_segmentation.png, with --quick digits_quick.png); the "
        "numbers go beside it, as .json",
    )
    parser.add_argument("--quick", action="store_true", help="one seed, six steps: does it run?")
    args = parser.parse_args()
    if args.out is None:
        args.out = Path("digits_quick.png" if args.quick else "digits_segmentation.png")
    if args.out.suffix != ".png":
        parser.error(f"--out: expected a name that ends in .png, got {args.out}")
    if not args.out.absolute().parent.is_dir():
        parser.error(f"--out: there is no folder {args.out.absolute().parent}")
    if args.quick:
        args.seeds, args.steps = 1, 6
    return args


@contextmanager
def process_group() -> Iterator[torch.device]:
    """Joins the ranks that torchrun started, or makes a group of one; yields the rank's device."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device = torch.device("cpu")
    if torch.cuda.device_count() >= local_ranks and dist.is_nccl_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        # TF32 convolutions round to 10 bits, and (b) could not be told from (c) by rounding.
        torch.backends.cudnn.conv.fp32_precision = "ieee"
        torch.backends.cudnn.deterministic = True
    started_alone = "RANK" not in os.environ
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        device_id=device if device.type == "cuda" else None,
        **({"store": dist.HashStore(), "rank": 0, "world_size": 1} if started_alone else {}),
    )
    try:
        yield device
    finally:
        gc.collect()  # DistributedDataParallel, in cycles, keeps Gloo's threads beyond Python's end
        dist.destroy_process_group()


def train(
    arm: str, seed: int, args: argparse.Namespace, device: torch.device, pages: dict, bar: tqdm
) -> Run:
    """Trains one net: (a) and (b) on all ranks together, (c) on the calling rank alone."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)  # the same weights for all arms and ranks
    net = UNet(CLASSES).to(device)
    if arm == "b":
        net = convert_sync_batchnorm(net)
    if arm == "c":
        model: nn.Module = net
        mine = range(args.images_per_rank * ranks)
    else:
        model = DistributedDataParallel(
            net, device_ids=[device.index] if device.type == "cuda" else None
        )
        mine = range(args.images_per_rank * rank, args.images_per_rank * (rank + 1))

    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=args.steps, cycle_momentum=False
    )
    every = max(1, args.steps // 10)
    run = Run()
    for step in range(args.steps):
        images, classes = (drawn.to(device) for drawn in pages["train"].draw(seed, step, mine))
        began = time.perf_counter()
        logits = model(images)
        # Every page has as many pixels, so the mean over ranks of the means (which is what DDP
        # follows) is the mean over the global batch (which is what one process follows).
        loss = F.cross_entropy(logits, classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        run.losses.append(loss.item())
        run.step_ms.append(1e3 * (time.perf_counter() - began))
        if step == 0:
            run.first = snapshot(net, logits=logits if arm == "c" else gather(logits))
        # Evaluation talks to no other rank, so rank 0 may do it alone.
        if rank == 0 and ((step + 1) % every == 0 or step + 1 == args.steps):
            score, labels = evaluate(net, *pages["test"])
            run.scores.append((step + 1, score))
        bar.set_postfix_str(f"{run.step_ms[-1]:.0f} ms a step, loss {run.losses[-1]:.3f}", False)
        bar.update()
    if arm != "c":
        losses = torch.tensor(run.losses, dtype=torch.float64, device=device)
        dist.all_reduce(losses)
        run.losses = (losses / ranks).tolist()
    if rank == 0:
        run.last = snapshot(net, labels=labels)
    return run


def snapshot(net: nn.Module, **more: Tensor) -> dict[str, Tensor]:
    """Copies a net's gradients, parameters and buffers, each kind as one flat vector."""
    parameters = list(net.parameters())
    kinds = {
        "gradients": [parameter.grad for parameter in parameters],
        "parameters": parameters,
        "buffers": [buffer for buffer in net.buffers() if buffer.is_floating_point()],
    }
    flat = {
        kind: torch.cat([each.detach().flatten() for each in all_]) for kind, all_ in kinds.items()
    }
    return {name: each.detach().cpu() for name, each in (flat | more).items()}


def gather(mine: Tensor) -> Tensor:
    """Returns the tensors of all ranks, one after the other, as one batch."""
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine.detach().contiguous())
    return torch.cat(parts)


@torch.no_grad()
def evaluate(net: nn.Module, images: Tensor, classes: Tensor) -> tuple[float, Tensor]:
    """Returns the mean over classes of intersection over union, and the predicted classes."""
    net.eval()
    labels = torch.cat([net(some).argmax(1) for some in images.split(16)])
    net.train()
    pairs = torch.bincount((classes * CLASSES + labels).flatten(), minlength=CLASSES**2)
    confusion = pairs.view(CLASSES, CLASSES).double()
    both = confusion.diagonal()
    union = confusion.sum(0) + confusion.sum(1) - both
    return (both / union.clamp(min=1)).mean().item(), labels


def main() -> None:
    args = parse_arguments()
    with process_group() as device:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        test = Pages(train=False).draw(0, 0, range(TEST_PAGES))
        pages = {"train": Pages(train=True), "test": [drawn.to(device) for drawn in test]}
        runs: dict[str, list[Run]] = {arm: [] for arm in "abc"}
        total = 3 * args.seeds * args.steps
        with tqdm(total=total, unit="step", disable=rank != 0, dynamic_ncols=True) as bar:
            for seed in range(args.seeds):
                for arm in "abc":
                    bar.set_description(f"seed {seed} ({arm})", refresh=False)
                    if arm != "c" or rank == 0:
                        runs[arm].append(train(arm, seed, args, device, pages, bar))
                    dist.barrier()
        if rank == 0:
            names = {
                "a": f"(a) BatchNorm, {args.images_per_rank} images a rank",
                "b": f"(b) FastSyncBatchNorm, {args.images_per_rank} images a rank",
                "c": f"(c) BatchNorm, one process, {args.images_per_rank * ranks} images",
            }
            print_tables(runs, names, f"{ranks} ranks on {device.type}, {args.steps} steps")
            draw_figure(args.out, runs, names, *(drawn.cpu() for drawn in test))
            numbers = args.out.with_suffix(".json")
            write_numbers(numbers, runs, names, ranks=ranks, device=device.type, **vars(args))
            if device.type == "cpu":
                print(
                    "ms a step: every layer of (b) waits for all ranks, so where ranks share cores "
                    "it\nwaits for turns on them. With a GPU for each rank there is no such queue."
                )
            print(f"\nFigure: {args.out.absolute()}\nNumbers: {numbers.absolute()}")


if __name__ == "__main__":
    main()
