"""Layers whose class is not all: parametrizations, reparametrizing hooks, own forwards, FSDP2."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from inputs import numpy, random
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize
from training import check_same_steps

from syncbn_cuda import (
    FastSyncBatchNorm,
    conversion_report,
    convert_sync_batchnorm,
    register_converter,
    revert_sync_batchnorm,
)

X = (4, 5, 3, 2)


class Registered(nn.BatchNorm2d):
    def forward(self, input):
        return super().forward(input).sigmoid()


@register_converter(Registered)
class SyncRegistered(Registered, FastSyncBatchNorm):
    pass


def two(layer):
    parametrize.register_parametrization(layer, "weight", nn.Softplus())
    parametrize.register_parametrization(layer, "weight", nn.Tanh())
    return parametrize.register_parametrization(layer, "bias", nn.Tanh())


#: What parametrizes a layer, and the tensors that are parametrized by it.
PARAMETRIZED = {
    "one": (lambda bn: parametrize.register_parametrization(bn, "bias", nn.Softplus()), ["bias"]),
    "several": (two, ["weight", "bias"]),
    "weight_norm": (parametrizations.weight_norm, ["weight"]),
    "spectral_norm": (parametrizations.spectral_norm, ["weight"]),
}
CLASSES = [(nn.BatchNorm2d, FastSyncBatchNorm), (Registered, SyncRegistered)]

each_parametrization = pytest.mark.parametrize(
    ("parametrized", "names"), PARAMETRIZED.values(), ids=PARAMETRIZED
)
each_class = pytest.mark.parametrize(("original", "replacement"), CLASSES)


def build(original, parametrized):
    torch.manual_seed(0)
    layer = original(5).double()
    nn.init.uniform_(layer.weight, 0.5, 1.5)
    return parametrized(layer)


def remove(layer, names):
    for name in names:
        parametrize.remove_parametrizations(layer, name)


@each_class
@each_parametrization
def test_a_parametrized_layer_does_the_same_and_comes_back(
    parametrized, names, original, replacement
):
    ours, theirs = build(original, parametrized), build(original, parametrized)
    text, kept = repr(theirs), vars(ours).keys()
    convert_sync_batchnorm(ours)
    assert isinstance(ours, replacement) and parametrize.is_parametrized(ours, names[0])
    check_same_steps(ours, theirs, random(X, torch.float64))
    revert_sync_batchnorm(ours)
    assert isinstance(ours, original) and not isinstance(ours, FastSyncBatchNorm)
    assert repr(ours) == text and vars(ours).keys() == kept
    check_same_steps(ours, theirs, random(X, torch.float64))


@each_class
@each_parametrization
def test_removed_parametrizations_leave_the_very_class(parametrized, names, original, replacement):
    for reverted_first in (True, False):
        ours, theirs = build(original, parametrized), build(original, parametrized)
        convert_sync_batchnorm(ours)
        if reverted_first:
            revert_sync_batchnorm(ours)
        remove(ours, names), remove(theirs, names)
        assert type(ours) is (original if reverted_first else replacement)
        check_same_steps(ours, theirs, random(X, torch.float64))
        assert type(revert_sync_batchnorm(ours)) is original


@each_class
@each_parametrization
def test_parametrized_after_the_conversion(parametrized, names, original, replacement):
    ours = build(original, convert_sync_batchnorm)
    parametrized(ours)
    check_same_steps(ours, build(original, parametrized), random(X, torch.float64))
    assert conversion_report(ours)[0][1:] == (
        replacement.__name__,
        "converted",
        f"from {original.__name__}",
    )
    revert_sync_batchnorm(ours)
    assert parametrize.is_parametrized(ours)
    remove(ours, names)
    assert type(ours) is original


@each_parametrization
def test_copies_of_a_parametrized_layer_are_converted_apart(parametrized, names):
    layer = build(nn.BatchNorm2d, parametrized)
    before, after = copy.deepcopy(layer), copy.deepcopy(convert_sync_batchnorm(layer))
    assert not isinstance(before, FastSyncBatchNorm) and isinstance(after, FastSyncBatchNorm)
    x = random(X, torch.float64)
    check_same_steps(after, before, x)
    assert revert_sync_batchnorm(after) is after
    assert not isinstance(after, FastSyncBatchNorm) and isinstance(layer, FastSyncBatchNorm)


#: The older form: a hook before each forward puts a plain tensor where the parameter was.
HOOKED = {
    "weight_norm": (nn.utils.weight_norm, nn.utils.remove_weight_norm),
    "spectral_norm": (nn.utils.spectral_norm, nn.utils.remove_spectral_norm),
}


@pytest.mark.filterwarnings("ignore:.*is deprecated")
@pytest.mark.parametrize(("add", "take_away"), HOOKED.values(), ids=HOOKED)
def test_reparametrizing_hooks_survive(add, take_away):
    ours, theirs = build(nn.BatchNorm2d, add), build(nn.BatchNorm2d, add)
    kept = vars(ours).keys()
    check_same_steps(convert_sync_batchnorm(ours), theirs, random(X, torch.float64))
    take_away(ours), take_away(theirs)
    assert type(ours) is FastSyncBatchNorm
    check_same_steps(ours, theirs, random(X, torch.float64))
    add(revert_sync_batchnorm(ours))
    assert type(ours) is nn.BatchNorm2d and vars(ours).keys() == kept


class Unknown(nn.BatchNorm2d):
    def forward(self, input):
        return super().forward(input).relu()


def test_what_computes_something_of_its_own_is_left_and_named():
    own_forward = nn.BatchNorm2d(3)
    own_forward.forward = lambda x: x
    parametrized = parametrize.register_parametrization(Unknown(3), "weight", nn.Softplus())
    net = nn.ModuleDict({"sub": Unknown(3), "own": own_forward, "par": parametrized})
    net["plain"] = nn.BatchNorm2d(3)
    classes = {name: type(layer) for name, layer in net.items()}
    with pytest.warns(UserWarning) as caught:
        convert_sync_batchnorm(net)
    (warning,) = caught
    for text in ("sub, par (a subclass, Unknown", "own (has a forward of its own"):
        assert text in str(warning.message)
    assert warning.filename == __file__
    assert type(net["plain"]) is FastSyncBatchNorm
    assert all(type(net[name]) is classes[name] for name in ("sub", "own", "par"))


def test_a_warning_that_is_an_error_leaves_all_as_it_was():
    net = nn.Sequential(nn.BatchNorm2d(3), Unknown(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="left alone"):
            convert_sync_batchnorm(net)
    assert type(net[0]) is nn.BatchNorm2d


class Own(FastSyncBatchNorm):
    def forward(self, input):
        return super().forward(input).relu()


def test_reverting_leaves_and_names_what_it_would_break():
    net = convert_sync_batchnorm(
        nn.ModuleDict({"now_own": nn.BatchNorm2d(3), "set": nn.BatchNorm2d(3)})
    )
    net["now_own"].__class__ = Own
    net["set"].forward = lambda x: -x
    net["own"], net["ok"] = Own(3), convert_sync_batchnorm(nn.BatchNorm2d(3))
    x = torch.randn(2, 3, 4, 4)
    before = [layer.eval()(x) for layer in net.values()]
    message = r"left alone: now_own, own \(a subclass, Own, that conv.*; set \(has a forward of"
    with pytest.warns(UserWarning, match=message) as caught:
        revert_sync_batchnorm(net)
    assert caught[0].filename == __file__
    for layer, y in zip(net.values(), before, strict=True):
        torch.testing.assert_close(layer(x), y)
    assert [type(layer) for layer in net.values()][-2:] == [Own, nn.BatchNorm2d]


def sharded(net, mesh):
    for child in (net[1], net):  # a block that holds a batch norm, and the rest
        fully_shard(child, mesh=mesh)
    return net


def wrapped(net, mesh):
    return DistributedDataParallel(net)


def wrapped_rank(rank, wrap, converted_first):
    torch.manual_seed(0)
    block = nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4))
    net = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), block).double()
    mesh = init_device_mesh(torch.get_default_device().type, (2,))
    if converted_first:
        net = wrap(convert_sync_batchnorm(net), mesh)
    else:
        net = convert_sync_batchnorm(wrap(net, mesh))
    assert type(block[1]) is FastSyncBatchNorm
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(2):
        y = net(random((2 + rank, 3, 4, 4), torch.float64, mean=float(rank + step)))
        y.pow(3).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = net.state_dict()
    full = [getattr(value, "full_tensor", lambda value=value: value)() for value in state.values()]
    return [numpy(value) for value in full]


@pytest.mark.parametrize("wrap", [wrapped, sharded])
def test_before_and_after_wrapping_is_the_same(run, wrap):
    before, after = (run(2, wrapped_rank, wrap, first) for first in (True, False))
    assert len(before[0]) == 7
    for values in zip(*before, *after, strict=True):
        assert len({value.tobytes() for value in values}) == 1


def itself_sharded_rank(rank):
    mesh = init_device_mesh(torch.get_default_device().type, (2,))
    plain, ours = (
        fully_shard(layer(4), mesh=mesh) for layer in (nn.BatchNorm2d, FastSyncBatchNorm)
    )
    with pytest.warns(UserWarning, match=r"convert.* alone: 0 \(fully_shard, applied to it"):
        convert_sync_batchnorm(nn.Sequential(plain))
    with pytest.warns(UserWarning, match=r"revert.* alone: 0 \(fully_shard, applied to it"):
        revert_sync_batchnorm(nn.Sequential(ours))
    ours(random((2, 4, 3, 3), mean=float(rank))).sum().backward()
    kept = all(isinstance(layer, FSDPModule) for layer in (plain, ours))
    return kept and isinstance(ours, FastSyncBatchNorm), numpy(ours.running_mean)


def test_a_layer_that_is_itself_sharded_is_left_and_named(run):
    (kept, mean), (also_kept, other) = run(2, itself_sharded_rank)
    assert kept and also_kept and mean.tobytes() == other.tobytes() and (mean != 0).all()
