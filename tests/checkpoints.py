"""Ways through blocks of layers in activation checkpoints, and a training step that takes one."""

from __future__ import annotations

import functools

import torch
from inputs import numpy, random
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from syncbn_cuda import FastSyncBatchNorm

CHANNELS = 4

torch.backends.cudnn.deterministic = True  # results are compared to the bit


class Block(nn.Module):
    """A block that uses one layer twice and another between."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.twice = FastSyncBatchNorm(CHANNELS)
        self.between = FastSyncBatchNorm(CHANNELS, momentum=None)

    def forward(self, x):
        y = self.twice(self.conv(x)).relu() + x
        return self.twice(self.between(y).sin())


def net_of_blocks(count=2):
    torch.manual_seed(5)
    return nn.Sequential(*(Block() for _ in range(count))).double()


def through(block, x):
    return block(x)


def checkpointed(*reentrant, **options):
    """Returns a way through a block in checkpoints, the first the outermost."""

    def way(block, x):
        if not reentrant:
            return block(x)
        inner = functools.partial(checkpointed(*reentrant[1:], **options), block)
        return checkpoint(inner, x, use_reentrant=reentrant[0], **options)

    return way


def selective(policy):
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return checkpointed(False, context_fn=contexts)


def save_all(context, operator, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE


def save_nothing(context, operator, *args, **kwargs):
    return CheckpointPolicy.PREFER_RECOMPUTE


def with_hooks_inside(block, x):
    def inner(x):
        with torch.autograd.graph.save_on_cpu():
            return block(x)

    return checkpoint(inner, x, use_reentrant=False)


def with_hooks_outside(block, x):
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        return checkpoint(block, x, use_reentrant=False)


class CheckpointFunction(torch.autograd.Function):
    """A reentrant checkpoint as other packages have their own, under torch's name."""

    @staticmethod
    def forward(ctx, block, x):
        ctx.block = block
        ctx.save_for_backward(x)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = (saved.detach().requires_grad_() for saved in ctx.saved_tensors)
        with torch.enable_grad():
            y = ctx.block(x)
        torch.autograd.backward(y, grad)
        return None, x.grad


WAYS = {
    "reentrant": checkpointed(True),
    "frames": checkpointed(False),
    "frames, no early stop": checkpointed(False, early_stop=False),
    "frames in frames": checkpointed(False, False),
    "three deep": checkpointed(False, False, False),
    "reentrant in reentrant": checkpointed(True, True),
    "reentrant in frames": checkpointed(False, True),
    "frames in reentrant": checkpointed(True, False),
    "frames in reentrant in frames": checkpointed(False, True, False),
    "reentrant in frames in reentrant": checkpointed(True, False, True),
    "selective, some saved": selective([torch.ops.aten.convolution.default]),
    "selective, all saved": selective(save_all),
    "selective, nothing saved": selective(save_nothing),
    "hooks inside": with_hooks_inside,
    "hooks outside": with_hooks_outside,
    "a wrapper": lambda block, x: checkpoint_wrapper(block)(x),
    "in segments": lambda block, x: checkpoint_sequential([block], 1, x, use_reentrant=False),
    "of another package": CheckpointFunction.apply,
}


def train(way, order=(0, 1), sizes=(3, 2), after=None):
    """Runs micro-batches forward, and backward in an order; returns all that may differ."""
    net = net_of_blocks()
    batches = [
        random((size, CHANNELS, 5, 6), torch.float64, mean=float(i)).requires_grad_()
        for i, size in enumerate(sizes)
    ]
    losses = []
    for x in batches:
        y = x
        for block in net:
            y = way(block, y)
        if after is not None:
            after(net, y)
        losses.append((y * random(y.shape, torch.float64)).sum())
    for index in order:
        losses[index].backward()
    state = {name: numpy(value) for name, value in net.state_dict().items()}
    gradients = {name: numpy(p.grad) for name, p in net.named_parameters()}
    return state | gradients | {f"dx {i}": numpy(x.grad) for i, x in enumerate(batches)}


def assert_same(results, expected):
    assert results.keys() == expected.keys()
    for name, value in expected.items():
        assert (results[name] == value).all(), f"{name} differs"
