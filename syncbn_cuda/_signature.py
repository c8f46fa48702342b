"""What ranks tell each other in debug mode, and the errors where they disagree or do not come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from syncbn_cuda._names import shown_ranks

CALLER = "FastSyncBatchNorm debug"


class Signature(NamedTuple):
    """What a rank is about to do."""

    direction: str
    layer: str
    model: str = ""  # that the layer is in, where its name is from there
    number: str = ""  # of the layer in the model: names may have the rank in them
    channels: int | None = None
    dtype: str | None = None  # to be shown alone: ranks may have different types
    grad: bool | None = None  # whether a backward will follow; None where that is not known
    step: int = 0
    error: str = ""  # what it ran into instead

    def shown(self) -> str:
        text = f"{self.direction} of {self.layer}"
        text += f" of {self.model}" if self.model else ""
        if self.error:
            return f"{text} raised {self.error}"
        facts = [] if self.channels is None else [f"{self.channels} channels"]
        facts += [] if self.dtype is None else [self.dtype]
        text = f"{text} ({', '.join(facts)}), step {self.step}"
        return f"{text}, recording no gradients" if self.grad is False else text


def disagreement(told: Mapping[int, Signature], number: int, ranks: list[int]) -> str:
    """Returns in what the signatures of all ranks differ; empty where they agree."""
    signatures = list(told.values())
    first = signatures[0]
    same_layer = all(
        (each.direction, each.model) == (first.direction, first.model) for each in signatures
    ) and (
        all(each.layer == first.layer for each in signatures)
        or all(each.number == first.number != "" for each in signatures)
    )
    same = same_layer and all(each.channels == first.channels for each in signatures)
    grads = {each.grad for each in signatures} - {None}
    if any(each.error for each in signatures):
        hint = ""
    elif not same_layer:
        hint = (
            ". One of them skipped a layer or has another order of layers, or has a layer in "
            "evaluation, no gradients or another number of steps"
        )
    elif not same:
        hint = ". Their models or inputs differ"
    elif len(grads) > 1:
        hint = ". Those that record gradients would wait in backward for those that do not"
    else:
        return ""
    return (
        f"{CALLER}: {shown_ranks(ranks)} of a group disagree at its collective {number + 1}: "
        f"{_by_ranks({rank: each.shown() for rank, each in told.items()})}{hint}"
    )


def desertion(
    told: Mapping[int, Signature],
    notes: Mapping[int, str],
    number: int,
    ranks: list[int],
    timeout: float,
) -> str:
    """Returns who did not come to an exchange in time, and what the others were about to do."""
    missing = [rank for rank in ranks if rank not in told]
    texts = {rank: each.shown() for rank, each in told.items()}
    texts |= {rank: f"{text}, which is no collective" for rank, text in notes.items()}
    return (
        f"{CALLER}: {shown_ranks(missing)} did not come to collective {number + 1} of the group "
        f"of {shown_ranks(ranks)} within {timeout:g} s: {_by_ranks(texts)}. Who did not come may "
        "wait in another collective, have ended or raised, have fewer steps, have its layers in "
        "evaluation, or run compiled (a peer whose compiler gave up at its recompile limit does "
        "not) or without debug mode, which has to be on on all ranks"
    )


def _by_ranks(texts: Mapping[int, str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank in sorted(texts):
        ranks.setdefault(texts[rank], []).append(rank)
    return "; ".join(f"{shown_ranks(of)}: {text}" for text, of in ranks.items())
