"""What the compiler leaves to Python runs eagerly as a whole, over ranks too."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from inputs import random
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close
from training import train_once

from syncbn_cuda import FastSyncBatchNorm

CHANNELS = 5


def refused(compile_, layer, x):
    """An input of a size not known to the compiler, which the layer refuses; the caller goes on."""
    with pytest.raises(ValueError, match=rf"FastSyncBatchNorm\({CHANNELS}\): expected input with"):
        compile_(nn.Sequential(layer), dynamic=True)(x[:, 1:])


def outside(compile_, layer, x):
    """A rank that is no member of the group it was given."""
    other = FastSyncBatchNorm(CHANNELS, process_group=dist.GroupMember.NON_GROUP_MEMBER)
    with pytest.raises(ValueError, match="not a member"):
        compile_(nn.Sequential(other))(x)


def transformed(compile_, layer, x):
    """torch.func over ranks, for which the compiler has no rule."""
    return compile_(lambda x: torch.func.grad(lambda x: layer(x).pow(3).sum())(x))(x)


def left_alone(compile_, layer, x):
    """A layer that the compiler is told to leave alone, in a step with two of its derivatives."""
    call, x = torch.compiler.disable(layer), x.clone().requires_grad_()

    def step(x):
        (grad,) = torch.autograd.grad(call(x).pow(3).sum(), x, create_graph=True)
        grad.pow(2).sum().backward()

    compile_(step, backend="eager")(x)  # other backends refuse a second derivative
    return x.grad


def uncompiled(function, **_):
    return function


def breaks_rank(rank, break_):
    """During the break and after it, what is compiled does what eager does."""
    layer = FastSyncBatchNorm(CHANNELS, track_running_stats=False)
    x, dy = (random((3, CHANNELS, 4), mean=mean) for mean in (float(rank), 0.0))
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compile_ = partial(torch.compile, backend=counter)
    assert_close(break_(compile_, layer, x), break_(uncompiled, layer, x))
    expected = train_once(layer, x, dy)
    assert_close(train_once(compile_(layer), x, dy), expected)
    counter.clear()
    assert_close(train_once(compile_(nn.Sequential(layer)), x, dy), expected)
    return counter.frame_count


@pytest.mark.parametrize("break_", [refused, outside, transformed, left_alone])
def test_a_layer_outside_of_graphs_runs_eagerly_and_can_be_compiled_after_it(run, break_):
    assert run(2, breaks_rank, break_) == [1, 1]
