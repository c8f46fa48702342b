"""The health check names each mistake in layers, groups, devices and launch, alike on all ranks."""

from __future__ import annotations

import warnings
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from mistakes import Mistake, assert_is_the_one_finding
from test_convert_report import ByItself, Unknown, own_forward
from torch import nn

from syncbn_cuda import (
    FastSyncBatchNorm,
    convert_sync_batchnorm,
    functional,
    sync_groups,
    verify,
)
from syncbn_cuda.health import facts


def net(first=nn.BatchNorm2d, **settings):
    """Two layers that normalise, of which the first is given."""
    layers = {"bn": first(4, **settings), "conv": nn.Conv2d(4, 4, 3), "last": nn.BatchNorm2d(4)}
    return nn.Sequential(OrderedDict(layers))


def converted(model, group=None):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of layers that are left
        return convert_sync_batchnorm(model, group)


def left(layer):
    """A layer that conversion leaves, beside one that it takes."""
    return lambda rank, patch: converted(net(lambda channels: layer()))


def setting(**by_rank):
    """A layer's argument that differs between the ranks."""

    def plant(rank, patch):
        return converted(net(**{name: values[rank] for name, values in by_rank.items()}))

    return plant


def changed_on_one(change):
    """A converted model that rank 1 changes; in place, or by returning another."""

    def plant(rank, patch):
        model = converted(net())
        return (change(model) or model) if rank == 1 else model

    return plant


def groups_of_another_size(rank, patch):
    alone = sync_groups(1)
    return converted(net(), alone if rank == 0 else None)


def groups_made_apart(rank, patch):
    return converted(net(), [dist.new_group([0, 1]) for _ in range(2)][rank])


def outside(rank, patch):
    return converted(net(), dist.new_group([0]))


def converted_on_one(rank, patch):
    return converted(net()) if rank == 0 else net()


def another_order(rank, patch):
    layers = list(net().named_children())
    return converted(nn.Sequential(OrderedDict(layers if rank == 0 else layers[::-1])))


def on_one_gpu(rank, patch):
    patch.setattr(facts, "gpus_of", lambda model: ("host GPU 7",))
    return converted(net())


def group_without_a_backend(rank, patch):
    return converted(net(), dist.new_group(backend="cuda:gloo"))


def wrong_sum(error):
    """A sum over ranks that comes out too large on one of them."""

    def plant(rank, patch):
        right = functional.all_reduce
        patch.setattr(functional, "all_reduce", lambda *args: right(*args).add_(error * rank))
        return converted(net())

    return plant


def sum_that_raises(rank, patch):
    def fail(*args):
        raise RuntimeError("no route to host")

    patch.setattr(functional, "all_reduce", fail)
    return converted(net())


def frozen_ones_converted(rank, patch):
    model = net()
    converted(model.last).eval()
    return model


def one_layer_in_evaluation(model):
    model.last.eval()


BOTH, ALL, LAST = (0, 1), ("bn", "last"), ("last",)
SAME_MODEL = "the same model on every rank"
MISTAKES = {
    "not converted": Mistake(
        lambda rank, patch: net(), "nothing is synchronised", "convert_sync", ALL, BOTH
    ),
    "only frozen ones converted": Mistake(
        frozen_ones_converted, "nothing is synchronised: no trained", "convert_sync", ranks=BOTH
    ),
    "groups of one rank": Mistake(
        lambda rank, patch: converted(net(), sync_groups(1)),
        "nothing is synchronised: each layer's group holds one rank",
        "larger groups",
        ALL,
        BOTH,
    ),
    "a subclass": Mistake(
        left(lambda: Unknown(4)), "^Unknown normalises over its own", "freeze", ranks=BOTH
    ),
    "a third party's": Mistake(
        left(ByItself), "ByItself normalises.*none of torch's", "freeze", ranks=BOTH
    ),
    "its own forward": Mistake(
        left(own_forward), "BatchNorm2d normalises.*forward of its own", "freeze", ranks=BOTH
    ),
    "groups that differ": Mistake(
        groups_of_another_size,
        "group differs: rank 0 on rank 0; ranks 0-1 on rank 1",
        "sync_groups",
        ALL,
    ),
    "groups made apart": Mistake(
        groups_made_apart, r"group differs: ranks 0-1 \(group .*\) on rank 0;", "sync_groups", ALL
    ),
    "outside of its group": Mistake(outside, "a group that this rank is not in", "each rank", ALL),
    "a layer of one rank": Mistake(
        changed_on_one(lambda model: model[:2]), "exists on some ranks only, 0", SAME_MODEL, LAST
    ),
    "channels": Mistake(
        changed_on_one(lambda model: model.add_module("last", FastSyncBatchNorm(5))),
        "channels differs: 4 on rank 0; 5 on rank 1",
        SAME_MODEL,
        LAST,
    ),
    "eps": Mistake(setting(eps=(1e-5, 1e-3)), "eps differs: 1e-05 on rank 0; 0.001", SAME_MODEL),
    "momentum": Mistake(setting(momentum=(0.1, None)), "momentum differs: .* None", SAME_MODEL),
    "affine": Mistake(setting(affine=(True, False)), "affine differs", SAME_MODEL),
    "statistics": Mistake(
        setting(track_running_stats=(True, False)), "track_running_stats differs", SAME_MODEL
    ),
    "dtype": Mistake(
        setting(dtype=(torch.float32, torch.float64)), "dtype differs: float32 .* float64", "type"
    ),
    "device": Mistake(setting(device=("cpu", "meta")), "device differs: cpu on .* meta", "move"),
    "evaluation": Mistake(
        changed_on_one(lambda model: model.eval()),
        "mode differs: training on rank 0; evaluation on rank 1",
        "model.train",
        ALL,
    ),
    "one layer in evaluation": Mistake(
        changed_on_one(one_layer_in_evaluation), "mode differs", "model.train", LAST
    ),
    "converted on one rank": Mistake(
        converted_on_one, "synchronised on some ranks only, 0$", "convert_sync", ALL
    ),
    "another order": Mistake(another_order, "stand in another order", SAME_MODEL, ALL),
    "one GPU": Mistake(
        on_one_gpu, "2 ranks are on one GPU, host GPU 7", "cuda.set_device", (), BOTH
    ),
    "no backend": Mistake(
        group_without_a_backend, "on cpu, and its group serves cuda alone", "gloo", ALL, BOTH
    ),
    "torch's on the CPU": Mistake(
        lambda rank, patch: net(nn.SyncBatchNorm),
        "SyncBatchNorm does not train on cpu",
        "convert_sync",
        ranks=BOTH,
    ),
    "DataParallel": Mistake(
        lambda rank, patch: nn.DataParallel(converted(net())),
        "nn.DataParallel: each device",
        "DistributedDataParallel",
        ("",),
        BOTH,
    ),
    "statistics that are wrong": Mistake(
        wrong_sum(1.0), "trial forward over ranks 0-1 went wrong: the mean is off", "network", ALL
    ),
    "statistics that differ in a bit": Mistake(
        wrong_sum(5e-7), "trial forward over ranks 0-1 went wrong: bits of its own", "network", ALL
    ),
    "a sum that raises": Mistake(
        sum_that_raises, "RuntimeError: no route to host on rank 0", "network", ALL, BOTH
    ),
}


def mistakes_rank(rank):
    """Makes every mistake in turn: starting ranks takes longer than making them does."""
    reports = {}
    for name, mistake in MISTAKES.items():
        with pytest.MonkeyPatch.context() as patch:
            report = verify(mistake.plant(rank, patch))
        reports[name] = report.findings, str(report)
    return reports


@pytest.fixture(scope="module")
def reports(run):
    return run(2, mistakes_rank)


@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_is_the_one_finding_on_every_rank(reports, name):
    assert_is_the_one_finding(MISTAKES[name], *(report[name] for report in reports))


def halves_rank(rank):
    """The first half of the ranks is one group, the others believe in the world."""
    half = sync_groups(2)
    return verify(converted(net(), half if rank < 2 else None)).findings


def test_most_ranks_are_taken_to_be_right(run):
    findings = run(4, halves_rank)
    assert findings == [findings[0]] * 4
    ((problem, layers, ranks, _),) = findings[0]
    assert problem == "the layer's group differs: ranks 0-1 on ranks 0-1; ranks 0-3 on ranks 2-3"
    assert (layers, ranks) == (ALL, (2, 3))


@pytest.mark.parametrize("initialised", [True, False], ids=["a world of one", "no world"])
@pytest.mark.parametrize(
    "variable", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"]
)
def test_a_process_that_was_started_with_others_is_not_alone(monkeypatch, variable, initialised):
    monkeypatch.setenv(variable, "4")
    if initialised:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ((problem, layers, ranks, remedy),) = verify(converted(net())).findings
    finally:
        if initialised:
            dist.destroy_process_group()
    assert f"4 processes were started ({variable}=4)" in problem
    assert (layers, ranks) == ((), (0,)) and "init_process_group" in remedy


def test_the_innermost_launcher_counts(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert verify(converted(net())).findings == []
