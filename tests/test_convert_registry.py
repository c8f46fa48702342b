"""Converters for subclasses: registered by a decorator, checked there, and used as they are."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from inputs import numpy, random
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import check_same_steps, saved_and_loaded

from syncbn_cuda import (
    FastSyncBatchNorm,
    _registry,
    convert_sync_batchnorm,
    register_converter,
    revert_sync_batchnorm,
)


class ByHand(nn.BatchNorm1d):
    """Normalises by itself, and has arguments, state and a child of its own."""

    def __init__(self, channels, slope):
        super().__init__(channels)
        self.slope = slope
        self.act = nn.SiLU()
        self.register_buffer("calls", torch.tensor(0))

    def after(self, y):
        self.calls += 1
        return self.act(y) * self.slope

    def forward(self, input):
        if self.training:
            self.num_batches_tracked += 1
        return self.after(
            F.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, self.training
            )
        )


@register_converter(ByHand)
class SyncByHand(ByHand, FastSyncBatchNorm):
    def forward(self, input):
        return self.after(FastSyncBatchNorm.forward(self, input))


class BySuper(nn.BatchNorm2d):
    def forward(self, input):
        return super().forward(input + 1).sigmoid()


@register_converter(BySuper)
class SyncBySuper(BySuper, FastSyncBatchNorm):
    pass


class Synced(nn.SyncBatchNorm):
    def forward(self, input):
        return F.silu(super().forward(input))


@register_converter(Synced)
class FastSynced(FastSyncBatchNorm):
    def forward(self, input):
        return F.silu(super().forward(input))


REGISTERED = {
    "by hand": (lambda: ByHand(5, 0.5), SyncByHand),
    "by super()": (lambda: BySuper(5), SyncBySuper),
    "synchronised": (lambda: Synced(5), FastSynced),
}


@pytest.mark.parametrize(("build", "replacement"), REGISTERED.values(), ids=REGISTERED)
def test_a_registered_subclass_does_the_same_and_comes_back(build, replacement):
    net, plain = (nn.Sequential(build()).double() for _ in range(2))
    if isinstance(plain[0], Synced):  # torch trains it on accelerators alone
        plain = nn.Sequential(nn.BatchNorm2d(5), nn.SiLU()).double()
    attributes = vars(net[0]).keys()
    original, text = type(net[0]), repr(net)
    assert type(convert_sync_batchnorm(net)[0]) is replacement
    check_same_steps(
        net, plain, random((4, 5, 6) if original is ByHand else (4, 5, 3, 2), torch.float64)
    )
    reverted = revert_sync_batchnorm(net)[0]
    assert type(reverted) is original and repr(net) == text
    assert vars(reverted).keys() == attributes


@pytest.mark.parametrize(("build", "replacement"), REGISTERED.values(), ids=REGISTERED)
def test_copies_and_pickles_of_a_registered_subclass(build, replacement):
    layer = convert_sync_batchnorm(build())
    x = random((4, 5, 6, 2))
    for other in (copy.deepcopy(layer), saved_and_loaded(layer)):
        assert type(other) is replacement
        torch.testing.assert_close(other(x), copy.deepcopy(layer)(x))
        assert type(revert_sync_batchnorm(other)) is type(build())
    assert type(layer) is replacement


def test_one_that_was_made_as_a_replacement_stands_for_what_it_replaces():
    layer = SyncByHand(3, slope=2.0)
    assert layer.process_group is None and layer(random((4, 3, 5))).shape == (4, 3, 5)
    assert type(revert_sync_batchnorm(layer)) is ByHand and layer.slope == 2.0


class Further(BySuper):
    pass


def test_a_subclass_of_a_registered_class_has_no_converter():
    net = nn.Sequential(Further(3), nn.ModuleDict({"bn": BySuper(3), "other": Further(3)}))
    message = r"alone: '0', '1.other' \(a subclass, Further, .*@register_converter\(Further\)"
    with pytest.warns(UserWarning, match=message):
        convert_sync_batchnorm(net)
    assert [type(m) for m in (net[0], *net[1].values())] == [Further, SyncBySuper, Further]


class Base(nn.BatchNorm2d):
    def forward(self, input):
        return F.batch_norm(input, self.running_mean, self.running_var, training=self.training)


class NamesItsBase(nn.BatchNorm2d):
    def forward(self, input):
        return nn.BatchNorm2d.forward(self, input).relu()


class Relu(nn.BatchNorm2d):
    def forward(self, input):
        return super().forward(input).relu()


class ByAHelper(nn.BatchNorm2d):
    def normalise(self, input):
        return F.batch_norm(input, None, None, training=True)

    def forward(self, input):
        return self.normalise(input).relu()


class Slotted(nn.BatchNorm2d):
    __slots__ = ("of_its_own",)


UNFIT = {
    "no class of ours": (Base, (nn.BatchNorm2d,), "expected a subclass of FastSyncBatchNorm"),
    "torch's own": (Base, (FastSyncBatchNorm, nn.SyncBatchNorm), "DistributedDataParallel refuses"),
    "functional": (Base, (Base, FastSyncBatchNorm), "Base.forward normalises without"),
    "base named": (NamesItsBase, (NamesItsBase, FastSyncBatchNorm), "NamesItsBase.forward normal"),
    "its forward unreached": (Relu, (FastSyncBatchNorm, Relu), "would never be called"),
    "its forward dropped": (NamesItsBase, (FastSyncBatchNorm,), r"Unfit\(NamesItsBase, Fast"),
    "by a helper": (ByAHelper, (ByAHelper, FastSyncBatchNorm), "ByAHelper.forward normalises"),
    "other layout": (Slotted, (FastSyncBatchNorm,), "a layer cannot change its class: .*layout"),
}


@pytest.mark.parametrize(("original", "bases", "message"), UNFIT.values(), ids=UNFIT)
def test_a_class_that_would_not_synchronise_is_refused(original, bases, message):
    with pytest.raises(TypeError, match=rf"register_converter\({original.__name__}\): .*{message}"):
        register_converter(original)(type("Unfit", bases, {}))
    with pytest.warns(UserWarning, match="left alone"):
        assert type(convert_sync_batchnorm(original(3))) is original


def test_what_leads_to_such_a_forward_or_inherits_it_under_another_name_is_refused():
    class Around(Base, FastSyncBatchNorm):
        def forward(self, input):
            return super().forward(input) + 1

    class Renamed(FastSyncBatchNorm):
        forward = nn.BatchNorm2d.forward

    for unfit in (Around, Renamed):
        with pytest.raises(TypeError, match="forward normalises without FastSyncBatchNorm"):
            register_converter(Base)(unfit)


def test_a_helper_may_lead_to_ours(monkeypatch):
    monkeypatch.setattr(_registry, "_replacements", dict(_registry._replacements))

    @register_converter(ByAHelper)
    class SyncByAHelper(ByAHelper, FastSyncBatchNorm):
        def normalise(self, input):
            return FastSyncBatchNorm.forward(self, input)

    layer = convert_sync_batchnorm(ByAHelper(3))
    layer(random((4, 3, 5, 5)))
    assert type(layer) is SyncByAHelper and layer.num_batches_tracked == 1


class Frozen(nn.BatchNorm2d):
    """Refuses what is set once it is made."""

    def __setattr__(self, name, value):
        if "made" in vars(self):
            raise AttributeError(f"frozen: {name}")
        super().__setattr__(name, value)

    def forward(self, input):
        return super().forward(input)


def test_a_layer_that_lets_nothing_be_set(monkeypatch):
    monkeypatch.setattr(_registry, "_replacements", dict(_registry._replacements))
    replacement = register_converter(Frozen)(type("SyncFrozen", (Frozen, FastSyncBatchNorm), {}))
    layer = Frozen(3)
    vars(layer)["made"] = True
    assert type(convert_sync_batchnorm(layer)) is replacement
    layer(random((4, 3, 5, 5)))
    assert type(revert_sync_batchnorm(layer)) is Frozen and "_group" not in vars(layer)


@pytest.mark.parametrize("original", [nn.Linear, nn.InstanceNorm2d, FastSyncBatchNorm, "BN", None])
def test_only_batch_norms_have_converters(original):
    with pytest.raises(TypeError, match="expected a subclass of torch's batch norms"):
        register_converter(original)


def test_the_same_class_defined_anew_replaces_and_another_is_refused(monkeypatch):
    monkeypatch.setitem(_registry._replacements, BySuper, SyncBySuper)
    anew = type("SyncBySuper", (BySuper, FastSyncBatchNorm), {"__module__": __name__})
    older = convert_sync_batchnorm(BySuper(3))
    register_converter(BySuper)(anew)
    assert type(convert_sync_batchnorm(BySuper(3))) is anew
    assert type(revert_sync_batchnorm(older)) is BySuper
    with pytest.raises(
        ValueError, match=r"\.SyncBySuper is registered for it already, got .*Other"
    ):
        register_converter(BySuper)(type("Other", (BySuper, FastSyncBatchNorm), {}))
    assert type(convert_sync_batchnorm(BySuper(3))) is anew


def test_what_comes_with_the_package_may_be_replaced(monkeypatch):
    monkeypatch.setitem(_registry._replacements, nn.BatchNorm3d, FastSyncBatchNorm)

    @register_converter(nn.BatchNorm3d)
    class Mine(FastSyncBatchNorm):
        pass

    net = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm3d(3), nn.BatchNorm2d(3)))
    assert [type(layer) for layer in net] == [Mine, FastSyncBatchNorm]
    assert [type(layer) for layer in revert_sync_batchnorm(net)] == [nn.BatchNorm3d, nn.BatchNorm2d]


def replaced_rank(rank):
    net = convert_sync_batchnorm(nn.Sequential(nn.Conv2d(3, 5, 1), BySuper(5), Synced(5)))
    wrapped = DistributedDataParallel(net.double())
    wrapped(random((2, 3, 4, 4), torch.float64, mean=float(rank))).sum().backward()
    return numpy(net[1].running_mean), numpy(net[2].running_var)


def test_registered_subclasses_synchronise_under_ddp(run):
    first, second = run(2, replaced_rank)
    for mine, other, untrained in zip(first, second, (0, 1), strict=True):
        assert mine.tobytes() == other.tobytes() and (mine != untrained).all()


def test_a_symbolic_trace_does_what_a_subclass_adds_once():
    net = convert_sync_batchnorm(nn.Sequential(nn.Conv2d(3, 4, 3), Synced(4)))
    traced = torch.fx.symbolic_trace(net)
    x = random((2, 3, 8, 8))
    for training in (True, False):
        net.train(training), traced.train(training)
        torch.testing.assert_close(traced(x), net(x))
