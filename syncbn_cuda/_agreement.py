"""The exchanges of debug mode: ranks tell each other what they do before a layer's collective.

The ranks of a group number its exchanges. In each a rank writes its signature to the group's store
and counts itself; the one that completes the count compares all signatures and writes a verdict,
for which all wait. Who waits in vain writes that as the verdict. The first verdict holds, so that
all ranks, also one that comes later, go on or raise alike. Nobody blocks in the store, as its
connection is shared by all threads of a process; and as no call of it returns where the rank that
keeps it hangs, a thread of its own makes them.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import nn

from syncbn_cuda._signature import Signature, desertion, disagreement

_LONGEST_PAUSE = 0.02
_ANSWER = 5.0  # seconds that a store that works may take to answer


class Exchange:
    """The exchanges of a group."""

    def __init__(self, group: Any, store: Any) -> None:
        self._whole_store = store
        self._store: Any = None
        self._ranks = dist.get_process_group_ranks(group)
        self._own = dist.get_rank()
        self._number = 0
        self._done: list[int] = []  # exchanges whose keys are left
        self._unanswered: threading.Thread | None = None
        self._steps: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()
        self.forget()

    def step(self, owner: nn.Module | None, direction: str) -> int:
        """Counts the collectives of a layer in a direction; those of the function together."""
        steps = self._steps.setdefault(type(self) if owner is None else owner, Counter())
        steps[direction] += 1
        return steps[direction]

    def count(self, model: nn.Module) -> str:
        """Tells models of a class apart, by the order of their first exchanges."""
        if model not in self._models:
            self._counts[type(model)] += 1
            self._models[model] = self._counts[type(model)]
        number = self._models[model]
        return "" if number == 1 else f" no. {number}"

    def forget(self) -> None:
        """Starts to count models anew, as ranks that disagree may have met other models."""
        self._models: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._counts: Counter[type[nn.Module]] = Counter()

    def meet(self, signature: Signature, timeout: float) -> None:
        """Tells the others what this rank does, and waits until all have told.

        Raises:
            RuntimeError: they disagree, or some did not come in time; the same on all ranks.
        """
        number = self._next()

        def meet() -> None:
            self._tell(number, signature)
            self._agree(number, timeout)

        self._patiently(meet, timeout + _ANSWER)

    def tell(self, signature: Signature) -> None:
        """Tells the others what this rank does, and goes on."""
        number = self._next()
        self._patiently(lambda: self._tell(number, signature), _ANSWER)

    def note(self, text: str) -> None:
        """Notes what this rank does between two exchanges, for those who wait for it."""
        if self._unanswered is None or not self._unanswered.is_alive():
            value = json.dumps((self._number, text))
            self._patiently(lambda: self._opened().set(f"note/{self._own}", value), _ANSWER)

    def _patiently(self, function: Callable[[], object], seconds: float) -> None:
        """Calls in a thread what may never return, as the rank that keeps the store hangs."""
        errors: list[BaseException | None] = []

        def call() -> None:
            try:
                function()
                errors.append(None)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(seconds)
        if not errors:
            self._unanswered = thread
            raise RuntimeError(f"the store did not answer within {seconds:g} s")
        if errors[0] is not None:
            raise errors[0]

    def _opened(self) -> Any:
        if self._store is None:
            place = f"syncbn_cuda/{_number_of_world(self._own)}"
            self._store = dist.PrefixStore(place, self._whole_store)
        return self._store

    def _next(self) -> int:
        self._number += 1
        return self._number - 1

    def _tell(self, number: int, signature: Signature) -> None:
        store = self._opened()
        store.set(f"{number}/{self._own}", json.dumps(signature))
        if store.add(f"{number}/count", 1) == len(self._ranks):
            self._judge(number)
        self._done.append(number)

    def _agree(self, number: int, timeout: float) -> None:
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
            raise Disagreement(text)

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


class Disagreement(RuntimeError):
    """Marks the verdict among what a store may raise."""


_worlds: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_world_lock = threading.Lock()


def _number_of_world(own: int) -> int:
    """Returns how many worlds over the store of this one the rank has had exchanges in.

    The same on all ranks that had some in each. A world may find what an earlier one has left.
    """
    world: Any = c10d._world.default_pg
    with _world_lock:
        if world not in _worlds:
            _worlds[world] = c10d._world.pg_map[world][1].add(f"syncbn_cuda/worlds/{own}", 1)
        return _worlds[world]
