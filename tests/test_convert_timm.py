"""timm's batch norms, with activation and drop, are converted as its tools expect them."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from inputs import numpy, random
from optional import optional
from torch import nn
from training import check_same_steps

from syncbn_cuda import (
    FastSyncBatchNorm,
    conversion_report,
    convert_sync_batchnorm,
    is_synchronized,
    revert_sync_batchnorm,
)

timm = optional("timm")
layers = optional("timm.layers")


class Drop(nn.Dropout):
    def __init__(self):
        super().__init__(0.3)


def split(channels, **arguments):
    """As timm makes it: of a layer with activation, whose activation it takes over."""
    net = nn.Sequential(layers.BatchNormAct2d(channels, **arguments))
    converted = layers.convert_splitbn_model(net, 2)
    for name in ("act", "drop"):
        setattr(converted[0], name, getattr(net[0], name))
    return converted[0]


def synced(channels, **arguments):
    """As timm makes it, of a layer with activation."""
    return layers.convert_sync_batchnorm(layers.BatchNormAct2d(channels, **arguments))


ARGUMENTS = {
    "relu": {},
    "no activation": {"apply_act": False},
    "swish not in place": {"act_layer": "swish", "inplace": False},
    "drop": {"act_layer": nn.SiLU, "drop_layer": Drop},
    "cumulative": {"momentum": None, "eps": 1e-3},
    "plain statistics": {"affine": False, "track_running_stats": False},
}


@pytest.mark.parametrize(
    ("build", "arguments"),
    [(layers.BatchNormAct2d, name) for name in ARGUMENTS]
    + [(split, name) for name in ARGUMENTS if name != "plain statistics"],  # timm splits none such
)
def test_a_layer_does_the_same_and_comes_back(build, arguments):
    ours, theirs = (nn.Sequential(build(6, **ARGUMENTS[arguments])).double() for _ in range(2))
    original, text, kept = type(ours[0]), repr(ours), vars(ours[0]).keys()
    assert conversion_report(convert_sync_batchnorm(ours))[0][2:] == (
        "converted",
        f"from {original.__name__}",
    )
    assert isinstance(ours[0], original) and isinstance(ours[0], FastSyncBatchNorm)
    check_same_steps(ours, theirs, random((4, 6, 5, 3), torch.float64))
    revert_sync_batchnorm(ours)
    assert type(ours[0]) is original and repr(ours) == text and vars(ours[0]).keys() == kept


@pytest.mark.parametrize("arguments", ARGUMENTS.values(), ids=ARGUMENTS)
def test_its_synchronised_layer_becomes_one_that_runs_on_the_cpu(arguments):
    ours = nn.Sequential(synced(6, **arguments)).double()
    assert is_synchronized(ours[0]) and type(ours[0]) is layers.SyncBatchNormAct
    theirs = nn.Sequential(layers.BatchNormAct2d(6, **arguments)).double()
    convert_sync_batchnorm(ours)
    assert not isinstance(ours[0], nn.SyncBatchNorm)
    check_same_steps(ours, theirs, random((4, 6, 5, 3), torch.float64))
    assert type(revert_sync_batchnorm(ours)[0]) is layers.SyncBatchNormAct


def test_a_synchronised_layer_without_activation_has_none():
    layer = convert_sync_batchnorm(layers.SyncBatchNormAct(6))
    check_same_steps(layer, nn.BatchNorm2d(6), random((4, 6, 5, 3)))


def test_all_parts_of_a_split_layer_are_converted():
    layer = convert_sync_batchnorm(split(6))
    assert all(type(part) is FastSyncBatchNorm for part in layer.aux_bn)
    assert all(type(part) is nn.BatchNorm2d for part in revert_sync_batchnorm(layer).aux_bn)


def test_its_own_tools_go_on_working():
    net = convert_sync_batchnorm(nn.Sequential(nn.Conv2d(3, 6, 1), layers.BatchNormAct2d(6)))
    x = random((2, 3, 4, 4))
    net(x)
    frozen = layers.freeze_batch_norm_2d(copy.deepcopy(net))
    assert type(frozen[1]) is layers.FrozenBatchNormAct2d
    torch.testing.assert_close(frozen(x), net.eval()(x))
    assert type(convert_sync_batchnorm(frozen)[1]) is layers.FrozenBatchNormAct2d
    assert conversion_report(frozen)[0].status == "needs none"


MODELS = ["resnet10t", "efficientnet_b0", "resnetv2_50", "test_byobnet", "densenet121"]


@pytest.mark.parametrize("name", MODELS)
def test_models_compute_the_same_and_come_back(name):
    build = {"drop_rate": 0.2, "num_classes": 5, "pretrained": False}
    theirs = timm.create_model(name, **build).double()
    ours = convert_sync_batchnorm(copy.deepcopy(theirs))
    report = conversion_report(ours)
    assert report and {row.status for row in report} <= {"converted", "needs none"}, str(report)
    check_same_steps(ours, theirs, random((2, 3, 64, 64), torch.float64))
    assert repr(revert_sync_batchnorm(ours)) == repr(theirs)


def test_a_symbolic_trace_acts_and_drops_once():
    net = convert_sync_batchnorm(timm.create_model("efficientnet_b0", pretrained=False)).eval()
    x = random((2, 3, 64, 64))
    torch.testing.assert_close(torch.fx.symbolic_trace(net)(x), net(x))
    stages = timm.create_model("resnet10t", pretrained=False, features_only=True).eval()
    expected = stages(x)
    for a, b in zip(convert_sync_batchnorm(stages)(x), expected, strict=True):
        torch.testing.assert_close(a, b)


def synchronised_rank(rank, build):
    layer = convert_sync_batchnorm(build(6, act_layer=nn.SiLU))
    layer(random((4, 6, 2, 2), mean=float(rank)))
    return numpy(layer.running_mean)


@pytest.mark.parametrize("build", [layers.BatchNormAct2d, split, synced])
def test_layers_synchronise(run, build):
    first, second = run(2, synchronised_rank, build)
    assert first.tobytes() == second.tobytes() and (first != 0).all()


def test_timm_is_not_imported_for_want_of_it():
    code = (
        "import sys, syncbn_cuda; from torch import nn;"
        "syncbn_cuda.convert_sync_batchnorm(nn.BatchNorm2d(3)); print('timm' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr
