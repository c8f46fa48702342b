"""The proof: a forward over each group, on batches that differ by rank and whose sums are known.

It takes the way that training takes, through a layer made for it: that of the model, its buffers
and its gradients are left alone. Layers with the same group, type and kind of device share one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from syncbn_cuda._exchange import gather, own_rank
from syncbn_cuda.health.facts import LayerFacts, RankFacts, device_of, dtype_of, layers_of
from syncbn_cuda.health.report import Finding, differing, on
from syncbn_cuda.module import FastSyncBatchNorm

_REMEDY = "check the backend and the network: an all_reduce over the group gives another sum"

#: Channels beyond these would tell no more.
_CHANNELS = 64
#: The sums are of whole numbers and exact; what rounds is the division and the type of the buffer.
_ROUNDINGS = 4


class Trial(NamedTuple):
    """A forward that a group makes."""

    group: str
    ranks: tuple[int, ...]
    device: str
    dtype: str


class Outcome(NamedTuple):
    """What a rank got: the bits of both running buffers, and what is wrong with them."""

    bits: tuple[bytes, bytes]
    wrong: str


def try_groups(ranks: Sequence[RankFacts], model: nn.Module) -> tuple[list[Finding], str]:
    """Runs every trial; returns those that failed, and what became of all of them, in a line.

    A collective, for ranks without conflicts.
    """
    trials: dict[Trial, dict[str, LayerFacts]] = {}  # with the layers that share each
    for facts in ranks:
        for layer in facts.layers:
            if (trial := _trial_of(layer)) is not None:
                trials.setdefault(trial, {}).setdefault(layer.name, layer)
    if not trials:
        return [], "none, as no layer of this package is synchronised"
    own = own_rank()
    layers = {name: layer for name, layer, _ in layers_of(model)}
    outcomes: dict[Trial, Outcome] = {}
    for trial, sharing in trials.items():  # in one order on all ranks, so that no two wait
        if own in trial.ranks:
            first = next(iter(sharing.values()))
            channels = min(first.channels or 1, _CHANNELS)
            outcomes[trial] = _run(trial, own, channels, layers[first.name], model)
    gathered = gather(outcomes)
    found = []
    for trial, sharing in trials.items():
        of_trial = {rank: gathered[rank][trial] for rank in trial.ranks}
        problem = f"a trial forward over {on(trial.ranks)} went wrong"
        wrong = {rank: outcome.wrong for rank, outcome in of_trial.items() if outcome.wrong}
        bits = {rank: outcome.bits for rank, outcome in of_trial.items()}
        if wrong:
            told = "; ".join(f"{text} on rank {rank}" for rank, text in wrong.items())
            found.append(Finding(f"{problem}: {told}", tuple(sharing), tuple(wrong), _REMEDY))
        else:
            apart = differing(bits, problem, _REMEDY, lambda _: "bits of its own")
            found += [finding._replace(layers=tuple(sharing)) for finding in apart]
    if found:
        return found, "went wrong"
    names = {name for sharing in trials.values() for name in sharing}
    return [], (
        f"{len(trials)} for {len(names)} layers, on data that differ by rank: the "
        "statistics are right, and the same bits on all ranks of a group"
    )


def _trial_of(layer: LayerFacts) -> Trial | None:
    group = layer.group
    if group is None or not group.ranks or not layer.ours or layer.device == "meta":
        return None
    return Trial(group.name, group.ranks, layer.device, layer.dtype)


def _run(trial: Trial, rank: int, channels: int, layer: nn.Module, model: nn.Module) -> Outcome:
    batches = {member: _batch(place, channels) for place, member in enumerate(trial.ranks)}
    together = torch.cat(list(batches.values()))
    device, dtype = device_of(layer, model), dtype_of(layer)
    made = FastSyncBatchNorm(
        channels,
        momentum=1.0,  # leaves the statistics of the batch in the buffers
        affine=False,
        process_group=layer.process_group,
        device=device,
        dtype=dtype,
    )
    try:
        with torch.no_grad():
            made(batches[rank].to(device, dtype))
    except (RuntimeError, ValueError, TypeError) as error:
        return Outcome((b"", b""), f"{type(error).__name__}: {error}")
    running = [getattr(made, name).cpu() for name in ("running_mean", "running_var")]
    return Outcome(
        (_bits(running[0]), _bits(running[1])),
        _off("mean", running[0], together.mean(0)) or _off("variance", running[1], together.var(0)),
    )


def _batch(place: int, channels: int) -> Tensor:
    """Returns a rank's batch, (rows, channels): small whole numbers, which every type can hold."""
    rows = torch.arange(2 + place % 3, dtype=torch.float64, device="cpu")[:, None]
    return (5 * place + 3 * rows + torch.arange(channels, device="cpu")) % 32


def _bits(tensor: Tensor) -> bytes:
    return bytes(tensor.view(torch.uint8).tolist())


def _off(what: str, got: Tensor, expected: Tensor) -> str:
    """Returns what is wrong with a statistic, if more than roundings of its type."""
    error = (got.double() - expected).abs().max().item()
    allowed = _ROUNDINGS * torch.finfo(got.dtype).eps * expected.abs().max().clamp(1).item()
    return "" if error <= allowed else f"the {what} is off by {error:.3g}"
