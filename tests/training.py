"""One training step of a layer in one process, and whether all that comes of it is right."""

from __future__ import annotations

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
