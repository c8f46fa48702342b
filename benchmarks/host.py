"""What does a layer cost the host in eager mode? Forward and backward of a chain of layers.

On the CPU: modules, checks included, over tensors of a few values and a process group that sends
nothing (the "fake" one of torch, of two ranks), on one thread. torch's own SyncBatchNorm runs on
ATen operators of the CPU in the place of its kernels (torch_on_cpu.py). Nothing is launched on a
device, so that what launches and waits take, and torch has many times as many, is not in here.

On CUDA: both synchronised, over a group of one rank, with all their launches and waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.groups import process_group
from benchmarks.harness import Spread, interleave, ratio
from benchmarks.options import Options
from benchmarks.report import as_table
from benchmarks.shapes import Shape
from benchmarks.synchronised import OursSynchronised, TorchSynchronised
from benchmarks.torch_on_cpu import torch_on_cpu
from syncbn_cuda import FastSyncBatchNorm

LAYERS = 20
#: Steps of one turn.
STEPS = 4
SHAPE = Shape("few values", (2, 64, 2, 2))

OURS, TORCH, PLAIN = "ours", "torch SyncBatchNorm", "torch BatchNorm (not synchronised)"
MODULES = {OURS: FastSyncBatchNorm, TORCH: nn.SyncBatchNorm, PLAIN: nn.BatchNorm2d}
#: Which also synchronise one rank alone.
SYNCHRONISED = {OURS: OursSynchronised, TORCH: TorchSynchronised}


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def fake_group(ranks: int = 2) -> Iterator[None]:
    """A process group whose collectives return at once, all but its sums left undone."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _steps(kind: type[nn.Module], device: torch.device) -> Callable[[], None]:
    """Returns some steps of training: all layers one after the other, and their gradients."""
    layers = nn.Sequential(*[kind(SHAPE.channels, device=device) for _ in range(LAYERS)])
    input = SHAPE.random(torch.float32, device).requires_grad_()
    grad_out = SHAPE.random_gradient(torch.float32, device)
    leaves = [input, *layers.parameters()]

    def steps() -> None:
        for _ in range(STEPS):
            torch.autograd.grad(layers(input), leaves, grad_out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # or the next one's waits would be for this one's work

    return steps


def measure(options: Options) -> list[dict]:
    """Times the chains in turn; returns one row."""
    cpu = options.device.type == "cpu"
    group = fake_group() if cpu else process_group(options.device)
    with group, torch_on_cpu(cpu), one_thread():
        kinds = MODULES if cpu else SYNCHRONISED
        steps = {name: _steps(kind, options.device) for name, kind in kinds.items()}
        # Of this thread alone, where it waits for nothing: others may have the processor meanwhile.
        clock = time.thread_time if cpu else time.perf_counter
        times = interleave(steps, torch.device("cpu"), options.turns, clock=clock)
        operators = {name: operators_of(step) for name, step in steps.items()}
    layers = LAYERS * STEPS
    return [{
        "question": "host",
        "chain": f"{LAYERS} layers, {SHAPE}, float32",
        "operators": {name: round(count / layers, 1) for name, count in operators.items()},
        "times_us": {name: asdict(Spread.of(each / layers)) for name, each in times.items()},
        "ratios": {f"{name} / {OURS}": asdict(ratio(times, OURS, name))
                   for name in times if name != OURS},
    }]  # fmt: skip


def operators_of(call: Callable[[], Any]) -> int:
    """Counts the operators that a call calls, but not those that these call in turn."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        call()

    def is_operator(event: Any) -> bool:
        return event is not None and "::" in event.name and "autograd::" not in event.name

    return sum(is_operator(e) and not is_operator(e.cpu_parent) for e in recorded.events())


def table(rows: list[dict]) -> str:
    """Formats the rows of a run."""
    lines = []
    for row in rows:
        for name, spread in row["times_us"].items():
            multiple = row["ratios"].get(f"{name} / {OURS}")
            lines.append([
                row["chain"], name, f"{row['operators'][name]:g}", str(Spread(**spread)),
                str(Spread(**multiple)) if multiple else "",
            ])  # fmt: skip
    header = [
        "chain",
        "layer",
        "operators a layer",
        "host time a layer",
        f"as a multiple of {OURS}",
    ]
    return as_table(header, lines, texts=2)


def bars(rows: list[dict]) -> list[tuple[str, str, str]]:
    """Returns the demand on the host time, its figure, and what was measured."""
    measured = [Spread(**row["ratios"][f"{TORCH} / {OURS}"]) for row in rows]
    return [
        ("eager host time a layer, torch's calls / ours", ">= 3", "; ".join(map(str, measured)))
    ]
