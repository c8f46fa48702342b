"""What the CUDA operators ask of streams and memory, seen by the emulator's runtime."""

from __future__ import annotations

import itertools

import pytest
import torch
from emulator import operators
from emulator.build import load
from inputs import random, unit_message

pytestmark = pytest.mark.usefixtures("uninitialized_is_nan")

EPS = 1e-5
ROWS = 256  # streams that have counters of their own
SEVERAL = (2, 1, 128, 128)  # a shape whose one channel takes several blocks
streams = itertools.count(1)


@pytest.fixture
def runtime():
    runtime = load()
    runtime.set_stream(next(streams))
    runtime.events()
    yield runtime
    runtime.set_stream(0)


@pytest.fixture
def kernels():
    return operators.kernels()


@pytest.fixture(params=["several blocks", "two levels", "one block"])
def batch(request):
    """x, dy and a message, such that the blocks of a channel meet as the name says."""
    shape = {
        "several blocks": SEVERAL,
        "two levels": (1, 128, 50, 50),
        "one block": (4, 9, 5),
    }[request.param]
    x, dy = random(shape), random(shape)
    if request.param == "two levels":
        x, dy = (t.to(memory_format=torch.channels_last) for t in (x, dy))
    return x, dy, unit_message(shape[1])


def reductions(kernels, x, dy, stats):
    """The steps in which blocks meet."""
    return [
        kernels.batch_norm_stats(x),
        *kernels.batch_norm_backward_reduce(dy, x, stats, EPS, False, False),
    ]


def all_equal(one, other):
    return all(map(torch.equal, one, other))


def test_each_step_is_one_launch(runtime, kernels, batch):
    x, dy, stats = batch
    reductions(kernels, *batch)  # the first on this stream
    buffers = [torch.zeros(x.shape[1]), torch.ones(x.shape[1]), torch.tensor(0)]
    sums = torch.zeros(2 * x.shape[1], dtype=torch.float64)
    for step, arguments in (
        ("stats", (x,)),
        ("elemt", (x, stats, None, None, EPS)),
        ("elemt_running", (x, stats, None, None, EPS, *buffers, 0.1)),
        ("backward_reduce", (dy, x, stats, EPS, False, False)),
        ("backward_elemt", (dy, x, stats, sums, None, EPS)),
    ):
        runtime.events()
        getattr(kernels, f"batch_norm_{step}")(*arguments)
        assert runtime.events() == ["launch"], step


def test_an_empty_rank_launches_no_kernel_but_that_of_the_buffers(runtime, kernels):
    x = torch.empty(0, 3, 5)
    stats = kernels.batch_norm_stats(x)
    assert runtime.events() == ["zero"]
    kernels.batch_norm_elemt(x, stats, None, None, EPS)
    assert runtime.events() == []
    buffers = [torch.zeros(3), torch.ones(3), torch.tensor(0)]
    kernels.batch_norm_elemt_running(x, stats, None, None, EPS, *buffers, 0.1)
    assert runtime.events() == ["launch"]
    kernels.batch_norm_backward_reduce(x, x, stats, EPS, False, False)
    assert runtime.events() == ["zero"] * 3  # the sums, and the gradients of weight and bias
    kernels.batch_norm_backward_elemt(x, x, stats, stats[:6], None, EPS)
    assert runtime.events() == []


def test_each_stream_has_counters_that_are_set_to_zero_once(runtime, kernels):
    x = random(SEVERAL)
    expected = kernels.batch_norm_stats(x)
    assert runtime.events() == ["allocate for good", "zero", "launch"]
    for events in (["launch"], ["allocate for good", "zero", "launch"], ["launch"]):
        if len(events) > 1:
            runtime.set_stream(next(streams))
        assert torch.equal(kernels.batch_norm_stats(x), expected)
        assert runtime.events() == events


def test_the_first_call_may_be_captured(runtime, kernels, batch):
    runtime.begin_capture()
    captured = reductions(kernels, *batch)
    graph = runtime.end_capture()
    assert "allocate for good" not in runtime.events()
    assert all(value.isnan().all() for value in captured)
    expected = reductions(kernels, *batch)
    for _ in range(2):
        for value in captured:
            value.fill_(torch.nan)
        runtime.replay([graph])
        assert all_equal(captured, expected)


def test_a_replay_reads_what_is_in_its_input_by_then(runtime, kernels, batch):
    x, dy, stats = (tensor.clone() for tensor in batch)
    runtime.begin_capture()
    captured = reductions(kernels, x, dy, stats)
    graph = runtime.end_capture()
    for scale in (2.0, 0.5):
        x.copy_(batch[0] * scale)
        runtime.replay([graph])
        assert all_equal(captured, reductions(kernels, x, dy, stats))


@pytest.mark.parametrize("used_before", [True, False])
def test_graphs_captured_on_one_stream_may_be_replayed_at_once(
    runtime, kernels, batch, used_before
):
    batches = [batch, [tensor + 1 for tensor in batch]]
    if used_before:
        reductions(kernels, *batch)
    graphs, captured = [], []
    for each in batches:
        runtime.begin_capture()
        captured.append(reductions(kernels, *each))
        graphs.append(runtime.end_capture())
    expected = [reductions(kernels, *each) for each in batches]
    for _ in range(20):
        runtime.replay(graphs)
        assert all(map(all_equal, captured, expected))


def test_more_streams_than_rows_of_counters(runtime, kernels):
    x = random(SEVERAL)
    expected = kernels.batch_norm_stats(x)
    for _ in range(ROWS + 1):
        runtime.set_stream(next(streams))
        assert torch.equal(kernels.batch_norm_stats(x), expected)
    runtime.events()
    kernels.batch_norm_stats(x)
    assert runtime.events() == ["zero", "launch"]
