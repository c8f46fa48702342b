"""torch.func and forward-mode AD over ranks: each layer is one over the batches of all of them."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from inputs import numpy, random
from test_transforms import (
    CHANNELS,
    SAMPLES,
    TRANSFORMS,
    Formula,
    assert_same,
    batch,
    gradient,
    linearized,
    net_of,
    vector_jacobian,
)
from torch._dynamo import compiled_autograd
from torch.autograd import forward_ad
from torch.func import grad, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import keystr, tree_leaves, tree_leaves_with_path
from torch.utils.checkpoint import checkpoint

from syncbn_cuda import FastSyncBatchNorm
from syncbn_cuda._collective import AllReduce, Sender

#: Samples of each rank.
COUNTS = (3, SAMPLES - 3)


def transforms_rank(rank, names):
    x = batch().split(COUNTS)[rank]
    results = [TRANSFORMS[name](net_of(FastSyncBatchNorm), x) for name in names]
    return [[numpy(leaf) for leaf in tree_leaves(result)] for result in results]


def joined(path, pieces, shape):
    """Puts what ranks got together to what one process gets of the whole batch."""
    if pieces[0].shape != shape:
        return np.concatenate(pieces, axis=pieces[0].ndim - 4)  # of an input or an output
    if "running" in keystr(path) or "tracked" in keystr(path):
        np.testing.assert_array_equal(*pieces)
        return pieces[0]
    return sum(pieces)  # of the loss, which is that of all ranks


def test_transforms_cross_ranks(run):
    names = [name for name in TRANSFORMS if name != "linearize"]
    for name, *parts in zip(names, *run(2, transforms_rank, names), strict=True):
        whole = tree_leaves_with_path(TRANSFORMS[name](net_of(Formula), batch()))
        for *pieces, (path, expected) in zip(*parts, whole, strict=True):
            actual = joined(path, pieces, expected.shape)
            np.testing.assert_allclose(actual, numpy(expected), rtol=1e-9, atol=1e-9, err_msg=name)


def refused_rank(rank):
    net, x = net_of(FastSyncBatchNorm), batch()
    of_net = functools.partial(gradient, net)
    compiled = torch.compile(of_net, backend="eager", fullgraph=True)
    one, layer = random((1 - rank, CHANNELS), torch.float64), net[1]
    for call, argument, message in (
        (functools.partial(linearized, net), x, "linearize does not work across ranks: use torch"),
        (compiled, x, r"Norm\(3\): .* leave the .* uncompiled"),
        (functools.partial(vector_jacobian, layer), one, r"Norm\(3\): .*1 value .* whole process"),
    ):
        with pytest.raises(Exception, match=message):
            call(argument)
    return True


def test_what_is_wrong_or_unsupported_over_ranks_is_refused(run):
    assert run(2, refused_rank) == [True, True]


def one_value_rank(rank):
    torch.manual_seed(0)
    x = random((4, 1, CHANNELS), torch.float64) * (-1) ** rank  # the mean over both is 0
    layer = FastSyncBatchNorm(CHANNELS, track_running_stats=False, dtype=torch.float64)
    assert_same(vmap(layer)(x), x / (x.square() + layer.eps).sqrt())
    return True


def test_vmap_over_batches_of_one_value_a_rank(run):
    """Outside of vmap a rank reads how many values there are in all; inside it cannot."""
    assert run(2, one_value_rank) == [True, True]


def sum_rank(rank):
    """The sum over ranks by itself, in a group that the last rank is not of."""
    group = dist.new_group([0, 1])
    if rank == 2:
        return True
    both = functools.partial(AllReduce.apply, Sender(group, None, "forward"))
    x = torch.arange(6.0).view(2, 3).t()  # not contiguous
    own, other = x * (rank + 1), torch.cos(x)
    assert both(own, other)[0].is_contiguous()  # NCCL sums nothing else

    def backward(*slopes):
        return vjp(both, other, other)[1](slopes)

    def forward(*slopes):
        return jvp(both, (other, other), slopes)[1]

    for each in (both, vmap(both, (1, None), (1, None)), backward, forward):
        torch.testing.assert_close(each(own, other), (3 * x, other))
        torch.testing.assert_close(own, x * (rank + 1))
    for each in (both, backward, forward):
        # Each rank goes on with another of the two, and takes part in the collective all the same.
        slopes = grad(lambda *pair, each=each: each(*pair)[rank].sum(), argnums=(0, 1))(own, other)
        torch.testing.assert_close(slopes, (torch.ones(3, 2), torch.full((3, 2), float(rank))))
    return True


def test_the_sum_over_ranks_and_its_derivatives(run):
    assert run(3, sum_rank) == [True] * 3


def step_of(net, x, create_graph=False):
    leaves = [x, *net.parameters()]
    return torch.autograd.grad(net(x).pow(3).sum(), leaves, create_graph=create_graph)


def graph_rank(rank, counts, pre_dispatch):
    """A graph of make_fx computes on another batch what a call does."""
    net = net_of(FastSyncBatchNorm, track_running_stats=False)[1]
    torch.manual_seed(rank)
    x, other = torch.randn(2, counts[rank], CHANNELS, dtype=torch.float64).unbind()
    step = functools.partial(step_of, net)
    graph = make_fx(step, pre_dispatch=pre_dispatch)(x.requires_grad_())
    other = other.clone().requires_grad_()
    assert_same(graph(other), step(other))
    return True


@pytest.mark.parametrize("pre_dispatch", [False, True])
@pytest.mark.parametrize("counts", [(2, 3), (0, 3)], ids=str)
def test_graphs_hold_the_sum_over_ranks(run, counts, pre_dispatch):
    assert run(2, graph_rank, counts, pre_dispatch) == [True, True]


def later_backward_rank(rank):
    """A backward that is compiled where the forward was not; and gradients written in place."""
    torch.compiler.reset()
    net, x = net_of(FastSyncBatchNorm), batch().split(COUNTS)[rank].requires_grad_()
    expected = step_of(net, x)
    y = net(x)
    with compiled_autograd._enable(torch.compile(backend="aot_eager")):
        y.pow(3).sum().backward()
    assert_same([x.grad, *(p.grad for p in net.parameters())], expected)
    twice = step_of(net, x, create_graph=True)
    assert_same([gradient.mul_(2) for gradient in twice], [2 * each for each in expected])
    return True


def test_later_backwards_are_those_of_eager(run):
    assert run(2, later_backward_rank) == [True, True]


def counted_rank(rank, reentrant):
    net, x = net_of(FastSyncBatchNorm), batch().split(COUNTS)[rank].requires_grad_()
    with forward_ad.dual_level():
        checkpoint(net, x, use_reentrant=reentrant).sum().backward()
    return net[1].num_batches_tracked.item()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_in_a_dual_level_moves_the_buffers_once(run, reentrant):
    assert run(2, counted_rank, reentrant) == [1, 1]
