"""Forwards that are no recompute, and regions and backwards that are hard to tell apart."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
from checkpoints import CHANNELS, WAYS, assert_same, net_of_blocks, through, train
from inputs import random
from torch.utils._python_dispatch import TorchDispatchMode

from syncbn_cuda import FastSyncBatchNorm


def forward_in_a_hook(net, y):
    for block in net:  # of them the last has the node of the checkpoint whose output this is
        y.register_hook(lambda grad, block=block: block.twice(grad) * 0 + grad)


def forward_without_grad(net, y):
    with torch.no_grad():
        net(y)


@pytest.mark.parametrize("after", [forward_in_a_hook, forward_without_grad])
@pytest.mark.parametrize("way", ["reentrant", "frames", "reentrant in reentrant"])
def test_other_forwards_are_forwards(way, after):
    torch.manual_seed(1)
    expected = train(through, after=after)
    torch.manual_seed(1)
    assert_same(train(WAYS[way], after=after), expected)


def with_grad(first, layer, x):
    with torch.enable_grad():
        y = layer(x)
    return y * layer(x.sin())


def without_grad(first, layer, x):
    with torch.no_grad():
        y = layer(x)
    return y * layer(x.sin())


def once(first, layer, x):
    if first:  # as what sets itself up by its first data
        with torch.no_grad():
            layer(x * 2)
    return layer(x).sin()


@pytest.mark.parametrize("way", ["reentrant", "frames", "frames in frames"])
@pytest.mark.parametrize("region", [with_grad, without_grad, once])
def test_forwards_with_and_without_grad_in_a_region(region, way):
    values = random((3, CHANNELS, 5))

    def step(way_through):
        layer, x = FastSyncBatchNorm(CHANNELS), values.clone().requires_grad_()
        first = iter([True, False])
        way_through(lambda x: region(next(first), layer, x), x).pow(3).sum().backward()
        return [x.grad, layer.weight.grad, *layer.buffers()]

    if region is once and way == "reentrant":
        with pytest.raises(
            RuntimeError,
            match=r"FastSyncBatchNorm\(4\): .*called a layer 2 times in forward and 1 times",
        ):
            step(WAYS[way])
        return
    for got, expected in zip(step(WAYS[way]), step(through), strict=True):
        assert torch.equal(got, expected)


@pytest.fixture
def eager_switching():
    """Makes threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.parametrize("way", ["reentrant", "frames"])
def test_two_backwards_at_once(way, eager_switching):
    """The graph is retained, and each thread has a recompute of its own."""
    layer, x = FastSyncBatchNorm(CHANNELS), random((3, CHANNELS, 5)).requires_grad_()
    passes = {}

    def region(x):
        for _ in range(20):
            x = layer(x * 1.1 + 1).sin() * 3
            passes.setdefault(threading.get_ident(), []).append(x.detach())
        return x

    together = threading.Barrier(2)

    def backward(loss):
        together.wait()
        loss.backward(retain_graph=True)
        together.wait()  # or the other thread might be known by the same number

    for _ in range(20):
        loss = WAYS[way](region, x).pow(3).sum()
        (first,) = passes.values()
        passes.clear()
        threads = [threading.Thread(target=backward, args=(loss,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for outputs in passes.values():
            assert all(map(torch.equal, outputs, first)) and len(outputs) >= 19
        assert len(passes) == 2
        passes.clear()


class Seen(TorchDispatchMode):
    """Notes the names of the operators that it sees."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.names.append(str(operator))
        return operator(*args, **(kwargs or {}))


def test_a_selective_checkpoint_hides_a_layer_from_no_other_mode():
    with Seen() as seen:
        WAYS["selective, all saved"](net_of_blocks(1)[0], random((3, 4, 5, 5), torch.float64))
    assert sum("batch_norm_stats" in name for name in seen.names) == 3
