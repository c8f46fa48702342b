"""The host reads nothing back, so that a CUDA graph can hold a step: shown without a GPU.

Fake tensors have shapes and no values: whatever asks for a value, or for a shape that depends on
one, is an error. The kernels themselves under capture: test_emulated_host.py; on a GPU:
test_gpu_streams.py.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from distributed import fake_world
from inputs import DTYPES, LAYOUTS
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.autograd import forward_ad

from syncbn_cuda import FastSyncBatchNorm, _checks, _library

CHANNELS = 5


@pytest.fixture(params=[None, 2], ids=["alone", "two ranks"])
def world(request):
    """A world of two, whose collectives do nothing, or none."""
    with nullcontext() if request.param is None else fake_world(request.param):
        yield request.param


@pytest.fixture(params=["compiled", "composite"])
def _kernels(request, monkeypatch):
    if request.param == "composite":
        monkeypatch.setattr(_library._available, "compiled", None)
    # Of fake tensors this check would read nothing, and so tell nothing.
    monkeypatch.setattr(_checks, "check_global_count", lambda *_: pytest.fail("reads the count"))


def step(layer, x, twice):
    """Forward and backward, and the backward of that."""
    y = layer(x)
    gradients = torch.autograd.grad(y.sum(), [x, *layer.parameters()], create_graph=twice)
    if twice:
        torch.stack([g.square().sum() for g in gradients]).sum().backward()
    return y, gradients[0]


@pytest.mark.usefixtures("world", "_kernels")
@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize(
    "arguments",
    [{}, {"momentum": None}, {"affine": False}, {"skip_nonfinite_update": True}],
    ids=str,
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_reads_nothing_back(layout, arguments, twice):
    for dtype in DTYPES:
        with FakeTensorMode():
            layer = FastSyncBatchNorm(CHANNELS, **arguments)
            layer.num_batches_tracked = torch.randint(3, ())  # the layer's own is a known 0
            x = LAYOUTS[layout](torch.randn(4, CHANNELS, 3, 3, dtype=dtype)).requires_grad_()
            y, dx = step(layer, x, twice)
        for result in (y, dx):
            assert result.shape == x.shape and result.dtype == dtype


@pytest.mark.parametrize("world", [2], indirect=True, ids=["two ranks"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_one_value_a_channel_is_not_read_where_there_is_none(world, device):
    """An eager rank reads the count there. Neither fake tensors nor those of meta have one."""
    with FakeTensorMode() if device == "cpu" else torch.device("meta"):
        layer, x = FastSyncBatchNorm(CHANNELS), torch.randn(1, CHANNELS).requires_grad_()
        y, dx = step(layer, x, False)
    assert y.shape == dx.shape == (1, CHANNELS)


@pytest.mark.usefixtures("world", "_kernels")
def test_forward_mode_reads_nothing_back():
    with FakeTensorMode(), forward_ad.dual_level():
        x = torch.randn(4, CHANNELS, 3, 3)
        y = FastSyncBatchNorm(CHANNELS)(forward_ad.make_dual(x, x))
        assert forward_ad.unpack_dual(y).tangent.shape == x.shape


def test_the_check_would_notice_a_read():
    with FakeTensorMode():
        x = torch.randn(4, CHANNELS, 3, 3).requires_grad_()
        layer = nn.BatchNorm2d(CHANNELS)
        layer.num_batches_tracked = torch.randint(3, ())
        step(layer, x, False)
        layer.momentum = None
        with pytest.raises(DataDependentOutputException):
            step(layer, x, False)
