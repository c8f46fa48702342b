"""What does synchronising cost over several ranks, and how much of it is waiting?

    torchrun --standalone --nproc-per-node 2 -m benchmarks [--device cpu]

Forward and backward of single layers, one batch a rank: nn.BatchNorm, which does not synchronise,
torch's SyncBatchNorm, and ours; over NCCL on GPUs, over Gloo on the CPU (where torch's side is its
autograd function on stand-ins for its kernels: benchmarks/synchronised.py).

In steps of their own, the collectives are timed apart from the wait for the slowest rank: see
benchmarks/collectives.py. What else is slower than without them (nn.BatchNorm) is launching and
computing.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.collectives import time_collectives
from benchmarks.groups import process_group
from benchmarks.harness import Spread, interleave, progress, ratio
from benchmarks.options import Options, name_of
from benchmarks.report import as_table
from benchmarks.shapes import Shape
from benchmarks.synchronised import KINDS, OURS, PLAIN, TORCH, convert

LAYERS = {
    "cpu": (
        Shape("resnet50.layer1", (2, 64, 56, 56)),
        Shape("resnet50.layer2", (2, 512, 28, 28), channels_last=True),
        Shape("resnet50.layer4", (2, 2048, 7, 7)),
        Shape("unet.full", (2, 64, 128, 128)),
        Shape("head", (64, 512)),
    ),
    "cuda": (
        Shape("resnet50.stem", (32, 64, 112, 112)),
        Shape("resnet50.layer2", (32, 512, 28, 28), channels_last=True),
        Shape("resnet50.layer4", (32, 2048, 7, 7)),
        Shape("unet.full", (2, 64, 512, 512)),
        Shape("head", (64, 512)),
    ),
}
QUICK = ("resnet50.layer4", "head")


def measure(options: Options) -> list[dict]:
    """Measures every layer, on all ranks at once; what rank 0 returns is reported."""
    layers = [
        layer
        for layer in LAYERS[options.device.type]
        if options.match in str(layer) and (not options.quick or layer.name in QUICK)
    ]
    jobs = [(layer, dtype) for layer in layers for dtype in options.dtypes]
    with process_group(options.device):
        return [_row(layer, dtype, options) for layer, dtype in progress(jobs)]


class Layer:
    """A batch norm with this rank's input, as one implementation computes it."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device, name: str) -> None:
        rank = dist.get_rank()
        norm = nn.BatchNorm1d if len(shape.size) == 2 else nn.BatchNorm2d
        (self.module,) = convert(nn.Sequential(norm(shape.channels, device=device)), KINDS[name])
        self.input = shape.random(dtype, device, seed=2 * rank).requires_grad_()
        self.grad_out = shape.random_gradient(dtype, device, seed=2 * rank + 1)

    def forward(self) -> Tensor:
        return self.module(self.input)

    def backward(self, output: Tensor) -> tuple[Tensor, ...]:
        wanted = (self.input, *self.module.parameters())
        return torch.autograd.grad(output, wanted, self.grad_out)

    def step(self) -> tuple[Tensor, ...]:
        return self.backward(self.forward())


def _row(shape: Shape, dtype: torch.dtype, options: Options) -> dict:
    device = options.device
    layers = {name: Layer(shape, dtype, device, name) for name in KINDS}
    exact = _of_the_whole_batch(shape, dtype, device)
    errors = {name: _error(layer, exact) for name, layer in layers.items()}
    limit = 8 * torch.finfo(dtype).eps
    if errors[OURS] > limit:
        raise RuntimeError(
            f"{shape}: ours is off by {errors[OURS]:.1e} from nn.BatchNorm over the batches of all "
            f"ranks, relative to the largest value; expected at most {limit:.1e}"
        )
    times = interleave({name: layer.step for name, layer in layers.items()}, device, options.turns)
    row = {
        "question": "ranks",
        "layer": str(shape),
        "dtype": name_of(dtype),
        "ranks": dist.get_world_size(),
        "backend": dist.get_backend(),
        "times_us": {name: asdict(Spread.of(each)) for name, each in times.items()},
        "over_ranks_us": {
            name: asdict(Spread.of(np.median(_of_all_ranks(each), axis=1)))
            for name, each in times.items()
        },
        "ratios": {f"{name} / {OURS}": asdict(ratio(times, OURS, name)) for name in (TORCH, PLAIN)},
        "errors": errors,
    }
    return row | _collectives(layers, device, options.turns)


def _collectives(
    layers: dict[str, Layer], device: torch.device, turns: int
) -> dict[str, dict[str, Any]]:
    """How many collectives a step has, and the time of them all and of the wait before them."""
    found: dict[str, dict[str, Any]] = {"collectives": {}}
    steps = {name: (layer.forward, layer.backward) for name, layer in layers.items()}
    for name, times in time_collectives(steps, device, turns).items():
        found["collectives"][name] = times["collective"].shape[1]
        if found["collectives"][name] > 0:
            for what, each in times.items():
                # It is over when the last rank is done, and the first to come waits the longest.
                longest = _of_all_ranks(each.sum(1)).max(0)
                found.setdefault(f"{what}_us", {})[name] = asdict(Spread.of(longest))
    return found


def _of_all_ranks(values: np.ndarray) -> np.ndarray:
    """Gathers the values of every rank: ``[ranks, ...]``."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, values)
    return np.stack(gathered)


def _of_the_whole_batch(
    shape: Shape, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """This rank's part of y and dx of BatchNorm over the batches of all ranks, in float64."""
    ranks = range(dist.get_world_size())
    input = torch.cat([shape.random(dtype, device, seed=2 * rank) for rank in ranks]).double()
    grad_out = torch.cat(
        [shape.random_gradient(dtype, device, seed=2 * rank + 1) for rank in ranks]
    ).double()
    output = F.batch_norm(input.requires_grad_(), None, None, training=True)
    (grad_input,) = torch.autograd.grad(output, input, grad_out)
    first = dist.get_rank() * shape.size[0]
    mine = slice(first, first + shape.size[0])
    return output[mine].detach(), grad_input[mine]


def _error(layer: Layer, exact: tuple[Tensor, Tensor]) -> float:
    """The largest error of y and dx on any rank, relative to their largest value."""
    output = layer.forward()
    results = output.detach(), layer.backward(output)[0]
    errors = [
        ((result.double() - expected).abs().max() / expected.abs().max()).item()
        for result, expected in zip(results, exact, strict=True)
    ]
    return float(_of_all_ranks(np.array(errors)).max())


def table(rows: list[dict]) -> str:
    """Formats the rows as one table."""
    lines = []
    for row in rows:
        for name, time_us in row["times_us"].items():
            cells = [row["layer"], row["dtype"], name, str(Spread(**time_us))]
            for what, key in (
                ("over_ranks_us", name),
                ("ratios", f"{name} / {OURS}"),
                ("collective_us", name),
                ("latency_us", name),
                ("wait_us", name),
            ):
                cells.append(str(Spread(**row[what][key])) if key in row.get(what, {}) else "")
            cells.insert(6, str(row["collectives"][name]))
            lines.append([*cells, f"{row['errors'][name]:.1e}"])
    header = ["layer", "dtype", "", "step us", "over ranks us", "it / ours", "collectives"]
    header += ["their time us", "of which latency us", "wait us", "error"]
    return (
        f"Forward and backward of a layer on each of {rows[0]['ranks']} ranks "
        f"({rows[0]['backend']}). Over ranks: the spread of the ranks' medians. Of all collectives "
        "of a step: their time where all ranks enter together; the latency, which is the time of "
        "as many of a single value; and how long the first rank waits for the last. Error: the "
        "largest of y and dx against float64 over the batches of all ranks, relative.\n\n"
        + as_table(header, lines, texts=3)
    )
