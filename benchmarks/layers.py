"""Is ours faster than what torch has, and as exact? Forward and backward, layer by layer.

On the CPU: the module FastSyncBatchNorm against nn.BatchNorm. torch's SyncBatchNorm refuses the
CPU, so ours is compared with the one that does not synchronise. On CUDA: the synchronised path
of ours against that of torch, both with a collective over a group of one rank (the module
nn.SyncBatchNorm would leave that path for cuDNN), and ours without a group against cuDNN.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules._functions import SyncBatchNorm as TorchSyncBatchNorm

import syncbn_cuda
from benchmarks.groups import process_group
from benchmarks.harness import Spread, interleave, progress, ratio
from benchmarks.options import Options, name_of
from benchmarks.shapes import QUICK, SHAPES, Shape

#: Ours, and the baseline that it is compared with.
PAIRS = {
    "cpu": [("ours", "torch")],
    "cuda": [("ours synchronised", "torch synchronised"), ("ours", "cuDNN")],
}

Layer = Callable[[Tensor], Tensor]


def measure(options: Options) -> list[dict]:
    """Times every layer."""
    shapes = [s for s in (QUICK if options.quick else SHAPES) if options.match in str(s)]
    jobs = [(shape, dtype) for shape in shapes for dtype in options.dtypes]
    on_cuda = options.device.type == "cuda"
    with process_group(options.device) if on_cuda else nullcontext():
        rows = [measure_layer(*job, options.device, options.turns) for job in progress(jobs)]
    return [row for rows_of_layer in rows for row in rows_of_layer]


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


def measure_layer(shape: Shape, dtype: torch.dtype, device: torch.device, turns: int) -> list[dict]:
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
                "question": "layers",
                "layer": str(shape),
                "dtype": name_of(dtype),
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


def error_of(layer: Layer, module: nn.Module, input: Tensor, grad_out: Tensor) -> dict[str, float]:
    """The largest error of y and dx against float64."""
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


def table(rows: list[dict]) -> str:
    """Formats rows as one table for each pair of candidates."""
    lines = [
        "Taken in turn; above 1 time as fast, ours is faster. Errors: the largest of y (forward), "
        "dx (backward) against float64.",
    ]
    for ours, baseline in dict.fromkeys((row["ours"], row["baseline"]) for row in rows):
        lines += ["", f"### {ours} against {baseline}", ""]
        lines += [f"| layer | dtype | | {ours} | {baseline} | times as fast | error | its error |"]
        lines += ["| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |"]
        for row in rows:
            if (row["ours"], row["baseline"]) != (ours, baseline):
                continue
            spreads = [Spread(**row[key]) for key in ("ours_us", "baseline_us", "times_as_fast")]
            errors = [row["ours_error"], row["baseline_error"]]
            cells = [row["layer"], row["dtype"], row["direction"]]
            cells += [str(spread) for spread in spreads]
            cells += [f"{error:.1e}" for error in errors]
            lines += ["| " + " | ".join(cells) + " |"]
    return "\n".join(lines) + "\n"
