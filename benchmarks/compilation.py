"""What does torch.compile take over a net, and what does it make of it?

Cold: the first forward and backward, compilation included, with nothing compiled before: neither in
memory (torch.compiler.reset) nor on disk (an empty cache folder each time). Only the compiler is
loaded before, by a function of one line. The implementations take turns, each with a new net.

Again: how often it compiles once more when batches of other sizes come. That is for the graph that
it records and its gradient to say, so here the kernels are not generated (backend aot_eager).
"""

from __future__ import annotations

import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from benchmarks.harness import Spread, ratios
from benchmarks.models import Task
from benchmarks.report import as_table
from benchmarks.synchronised import OURS
from benchmarks.training import compiled, gradients, model_of

#: How often each implementation is compiled cold.
COMPILES = 3

#: Batches that come one after another. The first says nothing of the second: the compiler takes a
#: size for fixed until it has seen another one. From then on it should leave it open.
BATCHES = (2, 3, 4, 5)


def compilation(
    task: Task,
    kinds: dict[str, type[nn.Module] | None],
    dtype: torch.dtype,
    device: torch.device,
    turns: int = COMPILES,
) -> dict[str, dict[str, Any]]:
    """Compiles the net of each kind; leaves nothing compiled behind.

    Returns:
        By kind: seconds of the first step, how many times as long they are as ours, graphs, breaks
        between them, and how often it compiled again; what is absent, with the reason.
    """
    load_compiler(device)
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    found: dict[str, dict[str, Any]] = {"graphs": {}, "breaks": {}, "again": {}, "absent": {}}
    for turn in range(turns):
        for name, kind in list(kinds.items())[:: -1 if turn % 2 else 1]:
            if name in found["absent"]:
                continue
            model = model_of(task, kind, dtype, device)
            try:
                seconds[name].append(_seconds_cold(task, model, dtype, device))
                found["graphs"][name], found["breaks"][name] = _graphs(), _breaks()
                if turn == 0:
                    found["again"][name] = _again(task, model, dtype, device)
            except Exception as error:
                found["absent"][name] = reason(error)
    torch.compiler.reset()
    for name in found["absent"]:
        del seconds[name]
    times = {name: np.array(each) for name, each in seconds.items()}
    found["first_step_s"] = {name: asdict(Spread.of(each)) for name, each in times.items()}
    found["first_step_ratios"] = ratios(times, OURS)
    return found


def reason(error: Exception) -> str:
    """Why something is absent, in a line."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def load_compiler(device: torch.device) -> None:
    """Compiles one line, so that what is loaded and started once counts for no net."""
    with suppress(Exception):  # which each net will raise again
        twice = torch.compile(lambda input: (2 * input).sum())
        twice(torch.ones(4, device=device, requires_grad=True)).backward()


def _seconds_cold(task: Task, model: nn.Module, dtype: torch.dtype, device: torch.device) -> float:
    """Compiles with nothing to go by and runs one step; the counts are of that."""
    torch.compiler.reset()
    counters.clear()
    # A folder around it, as it would leave its own where compiling fails.
    with tempfile.TemporaryDirectory() as folder, fresh_cache(dir=folder):
        first = gradients(task, compiled(model), dtype, device)
        began = time.perf_counter()
        float(first())  # waits for the device
        return time.perf_counter() - began


def _again(task: Task, model: nn.Module, dtype: torch.dtype, device: torch.device) -> int:
    """How many graphs more batches of other sizes took than the first one."""
    torch.compiler.reset()
    counters.clear()
    forward = compiled(model, backend="aot_eager")
    graphs = []
    for batch in BATCHES:
        sized = replace(task, size=(batch, *task.size[1:]))
        gradients(sized, forward, dtype, device)()
        graphs.append(_graphs())
    return graphs[-1] - graphs[0]


def _graphs() -> int:
    return counters["stats"]["unique_graphs"]


def _breaks() -> int:
    return sum(counters["graph_break"].values())


def bars(rows: list[dict]) -> list[tuple[str, str, str]]:
    """What is demanded of compiled nets with our layers; nothing where none was compiled."""
    counts = [
        tuple(row[what][OURS] for what in ("graphs", "breaks", "again"))
        for row in rows
        if OURS in row.get("again", {})
    ]
    if not counts:
        return []
    what = "compiled with ours: graphs; breaks between them; graphs more for other batches"
    worst = "; ".join(str(max(each)) for each in zip(*counts, strict=True))
    return [(what, "1; 0; <= 1", worst)]


def table(rows: list[dict]) -> str:
    """Formats what is known of compilation as one table; empty where nothing is."""
    lines = []
    for row in rows:
        for name, seconds in row.get("first_step_s", {}).items():
            over_ours = row.get("first_step_ratios", {}).get(f"{name} / {OURS}")
            lines.append(
                [row["net"], row["dtype"], row["layout"], name, str(Spread(**seconds))]
                + [str(Spread(**over_ours)) if over_ours else ""]
                + [str(row[what][name]) for what in ("graphs", "breaks", "again")]
            )
    if not lines:
        return ""
    header = ["net", "dtype", "layout", "", "first step s", "it / ours", "graphs", "breaks"]
    return (
        "The first forward and backward under torch.compile, compilation included, with empty "
        f"caches. Again: graphs more for batches of {', '.join(map(str, BATCHES))} in turn than "
        "for the first of them.\n\n" + as_table([*header, "again"], lines, texts=4)
    )
