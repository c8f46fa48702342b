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
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.graphs import captured, peak_bytes
from benchmarks.groups import process_group, rank, ranks
from benchmarks.harness import Spread, interleave, progress, ratio
from benchmarks.models import Task, UNet, memory_format, resnet50
from benchmarks.options import Options, name_of
from benchmarks.report import as_table
from benchmarks.synchronised import KINDS, OURS, PLAIN, TORCH, convert

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
QUICK = ("resnet50", "unet")

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
        if dtype in LOSS_TOLERANCE
        and (task.name in QUICK or not options.quick)
        and _modes(task, dtype, options)
    ]
    rows = []
    with _surroundings(options.device):
        for task, dtype in progress(jobs, "net"):
            rows += _rows(task, dtype, options)
            if not options.quick:
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
        modes += [COMPILED] * (not options.quick) + [GRAPH] * (options.device.type == "cuda")
    return [mode for mode in modes if options.match in f"{task} {name_of(dtype)} {mode}"]


def _rows(task: Task, dtype: torch.dtype, options: Options) -> list[dict]:
    """A row for each mode; all implementations in all modes take turns."""
    device, modes = options.device, _modes(task, dtype, options)
    about = {
        "question": "steps",
        "net": str(task),
        "dtype": name_of(dtype),
        "layout": "channels last" if _channels_last(dtype) else "contiguous",
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
        images = {name: 1e6 * task.size[0] * ranks() / each for name, each in mine.items()}
        row["times_us"] = {name: asdict(Spread.of(each)) for name, each in mine.items()}
        row["images_per_s"] = {name: asdict(Spread.of(each)) for name, each in images.items()}
        row["ratios"] = {
            f"{name} / {OURS}": asdict(ratio(mine, OURS, name))
            for name in mine
            if name != OURS and OURS in mine
        }
    return rows


def _of_all(
    task: Task, dtype: torch.dtype, device: torch.device, mode: str
) -> tuple[dict[str, Step], dict[str, dict]]:
    """Prepares the step of each implementation; returns them and what is known of them."""
    steps: dict[str, Step] = {}
    row: dict[str, dict] = {"first_loss": {}, "saved_bytes": {}, "peak_bytes": {}, "absent": {}}
    for name, kind in KINDS.items():
        if name == TORCH and device.type == "cpu":
            continue  # DistributedDataParallel refuses it there, and alone it has nothing to do
        model = _model(task, kind, dtype, device)
        try:
            steps[name], costs = _prepared(task, model, dtype, device, mode)
        except Exception as error:
            if mode == EAGER:
                raise
            # A compiler that is not installed, say, must not lose what can be measured.
            row["absent"][name] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        for what, cost in costs.items():
            row[what][name] = cost
    if ranks() == 1:
        _check_loss(f"{task} {mode}", row["first_loss"], LOSS_TOLERANCE[dtype])
    return steps, {what: each for what, each in row.items() if each}


def _channels_last(dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16


def _model(
    task: Task, kind: type[nn.Module] | None, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    torch.manual_seed(0)
    model = task.make()
    assert model is not None
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
        forward = torch.compile(with_code_of_its_own(model))
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


def with_code_of_its_own(model: nn.Module) -> nn.Module:
    """Gives a model a copy of its forward.

    The compiler keeps what it made, and what it gave up, with the code of a function: where it
    gives up one implementation (nn.SyncBatchNorm does what it cannot follow), it would run those
    that share the code uncompiled as well.
    """
    kind = type(model)
    forward = kind.forward
    code = forward.__code__.replace(co_name=f"forward_{id(model)}")
    copy = types.FunctionType(
        code, forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__
    )
    model.__class__ = type(kind.__name__, (kind,), {"forward": copy})
    return model


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
    """Formats the rows as one table."""
    lines = []
    for row in rows:
        texts = [row["net"], row["dtype"], row["layout"], row.get("mode", "")]
        for name, reason in row.get("absent", {}).items():
            lines.append([*texts, name, f"absent: {reason}", *[""] * 4])
        for name in row.get("times_us", {}):
            cells = [*texts, name]
            for what, key in (
                ("images_per_s", name),
                ("times_us", name),
                ("ratios", f"{name} / {OURS}"),
            ):
                cells.append(str(Spread(**row[what][key])) if key in row[what] else "")
            for what in ("saved_bytes", "peak_bytes"):
                size = row.get(what, {}).get(name)
                cells.append("" if size is None else f"{size / 2**20:,.1f}")
            lines.append(cells)
    header = ["net", "dtype", "layout", "mode", "", "images/s", "step us", "it / ours"]
    header += ["saved MiB", "peak MiB"]
    return (
        f"A training step on {rows[0]['ranks']} rank(s), of one batch of random images. Saved: "
        "what forward keeps for backward beside the model. Peak: of a step, beyond what was "
        "allocated before.\n\n" + as_table(header, lines, texts=5)
    )
