"""Wrong input gives one clear error that names the layer, what it expects and what came."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref

import pytest
import torch
from inputs import random
from torch import nn

from syncbn_cuda import FastSyncBatchNorm, functional, module
from syncbn_cuda.functional import sync_batch_norm

CASES = {
    "channels": (
        torch.randn(2, 18, 4, 4),
        ValueError,
        r"expected input with 36 channels in dim 1, got \[2, 18, 4, 4\]",
    ),
    "dimensions": (torch.randn(36), ValueError, r"expected at least 2D input \(got 1D input"),
    "scalar": (torch.tensor(1.0), ValueError, r"expected at least 2D input \(got 0D input"),
    "integer": (
        torch.ones(2, 36, dtype=torch.int64),
        TypeError,
        "expected input of float32.*got torch.int64",
    ),
    "bool": (
        torch.ones(2, 36, dtype=torch.bool),
        TypeError,
        "expected input of float32.*got torch.bool",
    ),
    "complex": (
        torch.ones(2, 36, dtype=torch.complex64),
        TypeError,
        "expected input of float32.*got torch.complex64",
    ),
    "device": (
        torch.ones(2, 36, device="meta"),
        ValueError,
        "expected weight on the input's device meta, got cpu",
    ),
    "type": (torch.ones(2, 36, dtype=torch.float64), None, None),
}


@pytest.fixture(params=["operators", "python"], autouse=True)
def first_step(request, monkeypatch):
    """Who checks: the operators, or else Python. Returns what a refused call must not reach."""
    if request.param == "operators":
        return "all_reduce"
    monkeypatch.setattr(functional, "checking_kernels", lambda input: None)
    return "kernels_for"


@pytest.fixture
def refused_early(first_step, monkeypatch):
    """Fails a test whose call is not refused before anything happens, which a peer would notice."""

    class Peers:
        def size(self):
            return 2

    monkeypatch.setattr(module, "resolve_group", lambda group: Peers())
    monkeypatch.setattr(functional, first_step, lambda *_: pytest.fail(f"reached {first_step}"))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_the_layer_names_what_it_expects(case, training, refused_early):
    x, error, message = CASES[case]
    layer = FastSyncBatchNorm(36).train(training)
    before = copy.deepcopy(layer.state_dict())
    if error is None:
        layer = layer.half()
        error, message = TypeError, "expected weight of float32 or of the input's torch.float64"
    with pytest.raises(error, match=r"FastSyncBatchNorm\(36\): " + message):
        layer(x)
    for key, value in layer.state_dict().items():
        assert torch.equal(value, before[key].to(value.dtype)), "half-updated"


@pytest.mark.parametrize("shape", [(1, 4), (1, 4, 1, 1)], ids=str)
def test_one_value_a_channel_alone(shape):
    layer = FastSyncBatchNorm(4)
    with pytest.raises(
        ValueError, match=r"FastSyncBatchNorm\(4\): expected more than 1 value per channel"
    ):
        layer(torch.randn(shape))
    assert layer.num_batches_tracked == 0
    layer.eval()(torch.randn(shape))


def test_the_number_of_channels_is_that_of_the_layer(refused_early):
    layer = FastSyncBatchNorm(3)
    layer.num_features = 5
    with pytest.raises(ValueError, match=r"expected input with 5 channels in dim 1"):
        layer(torch.randn(4, 3, 5))


def test_an_error_keeps_nothing_alive_and_tells_of_no_other():
    layer, x = FastSyncBatchNorm(3), torch.randn(4, 3, 5)
    layer.weight = nn.Parameter(torch.ones(4))
    alive = weakref.ref(x)
    gc.disable()
    try:
        with pytest.raises(ValueError, match="expected weight of shape") as caught:
            layer(x)
        assert caught.value.__suppress_context__ or caught.value.__context__ is None
        del x, caught
        assert alive() is None
    finally:
        gc.enable()


def test_no_channels():
    with pytest.raises(ValueError, match="expected a non-zero number of channels"):
        FastSyncBatchNorm(0)(torch.randn(2, 0, 3))


@pytest.mark.parametrize("name", ["weight", "bias", "running_mean", "running_var"])
def test_the_function_checks_every_vector(name):
    good = {n: torch.ones(3) for n in ("weight", "bias", "running_mean", "running_var")}
    x = torch.randn(4, 3, 2)
    for training in (True, False):
        sync_batch_norm(x, training=training, **good)
        for wrong in (torch.ones(4), torch.ones(3, 1), torch.tensor(1.0)):
            with pytest.raises(
                ValueError, match=rf"sync_batch_norm: expected {name} of shape \[3\]"
            ):
                sync_batch_norm(x, training=training, **{**good, name: wrong})
        with pytest.raises(TypeError, match=f"sync_batch_norm: expected {name} of float32"):
            sync_batch_norm(x, training=training, **{**good, name: torch.ones(3).half()})


def test_the_function_needs_what_it_uses():
    x, mean, var = torch.randn(4, 3), torch.zeros(3), torch.ones(3)
    with pytest.raises(ValueError, match="both or neither"):
        sync_batch_norm(x, mean, None, training=True)
    with pytest.raises(ValueError, match="expected num_batches_tracked"):
        sync_batch_norm(x, mean, var, training=True, momentum=None)
    with pytest.raises(ValueError, match="expected running buffers in evaluation"):
        sync_batch_norm(x, None, None)
    assert not mean.any() and (var == 1).all()


def test_a_batch_norm_2d_refuses_what_it_refused_after_a_round_trip():
    from syncbn_cuda import convert_sync_batchnorm, revert_sync_batchnorm

    layer = revert_sync_batchnorm(convert_sync_batchnorm(nn.BatchNorm2d(3)))
    with pytest.raises(ValueError, match="expected 4D input"):
        layer(torch.randn(2, 3, 4))


UNWRITABLE = {
    "running_mean": (torch.zeros(6)[::2], "expected running_mean to be contiguous"),
    "running_var": (torch.ones(6)[::2], "expected running_var to be contiguous"),
    "num_batches_tracked": (torch.tensor(0.0), "to be one int64 on cpu, got .* of torch.float32"),
    "num_batches_tracked ": (torch.zeros(2, dtype=torch.int64), r"got \[2\] of torch.int64"),
    "num_batches_tracked  ": (torch.tensor(0, device="meta"), "got .* on meta"),
}


@pytest.mark.parametrize("name", UNWRITABLE)
def test_buffers_that_cannot_be_written_are_refused_before_anything_happens(refused_early, name):
    buffer, message = UNWRITABLE[name]
    layer = FastSyncBatchNorm(3)
    setattr(layer, name.strip(), buffer)
    with pytest.raises(ValueError, match=r"FastSyncBatchNorm\(3\): .*" + message):
        layer(torch.randn(4, 3, 5))


@pytest.mark.parametrize("eps", [0.0, -1.0, float("nan")])
def test_eps_is_positive(eps):
    with pytest.raises(ValueError, match="expected eps to be positive"):
        FastSyncBatchNorm(3, eps=eps)(torch.randn(4, 3))


def test_tensors_of_inference_mode_are_refused_before_buffers_move():
    layer = FastSyncBatchNorm(3)
    with torch.inference_mode():
        x = torch.randn(4, 3, 5)
        made_inside = FastSyncBatchNorm(3)
        made_inside(x)
    with pytest.raises(RuntimeError, match="cannot be saved for backward"):
        layer(x)
    with pytest.raises(RuntimeError, match="made in inference mode"):
        made_inside(torch.randn(4, 3, 5))
    made_inside.track_running_stats = False  # then it is the weight that cannot be saved
    with pytest.raises(RuntimeError, match="clone input and weight"):
        made_inside(torch.randn(4, 3, 5))
    assert layer.num_batches_tracked == 0 and made_inside.num_batches_tracked == 1
    with torch.no_grad():
        layer(x)
    assert layer.num_batches_tracked == 1


def test_a_sparse_input_is_named():
    with pytest.raises(TypeError, match=r"FastSyncBatchNorm\(3\): expected a dense input"):
        FastSyncBatchNorm(3)(torch.randn(4, 3).to_sparse())


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
def test_a_model_in_training_is_not_exported_without_its_backward(strict):
    for leaf in (None, "input", "0.weight", "0.bias"):
        model, x = nn.Sequential(FastSyncBatchNorm(3)), random((4, 3, 6, 5))
        for name, tensor in (("input", x), *model.named_parameters()):
            tensor.requires_grad_(name == leaf)
        refused = pytest.raises(RuntimeError, match=r"BatchNorm\(3\): an exported program.*revert")
        with refused if leaf else contextlib.nullcontext():
            torch.export.export(model, (x,), strict=strict)
