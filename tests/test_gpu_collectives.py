"""What crosses ranks on GPUs, over Gloo and NCCL: the rest of test_distributed.py, NCCL alone."""

from __future__ import annotations

import distributed
import gpu
import pytest
import torch
import torch.distributed as dist
from gpu import capture, on_gpu, run, same  # noqa: F401
from inputs import random
from test_derivatives import (  # noqa: F401
    test_derivatives_of_three_orders_over_ranks,
    test_ranks_may_need_different_gradients,
    test_trainings_by_second_derivatives_are_those_of_one_process,
)
from test_distributed import (  # noqa: F401
    test_image_sizes_may_differ_between_ranks,
    test_one_value_a_channel_in_the_whole_group_raises_on_every_rank,
    test_when_every_rank_is_empty,
)

from syncbn_cuda import FastSyncBatchNorm, functional

pytestmark = gpu.MARKS


def synchronised(layer, x):
    """What the layer does in a larger group: in one of a single rank it skips the collective."""
    return functional.batch_norm(
        *(x, layer.running_mean, layer.running_var, layer.weight, layer.bias, True),
        *(layer.momentum, layer.eps, layer.num_batches_tracked, dist.group.WORLD, layer),
    )


def train(call, layer, batches):
    results = []
    for x, dy in batches:
        y = call(x)
        results += [y, *torch.autograd.grad(y, [x, *layer.parameters()], dy)]
    return [*results, *layer.buffers()]


def alone_rank(rank, waiting_raises):
    """One rank trains through the collective, then without: the same bits."""
    layers = [FastSyncBatchNorm(6) for _ in range(2)]
    shape = (4, 6, 130, 128)
    batches = [(random(shape).requires_grad_(), random(shape)) for _ in range(3)]
    warm, (x, _) = FastSyncBatchNorm(6), batches[0]
    synchronised(warm, x).sum().backward()  # connects, loads, allocates
    torch.cuda.synchronize()
    if waiting_raises:
        torch.cuda.set_sync_debug_mode("error")
    results = train(lambda x: synchronised(layers[0], x), layers[0], batches)
    torch.cuda.set_sync_debug_mode("default")
    return same(results, train(layers[1], layers[1], batches))


@pytest.mark.parametrize("waiting_raises", [False, True])
def test_one_rank_over_nccl(waiting_raises):
    options = {"backend": "nccl", "setup": gpu.take_gpu}
    assert distributed.run(1, alone_rank, waiting_raises, **options) == [True]


def test_one_rank_over_gloo():
    """Gloo takes the message through the CPU, so the host does wait."""
    assert distributed.run(1, alone_rank, False, setup=gpu.take_gpu) == [True]


def captured_rank(rank):
    """A step with its collectives in a graph, replayed on new data."""
    layers = [FastSyncBatchNorm(6) for _ in range(2)]
    x, dy = random((4, 6, 130, 128)).requires_grad_(), random((4, 6, 130, 128))

    def step(layer):
        y = synchronised(layer, x)
        return y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], dy)

    graph, outputs = capture(lambda: step(layers[0]))
    layers[1].load_state_dict(layers[0].state_dict())
    answers = []
    for _ in range(2):
        with torch.no_grad():
            x.copy_(random(x.shape))
        graph.replay()
        answers.append(same(outputs, step(layers[1])))
        answers.append(same(layers[0].buffers(), layers[1].buffers()))
    return answers


def test_a_graph_over_nccl():
    answers = distributed.run(1, captured_rank, backend="nccl", setup=gpu.take_gpu)
    assert answers == [[True] * 4]
