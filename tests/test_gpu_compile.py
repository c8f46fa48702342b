"""torch.compile on a GPU: the tests of test_compile.py, and the graphs that it captures itself."""

from __future__ import annotations

import copy

import gpu
import pytest
import torch
from gpu import on_gpu  # noqa: F401
from inputs import random
from test_compile import (  # noqa: F401
    test_a_block_of_layers,
    test_sizes_may_change_without_compiling_each,
)
from training import train_once

from syncbn_cuda import FastSyncBatchNorm

pytestmark = gpu.MARKS


def by_graphs_of_the_compiler(net, x):
    torch.compiler.reset()
    return torch.compile(net, mode="reduce-overhead", fullgraph=True)


def graphed(net, x):
    return torch.cuda.make_graphed_callables(net, (x.clone().requires_grad_(),))


@pytest.mark.parametrize("capture", [by_graphs_of_the_compiler, graphed])
def test_what_torch_captures_trains_as_eager_does(capture):
    eager = torch.nn.Sequential(FastSyncBatchNorm(6), FastSyncBatchNorm(6, momentum=None))
    before = copy.deepcopy(eager.state_dict())
    net = copy.deepcopy(eager)
    captured = capture(net, random((4, 6, 66, 64)))
    net.load_state_dict(before)  # warming up moves the buffers
    for mean in (0.0, 2.0, -1.0, 1.0):
        x, dy = random((4, 6, 66, 64), mean=mean), random((4, 6, 66, 64))
        for a, b in zip(train_once(captured, x, dy), train_once(eager, x, dy), strict=True):
            torch.testing.assert_close(a, b)
        for a, b in zip(net.buffers(), eager.buffers(), strict=True):
            torch.testing.assert_close(a, b)
