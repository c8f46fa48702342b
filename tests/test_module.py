"""The layer in one process: it is BatchNorm, in every mode, type, layout and shape."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import reference
import torch
from inputs import DENSE, DTYPES, LAYOUTS, SHAPES, assert_close, numpy, random
from torch import nn
from training import check_same_steps, check_training_step, train_once

from syncbn_cuda import FastSyncBatchNorm
from syncbn_cuda.functional import sync_batch_norm

BOTH = (FastSyncBatchNorm, nn.BatchNorm2d)
BATCH_NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [s for s in SHAPES if s[0] > 1 or len(s) > 2], ids=str)
def test_training_step_is_right_in_every_layout_and_type(shape, dtype, layout):
    check_training_step(LAYOUTS[layout](random(shape, dtype)), random(shape, dtype))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(4, 3, 5, 7), (2, 3, 4, 5, 6)], ids=str)
def test_memory_format_is_kept(shape, dtype, layout, training):
    x, dy = LAYOUTS[layout](random(shape, dtype)), random(shape, dtype)
    for given in (*(make(dy) for make in LAYOUTS.values()), dy[:1].expand_as(dy)):
        y, dx = train_once(FastSyncBatchNorm(3).train(training), x, given)
        assert y.stride() == x.stride() and dx.stride() == x.stride()


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("track", [True, False])
@pytest.mark.parametrize("momentum", [0.1, 0.0, 1.0, None])
@pytest.mark.parametrize("shape", [(6, 5), (6, 5, 4), (3, 5, 4, 2), (2, 5, 2, 3, 2)], ids=str)
def test_all_arguments_do_what_batch_norm_does(shape, momentum, track, bias, affine):
    arguments = {"momentum": momentum, "affine": affine, "track_running_stats": track}
    ours = FastSyncBatchNorm(5, 1e-3, bias=bias, dtype=torch.float64, **arguments)
    theirs = BATCH_NORMS[len(shape)](5, 1e-3, dtype=torch.float64, **arguments)
    if not bias:  # torch 2.10 has no argument for it
        theirs.register_parameter("bias", None)
    for _ in range(3):
        x, dy = random(shape, torch.float64, mean=2.0), random(shape, torch.float64)
        for a, b in zip(train_once(ours, x, dy), train_once(theirs, x, dy), strict=True):
            torch.testing.assert_close(a, b)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for key, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[key], value)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    ours.eval(), theirs.eval()
    for a, b in zip(train_once(ours, x, dy), train_once(theirs, x, dy), strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    for key, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[key], value)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_track_running_stats_may_be_turned_off_after_construction(momentum):
    """And on again: the layer does what torch's does with the buffers, whatever that is."""
    ours, theirs = (build(3, momentum=momentum) for build in BOTH)
    for track in (False, True, False, True):
        ours.track_running_stats = theirs.track_running_stats = track
        check_same_steps(ours, theirs, random((4, 3, 5, 5), mean=1.0))


@pytest.mark.parametrize("track", [True, False])
def test_a_layer_made_without_buffers_has_none_however_it_is_toggled(track):
    ours, theirs = (build(3, track_running_stats=False) for build in BOTH)
    ours.track_running_stats = theirs.track_running_stats = track
    check_same_steps(ours, theirs, random((4, 3, 5, 5), mean=1.0))


@pytest.mark.parametrize("parameters", ["float32", "same"])
@pytest.mark.parametrize("buffers", ["float32", "same"])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_mixtures_of_types(training, dtype, affine, buffers, parameters):
    layer = FastSyncBatchNorm(4, affine=affine)
    kinds = {"float32": torch.float32, "same": dtype}
    for name, parameter in layer.named_parameters():
        setattr(layer, name, nn.Parameter(parameter.to(kinds[parameters])))
    layer.running_mean = layer.running_mean.to(kinds[buffers])
    layer.running_var = layer.running_var.to(kinds[buffers])
    layer.train(training)
    x, dy = random((4, 4, 3, 3), dtype), random((4, 4, 3, 3), dtype)
    y, dx = train_once(layer, x, dy)
    assert y.dtype == dx.dtype == dtype
    exact = nn.BatchNorm2d(4, affine=affine, dtype=torch.float64).train(training)
    expected, expected_dx = train_once(exact, x.double(), dy.double())
    assert_close(y, numpy(expected), dtype)
    assert_close(dx, numpy(expected_dx), dtype)
    for ours, theirs in zip(layer.parameters(), exact.parameters(), strict=True):
        assert ours.grad.dtype == ours.dtype
        assert_close(
            ours.grad, numpy(theirs.grad), dtype if parameters == "same" else torch.float32
        )


def test_counts_beyond_the_range_of_half():
    layer = FastSyncBatchNorm(2).half()
    x = random((2, 2, 260, 260), torch.float16)
    layer(x)
    assert_close(
        layer.running_var,
        reference.running(np.zeros(2), np.ones(2), reference.forward(numpy(x)), 0.1)[1],
        torch.float16,
        ulps=2,
    )


def test_values_near_the_largest_half():
    x = (torch.rand(8, 3, 16, 16) * 6e4).half()
    layer = FastSyncBatchNorm(3)
    y = layer(x)
    assert_close(y, reference.forward(numpy(x)).output, torch.float16)
    assert layer.running_var.isfinite().all()


@pytest.mark.parametrize("layout", DENSE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("exponent", range(11))
def test_constant_channels_become_zero(exponent, dtype, layout):
    values = 10.0**exponent * torch.tensor([1.0, 1 / 3, -1.0], dtype=dtype)
    x = LAYOUTS[layout](values.view(1, 3, 1, 1).repeat(4, 1, 10, 10))
    layer = FastSyncBatchNorm(3)
    y, dx = train_once(layer, x, torch.randn_like(x))
    assert y.abs().max() < 1e-2
    for gradient in (dx, layer.weight.grad, layer.bias.grad):
        assert gradient.isfinite().all()


def test_eps_is_added_to_the_variance():
    x = random((8, 3, 9, 9), torch.float64, std=1e-4)
    expected = nn.BatchNorm2d(3, dtype=torch.float64)(x)
    torch.testing.assert_close(FastSyncBatchNorm(3, dtype=torch.float64)(x), expected)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(4, 3), (3, 2, 4), (2, 3, 2, 3)], ids=str)
def test_gradcheck(shape, layout, affine):
    x = LAYOUTS[layout](random(shape, torch.float64)).requires_grad_()
    parameters = [
        torch.rand(shape[1], dtype=torch.float64).requires_grad_() for _ in range(2 * affine)
    ]

    def call(x, weight=None, bias=None):
        return sync_batch_norm(x, None, None, weight, bias, training=True)

    assert torch.autograd.gradcheck(call, (x, *parameters))
    assert torch.autograd.gradgradcheck(call, (x, *parameters))


@pytest.mark.parametrize("frozen", [("weight",), ("bias",), ("weight", "bias")])
@pytest.mark.parametrize("needs_input", [True, False])
def test_only_what_needs_a_gradient_gets_one(frozen, needs_input):
    layer = FastSyncBatchNorm(3)
    for name in frozen:
        getattr(layer, name).requires_grad_(False)
    x = random((4, 3, 5, 5)).requires_grad_(needs_input)
    if not needs_input and len(frozen) == 2:
        assert not layer(x).requires_grad
        return
    layer(x).sum().backward()
    assert (x.grad is not None) == needs_input
    for name in ("weight", "bias"):
        assert (getattr(layer, name).grad is None) == (name in frozen)


@pytest.mark.parametrize("needs_input", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(0, 3), (0, 3, 5, 5), (4, 3, 0, 0), (4, 3, 0, 2)], ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_an_empty_batch_alone(training, shape, dtype, needs_input):
    layer = FastSyncBatchNorm(3).train(training)
    before = copy.deepcopy(layer.state_dict())
    x = torch.empty(shape, dtype=dtype, requires_grad=needs_input)
    y = layer(x)
    y.sum().backward()
    assert y.shape == x.shape and y.dtype == dtype
    assert x.grad.shape == x.shape if needs_input else x.grad is None
    for parameter in layer.parameters():
        assert torch.equal(parameter.grad, torch.zeros(3))
    for key, value in before.items():
        assert torch.equal(layer.state_dict()[key], value)


def test_a_kernel_that_wrote_the_buffers_is_seen_by_autograd():
    layer = FastSyncBatchNorm(3)
    used = (layer.running_mean * torch.ones(3, requires_grad=True).exp()).sum()
    layer(random((4, 3, 5, 5)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        used.backward()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_runs_are_the_same_bits(dtype, layout):
    x, dy = (LAYOUTS[layout](random((5, 7, 33, 9), dtype)) for _ in range(2))
    layers = [FastSyncBatchNorm(7) for _ in range(10)]
    torch.use_deterministic_algorithms(True)
    try:
        steps = [train_once(layer, x, dy) for layer in layers]
    finally:
        torch.use_deterministic_algorithms(False)
    first, *others = [
        (*step, *(p.grad for p in layer.parameters()), *layer.buffers())
        for layer, step in zip(layers, steps, strict=True)
    ]
    assert len(first) == 7
    for other in others:
        assert all(map(torch.equal, first, other))


def test_repr_and_state_are_those_of_torch():
    ours, theirs = FastSyncBatchNorm(8), nn.SyncBatchNorm(8)
    assert repr(ours).replace("FastSyncBatchNorm", "SyncBatchNorm") == repr(theirs)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    plain = nn.BatchNorm2d(8)
    plain.load_state_dict(ours.state_dict())
    ours.load_state_dict(plain.state_dict())


def test_autocast_keeps_the_type_of_the_input():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), FastSyncBatchNorm(4))
    x = random((2, 3, 8, 8))
    with torch.autocast(x.device.type, torch.bfloat16):
        y = net(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert net[1].weight.grad.dtype == torch.float32


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*is deprecated")
@pytest.mark.parametrize("training", [True, False])
def test_a_trace_computes_what_the_layer_does(training):
    layer, x = FastSyncBatchNorm(3).train(training), random((4, 3, 5, 5))
    traced = torch.jit.trace(copy.deepcopy(layer), x, check_trace=False)
    other = random((4, 3, 5, 5))
    torch.testing.assert_close(traced(other), layer(other))


def test_a_symbolic_trace_sees_a_leaf():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), FastSyncBatchNorm(4))
    traced = torch.fx.symbolic_trace(net)
    assert [n.target for n in traced.graph.nodes if n.op == "call_module"] == ["0", "1"]
    x = random((2, 3, 8, 8))
    torch.testing.assert_close(traced(x), net(x))
