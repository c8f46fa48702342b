"""The health check sees whether a sampler's epoch is set, in whatever way its loader works."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from test_verify_layers import converted, net
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

from syncbn_cuda import verify

DATA = TensorDataset(torch.arange(12.0))


def sampler_of(**arguments):
    return DistributedSampler(DATA, 1, 0, **arguments)


def batched(sampler):
    return DataLoader(DATA, batch_sampler=BatchSampler(sampler, 2, False))


LOADERS = {
    "plain": lambda sampler: DataLoader(DATA, 2, sampler=sampler),
    "sample by sample": lambda sampler: DataLoader(DATA, None, sampler=sampler),
    "a batch sampler": batched,
    "workers that stay": lambda sampler: DataLoader(
        DATA,
        2,
        sampler=sampler,
        num_workers=1,
        persistent_workers=True,
        multiprocessing_context="spawn",  # a process of tests may have threads
    ),
}


def epoch_of(loader):
    return [value for (batch,) in loader for value in batch.flatten().tolist()]


def findings(loader):
    return verify(converted(net()), loader).findings


@pytest.mark.parametrize("name", LOADERS)
def test_a_second_epoch_in_the_same_order_warns_once_and_is_found(name):
    loader = LOADERS[name](sampler_of())
    assert findings(loader) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = epoch_of(loader)
    assert findings(loader) == []  # and the watch goes on
    with pytest.warns(UserWarning, match=r"second epoch .* call sampler.set_epoch\(epoch\)"):
        assert epoch_of(loader) == first
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert epoch_of(loader) == first
    ((problem, layers, ranks, remedy),) = findings(loader)
    assert problem.startswith("set_epoch was not called") and remedy.startswith("call sampler.set")
    assert (layers, ranks) == ((), (0,))


@pytest.mark.parametrize("begin", [0, 5])
def test_a_sampler_that_is_given_its_epochs_is_left_alone(begin):
    sampler, other = sampler_of(seed=3), sampler_of(seed=3)
    loader = LOADERS["plain"](sampler)
    orders = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for epoch in range(begin, begin + 3):
            for each in (sampler, other):
                each.set_epoch(epoch)
            assert findings(loader) == []
            orders.append(list(other))
            assert epoch_of(loader) == orders[-1]
    assert sorted(orders[0]) == list(range(12)) and orders[0] != orders[1]
    sampler.set_epoch(9)
    assert type(sampler.epoch) is int


def test_the_epoch_may_be_set_for_the_first_time_after_the_first_epoch():
    sampler = sampler_of()
    loader = LOADERS["plain"](sampler)
    findings(loader)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for epoch in (1, 2):
            epoch_of(loader)
            sampler.set_epoch(epoch)
    assert findings(loader) == []


def test_each_loader_is_watched_by_itself():
    loaders = [LOADERS["plain"](sampler_of()) for _ in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for loader in loaders:
            findings(loader)
            epoch_of(loader)
    with pytest.warns(UserWarning, match="second epoch"):
        epoch_of(loaders[1])
    assert findings(loaders[0]) == [] and len(findings(loaders[1])) == 1


def test_an_order_that_never_changes_is_not_watched():
    loader = LOADERS["plain"](sampler_of(shuffle=False))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            assert findings(loader) == []
            assert epoch_of(loader) == list(range(12))


def reloaded(sampler):
    return pickle.loads(pickle.dumps(sampler))


@pytest.mark.parametrize("copied", [copy.deepcopy, reloaded])
def test_a_watched_epoch_is_its_number_and_copies_are_not_watched(copied):
    sampler, other = sampler_of(), sampler_of()
    for each in (sampler, other):
        each.set_epoch(4)
    findings(LOADERS["plain"](sampler))
    assert sampler.epoch == 4 and repr(sampler.epoch) == "4" and sampler.epoch + 1 == 5
    assert type(copied(sampler).epoch) is int
    assert list(copied(sampler)) == list(sampler) == list(other)


def ranks_rank(rank):
    loader = DataLoader(DATA, 2, sampler=DistributedSampler(DATA))
    model = converted(net())
    verify(model, loader)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            epoch_of(loader)
    return [str(warning.message) for warning in told], verify(model, loader).findings


def test_one_rank_warns_and_all_ranks_are_found(run):
    (told, first), (silence, second) = run(2, ranks_rank)
    assert len(told) == 1 and silence == []
    assert first == second and len(first) == 1 and first[0].ranks == (0, 1)
