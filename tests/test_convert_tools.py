"""torch's tools on models that are, were, or will be converted: quantisation, export, fusion."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
from inputs import random
from torch import nn
from training import check_same_steps

from syncbn_cuda import (
    FastSyncBatchNorm,
    conversion_report,
    convert_sync_batchnorm,
    revert_sync_batchnorm,
)


def net(*further):
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), *further)


def trained(*further):
    """Returns a net that was converted, has seen a batch, and was reverted."""
    model = convert_sync_batchnorm(net(*further))
    model(random((4, 3, 9, 9), mean=1.0))
    return revert_sync_batchnorm(model).eval()


quantization = pytest.mark.filterwarnings("ignore:.*deprecated", "ignore:.*reduce_range")


def fused(convert):
    """Returns a net that is fused and prepared for quantisation, converted on the way or not."""
    quantize = importlib.import_module("torch.ao.quantization")
    torch.manual_seed(0)
    model = net(nn.ReLU(), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)).train()
    model.qconfig = quantize.get_default_qat_qconfig("x86")
    model = quantize.fuse_modules_qat(model, [["0", "1", "2"], ["3", "4"]])
    if convert == "before preparing":
        convert_sync_batchnorm(model)
    model = quantize.prepare_qat(model)
    return model if convert is None else convert_sync_batchnorm(model)


@quantization
@pytest.mark.parametrize("convert", ["after preparing", "before preparing"])
def test_batch_norms_in_fused_modules_are_converted_and_come_back(convert):
    ours, theirs = fused(convert), fused(None)
    assert [row[:3] for row in conversion_report(ours)] == [
        ("0.bn", "FastSyncBatchNorm", "converted"),
        ("3.bn", "FastSyncBatchNorm", "converted"),
    ]
    x = random((4, 3, 9, 9), torch.float64)
    for model in (ours, theirs):
        model(x.float())
        # A rounding apart, a value may be quantised to its neighbour.
        model.apply(torch.ao.quantization.disable_fake_quant)
        model.double().apply(torch.ao.quantization.disable_observer)
    theirs.load_state_dict(ours.state_dict())
    check_same_steps(ours, theirs, x)
    reverted = revert_sync_batchnorm(ours.eval())
    assert repr(reverted) == repr(theirs)
    assert "QuantizedConvReLU2d" in repr(torch.ao.quantization.convert(reverted))


@quantization
def test_what_was_prepared_keeps_its_qconfig_and_observer():
    quantize = importlib.import_module("torch.ao.quantization")
    model = net().train()
    model.qconfig = quantize.get_default_qat_qconfig("x86")
    model = quantize.prepare_qat(model)
    qconfig = model[1].qconfig
    convert_sync_batchnorm(model)(random((4, 3, 9, 9)))
    assert type(model[1]) is FastSyncBatchNorm and model[1].qconfig is qconfig
    assert model[1].activation_post_process.activation_post_process.max_val.isfinite()


def test_fusing_a_convolution_works_after_reverting():
    model = trained()
    x = random((2, 3, 9, 9))
    torch.testing.assert_close(nn.utils.fuse_conv_bn_eval(*model)(x), model(x))


def test_a_graph_is_fused_after_reverting():
    optimization = importlib.import_module("torch.fx.experimental.optimization")
    model = trained(nn.ReLU())
    graph = optimization.fuse(model)
    assert not any(isinstance(layer, nn.BatchNorm2d) for layer in graph.modules())
    x = random((2, 3, 9, 9))
    torch.testing.assert_close(graph(x), model(x))


@pytest.mark.filterwarnings("ignore:.*is deprecated")
@pytest.mark.parametrize("export", [True, False], ids=["exported", "scripted"])
def test_a_reverted_model_is_exported_as_one_of_torch(export):
    model, x = trained(nn.ReLU()), random((2, 3, 9, 9))
    other = torch.export.export(model, (x,)).module() if export else torch.jit.script(model)
    text = str(other.graph if export else other.inlined_graph)
    assert "batch_norm" in text and "syncbn" not in text
    torch.testing.assert_close(other(x), model(x))


def test_a_compiled_model_is_converted_and_reverted():
    model = net().double()
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend="eager")
    x = random((4, 3, 9, 9), torch.float64)
    for step in (lambda net: net, convert_sync_batchnorm, revert_sync_batchnorm):
        step(compiled)
        check_same_steps(model, plain, x)
        torch.testing.assert_close(compiled(x), plain(x))
