"""What debug mode does around each call of a layer and before each of its collectives."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, nn

from syncbn_cuda import _checkpoint, _checks, _transforms
from syncbn_cuda._agreement import Disagreement, Exchange
from syncbn_cuda._collective import is_fork, resolve_group
from syncbn_cuda._names import Layer, caller
from syncbn_cuda._place import running_place, searched_place
from syncbn_cuda._signature import CALLER, Signature


class _Call(threading.local):
    """The forward that runs in a thread, if any."""

    running = False
    told = False
    grad: bool | None = None


_call = _Call()
_lock = threading.Lock()
#: None for a group without a store, or with one that keeps nothing. They outlive a watch, as the
#: numbers go on.
_exchanges: weakref.WeakKeyDictionary[Any, Exchange | None] = weakref.WeakKeyDictionary()
#: What the peers were told of a layer in its last forward, for its backward.
_told: weakref.WeakKeyDictionary[nn.Module, tuple[str, str, str]] = weakref.WeakKeyDictionary()


def _exchange_of(group: Any) -> Exchange | None:
    with _lock:
        if group not in _exchanges:
            backend, store = c10d._world.pg_map.get(group, ("fake", None))
            kept = backend != "fake" and store is not None
            _exchanges[group] = Exchange(group, store) if kept else None
        return _exchanges[group]


def _identity(owner: nn.Module | None, exchange: Exchange) -> tuple[str, str, str]:
    """Returns what a layer is known by: its name, its model, and its number in that."""
    if owner is None:
        return caller(owner), "", ""
    if not _call.running and owner in _told:
        return _told[owner]
    place = running_place(owner) or searched_place(owner)
    count = exchange.count(place.model)
    if place.name:
        told = repr(place.name), type(place.model).__name__ + count, place.number
    else:
        told = caller(owner) + count, "", ""
    _told[owner] = told
    return told


def _note_evaluation(owner: Any | None) -> None:
    if owner is None or is_fork():
        return
    with suppress(RuntimeError, ValueError):  # of the store; or this rank is not in the group
        group = resolve_group(owner._group)
        exchange = None if group is None else _exchange_of(group)
        if exchange is not None:
            place = running_place(owner)
            name = caller(owner) if place is None else repr(place.name)
            exchange.note(f"evaluation of {name}")


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
            silent = group is None or _call.told or is_fork()
            exchange = None if silent else _exchange_of(group)
            if exchange is not None:
                text = f"{type(error).__name__}: {error}"
                with suppress(RuntimeError):  # of the store: the error itself says more
                    exchange.tell(Signature("forward", *_identity(owner, exchange), error=text))
                exchange.forget()
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
        known, step = _identity(owner, exchange), exchange.step(owner, direction)
        signature = Signature(direction, *known, channels, dtype, grad, step)
        try:
            exchange.meet(signature, self._timeout or _timeout_of(group, message.device))
        except Disagreement as verdict:
            exchange.forget()
            raise RuntimeError(str(verdict)) from None
        except RuntimeError as error:
            raise RuntimeError(
                f"{CALLER}: before the {direction} of {known[0]} the store of the process group "
                f"failed, perhaps as the rank that keeps it has ended or hangs: {error}"
            ) from error


def _timeout_of(group: Any, device: torch.device) -> float:
    try:
        timeout = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):  # a backend that tells none
        timeout = c10d.default_pg_timeout
    return float(timeout.total_seconds())
