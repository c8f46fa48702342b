"""What does a training step gain? Images a second, end to end.

A step is forward, loss, backward and SGD with momentum, on one batch of random images that stays.
float32 runs on contiguous tensors, bfloat16 under autocast and channels-last, as such nets are
usually trained. Eager, compiled (torch.compile), and as one CUDA graph; all in turn.

On CUDA nn.BatchNorm (cuDNN), torch's SyncBatchNorm and ours, both on their synchronised path over a
group of one rank. Under torchrun (`torchrun ... -m benchmarks steps`) over all ranks, in
DistributedDataParallel, eager. On the CPU small sizes, nn.BatchNorm and ours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import syncbn_cuda
from benchmarks.graphs import captured, peak_bytes
from benchmarks.groups import process_group, rank, ranks
from benchmarks.harness import Spread, interleave, progress, ratio
from benchmarks.models import Task, UNet, memory_format, resnet50
from benchmarks.options import Options, name_of
from benchmarks.synchronised import OursSynchronised, TorchSynchronised, convert

PLAIN, TORCH, OURS = "nn.BatchNorm", "torch SyncBN", "ours"

unet, unet3d = functools.partial(UNet, 2, 3, 8), functools.partial(UNet, 3, 1, 4)

TASKS = {
    "cpu": (
        Task("resnet50", resnet50, (2, 3, 64, 64), 1000, dense=False),
        Task("unet", lambda: unet(width=8, depth=3), (2, 3, 64, 64), 8, dense=True),
        Task("unet3d", lambda: unet3d(width=4, depth=2), (2, 1, 16, 16, 16), 4, dense=True),
    ),
    "cuda": (
        Task("resnet50", resnet50, (32, 3, 224, 224), 1000, dense=False),
        Task("unet", lambda: unet(width=64, depth=4), (2, 3, 512, 512), 8, dense=True),
        Task("unet3d", lambda: unet3d(width=32, depth=3), (2, 1, 128, 128, 128), 4, dense=True),
    ),
}
EAGER, COMPILED, GRAPH = "eager", "compiled", "CUDA graph"

#: Steps before any that counts; cuDNN, the compiler and the allocator settle in them.
WARM_UP = 3

#: How far the first losses of two implementations may be apart, relative. (Later ones say nothing:
#: in a ResNet-50, rounding of the input alone moves the third loss by percents.)
LOSS_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}

Step = Callable[[], Tensor]


def measure(options: Options) -> list[dict]:
    """Trains every net with every implementation; returns a row for each, and mode."""
    jobs = [
        (task, dtype)
        for task in TASKS[options.device.type]
        for dtype in options.dtypes
        if dtype in LOSS_TOLERANCE and any(wanted for wanted in _modes(task, dtype, options))
    ]
    alone = options.device.type == "cpu" and ranks() == 1
    rows = []
    with nullcontext() if alone else process_group(options.device):
        for task, dtype in progress(jobs, "net"):
            rows += _rows(task, dtype, options)
            torch.compiler.reset()
    return rows


def _modes(task: Task, dtype: torch.dtype, options: Options) -> list[str]:
    modes = [EAGER]
    if ranks() == 1:
        modes += [COMPILED] * (not options.quick) + [GRAPH] * (options.device.type == "cuda")
    return [mode for mode in modes if options.match in f"{task} {name_of(dtype)} {mode}"]


def _rows(task: Task, dtype: torch.dtype, options: Options) -> list[dict]:
    device = options.device
    about = {
        "question": "steps",
        "net": str(task),
        "dtype": name_of(dtype),
        "layout": "channels-last" if _channels_last(dtype) else "contiguous",
        "ranks": ranks(),
    }
    if task.make() is None:
        return [about | {"missing": "neither torchvision nor timm is installed"}]
    kinds = {PLAIN: None, TORCH: TorchSynchronised, OURS: OursSynchronised}
    if device.type == "cpu":  # DistributedDataParallel refuses torch's there, and alone ours is it
        kinds = {PLAIN: None, OURS: syncbn_cuda.FastSyncBatchNorm}
    steps: dict[str, Step] = {}
    found: dict[str, dict] = {}
    # A graph is not captured on the default stream.
    with torch.cuda.stream(torch.cuda.Stream()) if device.type == "cuda" else nullcontext():
        for mode in _modes(task, dtype, options):
            for name, kind in kinds.items():
                key = f"{mode} {name}"
                about_it = about | {"mode": mode, "implementation": name}
                model = _model(task, kind, dtype, device)
                try:
                    steps[key], costs = _prepared(task, model, dtype, device, mode)
                except Exception as error:
                    if mode == EAGER:
                        raise
                    # A compiler that is not there, say, must not lose what can be measured.
                    reason = f"{type(error).__name__}: {error}".splitlines()[0]
                    found[key] = about_it | {"missing": reason}
                else:
                    found[key] = about_it | costs
        if ranks() == 1:
            _check_losses(list(found.values()), LOSS_TOLERANCE[dtype])
        times = interleave(steps, device, options.turns)
    images = task.size[0] * ranks()
    for key, each in times.items():
        ours = f"{found[key]['mode']} {OURS}"
        found[key]["step_us"] = asdict(Spread.of(each))
        found[key]["images_per_s"] = asdict(Spread.of(1e6 * images / each))
        if ours in times:
            found[key]["ours_times_as_fast"] = asdict(ratio(times, ours, key))
    return list(found.values())


def _channels_last(dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16


def _model(
    task: Task, kind: type[nn.Module] | None, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    torch.manual_seed(0)
    model = task.make()
    assert model is not None
    if kind is not None:
        convert(model, kind)
    return model.to(device, memory_format=memory_format(len(task.size), _channels_last(dtype)))


def _prepared(
    task: Task, model: nn.Module, dtype: torch.dtype, device: torch.device, mode: str
) -> tuple[Step, dict[str, float]]:
    """Makes the step of a model in a mode, warmed up; returns it with its loss and memory."""
    forward: Any = model
    if ranks() > 1:
        forward = DistributedDataParallel(model)
    elif mode == COMPILED:
        forward = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    images, classes = task.batch(device, _channels_last(dtype), seed=rank())

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = F.cross_entropy(forward(images), classes)
        loss.backward()
        optimizer.step()
        return loss.detach()

    costs = {"first_loss": float(step())}
    for _ in range(WARM_UP - 1):
        step()
    if mode == EAGER:
        costs["saved_bytes"] = float(saved_bytes(step, model))
    if device.type == "cuda" and mode != GRAPH:
        costs["peak_bytes"] = float(peak_bytes(step, device))
    return captured([step], keep=False) if mode == GRAPH else step, costs


def saved_bytes(step: Step, model: nn.Module) -> int:
    """What forward keeps for backward beside the model's own: the storages, each once."""
    own = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step()
    return sum(kept.values())


def _check_losses(rows: list[dict], tolerance: float) -> None:
    """Raises where ours computes another loss than nn.BatchNorm does of the same batch."""
    losses = {
        (row["mode"], row["implementation"]): row["first_loss"]
        for row in rows
        if "first_loss" in row
    }
    for (mode, name), loss in losses.items():
        plain = losses.get((mode, PLAIN))
        if name == OURS and plain is not None and not abs(loss / plain - 1) <= tolerance:
            raise RuntimeError(
                f"{rows[0]['net']} {mode}: expected the loss of nn.BatchNorm, {plain:.6f}, within "
                f"{tolerance:.0e} of it; got {loss:.6f} of ours"
            )


def table(rows: list[dict]) -> str:
    """Formats the rows as one table."""
    lines = [
        "Images a second of a training step on one batch of random images, median [20th, 80th "
        "percentile]. Saved: what forward keeps for backward beside the model. Peak: of a step, "
        "beyond what was allocated before. Missing: why there is no figure.",
        "",
        "| net | dtype | layout | mode | | images/s | step us | ours: times as fast | saved MiB "
        "| peak MiB | missing |",
        "| --- | --- | --- | --- | --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in rows:
        cells = [row.get(key, "") for key in ("net", "dtype", "layout", "mode", "implementation")]
        for key in ("images_per_s", "step_us", "ours_times_as_fast"):
            cells.append(str(Spread(**row[key])) if key in row else "")
        for key in ("saved_bytes", "peak_bytes"):
            cells.append(f"{row[key] / 2**20:,.1f}" if key in row else "")
        lines += [f"| {' | '.join([*cells, row.get('missing', '')])} |"]
    return "\n".join(lines) + "\n"
