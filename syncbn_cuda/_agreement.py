"""The exchanges of debug mode: ranks tell each other what they do before a layer's collective.

The ranks of a group number its exchanges. In each a rank writes its signature to the group's store
and counts itself; the one that completes the count compares all signatures and writes a verdict,
for which all wait. Who waits in vain writes that as the verdict. The first verdict holds, so that
all ranks, also one that comes later, go on or raise alike. Nobody blocks in the store, as its
connection is shared by all threads of a process.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, nn

from syncbn_cuda import _checkpoint, _checks, _transforms
from syncbn_cuda._collective import resolve_group
from syncbn_cuda._names import Layer, caller, qualified_names
from syncbn_cuda._signature import CALLER, Signature, desertion, disagreement

_LONGEST_PAUSE = 0.02


class _Exchange:
    """The exchanges of a group."""

    def __init__(self, group: Any) -> None:
        self._store = dist.PrefixStore("syncbn_cuda", c10d._world.pg_map[group][1])
        self._ranks = dist.get_process_group_ranks(group)
        self._own = dist.get_rank()
        self._number = 0
        self._done: list[int] = []  # exchanges whose keys are left
        self._steps: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()

    def step(self, owner: nn.Module | None, direction: str) -> int:
        """Counts the collectives of a layer in a direction; those of the function together."""
        steps = self._steps.setdefault(type(self) if owner is None else owner, Counter())
        steps[direction] += 1
        return steps[direction]

    def tell(self, signature: Signature) -> int:
        """Tells the others what this rank does; returns the number of the exchange."""
        number = self._number
        self._number += 1
        self._store.set(f"{number}/{self._own}", json.dumps(signature))
        if self._store.add(f"{number}/count", 1) == len(self._ranks):
            self._judge(number)
        self._done.append(number)
        return number

    def note(self, text: str) -> None:
        """Notes what this rank does between two exchanges, for those who wait for it."""
        self._store.set(f"note/{self._own}", json.dumps((self._number, text)))

    def agree(self, number: int, timeout: float) -> None:
        """Waits until all ranks have told what they do.

        Raises:
            RuntimeError: they disagree, or some did not come in time; the same on all ranks.
        """
        deadline, pause = time.monotonic() + timeout, 1e-4
        verdict = f"{number}/verdict"
        while not self._store.check([verdict]):
            if time.monotonic() > deadline:
                self._give_up(number, timeout)
                break
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        text, complete = json.loads(self._store.get(verdict))
        if complete:
            self._clear(number)
        if text:
            raise _Disagreement(text)

    def _judge(self, number: int) -> None:
        told = self._told(number, self._ranks)
        self._decide(number, disagreement(told, number, self._ranks), True)

    def _give_up(self, number: int, timeout: float) -> None:
        came = [rank for rank in self._ranks if self._store.check([f"{number}/{rank}"])]
        if len(came) == len(self._ranks):  # and who was to judge has not
            self._judge(number)
            return
        notes = {}
        for rank in set(self._ranks) - set(came):
            if self._store.check([f"note/{rank}"]):
                at, text = json.loads(self._store.get(f"note/{rank}"))
                if at == number:
                    notes[rank] = text
        told = self._told(number, came)
        self._decide(number, desertion(told, notes, number, self._ranks, timeout), False)

    def _told(self, number: int, ranks: list[int]) -> dict[int, Signature]:
        values = self._store.multi_get([f"{number}/{rank}" for rank in ranks])
        return {
            rank: Signature(*json.loads(value)) for rank, value in zip(ranks, values, strict=True)
        }

    def _decide(self, number: int, text: str, complete: bool) -> None:
        self._store.compare_set(f"{number}/verdict", "", json.dumps((text, complete)))

    def _clear(self, number: int) -> None:
        """Deletes what is left of earlier exchanges, as all ranks have come to this one."""
        for earlier in [done for done in self._done if done < number]:
            self._store.delete_key(f"{earlier}/{self._own}")
            if self._own == self._ranks[0]:
                self._store.delete_key(f"{earlier}/count")
                self._store.delete_key(f"{earlier}/verdict")
            self._done.remove(earlier)


class _Disagreement(RuntimeError):
    """Marks the verdict among what a store may raise."""


class _Call(threading.local):
    """The forward that runs in a thread, if any."""

    running = False
    told = False
    grad: bool | None = None


_call = _Call()
_lock = threading.Lock()
#: None for a group without a store, or with one that keeps nothing. They outlive a watch, as the
#: numbers go on.
_exchanges: weakref.WeakKeyDictionary[Any, _Exchange | None] = weakref.WeakKeyDictionary()
_names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


def _exchange_of(group: Any) -> _Exchange | None:
    with _lock:
        if group not in _exchanges:
            backend = c10d._world.pg_map.get(group, ("fake", None))[0]
            _exchanges[group] = None if backend == "fake" else _Exchange(group)
        return _exchanges[group]


def _name_of(owner: nn.Module | None) -> str:
    if owner is None:
        return caller(owner)
    if owner not in _names:  # the search takes a moment: one for all layers of a model
        _names.update(qualified_names(type(owner)))
    name = _names.setdefault(owner, "")
    return repr(name) if name else caller(owner)


def _note_evaluation(owner: Any | None) -> None:
    with suppress(RuntimeError, ValueError):  # of the store; or this rank is not in the group
        group = None if owner is None else resolve_group(owner._group)
        exchange = None if group is None else _exchange_of(group)
        if exchange is not None:
            exchange.note(f"evaluation of {_name_of(owner)}")


class Watch:
    """What layers tell before they call on their peers.

    Args:
        timeout: how long they wait for the peers, in seconds; None for the group's timeout.
    """

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout

    @staticmethod
    def is_within() -> bool:
        """Whether this thread is within :meth:`call`."""
        return _call.running

    def call(self, batch_norm: Callable[..., Tensor], *args: Any) -> Tensor:
        """Calls ``functional.batch_norm``; what it raises before its collective the peers hear of.

        Of an evaluation they hear where they wait for this rank in training.
        """
        input, _, _, weight, bias, training, _, _, _, group, owner, _ = args
        _call.running, _call.told, _call.grad = True, False, None
        try:
            if not training:
                _note_evaluation(owner)
            elif not (_checkpoint.inside_function() or _transforms.active()):
                needed = any(t is not None and t.requires_grad for t in (input, weight, bias))
                _call.grad = torch.is_grad_enabled() and needed
            return batch_norm(*args)
        except (RuntimeError, TypeError, ValueError) as error:  # not what ends a recompute early
            exchange = None if group is None or _call.told else _exchange_of(group)
            if exchange is not None:
                text = f"{type(error).__name__}: {error}"
                with suppress(RuntimeError):  # of the store: the error itself says more
                    exchange.tell(Signature("forward", _name_of(owner), error=text))
            raise
        finally:
            _call.running = False

    def agree(
        self, message: Tensor, group: Any, layer: Layer | None, direction: str, input: Tensor | None
    ) -> None:
        """Waits until all ranks of a group have told that they are about to do the same.

        Raises:
            RuntimeError: they are not, or some did not come in time; the same on all ranks.
        """
        exchange = None if _checks.has_no_values(message) else _exchange_of(group)
        if exchange is None:
            return
        owner: Any = None if layer is None else layer()
        channels = None if owner is None else owner.num_features
        dtype = None
        if input is not None:
            channels, dtype = input.shape[1], str(input.dtype).removeprefix("torch.")
        grad = _call.grad if _call.running else None
        _call.told = True
        name, step = _name_of(owner), exchange.step(owner, direction)
        with _store_named(f"{direction} of {name}"):
            number = exchange.tell(Signature(direction, name, channels, dtype, grad, step))
            exchange.agree(number, self._timeout or _timeout_of(group, message.device))


def _timeout_of(group: Any, device: torch.device) -> float:
    try:
        timeout = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):  # a backend that tells none
        timeout = c10d.default_pg_timeout
    return float(timeout.total_seconds())


@contextmanager
def _store_named(doing: str) -> Iterator[None]:
    try:
        yield
    except _Disagreement as verdict:
        raise RuntimeError(str(verdict)) from None
    except RuntimeError as error:
        raise RuntimeError(
            f"{CALLER}: before the {doing} the store of the process group failed, perhaps as the "
            f"rank that keeps it has ended: {error}"
        ) from error
