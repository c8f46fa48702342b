"""How long does a layer take, beside what people use instead, and beside a copy of its bytes?

On the CPU: our module against nn.BatchNorm. (torch's SyncBatchNorm refuses the CPU, so ours is
compared with a layer that does not synchronise.) On CUDA: ours with its collectives over a group
of one rank against torch's SyncBatchNorm with its own, apex and inplace_abn where they are
installed, and against cuDNN, which does not synchronise; ours without a group too.

Forward reads its input twice and writes its output, backward reads two tensors twice and writes
one: a copy of 3 and 5 times the bytes of the input is the floor below which only caches lead.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import graphs
from benchmarks.bars import bars
from benchmarks.candidates import BOTH, FLOOR, PASSES, Candidate, candidates, copies
from benchmarks.counts import Counts, profiled
from benchmarks.groups import process_group, ranks
from benchmarks.harness import Spread, interleave, progress, ratio
from benchmarks.layers_table import headline, table
from benchmarks.options import Options, name_of
from benchmarks.shapes import Shape, shapes

#: What each of these is compared with: the time of the first over that of the second.
PAIRS = (
    ("torch", "ours"),
    ("torch synchronised", "ours synchronised"),
    ("apex", "ours synchronised"),
    ("inplace_abn", "ours synchronised"),
    ("cuDNN", "ours synchronised"),
    ("cuDNN", "ours"),
)

__all__ = ["bars", "measure", "plots", "table"]

Call = Callable[[], Any]
#: For each direction and candidate, one call for each of the buffers that take turns.
Calls = dict[str, dict[str, list[Call]]]
#: Microseconds of each turn, for each direction and candidate.
Times = dict[str, dict[str, np.ndarray]]


def measure(options: Options) -> list[dict]:
    """Measures every layer."""
    if ranks() > 1:
        raise SystemExit("layers: for one process; the question for several is: ranks")
    layers = shapes(options.device, options.quick, options.match)
    jobs = [(shape, dtype) for shape in layers for dtype in options.dtypes]
    began = time.monotonic()
    measure_layer = _on_cuda if options.device.type == "cuda" else _on_cpu
    rows: list[dict] = []
    with _surroundings(options.device):
        for done, (shape, dtype) in enumerate(progress(jobs)):
            if time.monotonic() - began > options.seconds:
                print(f"layers: stopped after {done} of {len(jobs)} as time is up", file=sys.stderr)
                break
            rows += measure_layer(shape, dtype, options)
    return rows


@contextmanager
def _surroundings(device: torch.device) -> Iterator[None]:
    """On CUDA a group of one rank, and one stream for all: graphs are not captured on the default.

    (With a stream for each layer, our kernels would run out of the counters that they keep.)
    """
    if device.type == "cpu":
        yield
        return
    with process_group(device), torch.cuda.stream(torch.cuda.Stream()):
        yield


def _on_cpu(shape: Shape, dtype: torch.dtype, options: Options) -> list[dict]:
    made, absent = candidates(shape, dtype, options.device, False)
    inputs, grads = _buffers(shape, dtype, options.device, 1)
    calls = _calls(made, inputs, grads, shape, dtype)
    x, dy = inputs[0], grads[0]
    calls[BOTH] = {name: [partial(_step, layer, x, dy)] for name, layer in made.items()}
    calls[BOTH][FLOOR] = [lambda: [calls[d][FLOOR][0]() for d in PASSES]]
    times = {
        direction: interleave({k: v[0] for k, v in each.items()}, options.device, options.turns)
        for direction, each in calls.items()
    }
    about = _about(shape, dtype)
    costs = {"errors": errors(made, x, dy), "absent": absent}
    return [*_rows(times, about | {"clock": "wall"}), about | {"measured": "cost"} | costs]


def _on_cuda(shape: Shape, dtype: torch.dtype, options: Options) -> list[dict]:
    device, turns = options.device, options.turns
    made, absent = candidates(shape, dtype, device, True)
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    large = 2 * shape.bytes(dtype) > cache  # no cache holds what it reads and writes
    inputs, grads = _buffers(shape, dtype, device, graphs.rotation(shape.bytes(dtype), cache))
    about = _about(shape, dtype)
    # Before all else, as it warms every candidate up.
    costs = {"errors": errors(made, inputs[0], grads[0]), "absent": absent}
    steps = {name: partial(_step, c, inputs[0], grads[0]) for name, c in made.items()}
    costs["peak_bytes"] = {name: graphs.peak_bytes(step, device) for name, step in steps.items()}
    calls = _calls(made, inputs, grads, shape, dtype)
    costs["counts"] = _counts(calls, device)
    rows = [about | {"measured": "cost"} | costs]
    for cache_state in ("cold", "warm"):
        for clock, timed in (("graph", graphs.time_graphs), ("events", graphs.time_eager)):
            if options.quick and cache_state == "warm" and (large or clock == "events"):
                continue
            times = {d: timed(c, device, turns, cache_state == "cold") for d, c in calls.items()}
            times[BOTH] = {name: sum(times[d][name] for d in PASSES) for name in calls["forward"]}
            rows += _rows(times, about | {"cache": cache_state, "clock": clock})
    return rows


def _buffers(
    shape: Shape, dtype: torch.dtype, device: torch.device, count: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Draws an input and a gradient of the output, and copies them as often as asked."""
    x, dy = shape.random(dtype, device), shape.random_gradient(dtype, device)
    inputs = [x, *(shape.laid_out(x) for _ in range(count - 1))]
    grads = [dy, *(shape.laid_out(dy) for _ in range(count - 1))]
    return [x.requires_grad_() for x in inputs], grads


def _calls(
    made: dict[str, Candidate],
    inputs: list[Tensor],
    grads: list[Tensor],
    shape: Shape,
    dtype: torch.dtype,
) -> Calls:
    def backward(layer: Candidate, x: Tensor, dy: Tensor) -> Call:
        wanted = (x, *layer.module.parameters())
        return partial(torch.autograd.grad, layer.run(x), wanted, dy, retain_graph=True)

    calls: Calls = {
        "forward": {name: [partial(c.run, x) for x in inputs] for name, c in made.items()},
        "backward": {
            name: [backward(c, x, dy) for x, dy in zip(inputs, grads, strict=True)]
            for name, c in made.items()
        },
    }
    for direction, each in calls.items():
        each[FLOOR] = [copies(shape, dtype, x.device, direction) for x in inputs]
    return calls


def _step(layer: Candidate, x: Tensor, dy: Tensor) -> Any:
    return torch.autograd.grad(layer.run(x), (x, *layer.module.parameters()), dy)


def errors(made: dict[str, Candidate], x: Tensor, dy: Tensor) -> dict[str, dict[str, float]]:
    """The largest error of y and dx against float64."""
    exact_x = x.detach().double().requires_grad_()
    exact = F.batch_norm(exact_x, None, None, training=True)
    (exact_dx,) = torch.autograd.grad(exact, exact_x, dy.double())
    exact_y = exact.detach()
    found = {}
    for name, layer in made.items():  # whose weight is 1 and whose bias is 0
        y = layer.run(x)
        (dx,) = torch.autograd.grad(y, x, dy)
        found[name] = {
            "y": (y.detach().double() - exact_y).abs().max().item(),
            "dx": (dx.double() - exact_dx).abs().max().item(),
        }
    return found


def _counts(calls: Calls, device: torch.device) -> dict[str, dict[str, dict[str, int]]]:
    first = {f"{d}: {name}": each[0] for d in PASSES for name, each in calls[d].items()}
    counts = profiled(first, device)
    if all(counts[f"{d}: {FLOOR}"] == Counts() for d in PASSES):
        return {}  # even a copy launches something: the profiler may not look at the device here
    return {name: {d: asdict(counts[f"{d}: {name}"]) for d in PASSES} for name in calls["forward"]}


def _about(shape: Shape, dtype: torch.dtype) -> dict:
    return {
        "question": "layers",
        "layer": str(shape),
        "dtype": name_of(dtype),
        "net": f"{shape.name} N={shape.size[0]}",
        "layout": "channels last" if shape.channels_last else "contiguous",
        "pass_bytes": shape.bytes(dtype),
    }


def _rows(times: Times, about: dict) -> list[dict]:
    """A row for each direction: times, and ratios that are taken turn by turn."""
    rows = []
    for direction, each in times.items():
        pairs = [pair for pair in PAIRS if each.keys() >= set(pair)]
        pairs += [(FLOOR, name) for name in each if name != FLOOR]
        rows.append(
            about
            | {
                "measured": "time",
                "direction": direction,
                "passes": PASSES.get(direction, sum(PASSES.values())),
                "times_us": {name: asdict(Spread.of(t)) for name, t in each.items()},
                "ratios": {f"{a} / {b}": asdict(ratio(each, b, a)) for a, b in pairs},
            }
        )
    return rows


def plots(rows: list[dict], folder: Path) -> list[Path]:
    """Draws time against bytes, and the ratio of each layer."""
    from benchmarks.plots import ratio_by_layer, time_against_bytes

    timed = headline(rows)
    return [time_against_bytes(timed, folder), ratio_by_layer(timed, folder)]
