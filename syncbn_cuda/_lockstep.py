"""A pass over the data in which every rank takes part, though some have fewer batches than others.

Before each batch the ranks tell each other who still has one. Layers that synchronise do so among
those ranks: they hold smaller groups then, in whose making the others take part as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from syncbn_cuda._collective import HeldGroup, hold_group, resolve_group
from syncbn_cuda._exchange import (
    gather,
    is_distributed,
    own_group,
    own_rank,
    raise_together,
    shown,
)
from syncbn_cuda.module import FastSyncBatchNorm

_FAILED = 2  # beside 0, no batch left, and 1


class Peers(NamedTuple):
    """The ranks that a layer synchronises over, and by what."""

    ranks: tuple[int, ...]
    backend: str


def peers_of(layer: Any) -> Peers | None:
    """Returns whom a synchronised layer waits for in training; None where it is alone."""
    group = resolve_group(hold_group(layer.process_group))
    if group is None:
        return None
    ranks = dist.get_process_group_ranks(group)
    return Peers(tuple(ranks), dist.distributed_c10d.get_backend_config(group))


class Lockstep:
    """Who has a batch, asked in step by every rank of the world; a context around the pass.

    Args:
        caller: the public function, for errors.
        layers: the layers of this rank that synchronise in the pass.
        everyones: the peers of such layers on any rank, the same on all ranks.
    """

    def __init__(
        self, caller: str, layers: dict[nn.Module, Peers], everyones: Iterable[Peers]
    ) -> None:
        self._caller = caller
        self._layers = layers
        self._everyones = sorted(set(everyones))
        self._active: frozenset[int] | None = None
        self._own = own_rank()
        self._control: Any = None
        self._exit = ExitStack()
        self._smaller = ExitStack()  # what is undone when the active ranks change

    def __enter__(self) -> Lockstep:
        if is_distributed():
            self._control = self._exit.enter_context(own_group())
        return self

    def __exit__(self, *_: object) -> None:
        with self._exit:
            self._smaller.close()

    def agree(self, has_batch: bool, error: Exception | None) -> frozenset[int]:
        """Returns which ranks have a batch; where one has met an error, all raise."""
        state = _FAILED if error is not None else int(has_batch)
        states = [state]
        if self._control is not None:
            # Not the layers' group: there a peer in its forward would take this for its message.
            told = torch.zeros(dist.get_world_size(), dtype=torch.int64, device="cpu")
            told[self._own] = state
            dist.all_reduce(told, group=self._control)
            states = told.tolist()
        if _FAILED in states:
            texts = [shown(error)]
            if self._control is not None:
                texts = gather(shown(error), self._control)
            raise_together(self._caller, error, list(enumerate(texts)))
        active = frozenset(rank for rank, state in enumerate(states) if state)
        if active != self._active:
            self._regroup(active)
            self._active = active
        return active

    def _regroup(self, active: frozenset[int]) -> None:
        """Lets the layers synchronise over those of their peers that have a batch."""
        self._smaller.close()
        for peers in self._everyones:
            left = [rank for rank in peers.ranks if rank in active]
            if not 0 < len(left) < len(peers.ranks):
                continue
            group: Any = dist.new_group(left, backend=peers.backend)  # a collective of the world
            if self._own not in left:
                continue
            self._smaller.callback(dist.destroy_process_group, group)
            for layer, own in self._layers.items():
                if own == peers:
                    self._hold(layer, group)

    def _hold(self, layer: nn.Module, group: Any) -> None:
        """Gives a layer another group; what it held, the very object, comes back."""
        ours = isinstance(layer, FastSyncBatchNorm)
        slot = "_group" if ours else "process_group"
        held: HeldGroup | Any = hold_group(group) if ours else group
        own = vars(layer)
        if slot in own:
            self._smaller.callback(own.__setitem__, slot, own[slot])
        else:
            self._smaller.callback(own.pop, slot)
        own[slot] = held
