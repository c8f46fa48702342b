"""Is ours faster than what torch has, and as exact? Forward and backward, layer by layer.

    python -m benchmarks.compare                        # this machine's GPU, else its CPU
    python -m benchmarks.compare --device cpu --quick
    torchrun --nproc-per-node 2 -m benchmarks.compare --device cpu     # ours over Gloo

On the CPU: the module FastSyncBatchNorm against nn.BatchNorm. torch's SyncBatchNorm refuses the
CPU, so ours is compared with the one that does not synchronise. On CUDA: the synchronised path
of ours against that of torch, both with a collective over a group of one rank (the module
nn.SyncBatchNorm would leave that path for cuDNN), and ours without a group against cuDNN.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules._functions import SyncBatchNorm as TorchSyncBatchNorm

import syncbn_cuda
from benchmarks.harness import Spread, interleave, machine, ratio
from benchmarks.shapes import QUICK, SHAPES, Shape

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

#: Ours, and the baseline that it is compared with.
PAIRS = {
    "cpu": [("ours", "torch")],
    "cuda": [("ours synchronised", "torch synchronised"), ("ours", "cuDNN")],
}

Layer = Callable[[Tensor], Tensor]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPU, if any")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--shapes", metavar="TEXT", help="only layers with it in their name")
    parser.add_argument("--turns", type=int, default=50, help="timed turns of each candidate")
    parser.add_argument("--threads", type=int, help="threads of torch on the CPU")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write compare-DEVICE.json and .md")
    parser.add_argument("--quick", action="store_true", help="few layers, few turns")
    parser.add_argument(
        "--allow-composite",
        action="store_true",
        help="compare even where the compiled kernels are not in use",
    )
    args = parser.parse_args()
    if args.device is None:
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU")
    if args.turns < 1:
        parser.error(f"--turns: expected at least 1, got {args.turns}")
    args.layers = [
        shape for shape in (QUICK if args.quick else SHAPES) if (args.shapes or "") in str(shape)
    ]
    if not args.layers:
        parser.error(f"--shapes: no layer has {args.shapes!r} in its name")
    if args.quick:
        args.turns = min(args.turns, 15)
    return args


def require_kernels(device: str, allow_composite: bool) -> bool:
    """Says whether the compiled kernels are in use; ends the program where they must be."""
    state = syncbn_cuda.build_info()[device]
    if not state["loaded"] and not allow_composite:
        sys.exit(
            f"benchmarks.compare: the compiled {device} kernels are not in use: "
            f"{state['reason']}\nWithout them this would time torch against torch. "
            "--allow-composite does so all the same."
        )
    return state["loaded"]


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """The group of torchrun; without it, one of a single rank on CUDA and none on the CPU."""
    started_alone = "RANK" not in os.environ
    if started_alone and device.type == "cpu":
        yield
        return
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if started_alone else {}
    if device.type == "cuda":
        dist.init_process_group("nccl", device_id=device, **alone)
    else:
        dist.init_process_group("gloo", **alone)
    try:
        yield
    finally:
        dist.destroy_process_group()


def candidates(shape: Shape, device: torch.device) -> dict[str, tuple[Layer, nn.Module]]:
    """Makes the layers to compare, each with the module that holds its weight and bias."""

    def batch_norm() -> nn.Module:
        kind = nn.BatchNorm1d if len(shape.size) == 2 else nn.BatchNorm2d
        return kind(shape.channels, device=device)

    ours = syncbn_cuda.convert_sync_batchnorm(batch_norm())
    plain = batch_norm()
    if device.type == "cpu":
        return {"ours": (ours, ours), "torch": (plain, plain)}

    group = dist.group.WORLD
    ours_sync, torch_sync = syncbn_cuda.convert_sync_batchnorm(batch_norm()), batch_norm()

    def run_ours_sync(input: Tensor) -> Tensor:
        # The module itself skips the collective in a group of one.
        m = ours_sync
        return syncbn_cuda.functional.batch_norm(
            input, m.running_mean, m.running_var, m.weight, m.bias, True, m.momentum, m.eps,
            m.num_batches_tracked, group, m,
        )  # fmt: skip

    def run_torch_sync(input: Tensor) -> Tensor:
        m = torch_sync
        m.num_batches_tracked.add_(1)  # as its module does
        return TorchSyncBatchNorm.apply(
            input, m.weight, m.bias, m.running_mean, m.running_var, m.eps, m.momentum, group, 1
        )

    return {
        "ours synchronised": (run_ours_sync, ours_sync),
        "torch synchronised": (run_torch_sync, torch_sync),
        "ours": (ours, ours),
        "cuDNN": (plain, plain),
    }


def measure(shape: Shape, dtype: torch.dtype, device: torch.device, turns: int) -> list[dict]:
    """Times one layer; returns a row for each direction and pair."""
    input = shape.random(dtype, device).requires_grad_()
    grad_out = shape.random_gradient(dtype, device)
    layers = candidates(shape, device)

    def backward(layer: Layer, module: nn.Module) -> Callable[[], Any]:
        output = layer(input)
        wanted = (input, *module.parameters())
        return lambda: torch.autograd.grad(output, wanted, grad_out, retain_graph=True)

    directions = {
        "forward": {name: lambda layer=layer: layer(input) for name, (layer, _) in layers.items()},
        "backward": {name: backward(*layer) for name, layer in layers.items()},
    }
    errors = {name: error_of(*layer, input, grad_out) for name, layer in layers.items()}
    rows = []
    for direction, calls in directions.items():
        times = interleave(calls, device, turns)
        for ours, baseline in PAIRS[device.type]:
            rows.append({
                "layer": str(shape),
                "dtype": str(dtype).removeprefix("torch."),
                "direction": direction,
                "ours": ours,
                "baseline": baseline,
                "ours_us": asdict(Spread.of(times[ours])),
                "baseline_us": asdict(Spread.of(times[baseline])),
                "times_as_fast": asdict(ratio(times, ours, baseline)),
                "error_of": {"forward": "y", "backward": "dx"}[direction],
                "ours_error": errors[ours][direction],
                "baseline_error": errors[baseline][direction],
            })  # fmt: skip
    return rows


def error_of(
    layer: Layer, module: nn.Module, input: Tensor, grad_out: Tensor
) -> dict[str, float | None]:
    """The largest error of y and dx against float64; None in a group, which has another batch."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        return {"forward": None, "backward": None}
    exact_input = input.detach().double().requires_grad_()
    weight, bias = (parameter.detach().double() for parameter in (module.weight, module.bias))
    exact = F.batch_norm(exact_input, None, None, weight, bias, True, eps=module.eps)
    (exact_dx,) = torch.autograd.grad(exact, exact_input, grad_out.double())
    output = layer(input)
    (dx,) = torch.autograd.grad(output, input, grad_out)
    return {
        "forward": (output.double() - exact).abs().max().item(),
        "backward": (dx.double() - exact_dx).abs().max().item(),
    }


def as_markdown(rows: list[dict]) -> str:
    """Formats rows as one table for each pair of candidates, under the machine."""
    where = rows[0]["machine"]
    lines = ["# Ours against torch", ""]
    lines += [f"* {name}: {value}" for name, value in where.items() if value is not None]
    lines += [
        f"* compiled kernels: {'in use' if rows[0]['compiled'] else 'NOT in use'}",
        "",
        "Times in microseconds, median [20th, 80th percentile], taken in turn; above 1 time as "
        "fast, ours is faster. Errors: the largest of y (forward), dx (backward) against float64.",
    ]
    for ours, baseline in dict.fromkeys((row["ours"], row["baseline"]) for row in rows):
        lines += ["", f"## {ours} against {baseline}", ""]
        lines += [f"| layer | dtype | | {ours} | {baseline} | times as fast | error | its error |"]
        lines += ["| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |"]
        for row in rows:
            if (row["ours"], row["baseline"]) != (ours, baseline):
                continue
            spreads = [Spread(**row[key]) for key in ("ours_us", "baseline_us", "times_as_fast")]
            errors = [row["ours_error"], row["baseline_error"]]
            cells = [row["layer"], row["dtype"], row["direction"]]
            cells += [str(spread) for spread in spreads]
            cells += ["" if error is None else f"{error:.1e}" for error in errors]
            lines += ["| " + " | ".join(cells) + " |"]
    return "\n".join(lines) + "\n"


def progress(jobs: list, shown: bool) -> Any:
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        return jobs
    return tqdm(jobs, unit="layer", disable=not shown)


def main() -> None:
    args = parse_arguments()
    compiled = require_kernels(args.device, args.allow_composite)
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if args.threads:
        torch.set_num_threads(args.threads)
    with process_group(device):
        first = not dist.is_initialized() or dist.get_rank() == 0
        about = {"compiled": compiled, "machine": machine(device)}
        jobs = [(shape, DTYPES[name]) for shape in args.layers for name in args.dtypes]
        rows = []
        for shape, dtype in progress(jobs, first):
            rows += [row | about for row in measure(shape, dtype, device, args.turns)]
    if not first:
        return
    table = as_markdown(rows)
    print(table)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        name = f"compare-{args.device}"
        (args.out / f"{name}.json").write_text(json.dumps(rows, indent=1) + "\n")
        (args.out / f"{name}.md").write_text(table)
        print(f"Written: {args.out / name}.json and .md")


if __name__ == "__main__":
    main()
