"""What does a training step gain? Steps and images a second, end to end.

A step is forward, loss, backward and SGD with momentum, on one batch of random images that stays.
Eager, compiled (torch.compile; what that takes: compilation.py), and as one CUDA graph; all in
turn.

On CUDA nn.BatchNorm (cuDNN), torch's SyncBatchNorm and ours, both on their synchronised path over a
group of one rank. Under torchrun (`torchrun ... -m benchmarks steps`) over all ranks, in
DistributedDataParallel, eager. On the CPU small sizes, nn.BatchNorm and ours.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import compilation
from benchmarks.graphs import captured, peak_bytes
from benchmarks.groups import process_group, rank, ranks
from benchmarks.harness import Spread, interleave, progress, ratios
from benchmarks.models import Task, UNet, resnet50
from benchmarks.options import Options, name_of
from benchmarks.report import as_table
from benchmarks.synchronised import KINDS, OURS, PLAIN, TORCH
from benchmarks.training import Step, channels_last, compiled, gradients, model_of

unet, unet3d = functools.partial(UNet, 2, 3, 8), functools.partial(UNet, 3, 1, 4)

TASKS = {
    "cpu": (
        Task("resnet50", resnet50, (2, 3, 64, 64), 1000, dense=False),
        Task("unet", lambda: unet(width=8, depth=3), (2, 3, 64, 64), 8, dense=True),
        Task("unet3d", lambda: unet3d(width=4, depth=2), (2, 1, 16, 16, 16), 4, dense=True),
        Task("tiny unet", lambda: unet(width=8, depth=1), (2, 3, 32, 32), 8, dense=True),
    ),
    "cuda": (
        Task("resnet50", resnet50, (32, 3, 224, 224), 1000, dense=False),
        Task("unet", lambda: unet(width=64, depth=4), (2, 3, 512, 512), 8, dense=True),
        Task("unet3d", lambda: unet3d(width=32, depth=3), (2, 1, 128, 128, 128), 4, dense=True),
    ),
}

#: The nets of a quick run, and what it also compiles.
QUICK, QUICK_COMPILED = ("resnet50", "unet", "tiny unet"), {("tiny unet", torch.float32)}

EAGER, COMPILED, GRAPH = "eager", "compiled", "CUDA graph"

#: Steps before any that counts; cuDNN, the compiler and the allocator settle in them.
WARM_UP = 3

#: How far the first losses of two implementations may be apart, relative. (Later ones say nothing:
#: in a ResNet-50, rounding of the input alone moves the third loss by percents; in bfloat16, on
#: small images, also the first, up to 4 % with nn.BatchNorm where the input grows by 0.1 %.)
LOSS_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-1}

bars = compilation.bars


def measure(options: Options) -> list[dict]:
    """Trains every net with every implementation; returns a row for each, and mode."""
    jobs = [
        (task, dtype)
        for task in TASKS[options.device.type]
        for dtype in options.dtypes
        if dtype in LOSS_TOLERANCE
        and (task.name in QUICK or not options.quick)
        and _modes(task, dtype, options)
    ]
    rows = []
    with _surroundings(options.device):
        for task, dtype in progress(jobs, "net"):
            rows += _rows(task, dtype, options)
            if COMPILED in _modes(task, dtype, options):
                torch.compiler.reset()  # or what was compiled of one net would slow down the next
    return rows


@contextmanager
def _surroundings(device: torch.device) -> Iterator[None]:
    """A group, unless on the CPU alone; on CUDA a stream, as the default one captures no graph."""
    with ExitStack() as stack:
        if device.type == "cuda" or ranks() > 1:
            stack.enter_context(process_group(device))
        if device.type == "cuda":
            stack.enter_context(torch.cuda.stream(torch.cuda.Stream()))
        yield


def _modes(task: Task, dtype: torch.dtype, options: Options) -> list[str]:
    modes = [EAGER]
    if ranks() == 1:
        modes += [COMPILED] * (not options.quick or (task.name, dtype) in QUICK_COMPILED)
        modes += [GRAPH] * (options.device.type == "cuda")
    return [mode for mode in modes if options.match in f"{task} {name_of(dtype)} {mode}"]


def _rows(task: Task, dtype: torch.dtype, options: Options) -> list[dict]:
    """A row for each mode; all implementations in all modes take turns."""
    device, modes = options.device, _modes(task, dtype, options)
    about = {
        "question": "steps",
        "net": str(task),
        "dtype": name_of(dtype),
        "layout": "channels last" if channels_last(dtype) else "contiguous",
        "ranks": ranks(),
    }
    if task.make() is None:
        return [about | {"absent": {task.name: "neither torchvision nor timm is installed"}}]
    steps: dict[str, Step] = {}
    rows = []
    for mode in modes:
        made, row = _of_all(task, dtype, device, mode)
        steps |= {f"{mode} {name}": step for name, step in made.items()}
        rows.append(about | {"mode": mode} | row)
    times = interleave(steps, device, options.turns)
    for row in rows:
        mine = {name: times[key] for name in KINDS if (key := f"{row['mode']} {name}") in times}
        images = task.size[0] * ranks()
        row["times_us"] = {name: asdict(Spread.of(each)) for name, each in mine.items()}
        for what, size in (("steps_per_s", 1), ("images_per_s", images)):
            row[what] = {name: asdict(Spread.of(1e6 * size / mine[name])) for name in mine}
        row["ratios"] = ratios(mine, OURS)
        row["gains"] = {
            name: asdict(Spread.of(times[eager] / each))
            for name, each in mine.items()
            if row["mode"] != EAGER and (eager := f"{EAGER} {name}") in times
        }
    return rows


def _of_all(
    task: Task, dtype: torch.dtype, device: torch.device, mode: str
) -> tuple[dict[str, Step], dict[str, dict]]:
    """Prepares the step of each implementation; returns them and what is known of them."""
    steps: dict[str, Step] = {}
    row: dict[str, dict] = {"first_loss": {}, "saved_bytes": {}, "peak_bytes": {}, "absent": {}}
    kinds = dict(KINDS)
    if device.type == "cpu":
        del kinds[TORCH]  # DistributedDataParallel refuses it there, and alone it does nothing
    if mode == COMPILED:
        row |= compilation.compilation(task, kinds, dtype, device)
    for name, kind in kinds.items():
        model = model_of(task, kind, dtype, device)
        try:
            steps[name], costs = _prepared(task, model, dtype, device, mode)
        except Exception as error:
            if mode == EAGER:
                raise
            # A compiler that is not installed, say, must not lose what can be measured.
            row["absent"][name] = compilation.reason(error)
            continue
        for what, cost in costs.items():
            row[what][name] = cost
    if ranks() == 1:
        _check_loss(f"{task} {mode}", row["first_loss"], LOSS_TOLERANCE[dtype])
    return steps, {what: each for what, each in row.items() if each}


def _prepared(
    task: Task, model: nn.Module, dtype: torch.dtype, device: torch.device, mode: str
) -> tuple[Step, dict[str, float]]:
    """Makes the step of a model in a mode, warmed up; returns it with its loss and memory."""
    forward: Any = model
    if ranks() > 1:
        forward = DistributedDataParallel(model)
    elif mode == COMPILED:
        forward = compiled(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    forward_backward = gradients(task, forward, dtype, device, seed=rank())

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = forward_backward()
        optimizer.step()
        return loss

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


def _check_loss(what: str, losses: dict[str, float], tolerance: float) -> None:
    """Raises where ours computes another loss than nn.BatchNorm does of the same batch."""
    ours, plain = losses.get(OURS), losses.get(PLAIN)
    if ours is not None and plain is not None and not abs(ours / plain - 1) <= tolerance:
        raise RuntimeError(
            f"{what}: expected the loss of nn.BatchNorm, {plain:.6f}, within {tolerance:.0e} of "
            f"it; got {ours:.6f} of ours"
        )


def table(rows: list[dict]) -> str:
    """Formats the rows as a table of steps, and one of compilation."""
    lines = []
    for row in rows:
        texts = [row["net"], row["dtype"], row["layout"], row.get("mode", "")]
        for name, reason in row.get("absent", {}).items():
            lines.append([*texts, name, f"absent: {reason}", *[""] * 5])
        for name in row.get("times_us", {}):
            cells = [*texts, name]
            for what, key in (
                ("steps_per_s", name),
                ("images_per_s", name),
                ("ratios", f"{name} / {OURS}"),
                ("gains", name),
            ):
                cells.append(str(Spread(**row[what][key])) if key in row[what] else "")
            for what in ("saved_bytes", "peak_bytes"):
                size = row.get(what, {}).get(name)
                cells.append("" if size is None else f"{size / 2**20:,.1f}")
            lines.append(cells)
    header = ["net", "dtype", "layout", "mode", "", "steps/s", "images/s", "it / ours"]
    header += ["eager / it", "saved MiB", "peak MiB"]
    return (
        f"A training step on {rows[0]['ranks']} rank(s), of one batch of random images. Ratios are "
        "of times, turn by turn. Saved: what forward keeps for backward beside the model. Peak: of "
        "a step, beyond what was allocated before.\n\n"
        + as_table(header, lines, texts=5)
        + "\n\n"
        + compilation.table(rows)
    )
