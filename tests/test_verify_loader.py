"""The health check tells whether a loader gives each rank its own part of the data."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from test_verify_layers import converted, net
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from syncbn_cuda import sync_groups, verify

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


def another_split(rank):
    part, _ = random_split(Squares(), [10, 10], torch.Generator().manual_seed(rank))
    return loader(DistributedSampler(part), part)


def divided_twice(rank):
    part = Subset(Squares(), range(rank, SIZE, 2))
    return loader(DistributedSampler(part), part)


@dataclass(frozen=True)
class Mistake:
    """How a rank makes its loader wrong, and what is found: parts of the texts."""

    plant: Callable
    problem: str
    remedy: str
    ranks: tuple[int, ...] = (1,)


BOTH = (0, 1)
NONE, TWICE = "has no DistributedSampler", "shuffles twice, by DistributedSampler and RandomSampler"
MISTAKES = {
    "no sampler": Mistake(lambda rank: loader(), NONE, "sampler=DistributedSampler", BOTH),
    "shuffle=True": Mistake(lambda rank: loader(shuffle=True), NONE, "sampler=Distr", BOTH),
    "no batches": Mistake(
        lambda rank: DataLoader(Squares(), batch_size=None), NONE, "sampler=Distr", BOTH
    ),
    "none on one rank": Mistake(
        lambda rank: loader(DistributedSampler(Squares()) if rank == 0 else None), NONE, "sampler"
    ),
    "rank": Mistake(distributed(rank=0, num_replicas=2), "has rank=0", "after init_process_group"),
    "world": Mistake(
        distributed(rank=0, num_replicas=1), "num_replicas=1, where 2 share", "after init", BOTH
    ),
    "seed": Mistake(distributed(seed=(0, 7)), "differ in seed.*: 0 on rank 0; 7", "same seed"),
    "epoch": Mistake(distributed(epoch=(0, 3)), "differ in epoch", "same epoch"),
    "shuffle": Mistake(distributed(shuffle=(False, True)), "differ in shuffle", "same shuffle"),
    "size": Mistake(distributed(size=(SIZE, 18)), "divide different datasets", "same dataset"),
    "split": Mistake(another_split, "divide different datasets", "random_split with generator"),
    "divided twice": Mistake(divided_twice, "divide different datasets", "same dataset"),
    "shuffled twice": Mistake(
        lambda rank: loader(OverSampler(RandomSampler(Squares()))), TWICE, "leave the order", BOTH
    ),
    "shuffled in two places": Mistake(
        lambda rank: loader(DistributedSampler(RandomSampler(Squares()))), TWICE, "leave", BOTH
    ),
    "batches": Mistake(
        lambda rank: loader(dataset=Squares(SIZE - 4 * rank)),
        "different numbers of batches.*: 10 on rank 0; 8 on rank 1",
        "drop_last",
    ),
    "a loader on one rank": Mistake(
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
    "a batch sampler of its own": lambda rank: DataLoader(
        Squares(), batch_sampler=[[rank, 2 + rank], [4 + rank]]
    ),
    "drawn with replacement": lambda rank: loader(WeightedRandomSampler([1.0] * SIZE, SIZE)),
    "parts by rank": lambda rank: loader(dataset=Subset(Squares(), range(rank, SIZE, 2))),
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
    mistake = MISTAKES[name]
    assert reports[0][name] == reports[1][name]
    (finding,), text = reports[0][name]
    assert re.search(mistake.problem, finding.problem), finding
    assert re.search(mistake.remedy, finding.remedy), finding
    assert (finding.layers, finding.ranks) == ((), mistake.ranks)
    assert text.endswith(f"1 found:\n1. {finding}")


@pytest.mark.parametrize("name", CORRECT)
def test_correct_loaders_are_silent(reports, name):
    assert reports[0][name] == reports[1][name]
    assert reports[0][name][0] == []


def test_what_cannot_be_judged_is_said(reports):
    for name, why in (
        ("an iterable dataset", "its dataset is iterable"),
        ("a sampler of its own", "its sampler is of class Own"),
        ("a batch sampler of its own", "its sampler is of class list"),
        ("drawn with replacement", "its sampler draws with replacement"),
        ("no loader of torch's", "it is of class list"),
    ):
        assert f"cannot be judged: {why}" in reports[0][name][1]


def shared_rank(rank):
    """Two ranks hold one copy of the model; DDP's group says so, and those two share the data."""
    group = sync_groups(2)
    model = DistributedDataParallel(converted(net(), group), process_group=group)
    right = DistributedSampler(Squares(), 2, rank % 2)
    wrong = DistributedSampler(Squares(), 4, rank)
    return [verify(model, loader(sampler)).findings for sampler in (right, wrong)]


def test_the_ranks_of_ddp_share_the_data(run):
    first, *others = run(4, shared_rank)
    assert others == [first] * 3
    silent, ((problem, _, ranks, _),) = first
    assert silent == [] and "num_replicas=4, where 2 share" in problem and ranks == (0, 1, 2, 3)


@pytest.mark.parametrize("make", [SequentialSampler, RandomSampler])
def test_a_process_alone_needs_no_division(make):
    assert verify(converted(net()), loader(make(Squares()))).findings == []


def sharded_rank(rank):
    """Sharded over the world each rank has data of its own; otherwise it cannot be told."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    loaders = [loader(DistributedSampler(Squares(), 4, rank)), loader()]
    models = {
        "over the world": fully_shard(converted(net())),
        "over a part": fully_shard(converted(net(), mesh["data"]), mesh=mesh["data"]),
        "twice": fully_shard(converted(net()), mesh=mesh),
        "by tensors": parallelize_module(
            nn.Sequential(nn.Linear(4, 4)), init_device_mesh("cpu", (4,)), {"0": ColwiseParallel()}
        ),
    }
    return {
        name: [[finding.problem for finding in verify(model, each).findings] for each in loaders]
        for name, model in models.items()
    }


def test_who_shares_the_data_of_sharded_models(run):
    first, *others = run(4, sharded_rank)
    assert others == [first] * 3
    silent, (problem,) = first.pop("over the world")
    assert silent == [] and NONE in problem
    assert set(map(str, first.values())) == {"[[], []]"}
