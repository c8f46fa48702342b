"""Whether a loader gives each rank its own part of the data, as far as that can be told.

Nothing is loaded and no sampler is asked for an index: both may have effects.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
)

from syncbn_cuda.health import epochs
from syncbn_cuda.health.data import identity, length
from syncbn_cuda.health.report import Finding, differing, over_ranks

if TYPE_CHECKING:
    from syncbn_cuda.health.facts import RankFacts

#: Those that go through the data once, all of it: on several ranks each sample comes several times.
_UNDIVIDED = (BatchSampler, SequentialSampler, RandomSampler, SubsetRandomSampler)

_DIVIDE = (
    "give the loader sampler=DistributedSampler(dataset), made after init_process_group, which "
    "tells it rank and world"
)
#: What has to be the same in the samplers of all ranks.
_SHARED = ("shuffle", "seed", "epoch", "drop_last")


class SamplerFacts(NamedTuple):
    """A sampler that divides the data among ranks."""

    rank: int
    replicas: int
    shuffle: bool
    seed: int  # 0 where no order is drawn
    epoch: int  # likewise
    drop_last: bool
    repeats: bool  # it gave the same order for two epochs


class LoaderFacts(NamedTuple):
    """What a rank knows of its loader."""

    sampler: SamplerFacts | None
    also_shuffles: str  # the class beside the sampler that draws an order as well
    data: str  # what tells one dataset from another
    batches: int | None
    opaque: str  # why nobody can tell how it is divided; empty where one can


def loader_facts(loader: Any) -> LoaderFacts:
    """Describes a loader, and begins to watch the epochs of its sampler."""
    if not isinstance(loader, DataLoader):
        return LoaderFacts(None, "", "", None, f"it is of class {type(loader).__name__}")
    if isinstance(loader.dataset, IterableDataset):
        return LoaderFacts(None, "", "", None, "its dataset is iterable and divides itself")
    samplers = _samplers(loader)
    dividing = [
        s for s in samplers if _number(s, "num_replicas") and _number(s, "rank") is not None
    ]
    opaque = "" if dividing else next(filter(None, map(_why_opaque, samplers)), "")
    drawing = [s for s in samplers if isinstance(s, RandomSampler | SubsetRandomSampler)]
    data = loader.dataset
    for sampler in drawing:
        if isinstance(sampler, SubsetRandomSampler):
            data = Subset(data, sampler.indices)
    facts = LoaderFacts(
        _sampler_facts(dividing[0]) if dividing else None,
        type(drawing[0]).__name__ if drawing else "",
        identity(data),
        length(loader),
        opaque,
    )
    for sampler in dividing:
        if isinstance(sampler, DistributedSampler):
            epochs.watch(sampler)
    return facts


def _samplers(loader: DataLoader[Any]) -> list[Any]:
    """Returns the samplers of a loader from the outermost to those that they hold."""
    found: list[Any] = []
    todo: list[Any] = [loader.sampler if loader.batch_sampler is None else loader.batch_sampler]
    while todo:
        sampler = todo.pop(0)
        if not any(sampler is other for other in found):
            found.append(sampler)
            todo += _held(sampler)
    return found


def _held(sampler: Any) -> Iterator[Any]:
    for name, value in getattr(sampler, "__dict__", {}).items():
        # What a batch sampler goes through, be it a list of indices.
        if isinstance(value, Sampler) or (name == "sampler" and type(sampler) is BatchSampler):
            yield value
        elif name in ("dataset", "data_source"):  # it may be a sampler in the dress of a dataset
            inner = getattr(value, "__dict__", {}).values()
            yield from (item for item in inner if isinstance(item, Sampler))


def _why_opaque(sampler: Any) -> str:
    if getattr(sampler, "replacement", False):
        return "its sampler draws with replacement"
    return (
        "" if type(sampler) in _UNDIVIDED else f"its sampler is of class {type(sampler).__name__}"
    )


def _sampler_facts(sampler: Any) -> SamplerFacts:
    shuffle = bool(getattr(sampler, "shuffle", False))
    return SamplerFacts(
        _number(sampler, "rank") or 0,
        _number(sampler, "num_replicas") or 0,
        shuffle,
        shuffle and _number(sampler, "seed") or 0,
        shuffle and _number(sampler, "epoch") or 0,
        bool(getattr(sampler, "drop_last", False)),
        epochs.repeats(sampler),
    )


def _number(sampler: Any, name: str) -> int | None:
    """Returns a number that a sampler has; None where it is another's word for something else."""
    value = getattr(sampler, name, None)
    return int(value) if isinstance(value, int) else None


def loader_findings(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Returns what is wrong with the loaders of all ranks."""
    loaders = {facts.rank: facts.loader for facts in ranks if facts.loader is not None}
    if not loaders:
        return []
    uneven = differing(
        {facts.rank: facts.loader is not None for facts in ranks},
        "the health check got a loader on some ranks only",
        "call verify(model, loader) alike on every rank",
        lambda given: "given" if given else "none",
    )
    if uneven:
        return uneven
    found = [*_undivided(loaders, ranks), *_wrong_parts(ranks), *_epochs(loaders)]
    if any(loader.sampler for loader in loaders.values()):
        found += _different_parts(loaders)
    return found or differing(
        {rank: loader.batches for rank, loader in loaders.items()},
        "the loaders have different numbers of batches, and ranks with fewer let the others hang",
        "divide the data evenly (DistributedSampler), or set drop_last=True",
    )


def loader_note(ranks: Sequence[RankFacts]) -> str:
    """Returns how the loader divides the data, in a line."""
    loader = ranks[0].loader
    if loader is None:
        return "loader: none given"
    if loader.sampler is not None:
        return f"loader: divided among {loader.sampler.replicas}, {loader.data}"
    if loader.opaque:
        return f"loader: its division cannot be judged: {loader.opaque}"
    return f"loader: divided by none of torch's samplers, {loader.data}"


def _undivided(loaders: dict[int, LoaderFacts], ranks: Sequence[RankFacts]) -> list[Finding]:
    # Ranks that hold different data have divided them before.
    if len({loader.data for loader in loaders.values()}) > 1:
        return []
    loaders = {facts.rank: loaders[facts.rank] for facts in ranks if len(facts.replicas) > 1}
    whole = [r for r, loader in loaders.items() if loader.sampler is None and not loader.opaque]
    problem = "the loader has no DistributedSampler: each rank goes through all of the data"
    return [Finding(problem, (), tuple(whole), _DIVIDE)] if whole else []


def _wrong_parts(ranks: Sequence[RankFacts]) -> list[Finding]:
    found = []
    for facts in ranks:
        if facts.loader is None or facts.loader.sampler is None:
            continue
        if not facts.replicas or (facts.world == 1 and (facts.launched or ("", 1))[1] > 1):
            continue  # who shares the data is not known here
        sampler, expected = facts.loader.sampler, len(facts.replicas)
        if sampler.replicas != expected:
            problem = (
                f"the sampler has num_replicas={sampler.replicas}, where {expected} share the data"
            )
            found.append((problem, facts.rank, _DIVIDE))
        elif sampler.rank != facts.replicas.index(facts.rank):
            problem = f"the sampler has rank={sampler.rank}, which is not that of the process"
            found.append((problem, facts.rank, _DIVIDE))
    return over_ranks(found)


def _different_parts(loaders: dict[int, LoaderFacts]) -> list[Finding]:
    samplers = {rank: loader.sampler for rank, loader in loaders.items() if loader.sampler}
    found = []
    for name in _SHARED:
        values = {rank: getattr(sampler, name) for rank, sampler in samplers.items()}
        remedy = f"give the samplers of all ranks the same {name}"
        found += differing(values, f"the samplers differ in {name}, so their parts overlap", remedy)
    return found + differing(
        {rank: loaders[rank].data for rank in samplers},
        "the samplers divide different datasets, so their parts overlap",
        "make the same dataset on every rank; random_split with "
        "generator=torch.Generator().manual_seed(seed)",
    )


def _epochs(loaders: dict[int, LoaderFacts]) -> list[Finding]:
    found = []
    for rank, loader in loaders.items():
        if loader.sampler is None:
            continue
        if loader.sampler.shuffle and loader.also_shuffles:
            problem = f"the loader shuffles twice, by DistributedSampler and {loader.also_shuffles}"
            found.append((problem, rank, "leave the order to DistributedSampler(shuffle=True)"))
        if loader.sampler.repeats:
            problem = "set_epoch was not called: two epochs had the same order"
            found.append((problem, rank, epochs.REMEDY))
    return over_ranks(found)
