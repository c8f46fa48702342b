"""Graphs and streams on a GPU: captured, replayed and side by side, results are eager's bits."""

from __future__ import annotations

import copy
import ctypes

import distributed
import gpu
import pytest
import torch
from gpu import capture, on_gpu, same  # noqa: F401
from inputs import LAYOUTS, random

from syncbn_cuda import FastSyncBatchNorm

pytestmark = gpu.MARKS

#: Large enough that the sums of a channel cross from block to block.
SHAPE = (4, 6, 130, 128)


class Training:
    """One training step on tensors that stay where they are, as a captured graph needs."""

    def __init__(self, shape=SHAPE, layout="contiguous", momentum=0.1, seed=0):
        torch.manual_seed(seed)
        self.layer = FastSyncBatchNorm(shape[1], momentum=momentum)
        self.x = LAYOUTS[layout](random(shape)).requires_grad_()
        self.dy = LAYOUTS[layout](random(shape))

    def __call__(self):
        """Returns output and gradients; the layer's buffers move."""
        y = self.layer(self.x)
        return y.detach(), *torch.autograd.grad(y, [self.x, *self.layer.parameters()], self.dy)

    def twin(self):
        """The same step on other memory."""
        twin = copy.copy(self)
        twin.layer = copy.deepcopy(self.layer)
        twin.x = self.x.detach().clone().requires_grad_()
        twin.dy = self.dy.clone()
        return twin

    def take(self, x, dy):
        with torch.no_grad():
            self.x.copy_(x)
            self.dy.copy_(dy)

    def buffers(self):
        return [buffer.clone() for buffer in self.layer.buffers()]


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("shape", [SHAPE, (2, 64, 64, 65), (3, 7, 5, 5)], ids=str)
def test_a_replayed_graph_computes_what_eager_does(shape, layout, momentum):
    training = Training(shape, layout, momentum)
    graph, outputs = capture(training, warm_ups=3)
    assert training.layer.num_batches_tracked == 3, "capturing alone moved the buffers"
    eager = training.twin()
    for _ in range(3):
        x, dy = random(shape, mean=2.0), random(shape)
        for each in (training, eager):
            each.take(x, dy)
        before = training.buffers()
        graph.replay()
        assert same(outputs, eager())
        after = training.buffers()
        assert same(after, eager.buffers())
        assert not any(map(torch.equal, before, after)), "a replay left a buffer as it was"


def first_call_rank(rank):
    """In a process of its own: neither kernels nor counters have been used before the capture."""
    training = Training()
    eager = training.twin()
    graph, outputs = capture(training, warm_ups=0)
    results = []
    for _ in range(2):
        graph.replay()
        results.append(same(outputs, eager()) and same(training.buffers(), eager.buffers()))
    return results


def test_the_first_call_of_a_process_may_be_captured():
    assert distributed.run(1, first_call_rank, setup=gpu.take_gpu) == [[True, True]]


def test_graphs_captured_on_one_stream_may_run_at_once():
    """They must not share the counters by which the blocks of a channel find the last."""
    trainings = [Training(seed=seed) for seed in range(2)]
    expected = [training.twin()() for training in trainings]
    stream = torch.cuda.Stream()
    captured = [capture(training, stream=stream) for training in trainings]
    sides = [torch.cuda.Stream() for _ in trainings]
    torch.cuda.synchronize()
    for _ in range(20):
        for (graph, _), side in zip(captured, sides, strict=True):
            with torch.cuda.stream(side):
                for _ in range(5):
                    graph.replay()
        torch.cuda.synchronize()
        for (_, outputs), right in zip(captured, expected, strict=True):
            assert same(outputs, right)


def run_side_by_side(streams, repeats):
    """Trains on all streams at once, on each with data of its own; returns whether it is right."""
    kinds = [Training(seed=seed) for seed in range(5)]
    expected = [training() for training in kinds]
    trainings = [kinds[i % 5].twin() for i in range(len(streams))]
    torch.cuda.synchronize()
    for _ in range(repeats):
        results = []
        for training, stream in zip(trainings, streams, strict=True):
            with torch.cuda.stream(stream):
                results.append(training())
        torch.cuda.synchronize()
        if not all(same(result, expected[i % 5]) for i, result in enumerate(results)):
            return False
    return True


def test_streams_side_by_side_give_the_same_bits():
    assert run_side_by_side([torch.cuda.Stream() for _ in range(16)], repeats=10)


def many_streams_rank(rank):
    """In a process of its own, as it leaves no counters for further streams."""
    cudart = torch.cuda.cudart()
    pointers = [ctypes.c_void_p() for _ in range(300)]
    for pointer in pointers:
        error = cudart.cudaStreamCreate(ctypes.addressof(pointer))
        assert error == cudart.cudaError.success
    device = torch.cuda.current_device()
    streams = [torch.cuda.ExternalStream(pointer.value, device) for pointer in pointers]
    return run_side_by_side(streams, repeats=2)


def test_more_streams_than_there_are_rows_of_counters():
    assert distributed.run(1, many_streams_rank, setup=gpu.take_gpu) == [True]


@pytest.fixture
def no_waiting():
    """Makes torch raise wherever the host waits for the GPU.

    All but collectives is covered. What may wait is a rank with at most one value a channel: it
    reads the count, as only then there may be a single one in the whole group.
    """

    def forbid():
        torch.cuda.set_sync_debug_mode("error")

    yield forbid
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_host_never_waits(no_waiting, layout):
    Training((3, 7, 5))()  # what is loaded and allocated once
    trainings = [Training(layout=layout, momentum=momentum) for momentum in (0.1, None)]
    expected = [training() for training in trainings]
    unused = Training((5, 9, 11, 3), layout)
    torch.cuda.synchronize()
    no_waiting()
    results = [training() for training in trainings]
    unused()
    torch.cuda.set_sync_debug_mode("default")
    assert all(map(same, results, expected))


def test_the_check_would_notice_a_wait(no_waiting):
    x = torch.ones(3)
    no_waiting()
    with pytest.raises(RuntimeError, match="synchronizing"):
        x.sum().item()
