"""What is wrong with layers and groups, from what all ranks have told; the same on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from syncbn_cuda.health.facts import GroupFacts, LayerFacts, RankFacts
from syncbn_cuda.health.report import (
    Finding,
    LayerHealth,
    differing,
    on,
    over_layers,
    over_ranks,
    ranks_by,
    shown_groups,
    spans,
)

#: A layer over the ranks that have it.
Held = dict[int, LayerFacts]

_SAME_MODEL = "build the same model on every rank, in the same order"
_OWN_GROUP = (
    "make the groups on every rank by sync_groups(size), and give each rank the group that holds it"
)
_CONVERT = "convert_sync_batchnorm(model), alike on every rank"

_LARGER = "give the layers the world (process_group=None) or larger groups, sync_groups(size)"
_SERVED = "move the model to such a device, or make the group with backend 'cpu:gloo,cuda:nccl'"

#: What has to be the same on all ranks of a group, and what to do where it is not.
_SETTINGS = {
    "channels": _SAME_MODEL,
    "eps": _SAME_MODEL,
    "momentum": _SAME_MODEL,
    "affine": _SAME_MODEL,
    "track_running_stats": _SAME_MODEL,
    "dtype": "give the model the same type on every rank",
    "device": "move the model to the same kind of device on every rank",
    "mode": "call model.train() on every rank, and layer.eval() for frozen layers on all or none",
}


def conflicts(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Returns what would make a forward of the layers hang, fail or mean something else."""
    held = _by_layer(ranks)
    found = [(name, finding) for name, layer in held.items() for finding in _layer(layer)]
    return over_layers(found) or _orders(ranks)


def unsynchronised(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Returns what is left to normalise over its own rank, where there are several."""
    held = _by_layer(ranks)
    everyone = tuple(facts.rank for facts in ranks)
    trained = {name: layer for name, layer in held.items() if any(map(_trains, layer.values()))}
    if len(ranks) < 2:
        return []
    if trained and not any(map(_reaches_others, trained.values())):
        grouped = any(facts.group for layer in trained.values() for facts in layer.values())
        reason = "each layer's group holds one rank" if grouped else "no trained layer is converted"
        remedy = _LARGER if grouped else _CONVERT
        return [Finding(f"nothing is synchronised: {reason}", tuple(trained), everyone, remedy)]
    found = []
    for name, layer in held.items():
        left = {rank: facts for rank, facts in layer.items() if _stays_behind(facts)}
        if left:
            first = next(iter(left.values()))
            problem = f"{first.class_name} normalises over its own rank: {first.reason}"
            remedy = (
                "convert it, replace it by a batch norm of torch's, or freeze it (layer.eval())"
            )
            found.append((name, Finding(problem, (), tuple(left), remedy)))
    return over_layers(found)


def layer_table(ranks: Sequence[RankFacts]) -> list[LayerHealth]:
    """Returns a row for each layer of any rank."""
    rows = []
    for name, layer in _by_layer(ranks).items():
        first = next(iter(layer.values()))
        groups = [facts.group.ranks for facts in layer.values() if facts.group is not None]
        over = "own rank" if first.over_batch else "own samples"
        if groups:
            over = shown_groups([ranks for ranks in groups if ranks], len(ranks))
        evaluates = ", in evaluation" if first.mode == "evaluation" else ""
        rows.append(LayerHealth(name, first.class_name, over, first.reason + evaluates))
    return rows


def _by_layer(ranks: Sequence[RankFacts]) -> dict[str, Held]:
    layers: dict[str, Held] = {}
    for facts in ranks:
        for layer in facts.layers:
            layers.setdefault(layer.name, {})[facts.rank] = layer
    return layers


def _trains(facts: LayerFacts) -> bool:
    return facts.over_batch and not facts.frozen


def _stays_behind(facts: LayerFacts) -> bool:
    """Whether a layer goes by its own rank and selecting it for conversion would not help."""
    return _trains(facts) and facts.group is None and not facts.convertible


def _reaches_others(layer: Held) -> bool:
    """Whether a layer has a group of several ranks, or one that is not known here."""
    groups = [facts.group.ranks for facts in layer.values() if facts.group is not None]
    return any(ranks is None or len(ranks) != 1 for ranks in groups)


def _layer(layer: Held) -> Iterator[Finding]:
    """Yields what is wrong with one layer, the first of each kind that makes others senseless."""
    grouped = {rank: facts.group for rank, facts in layer.items() if facts.group is not None}
    # Few groups, each of them held by many ranks.
    holders = {key: ranks for key, ranks in ranks_by(_keys(grouped)).items() if key[1]}
    wanted = {rank for _, members in holders for rank in members}
    yield from _refused(layer)
    outside = tuple(rank for rank, group in grouped.items() if group.ranks is None)
    if outside:
        yield Finding("the layer has a group that this rank is not in", (), outside, _OWN_GROUP)
        return
    missing = tuple(sorted(wanted - layer.keys()))
    if missing:
        there = spans(grouped)
        problem = f"the layer exists on some ranks only, {there} of {spans(wanted)}"
        yield Finding(problem, (), missing, _SAME_MODEL)
        return
    alone = tuple(sorted(wanted - grouped.keys()))
    if alone:
        problem = f"the layer is synchronised on some ranks only, {spans(grouped)}"
        yield Finding(problem, (), alone, _CONVERT)
        return
    # A member that holds another group waits there.
    keys = _keys(grouped)
    apart: set[int] = set()
    for key, ranks in holders.items():
        elsewhere = [member for member in key[1] if keys[member] != key]
        apart.update(elsewhere, ranks if elsewhere else ())
    if apart:
        several = len({keys[rank][1] for rank in apart}) > 1
        yield from differing(
            {rank: keys[rank] for rank in apart},
            "the layer's group differs",
            _OWN_GROUP,
            lambda key: on(key[1]) + ("" if several else f" (group {key[0]})"),
        )
        return
    for _, members in holders:
        for setting, remedy in _SETTINGS.items():
            values = {rank: getattr(layer[rank], setting) for rank in members}
            yield from differing(values, f"{setting} differs", remedy)


def _keys(grouped: dict[int, GroupFacts]) -> dict[int, tuple[str, tuple[int, ...]]]:
    """Returns what tells the groups of one rank from those of another."""
    return {rank: (group.name, group.ranks or ()) for rank, group in grouped.items()}


def _refused(layer: Held) -> Iterator[Finding]:
    """Yields where a layer's tensors are on a device that nothing sums over ranks."""
    found = []
    for rank, facts in layer.items():
        if facts.group is None or facts.device == "meta":
            continue
        if facts.group.served and facts.device not in facts.group.served:
            served = " and ".join(facts.group.served)
            problem = f"the layer is on {facts.device}, and its group serves {served} alone"
            found.append((problem, rank, _SERVED))
        elif facts.device == "cpu" and not facts.ours:
            found.append((f"{facts.class_name} does not train on cpu", rank, _CONVERT))
    yield from over_ranks(found)


def _orders(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Returns where the ranks of a group have its layers in another order."""
    orders: dict[GroupFacts, dict[int, tuple[str, ...]]] = {}
    for facts in ranks:
        for layer in facts.layers:
            if layer.group is not None and layer.group.ranks:
                of_group = orders.setdefault(layer.group, {})
                of_group[facts.rank] = (*of_group.get(facts.rank, ()), layer.name)
    found = []
    for of_group in orders.values():
        for finding in differing(of_group, "", _SAME_MODEL):
            first = of_group[min(of_group)]
            moved = {
                name
                for names in of_group.values()
                for name, other in zip(first, names, strict=True)
                if name != other
            }
            layers = tuple(name for name in first if name in moved)
            problem = "the layers stand in another order than on the other ranks"
            found.append(finding._replace(problem=problem, layers=layers))
    return found
