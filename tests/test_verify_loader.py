"""The health check tells whether a loader gives each rank its own part of the data."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from mistakes import Mistake, assert_is_the_one_finding
from test_verify_layers import converted, net
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from syncbn_cuda import verify

SIZE = 20


class Squares(torch.utils.data.Dataset):
    """Of a class of its own, and no sample of it may be asked for."""

    def __init__(self, size=SIZE):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        pytest.fail("a sample was loaded")


class Stream(IterableDataset):
    def __iter__(self):
        pytest.fail("a sample was loaded")


class Own(Sampler):
    """A sampler that divides the data by rank in a way of its own."""

    def __iter__(self):
        return iter(range(dist.get_rank(), SIZE, dist.get_world_size()))

    def __len__(self):
        return SIZE // dist.get_world_size()


class Bare:
    """An order of a rank's part that is no torch ``Sampler``."""

    __len__, __iter__ = Own.__len__, Own.__iter__


class Transformed(torch.utils.data.Dataset):
    """A dataset over another one, which keeps itself as well."""

    def __init__(self, data):
        self.data, self.original, self.names = data, self, ["a", "b"]

    def __len__(self):
        return len(self.data)


class Files(Squares):
    """Lists the files of a rank."""

    def __init__(self, rank):
        super().__init__(10)
        self.files = [(f"{index}.png", index) for index in by_rank(rank)]


class NotDivided(Own):
    """Has the words of a DistributedSampler for other things."""

    rank, num_replicas, seed = "first", torch.ones(2), None


class OverSampler(DistributedSampler):
    """Divides the order that another sampler draws, as wrappers of frameworks do."""

    def __init__(self, sampler, **arguments):
        super().__init__(_AsDataset(sampler), **arguments)


class _AsDataset:
    def __init__(self, sampler):
        self._sampler = sampler

    def __len__(self):
        return len(self._sampler)


def loader(sampler=None, dataset=None, **arguments):
    return DataLoader(Squares() if dataset is None else dataset, 2, sampler=sampler, **arguments)


def distributed(**by_name):
    """A loader with a DistributedSampler; what is a pair differs between the ranks."""

    def plant(rank):
        pick = {k: v[rank] if isinstance(v, tuple) else v for k, v in by_name.items()}
        epoch = pick.pop("epoch", 0)
        data = Squares(pick.pop("size", SIZE))
        sampler = DistributedSampler(data, **pick)
        sampler.set_epoch(epoch)
        return loader(sampler, data)

    return plant


def another_split(rank, wrap=lambda part: part):
    part, _ = random_split(Squares(), [10, 10], torch.Generator().manual_seed(rank))
    return loader(DistributedSampler(part), wrap(part))


def by_rank(rank):
    return range(rank, SIZE, 2)


def divided_twice(rank):
    part = Subset(Squares(), by_rank(rank))
    return loader(DistributedSampler(part), part)


OfLoader = functools.partial(Mistake, layers=())
BOTH = (0, 1)
NONE, TWICE = "has no DistributedSampler", "shuffles twice, by DistributedSampler and RandomSampler"
MISTAKES = {
    "no sampler": OfLoader(lambda rank: loader(), NONE, "sampler=DistributedSampler", ranks=BOTH),
    "shuffle=True": OfLoader(lambda rank: loader(shuffle=True), NONE, "sampler=Distr", ranks=BOTH),
    "no batches": OfLoader(
        lambda rank: DataLoader(Squares(), batch_size=None), NONE, "sampler=Distr", ranks=BOTH
    ),
    "none on one rank": OfLoader(
        lambda rank: loader(DistributedSampler(Squares()) if rank == 0 else None), NONE, "sampler"
    ),
    "rank": OfLoader(distributed(rank=0, num_replicas=2), "has rank=0", "after init_process_group"),
    "world": OfLoader(
        distributed(rank=0, num_replicas=1),
        "num_replicas=1, where 2 share",
        "after init",
        ranks=BOTH,
    ),
    "seed": OfLoader(distributed(seed=(0, 7)), "differ in seed.*: 0 on rank 0; 7", "same seed"),
    "epoch": OfLoader(distributed(epoch=(0, 3)), "differ in epoch", "same epoch"),
    "shuffle": OfLoader(distributed(shuffle=(False, True)), "differ in shuffle", "same shuffle"),
    "size": OfLoader(distributed(size=(SIZE, 18)), "divide different datasets", "same dataset"),
    "split": OfLoader(another_split, "divide different datasets", "random_split with generator"),
    "split, transformed": OfLoader(
        lambda rank: another_split(rank, Transformed), "divide different datasets", "same dataset"
    ),
    "one choice for all": OfLoader(
        lambda rank: loader(SubsetRandomSampler(range(10))), NONE, "sampler=Distr", ranks=BOTH
    ),
    "divided twice": OfLoader(divided_twice, "divide different datasets", "same dataset"),
    "shuffled twice": OfLoader(
        lambda rank: loader(OverSampler(RandomSampler(Squares()))),
        TWICE,
        "leave the order",
        ranks=BOTH,
    ),
    "shuffled in two places": OfLoader(
        lambda rank: loader(DistributedSampler(RandomSampler(Squares()))),
        TWICE,
        "leave",
        ranks=BOTH,
    ),
    "batches": OfLoader(
        lambda rank: loader(dataset=Squares(SIZE - 4 * rank)),
        "different numbers of batches.*: 10 on rank 0; 8 on rank 1",
        "drop_last",
    ),
    "a loader on one rank": OfLoader(
        lambda rank: loader(Own()) if rank == 0 else None, "on some ranks only", "on every rank"
    ),
}

CORRECT = {
    "shuffled": distributed(),
    "not shuffled": distributed(shuffle=False),
    "at another epoch": distributed(epoch=5),
    "a batch sampler over it": lambda rank: DataLoader(
        Squares(), batch_sampler=BatchSampler(DistributedSampler(Squares()), 2, True)
    ),
    "an order that is divided": lambda rank: loader(
        OverSampler(RandomSampler(Squares()), shuffle=False)
    ),
    "a split that is the same": lambda rank: another_split(0),
    "an iterable dataset": lambda rank: loader(dataset=Stream()),
    "a sampler of its own": lambda rank: loader(Own()),
    "a sampler that means other things": lambda rank: loader(NotDivided()),
    "a list as a sampler": lambda rank: loader(list(by_rank(rank))),
    "no sampler of torch's": lambda rank: loader(Bare()),
    "a choice by rank": lambda rank: loader(SubsetRandomSampler(by_rank(rank))),
    "a batch sampler of its own": lambda rank: DataLoader(
        Squares(), batch_sampler=[[rank, 2 + rank], [4 + rank]]
    ),
    "drawn with replacement": lambda rank: loader(WeightedRandomSampler([1.0] * SIZE, SIZE)),
    "parts by rank": lambda rank: loader(dataset=Subset(Squares(), by_rank(rank))),
    "files by rank": lambda rank: loader(dataset=Files(rank)),
    "several parts by rank": lambda rank: loader(
        dataset=ConcatDataset([Squares(), Subset(Squares(), by_rank(rank))])
    ),
    "names of samples": lambda rank: loader(
        DistributedSampler(range(2)), Subset({"a": 1, "b": 2}, ["a", "b"])
    ),
    "tensors by rank": lambda rank: loader(
        dataset=TensorDataset(torch.full((SIZE, 3), float(rank))), shuffle=True
    ),
    "no loader of torch's": lambda rank: [torch.ones(2, 3)],
}


def loaders_rank(rank):
    plants = {name: mistake.plant for name, mistake in MISTAKES.items()} | CORRECT
    model, reports = converted(net()), {}
    for name, plant in plants.items():
        random_state = torch.get_rng_state()
        report = verify(model, plant(rank))
        reports[name] = report.findings, str(report)
    assert torch.equal(torch.get_rng_state(), random_state)
    return reports


@pytest.fixture(scope="module")
def reports(run):
    return run(2, loaders_rank)


@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_is_the_one_finding_on_every_rank(reports, name):
    assert_is_the_one_finding(MISTAKES[name], *(report[name] for report in reports))


@pytest.mark.parametrize("name", CORRECT)
def test_correct_loaders_are_silent(reports, name):
    assert reports[0][name] == reports[1][name]
    assert reports[0][name][0] == []


def test_what_cannot_be_judged_is_said(reports):
    for name, why in (
        ("an iterable dataset", "its dataset is iterable"),
        ("a sampler of its own", "its sampler is of class Own"),
        ("a batch sampler of its own", "its sampler is of class list"),
        ("a list as a sampler", "its sampler is of class list"),
        ("no sampler of torch's", "its sampler is of class Bare"),
        ("drawn with replacement", "its sampler draws with replacement"),
        ("no loader of torch's", "it is of class list"),
    ):
        assert f"cannot be judged: {why}" in reports[0][name][1]


@pytest.mark.parametrize("make", [SequentialSampler, RandomSampler])
def test_a_process_alone_needs_no_division(make):
    assert verify(converted(net()), loader(make(Squares()))).findings == []
