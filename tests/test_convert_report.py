"""What the report says of each layer, and which layers count as synchronised."""

from __future__ import annotations

import pytest
import torch
from optional import optional
from torch import nn
from torch.nn.utils import parametrize

from syncbn_cuda import (
    FastSyncBatchNorm,
    conversion_report,
    convert_sync_batchnorm,
    is_synchronized,
    revert_sync_batchnorm,
)


class Unknown(nn.BatchNorm2d):
    pass


class OwnSync(nn.SyncBatchNorm):
    pass


class OwnGroupNorm(nn.GroupNorm):
    pass


class Frozen(nn.Module):
    """As torchvision's, timm's and detectron2's: all that it has are buffers."""

    def __init__(self):
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.ones(4))


class ByItself(nn.Module):
    """As inplace_abn's: a batch norm from outside of torch."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.ones(4)) for _ in range(2))
        for name in ("running_mean", "running_var"):
            self.register_buffer(name, torch.ones(4))


def apex_class():
    """Returns a stand-in for apex's layer, which is known by its name and module."""
    return type("SyncBatchNorm", (nn.modules.batchnorm._BatchNorm,), {"__module__": APEX})


APEX = "apex.parallel.optimized_sync_batchnorm"


def own_forward():
    layer = nn.BatchNorm2d(4)
    layer.forward = lambda input: input
    return layer


def parametrized():
    layer = nn.BatchNorm2d(4)
    return parametrize.register_parametrization(layer, "weight", nn.Softplus())


SUBCLASS = "a subclass, {0}, that may compute something of its own: give it a converter"
BY_ITSELF = ("needs none", "normalises each sample by itself")
#: name: (layer, class, status, reason), and what status and reason are once it is converted.
LAYERS = {
    "plain": (nn.BatchNorm1d(4), "BatchNorm1d", "left", "not converted yet, or not selected"),
    "parametrized": (parametrized(), "BatchNorm2d", "left", "not converted yet, or not selected"),
    "torchs": (nn.SyncBatchNorm(4), "SyncBatchNorm", "synchronised", "not converted yet"),
    "ours": (FastSyncBatchNorm(4), "FastSyncBatchNorm", "synchronised", "made as it is"),
    "unknown": (Unknown(4), "Unknown", "left", SUBCLASS.format("Unknown")),
    "own_sync": (OwnSync(4), "OwnSync", "synchronised", SUBCLASS.format("OwnSync")),
    "apexs": (apex_class()(4), "SyncBatchNorm", "synchronised", SUBCLASS.format("SyncBatchNorm")),
    "forward": (own_forward(), "BatchNorm2d", "left", "has a forward of its own"),
    "lazy": (nn.LazyBatchNorm1d(), "LazyBatchNorm1d", "left", "does not know its number of chan"),
    "frozen": (Frozen(), "Frozen", "needs none", "frozen"),
    "foreign": (ByItself(), "ByItself", "left", "keeps running statistics, but is none of torch's"),
    "instance": (nn.InstanceNorm2d(4, track_running_stats=True), "InstanceNorm2d", *BY_ITSELF),
    "group": (OwnGroupNorm(2, 4), "OwnGroupNorm", *BY_ITSELF),
    "layer": (nn.LayerNorm(4), "LayerNorm", *BY_ITSELF),
    "rms": (nn.RMSNorm(4), "RMSNorm", *BY_ITSELF),
    "other": (nn.Linear(4, 4), None, None, None),
    "container": (nn.Sequential(nn.ReLU()), None, None, None),
}


@pytest.mark.parametrize("name", LAYERS)
def test_each_kind_of_layer_has_its_row(name):
    layer, class_name, status, reason = LAYERS[name]
    rows = conversion_report(nn.ModuleDict({"inner": nn.Sequential(nn.Identity(), layer)}))
    if class_name is None:
        assert rows == ()
        return
    (row,) = rows
    assert row[:3] == ("inner.1", class_name, status)
    assert row.reason.startswith(reason)


@pytest.mark.parametrize("name", LAYERS)
def test_only_layers_that_normalise_over_ranks_are_synchronised(name):
    layer, _, status, _ = LAYERS[name]
    assert is_synchronized(layer) == (status == "synchronised")
    assert not is_synchronized(nn.Sequential(layer))


def test_the_report_follows_conversion_and_selection_and_revert():
    net = nn.ModuleDict({"a": nn.BatchNorm1d(4), "b": parametrized(), "c": nn.SyncBatchNorm(4)})
    net["again"] = net["a"]
    before = conversion_report(net)
    convert_sync_batchnorm(net, select="!c")
    assert conversion_report(net) == (
        ("a", "FastSyncBatchNorm", "converted", "from BatchNorm1d"),
        ("b", "FastSyncBatchNorm", "converted", "from BatchNorm2d"),
        ("c", "SyncBatchNorm", "synchronised", "not converted yet, or not selected"),
    )
    assert [is_synchronized(layer) for layer in net.values()] == [True] * 4
    assert conversion_report(revert_sync_batchnorm(net)) == before


def test_the_table_has_aligned_columns_and_a_sum():
    net = nn.Sequential(nn.BatchNorm2d(4), nn.LayerNorm(4), nn.BatchNorm1d(4))
    convert_sync_batchnorm(net, select="0")
    assert str(conversion_report(net)).split("\n") == [
        "0  FastSyncBatchNorm  converted   from BatchNorm2d",
        "1  LayerNorm          needs none  normalises each sample by itself",
        "2  BatchNorm1d        left        not converted yet, or not selected",
        "3 normalise: 1 converted, 1 left, 1 needs none",
    ]


def test_a_single_layer_and_a_model_without_any():
    assert str(conversion_report(nn.LayerNorm(4))).startswith("(the model)  LayerNorm  needs none")
    assert str(conversion_report(nn.Linear(2, 2))) == "0 normalise: nothing to do"


def test_torchvisions_frozen_layer_is_frozen_and_stays():
    ops = optional("torchvision.ops")
    net = convert_sync_batchnorm(nn.Sequential(ops.FrozenBatchNorm2d(4)))
    assert type(net[0]) is ops.FrozenBatchNorm2d
    assert conversion_report(net)[0][2] == "needs none"
