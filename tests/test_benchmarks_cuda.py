"""The part of the benchmarks that is for a GPU, on stand-ins: what it counts, rotates, reports."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from benchmarked import CPU
from torch.autograd import DeviceType

from benchmarks import bars, counts, graphs, groups, harness, layers
from benchmarks.candidates import BOTH
from benchmarks.counts import Counts
from benchmarks.layers_table import headline, table
from benchmarks.options import Options
from benchmarks.shapes import Shape
from benchmarks.synchronised import lend_cpu_kernels


def event(name, start, end, device=False, annotation=False):
    return SimpleNamespace(
        name=name,
        time_range=SimpleNamespace(start=start, end=end),
        device_type=DeviceType.CUDA if device else DeviceType.CPU,
        is_user_annotation=annotation,
    )


def test_events_are_counted_for_the_call_that_made_them():
    events = [
        event("a", 10_000, 10_300),
        event("aten::add", 10_005, 10_010),
        event("cudaLaunchKernel", 10_006, 10_007),
        event("a", 10_002, 10_500, device=True, annotation=True),
        event("void stats_kernel<float>(float*)", 9_999, 10_400, device=True),  # the clocks differ
        event("Memcpy DtoD (Device -> Device)", 10_410, 10_420, device=True),
        event("Memcpy DtoH (Device -> Pinned)", 10_430, 10_440, device=True),
        event("Memset (Device)", 10_450, 10_460, device=True),
        event("cudaStreamSynchronize", 10_200, 10_250),
        event("cudaMemcpyAsync", 10_190, 10_195),
        event("cudaDeviceSynchronize", 10_310, 10_500),  # the profiler's own, after the call
        event("b", 13_000, 13_100),
        event("void elemt_kernel<float>(float*)", 13_200, 13_300, device=True),
        event("void elemt_kernel<float>(float*)", 13_300, 13_400, device=True),
        event("cudaDeviceSynchronize", 13_110, 13_500),
    ]
    assert counts.count(events, ["b", "a"]) == {
        "a": Counts(kernels=1, memcpys=2, device_to_host=1, memsets=1, syncs=1),
        "b": Counts(kernels=2),
    }


def test_the_profiler_of_this_torch_is_understood():
    x = torch.ones(3)
    calls = {"forward: a": lambda: x + 1, "backward: a": lambda: x.sum()}
    assert counts.profiled(calls, CPU) == dict.fromkeys(calls, Counts())


def test_buffers_outgrow_the_cache_twice():
    assert graphs.rotation(10, cache_bytes=50) == 11
    assert graphs.rotation(1000, cache_bytes=50) == 2
    assert graphs.rotation(1, cache_bytes=10**6) == graphs.MOST_BUFFERS


class Graph:
    def __init__(self):
        self.replays = 0

    def replay(self):
        self.replays += 1
        time.sleep(1e-5)


class Event:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, end):
        return 1e3 * (end.at - self.at)


class Stream:
    def wait_stream(self, other):
        assert isinstance(other, Stream)


@pytest.fixture
def pretended(monkeypatch):
    """Stands in for the CUDA of torch, and nn.BatchNorm for its SyncBatchNorm."""
    seen = SimpleNamespace(graphs=[], sleeps=0)

    @contextmanager
    def capture(graph, stream, capture_error_mode):
        assert isinstance(stream, Stream) and capture_error_mode == "thread_local"
        seen.graphs.append(graph)
        yield

    def sleep(cycles):
        seen.sleeps += 1

    memory = iter([1000, 5000] * 1000)
    for name, stand_in in {
        "CUDAGraph": Graph,
        "Event": Event,
        "Stream": Stream,
        "graph": capture,
        "_sleep": sleep,
        "current_stream": Stream,
        "stream": lambda stream: nullcontext(),
        "synchronize": lambda device=None: None,
        "reset_peak_memory_stats": lambda device: None,
        "memory_allocated": lambda device: next(memory),
        "max_memory_allocated": lambda device: next(memory),
        "get_device_properties": lambda device: SimpleNamespace(L2_cache_size=4096),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    on_device = harness._interleave_cuda
    monkeypatch.setattr(
        harness,
        "_interleave_cpu",
        lambda calls, turns, clock: on_device(calls, CPU, turns, lambda call: call()),
    )

    lend_cpu_kernels()  # to torch's own
    return seen


def test_graphs_hold_a_call_for_each_buffer_or_repeat_one(pretended):
    made = {"a": [], "b": []}
    calls = {
        name: [lambda i=i, log=log: log.append(i) for i in range(3)] for name, log in made.items()
    }
    cold = graphs.time_graphs(calls, CPU, turns=5, cold=True)
    assert made == {"a": [0, 1, 2], "b": [0, 1, 2]}  # captured once
    warm = graphs.time_graphs(calls, CPU, turns=5, cold=False)
    assert made["a"][3:] == [0, 0, 0]
    assert [graph.replays for graph in pretended.graphs] == 4 * [1 + 2 * 5]
    for times in (cold, warm):
        assert times.keys() == {"a", "b"}
        assert all(len(each) == 5 and (each >= 10 / 3).all() for each in times.values())


def test_eager_calls_take_turns_with_the_buffers(pretended):
    made = []
    calls = {"a": [lambda i=i: made.append(i) for i in range(3)]}
    graphs.time_eager(calls, CPU, turns=4, cold=True)
    # One to warm up, and in each turn one before and the one that is timed.
    assert made == [i % 3 for i in range(9)]


def test_layers_on_a_gpu(pretended, monkeypatch):
    monkeypatch.setitem(sys.modules, "apex", None)
    monkeypatch.setitem(sys.modules, "inplace_abn", SimpleNamespace(InPlaceABNSync=None))
    launched = Counts(kernels=2)
    monkeypatch.setattr(layers, "profiled", lambda calls, _: dict.fromkeys(calls, launched))
    options = Options(CPU, turns=3)
    shape = Shape("odd", (2, 3, 5, 7), channels_last=True)
    with groups.process_group(CPU):
        rows = layers._on_cuda(shape, torch.float32, options)
        assert dist.get_world_size() == 1
    cost, *timed = rows
    settings = [(row["cache"], row["clock"], row["direction"]) for row in timed]
    assert settings == [
        (cache, clock, direction)
        for cache in ("cold", "warm")
        for clock in ("graph", "events")
        for direction in ("forward", "backward", BOTH)
    ]
    for row in timed:
        names = {"ours", "ours synchronised", "torch", "torch synchronised", "copy"}
        assert row["times_us"].keys() == names
        assert "torch synchronised / ours synchronised" in row["ratios"]
        assert "copy / ours synchronised" in row["ratios"]
    assert [row["direction"] for row in headline(rows)] == ["forward", "backward", BOTH]
    assert cost["absent"]["apex"] == "not installed"
    assert cost["absent"]["inplace_abn"].startswith("TypeError: ")
    assert cost["peak_bytes"]["ours"] == 4000
    assert cost["errors"]["ours synchronised"]["dx"] < 1e-5
    text = table(rows)
    for part in (
        "### Layers: graph cold",
        "### Layers: events warm",
        "| ours | forward | 2 | 0 | 0 | 0 | 0 | 1 |",
        f"| ours synchronised | {4000 / shape.bytes(torch.float32):.2f} |",
        "Not measured: apex: not installed; inplace_abn: TypeError",
    ):
        assert part in text


def test_a_profiler_that_sees_no_device_counts_nothing(monkeypatch):
    calls = {d: {name: [None] for name in ("ours", "copy")} for d in ("forward", "backward")}
    monkeypatch.setattr(layers, "profiled", lambda calls, _: dict.fromkeys(calls, Counts()))
    assert layers._counts(calls, CPU) == {}


def test_quick_leaves_out_what_no_cache_holds(pretended):
    options = Options(CPU, turns=3, quick=True)
    with groups.process_group(CPU):
        for side, settings in (
            (3, {"graph cold", "events cold", "graph warm"}),
            (30, {"graph cold", "events cold"}),
        ):
            rows = layers._on_cuda(Shape("odd", (2, 3, side, side)), torch.float32, options)
            assert {f"{r['clock']} {r['cache']}" for r in rows if "clock" in r} == settings


def row(layer, net, dtype, direction, megabytes, layout="contiguous", **times):
    passes = {"forward": 3, "backward": 5, BOTH: 8}[direction]
    spreads = {name.replace("_", " "): harness.Spread(t, t, t) for name, t in times.items()}
    about = {"layer": layer, "net": net, "dtype": dtype, "direction": direction, "layout": layout}
    about |= {"measured": "time", "clock": "graph", "cache": "cold", "passes": passes}
    ratios = {
        f"{a} / {b}": vars(harness.Spread(*3 * [spreads[a].p50 / spreads[b].p50]))
        for a in spreads
        for b in spreads
    }
    return about | {
        "pass_bytes": int(1e6 * megabytes),
        "times_us": {name: vars(spread) for name, spread in spreads.items()},
        "ratios": ratios,
    }


def test_bars_are_read_off_the_rows():
    layer = {"ours_synchronised": 100.0, "torch_synchronised": 400.0, "copy": 90.0, "cuDNN": 110.0}
    slow = {"ours_synchronised": 8.0, "torch_synchronised": 8.0, "copy": 3.0, "cuDNN": 4.0}
    rows = [
        # 1 MB a microsecond is the rate of the largest copy.
        row("x", "unet N=2", "float32", "forward", 200, ours_synchronised=750.0, copy=600.0),
        row("y", "odd", "float32", "forward", 2, ours_synchronised=12.0, copy=1.0),
        row("z", "odd", "float32", "forward", 10, ours_synchronised=20.0, copy=9.0),
        row("z", "odd", "float32", "backward", 10, ours_synchronised=40.0, copy=50.0),
        row("r", "resnet50 N=32", "bfloat16", BOTH, 5, **layer),
        row("r", "resnet50 N=32", "bfloat16", BOTH, 5, layout="channels last", **slow),
        row("2x64x512x512", "unet N=2", "float32", BOTH, 5, **layer),
        {"measured": "cost", "counts": {bars.OURS: {
            "forward": dict(kernels=2, memcpys=1, memsets=0, device_to_host=0, syncs=0),
            "backward": dict(kernels=2, memcpys=0, memsets=0, device_to_host=0, syncs=1)}}},
    ]  # fmt: skip
    measured = [value for _, _, value in bars.bars(rows)]
    assert measured == [
        "3 / 2; 1; 0",
        "0.80 (x, float32)",
        "0.50",
        "4.00 [4.00, 4.00]",
        "4.00 [4.00, 4.00]; -; -",
        "1.00 [1.00, 1.00]; 1.00 (r, bfloat16)",
        "1.50; 1.25",
        f"{(2 / 1.1**2) ** (1 / 3):.2f} " + "[1.18, 1.18]; 2.00",
        "",
    ]


def test_a_bar_that_nothing_was_measured_for_is_blank():
    assert {value for _, _, value in bars.bars([])} == {""}
