"""Training steps in one process, whether all that comes of them is right, and saved modules."""

from __future__ import annotations

import io

import numpy as np
import reference
import torch
from inputs import assert_close, numpy
from torch import nn

from syncbn_cuda import FastSyncBatchNorm


def train_once(layer, x, dy):
    x = x.detach().requires_grad_()
    y = layer(x)
    y.backward(dy)
    return y, x.grad


def check_training_step(x, dy):
    """Trains a new layer for one step and compares all that comes of it with the reference."""
    shape, dtype = x.shape, x.dtype
    layer = FastSyncBatchNorm(shape[1])
    nn.init.uniform_(layer.weight, 0.5, 1.5)
    nn.init.uniform_(layer.bias)
    weight, bias = numpy(layer.weight), numpy(layer.bias)
    y, dx = train_once(layer, x, dy)
    batch = reference.forward(numpy(x), weight, bias)
    grads = reference.backward(numpy(dy), numpy(x), weight)
    assert y.dtype == dx.dtype == dtype
    assert_close(y, batch.output, dtype)
    assert_close(dx, grads.input, dtype)
    largest = float(np.abs(numpy(dy)).sum() / shape[1])
    assert_close(layer.weight.grad, grads.weight, torch.float32, scale=largest)
    assert_close(layer.bias.grad, grads.bias, torch.float32, scale=largest)
    mean, var = reference.running(np.zeros(shape[1]), np.ones(shape[1]), batch, 0.1)
    assert_close(layer.running_mean, mean, torch.float32)
    assert_close(layer.running_var, var, torch.float32)
    assert layer.num_batches_tracked == 1


def check_same_steps(ours, theirs, x):
    """Runs two nets in training and evaluation: outputs, gradients and state are the same."""
    for training in (True, False):
        results = []
        for net in (ours, theirs):
            torch.manual_seed(1)  # for what drops
            leaf = x.detach().requires_grad_()
            y = net.train(training)(leaf)
            y.backward(torch.randn_like(y))
            results.append([y, leaf.grad, *(p.grad for p in net.parameters())])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)
    state = ours.state_dict()
    assert state.keys() == theirs.state_dict().keys()
    for key, value in theirs.state_dict().items():
        torch.testing.assert_close(state[key], value)


def saved_and_loaded(module):
    """Returns what torch.load makes of a whole module."""
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)
