"""torch.func and forward-mode AD through a layer in training, alone and compiled.

Over ranks: test_transforms_ranks.py.

The reference is the formula in torch operations, of which torch knows every derivative:
``nn.BatchNorm`` itself has wrong ones (test_batch_norm_has_wrong_derivatives_of_its_own).
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from inputs import random
from torch import nn
from torch.autograd import forward_ad
from torch.func import (
    functional_call,
    grad,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    stack_module_state,
    vjp,
    vmap,
)
from torch.utils._pytree import tree_leaves

from syncbn_cuda import FastSyncBatchNorm, convert_sync_batchnorm

CHANNELS = 3
SAMPLES = 5


class Formula(nn.BatchNorm2d):
    """Training of a batch norm as the textbook has it."""

    def forward(self, x):
        dims, shape = (0, 2, 3), (1, -1, 1, 1)
        mean, var = x.mean(dims), x.var(dims, correction=0)
        with torch.no_grad():
            if self.running_mean is not None:
                self.num_batches_tracked.add_(1)
                unbiased = x.var(dims)
                self.running_mean.copy_(self.running_mean * 0.9 + mean * 0.1)
                self.running_var.copy_(self.running_var * 0.9 + unbiased * 0.1)
        y = (x - mean.view(shape)) / (var + self.eps).sqrt().view(shape)
        return y * self.weight.view(shape) + self.bias.view(shape)


def net_of(layer, seed=0, **arguments):
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Conv2d(2, CHANNELS, 1),
        layer(CHANNELS, **arguments),
        nn.Tanh(),
        nn.Conv2d(CHANNELS, 2, 1),
    )
    if net[1].affine:
        nn.init.uniform_(net[1].weight, 0.5, 1.5)
    return net.double()


def arguments_of(net):
    """Returns the parameters and buffers of a net, copied."""
    named = (net.named_parameters(), net.named_buffers())
    return tuple({name: each.detach().clone() for name, each in group} for group in named)


def batch():
    torch.manual_seed(1)
    return random((SAMPLES, 2, 3, 2), torch.float64)


def tangents_of(values):
    return {name: torch.sin(7 * value) for name, value in values.items()}


def loss_of(net, parameters, buffers, x):
    return functional_call(net, (parameters, buffers), (x,)).pow(3).sum()


def of_weight(net, x):
    """Returns a weight before the layer and the loss as a function of it; buffers are new ones."""
    parameters, _ = arguments_of(net)

    def loss(weight):
        return loss_of(net, {**parameters, "0.weight": weight}, arguments_of(net)[1], x)

    return parameters["0.weight"], loss


# Each takes a net and a batch and returns what the transform gives, and the buffers that it moved.


def gradient(net, x):
    arguments = arguments_of(net)
    grads = grad(lambda p, b, x: loss_of(net, p, b, x), argnums=(0, 2))(*arguments, x)
    return *grads, arguments[1]


def vector_jacobian(net, x):
    y, pull = vjp(lambda x: functional_call(net, arguments_of(net), (x,)), x)
    return y, pull(torch.cos(y))


def directional(net, x):
    parameters, _ = arguments_of(net)

    def call(parameters, x):
        return functional_call(net, (parameters, arguments_of(net)[1]), (x,))

    return jvp(call, (parameters, x), (tangents_of(parameters), torch.sin(x)))


def linearized(net, x):
    weight, loss = of_weight(net, x)
    y, line = linearize(loss, weight)
    return y, line(torch.cos(weight))


def dual_numbers(net, x):
    net = copy.deepcopy(net)
    with forward_ad.dual_level():
        y = net(forward_ad.make_dual(x, torch.sin(x)))
        return forward_ad.unpack_dual(y).tangent, dict(net.named_buffers())


def backward_of(net, x, create_graph):
    """Calls a net outside of all transforms; returns its output, and its backward to transform."""
    x = x.clone().requires_grad_()
    y = net(x)
    leaves = (x, *net.parameters())
    return y.detach(), functools.partial(
        torch.autograd.grad, y, leaves, retain_graph=True, create_graph=create_graph
    )


def batched_backward(create_graph, net, x):
    y, backward = backward_of(net, x, create_graph)
    return vmap(backward)(torch.stack([torch.cos(y), torch.sin(y)]))


def dual_backward(create_graph, net, x):
    y, backward = backward_of(net, x, create_graph)
    with forward_ad.dual_level():
        grads = backward(forward_ad.make_dual(torch.cos(y), torch.sin(y)))
        return [forward_ad.unpack_dual(grad).tangent for grad in grads]


def nested(*transforms):
    def of(net, x):
        weight, function = of_weight(net, x)
        for transform in transforms:
            function = transform(function)
        return function(weight)

    return of


def ensemble(net, x):
    models = stack_module_state([net_of(type(net[1]), seed) for seed in range(3)])
    return vmap(lambda p, b: functional_call(net, (p, b), (x,)))(*models), models[1]


def gradients_of_an_ensemble(net, x):
    models = stack_module_state([net_of(type(net[1]), seed) for seed in range(3)])
    return vmap(grad(lambda p, b: loss_of(net, p, b, x)))(*models), models[1]


def batches(net, x):
    net = net_of(type(net[1]), track_running_stats=False)
    parameters, _ = arguments_of(net)
    return vmap(lambda x: functional_call(net, parameters, (x,)))(torch.stack([x, x + 1]))


TRANSFORMS = {
    "grad": gradient,
    "vjp": vector_jacobian,
    "jvp": directional,
    "linearize": linearized,
    "dual_level": dual_numbers,
    "hessian": nested(hessian),
    "jacrev jacrev": nested(jacrev, jacrev),
    "jacfwd jacfwd": nested(jacfwd, jacfwd),
    "jacrev jacfwd": nested(jacfwd, jacrev),
    "third order": nested(jacrev, jacrev, jacfwd),
    "vmap over an ensemble": ensemble,
    "vmap of grad over an ensemble": gradients_of_an_ensemble,
    "vmap over batches": batches,
    "vmap of a backward": functools.partial(batched_backward, False),
    "vmap of a backward with a graph": functools.partial(batched_backward, True),
    "dual level of a backward": functools.partial(dual_backward, False),
    "dual level of a backward with a graph": functools.partial(dual_backward, True),
}


def assert_same(actual, expected):
    for a, b in zip(tree_leaves(actual), tree_leaves(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_training_are_right(transform):
    results = [
        TRANSFORMS[transform](net_of(kind), batch()) for kind in (FastSyncBatchNorm, Formula)
    ]
    assert_same(*results)


@pytest.mark.parametrize("transform", ["grad", "jvp", "hessian"])
def test_transforms_inside_of_one_compiled_graph(transform):
    net, x = net_of(FastSyncBatchNorm), batch()
    torch.compiler.reset()
    compiled = torch.compile(
        lambda x: TRANSFORMS[transform](net, x), backend="aot_eager", fullgraph=True
    )
    assert_same(compiled(x), TRANSFORMS[transform](net_of(Formula), x))


def test_captured_buffers_are_refused_as_by_batch_norm_and_stay():
    for kind in (nn.BatchNorm2d, FastSyncBatchNorm):
        net = net_of(kind)
        before = arguments_of(net)[1]
        with pytest.raises(RuntimeError, match="would mutate a captured Tensor"):
            grad(lambda x, net=net: net(x).sum())(batch())
        assert_same(arguments_of(net)[1], before)


def test_batch_norm_has_wrong_derivatives_of_its_own():
    """If this fails, torch has mended it, and the reference above can be nn.BatchNorm2d."""
    wrong, right = (
        TRANSFORMS["jacfwd jacfwd"](net_of(k), batch()) for k in (nn.BatchNorm2d, Formula)
    )
    assert not torch.allclose(wrong, right, rtol=1e-3)


def ensembles_of_evaluation(net, x):
    return ensemble(net.eval(), x)[0]


def gradients_of_each_sample(net, x):
    net.eval()
    arguments = arguments_of(net)
    of_one = grad(lambda p, b, one: loss_of(net, p, b, one[None]))
    return vmap(of_one, in_dims=(None, None, 0))(*arguments, x)


@pytest.mark.parametrize("of", [ensembles_of_evaluation, gradients_of_each_sample])
def test_transforms_of_evaluation_are_those_of_batch_norm(of):
    results = []
    for kind in (FastSyncBatchNorm, nn.BatchNorm2d):
        net = net_of(kind)
        net[1].running_mean.uniform_(-1, 1)
        net[1].running_var.uniform_(0.5, 2)
        results.append(of(net, batch()))
    assert_same(*results)


@pytest.mark.parametrize(
    "arguments",
    [
        *({}, {"momentum": 0.3, "eps": 0.1}, {"momentum": None}, {"affine": False}),
        {"track_running_stats": False, "eps": 0.1},
    ],
    ids=str,
)
def test_a_converted_model_is_transformed_as_one_of_batch_norm(arguments):
    plain = net_of(nn.BatchNorm2d, **arguments)
    assert_same(
        gradient(convert_sync_batchnorm(copy.deepcopy(plain)), batch()), gradient(plain, batch())
    )
