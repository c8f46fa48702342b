"""Which layers are converted: by predicate, by patterns of names, and where a group is set."""

from __future__ import annotations

import warnings

import pytest
import torch.distributed as dist
from torch import nn

from syncbn_cuda import FastSyncBatchNorm, convert_sync_batchnorm


class Unknown(nn.BatchNorm2d):
    pass


def block():
    return nn.ModuleDict({"conv": nn.Conv2d(3, 3, 1), "bn1": nn.BatchNorm2d(3), "bn2": Unknown(3)})


def model():
    """Its layers: backbone.{0,1}.{bn1,bn2}, head.norm, neck.lazy, and neck.same = head.norm."""
    net = nn.ModuleDict({"backbone": nn.Sequential(block(), block())})
    net["head"] = nn.ModuleDict({"norm": nn.BatchNorm1d(3)})
    net["neck"] = nn.ModuleDict({"lazy": nn.LazyBatchNorm1d(), "same": net["head"]["norm"]})
    return net


def converted(net):
    return {name for name, layer in net.named_modules() if isinstance(layer, FastSyncBatchNorm)}


BN1 = {"backbone.0.bn1", "backbone.1.bn1"}
SELECTIONS = {
    "a module takes all beneath": ("backbone", BN1),
    "several": (["backbone.0", "head"], {"backbone.0.bn1", "head.norm"}),
    "a tuple": (("backbone.1.bn1",), {"backbone.1.bn1"}),
    "a glob of layers": ("*.bn1", BN1),
    "a glob of modules": ("b*.1", {"backbone.1.bn1"}),
    "one character": ("backbone.?.bn1", BN1),
    "all but": (["!neck", "!backbone.0"], {"backbone.1.bn1"}),
    "some of some": (["backbone", "!*.0"], {"backbone.1.bn1"}),
    "an exclusion wins in either order": (["!*.0", "backbone"], {"backbone.1.bn1"}),
    "any name of a shared layer": ("neck.same", {"head.norm"}),
    "any name of a shared layer excludes": (["head", "backbone.0", "!neck"], {"backbone.0.bn1"}),
    "a predicate": (lambda name, layer: type(layer) is nn.BatchNorm1d, {"head.norm"}),
    "a predicate sees every name": (lambda name, layer: name == "neck.same", {"head.norm"}),
    "a predicate that takes none": (lambda name, layer: False, set()),
}


@pytest.mark.filterwarnings("ignore:convert_sync_batchnorm left alone")
@pytest.mark.parametrize(("select", "expected"), SELECTIONS.values(), ids=SELECTIONS)
def test_a_selection_is_converted_and_nothing_else(select, expected):
    net = model()
    assert converted(convert_sync_batchnorm(net, select=select)) == expected


def test_a_generator_of_patterns_is_read_once():
    net = convert_sync_batchnorm(model(), select=(n for n in ("head", "!backbone.0")))
    assert converted(net) == {"head.norm"}


def test_brackets_are_those_of_a_name():
    net = nn.ModuleDict({"a[0]": nn.BatchNorm2d(3), "a0": nn.BatchNorm2d(3)})
    assert converted(convert_sync_batchnorm(net, select="a[0]")) == {"a[0]"}


def test_what_is_not_selected_is_no_reason_for_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert_sync_batchnorm(model(), select=["*.bn1", "head"])
    with pytest.warns(UserWarning, match=r"left alone: backbone.0.bn2 \(a subclass, Unknown"):
        convert_sync_batchnorm(model(), select="backbone.0")


MISTAKES = {
    "matches nothing": (
        "bakbone",
        ValueError,
        r"'bakbone' matches no batch norm; .*'backbone.0.bn1'",
    ),
    "one of several": (["head", "neck.3"], ValueError, "'neck.3' matches no batch norm"),
    "an exclusion": (["head", "!tail"], ValueError, "'!tail' matches no batch norm.* and 2 more"),
    "part of a name": ("back", ValueError, "'back' matches no batch norm"),
    "another layer": ("backbone.0.conv", ValueError, "conv' matches no batch norm"),
    "no pattern": ([], ValueError, "expected a pattern or more, got none"),
    "a number": (3, TypeError, r"expected a predicate .*, got int"),
    "a class": (nn.BatchNorm2d, TypeError, r"expected a predicate .*, got type"),
    "layers": ([nn.BatchNorm1d(3)], TypeError, "a pattern of names, or several, got BatchNorm1d"),
}


@pytest.mark.parametrize(("select", "error", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistaken_selection_converts_nothing(select, error, message):
    net = model()
    with pytest.raises(error, match="select: .*" + message):
        convert_sync_batchnorm(net, select=select)
    assert converted(net) == set()


def test_a_pattern_for_a_model_without_batch_norms_says_so():
    with pytest.raises(ValueError, match="this model has none at all"):
        convert_sync_batchnorm(nn.Linear(2, 2), select="head")


def test_a_lazy_layer_counts_where_it_is_selected():
    net = model()
    with pytest.raises(ValueError, match="expected neck.lazy to know its number of channels"):
        convert_sync_batchnorm(net, select=["neck", "head"])
    assert converted(net) == set()


@pytest.mark.parametrize("pattern", ["*", ""])
def test_a_root_that_is_itself_a_batch_norm_has_an_empty_name(pattern):
    assert isinstance(convert_sync_batchnorm(nn.BatchNorm2d(3), select=pattern), FastSyncBatchNorm)


def given_rank(rank):
    group, other = dist.new_group([0, 1]), dist.new_group([0, 1])
    net = nn.ModuleDict({"a": nn.BatchNorm1d(3), "b": FastSyncBatchNorm(3, process_group=other)})
    net["c"] = nn.SyncBatchNorm(3, process_group=other)

    def groups():
        known = {id(None): None, id(group): "given", id(other): "other"}
        return [known[id(layer.process_group)] for layer in net.values()]

    seen = []
    for arguments in ({}, {"process_group": group, "select": "b"}, {"process_group": group}, {}):
        seen.append((convert_sync_batchnorm(net, **arguments), groups())[1])
    return seen


def test_a_group_is_given_to_selected_layers_that_were_converted_before_too(run):
    expected = [
        [None, "other", "other"],
        [None, "given", "other"],
        ["given"] * 3,
        ["given"] * 3,
    ]
    assert run(2, given_rank) == [expected] * 2


@pytest.mark.parametrize("where", ["argument", "layer"])
def test_a_group_of_a_wrong_type_converts_nothing(where):
    net = nn.Sequential(nn.BatchNorm1d(3), nn.SyncBatchNorm(3))
    group = "world" if where == "argument" else None
    net[1].process_group = "world" if where == "layer" else None
    with pytest.raises(TypeError, match="expected a torch.distributed process group"):
        convert_sync_batchnorm(net, group)
    assert converted(net) == set()
