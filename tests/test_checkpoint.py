"""Activation checkpointing: the same gradients, buffers moved once, and no message twice."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import threading

import pytest
import torch
from checkpoints import CHANNELS, WAYS, assert_same, net_of_blocks, through, train
from inputs import numpy, random
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from syncbn_cuda import FastSyncBatchNorm, _checkpoint, _checks, _composite, functional


@pytest.mark.filterwarnings("ignore:.*None of the inputs have requires_grad")
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_it_computes_what_it_does_without(way, order):
    torch.manual_seed(1)
    expected = train(through, order)
    torch.manual_seed(1)
    assert_same(train(WAYS[way], order), expected)


@pytest.fixture(params=["torch operations", "no float64"])
def other_kernels(request, monkeypatch):
    monkeypatch.setattr(functional, "checking_kernels", lambda input: None)
    monkeypatch.setattr(functional, "kernels_for", lambda device: _composite)
    if request.param == "no float64":
        monkeypatch.setattr(_checks, "lacks_float64", lambda input: True)


@pytest.mark.parametrize("way", ["reentrant", "frames in frames", "selective, all saved"])
def test_it_does_so_without_kernels(way, other_kernels):
    torch.manual_seed(1)
    expected = train(through)
    torch.manual_seed(1)
    assert_same(train(WAYS[way]), expected)


def messages_rank(rank):
    """Asserts for each way that this rank's results and messages are those without it."""
    sent = []
    all_reduce = functional.all_reduce

    def counting(tensor, *others):
        sent.append(tensor.numel())
        return all_reduce(tensor, *others)

    functional.all_reduce = counting
    for order in ((0, 1), (1, 0)):
        for way in (through, *WAYS.values()):
            sent.clear()
            torch.manual_seed(rank)
            results = train(way, order, sizes=((3, 2), (1, 4))[rank])
            if way is through:
                expected, messages = results, list(sent)
                assert len(messages) == 2 * 2 * 6, "forward and backward, batches, layers"
            assert sent == messages, way
            assert_same(results, expected)


def test_ranks_exchange_each_message_once(run):
    run(2, messages_rank)


class Solver(torch.autograd.Function):
    """Not a checkpoint: it runs the layer in backward, for what is no recompute."""

    @staticmethod
    def forward(ctx, layer, x):
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return None, grad * ctx.layer(x * 2)


def test_a_function_that_is_no_checkpoint_runs_forwards():
    layer = FastSyncBatchNorm(CHANNELS)
    Solver.apply(layer, random((3, CHANNELS, 2)).requires_grad_()).sum().backward()
    assert layer.num_batches_tracked == 2


@pytest.mark.parametrize("way", WAYS)
def test_backward_in_another_thread(way):
    """As on a GPU, whose backward has a thread of its own: what is one's own there is not here."""
    net, x = net_of_blocks(1), random((3, CHANNELS, 5, 5), torch.float64).requires_grad_()
    loss = WAYS[way](net[0], x).pow(3).sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    plain, expected = net_of_blocks(1), x.detach().clone().requires_grad_()
    plain(expected).pow(3).sum().backward()
    assert torch.equal(x.grad, expected.grad)
    for ours, theirs in zip(net.buffers(), plain.buffers(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("way", ["reentrant", "frames", "frames in frames", "reentrant in frames"])
def test_a_graph_that_is_retained_recomputes_again(way):
    net, x = net_of_blocks(1), random((3, CHANNELS, 5, 5), torch.float64).requires_grad_()
    plain, plain_x = copy.deepcopy(net), x.detach().clone().requires_grad_()
    for way_through, module, leaf in ((through, plain, plain_x), (WAYS[way], net, x)):
        loss = way_through(module[0], leaf).pow(3).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert torch.equal(x.grad, plain_x.grad)
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    for ours, theirs in zip(net.buffers(), plain.buffers(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("way", ["frames", "frames in frames"])
def test_a_second_derivative(way):
    net, x = net_of_blocks(1), random((3, CHANNELS, 5, 5), torch.float64).requires_grad_()
    results = []
    for way_through in (through, WAYS[way]):
        module = copy.deepcopy(net)
        y = way_through(module[0], x)
        (slope,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(slope.pow(2).sum(), x)
        results.append([second, *module.buffers()])
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("way", WAYS)
def test_a_forward_without_backward_counts_once_and_leaves_nothing(way):
    net, x = net_of_blocks(1), random((3, CHANNELS, 5, 5), torch.float64).requires_grad_()
    loss = WAYS[way](net[0], x).sum()
    assert net[0].twice.num_batches_tracked == 2 and net[0].between.num_batches_tracked == 1
    del loss
    gc.collect()
    assert len(_checkpoint._regions) == 0


def test_a_recompute_that_goes_another_way_is_a_forward():
    layers = [FastSyncBatchNorm(CHANNELS), FastSyncBatchNorm(CHANNELS)]
    used = iter([0, 1])
    x = random((3, CHANNELS, 2)).requires_grad_()
    checkpoint(lambda x: layers[next(used)](x), x, use_reentrant=False).sum().backward()
    assert [layer.num_batches_tracked.item() for layer in layers] == [1, 1]


class Checkpointed(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way, self.blocks = way, net_of_blocks()

    def forward(self, x):
        for block in self.blocks:
            x = self.way(block, x)
        return x


def ddp_rank(rank, x, static_graph):
    for way in (through, WAYS["reentrant"], WAYS["frames"], WAYS["frames in frames"]):
        ddp = DistributedDataParallel(Checkpointed(way), static_graph=static_graph)
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            ddp(x[rank::2].clone().requires_grad_()).pow(3).mean().backward()
            optimizer.step()
        results = {name: numpy(value) for name, value in ddp.state_dict().items()}
        if way is through:
            expected = results
        assert_same(results, expected)


@pytest.mark.parametrize("static_graph", [False, True])
def test_checkpoints_under_ddp(run, static_graph):
    run(2, ddp_rank, random((4, CHANNELS, 5, 6), torch.float64), static_graph)


@pytest.mark.parametrize("reentrant", [True, False])
def test_compiled_as_a_whole(reentrant):
    net, x = net_of_blocks(1), random((3, CHANNELS, 5, 5), torch.float64).requires_grad_()
    plain, plain_x = copy.deepcopy(net), x.detach().clone().requires_grad_()
    plain(plain_x).pow(3).sum().backward()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(x):
        return checkpoint(net, x, use_reentrant=reentrant).pow(3).sum()

    step(x).backward()
    torch.testing.assert_close(x.grad, plain_x.grad)
    for ours, theirs in zip(net.state_dict().values(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_torch_with_other_checkpoints_is_told_of():
    code = (
        "import torch.utils.checkpoint as c; del c._CheckpointFrame; import syncbn_cuda, torch;"
        "layer = syncbn_cuda.FastSyncBatchNorm(3); layer(torch.randn(4, 3)).sum().backward();"
        "assert layer.num_batches_tracked == 1"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "does not know the activation checkpointing of torch" in done.stderr
    assert "_CheckpointFrame" in done.stderr
