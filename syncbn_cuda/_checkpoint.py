"""Activation checkpointing: telling the recompute of a forward from a forward.

A checkpoint runs its region once more inside backward. There a layer must neither move its buffers
again nor ask its peers, who may be elsewhere: it takes the reduced message of the first pass. Being
inside backward says too little, as hooks run forwards there too; and a queue a layer would mix up
micro-batches whose backwards run in another order. So the first pass keeps its messages by the
checkpoint's own identity, in the order of the calls, and the recompute takes them in that order:

* non-reentrant, the identity is the ``_CheckpointFrame``. The saved-tensor hooks of both passes
  have it in their closure (the recompute's by a weak reference), and hooks of nested checkpoints
  lie in a stack;
* reentrant, it is the context of the ``CheckpointFunction``, torch's or one of that name: an
  argument of its ``forward`` in the first pass, and the node that autograd runs in the recompute.

What runs inside an outer region's recompute is new to the checkpoints nested in it, so a message
is kept for each checkpoint between the call and that recompute.
"""

from __future__ import annotations

import inspect
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils import _python_dispatch as dispatch
from torch.utils import checkpoint as torchs

from syncbn_cuda._checks import fail

try:
    _top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
    _pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
    _push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
    _graph_task = torch._C._current_graph_task_id
    _node = torch._C._current_autograd_node
    _outside_functions = torch._C._is_fwd_grad_enabled
    _FRAME = torchs._CheckpointFrame
    _SELECTIVE = (torchs._CachingTorchDispatchMode, torchs._CachedTorchDispatchMode)
    _modes = dispatch._get_current_dispatch_mode_stack
    _pop_mode, _push_mode = dispatch._pop_mode, dispatch._push_mode
    _KNOWN = True
except AttributeError as missing:  # none of these names is public
    _KNOWN = False
    warnings.warn(
        f"syncbn_cuda does not know the activation checkpointing of torch {torch.__version__} "
        f"({missing}): in a checkpoint, a layer moves its buffers and asks its peers once more",
        stacklevel=2,
    )


class _Forward(NamedTuple):
    """What a training forward is known by, and the reduced message that it made."""

    owner: Any  # a weak reference to the layer, if there is one
    shape: torch.Size
    grad: bool | None  # whether grad was enabled; None where the first pass does not tell
    stats: Tensor | None


class _Recompute:
    """A recompute under way: which forwards of the first pass it has repeated, and how far."""

    def __init__(self, key: Any, forwards: list[_Forward]) -> None:
        self.key = key
        self._forwards = forwards
        self._repeated: list[_Forward] = []
        self._position = 0

    def take(self, known: _Forward) -> _Forward | None:
        """Returns the forward of the first pass that this one repeats, if any.

        It passes over what only the first pass did.
        """
        for index in range(self._position, len(self._forwards)):
            if self._forwards[index][:3] == known[:3]:
                self._position = index + 1
                self._repeated.append(self._forwards[index])
                return self._forwards[index]
        return None

    def counts(self, known: _Forward) -> tuple[int, int]:
        """Returns how often the first pass and the recompute made such a forward."""
        passes = (self._forwards, self._repeated)
        first, repeated = (sum(each[:3] == known[:3] for each in forwards) for forwards in passes)
        return first, repeated


class _Region:
    """The training forwards of a checkpoint's first pass, and its recomputes."""

    def __init__(self) -> None:
        self.forwards: list[_Forward] = []
        self._recomputes: dict[int, _Recompute] = {}  # by thread

    def recompute(self, key: Any) -> _Recompute:
        """Returns the recompute that runs in this thread."""
        running = self._recomputes.get(threading.get_ident())
        if running is None or running.key != key:  # as often as the graph is retained
            running = self._recomputes[threading.get_ident()] = _Recompute(key, self.forwards)
        return running


_regions: weakref.WeakKeyDictionary[Any, _Region] = weakref.WeakKeyDictionary()


class Passage:
    """A training forward inside of checkpoints."""

    def __init__(self, input: Tensor, owner: torch.nn.Module | None) -> None:
        name = None if owner is None else weakref.ref(owner)
        self._forward = _Forward(name, input.shape, torch.is_grad_enabled(), None)
        self._kept_for: list[tuple[_Region, bool]] = []
        self._repeats: tuple[_Recompute, _Forward] | None = None
        for checkpoint, recompute in _checkpoints():
            # A reentrant first pass is without grad, whatever its recompute is.
            tells = isinstance(checkpoint, _FRAME)
            region = _regions.get(checkpoint)
            if recompute is None:
                if region is None:
                    region = _regions[checkpoint] = _Region()
                self._kept_for.append((region, tells))
            elif region is not None:
                running = region.recompute(recompute)
                first = running.take(self._known(tells))
                self._repeats = None if first is None else (running, first)
                break

    @property
    def is_recompute(self) -> bool:
        return self._repeats is not None

    @property
    def stats(self) -> Tensor | None:
        """The reduced message of the first pass, in a recompute."""
        return None if self._repeats is None else self._repeats[1].stats

    def keep(self, stats: Tensor | None) -> None:
        """Keeps the reduced message for the recomputes of this forward."""
        for region, tells in self._kept_for:
            region.forwards.append(self._known(tells)._replace(stats=stats))

    def check(self) -> None:
        """Checks, once the recompute is through, that it was told which forwards it repeats.

        Raises:
            RuntimeError: a reentrant checkpoint, whose first pass does not tell forwards with grad
                from those without, made more of these forwards in its first pass.
        """
        if self._repeats is None or self._repeats[1].grad is not None:
            return
        running, own = self._repeats
        first, repeated = running.counts(own)
        if first != repeated:
            fail(
                None if own.owner is None else own.owner(),
                f"a checkpoint with use_reentrant=True called a layer {first} times in forward and "
                f"{repeated} times in its recompute, and which of them was repeated cannot be "
                "told: call it alike in both, or use use_reentrant=False",
                RuntimeError,
            )

    def _known(self, tells: bool) -> _Forward:
        return self._forward if tells else self._forward._replace(grad=None)


def may_be_around() -> bool:
    """Whether a call may be inside of a checkpoint; quick where it is not, the ordinary case."""
    return _KNOWN and (
        _top_hooks(False) is not None or not _outside_functions() or _graph_task() != -1
    )


def inside_function() -> bool:
    """Whether a call is inside of an autograd function, whose grad mode says nothing of outside."""
    return _KNOWN and not _outside_functions()


def selects() -> bool:
    """Whether a selective checkpoint, by a dispatch mode, saves what some operators return."""
    return any(isinstance(mode, _SELECTIVE) for mode in _modes())


@contextmanager
def unselected() -> Iterator[None]:
    """Hides what runs inside from selective checkpoints, though from no other dispatch mode.

    They number the calls of each operator, and the recompute of a layer makes fewer.
    """
    taken = []
    while selects():
        taken.append(_pop_mode())
    others = [mode for mode in reversed(taken) if not isinstance(mode, _SELECTIVE)]
    for mode in others:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in others:
            _pop_mode()
        for mode in reversed(taken):
            _push_mode(mode)


def _checkpoints() -> Iterator[tuple[Any, Any]]:
    """Yields the checkpoints around a call, each with its recompute or None for the first pass.

    A recompute comes after the first passes inside of it: those outside of it are not asked for.
    """
    if not _outside_functions():
        yield from ((context, None) for context in _running("forward"))
    for pack in _pack_hooks():
        for content in _closure(inspect.unwrap(pack)):
            if isinstance(content, _FRAME):
                yield content, None
            elif isinstance(content, weakref.ref) and isinstance(content(), _FRAME):
                yield content(), weakref.ref(pack)
    node = _node()  # also while hooks of it run, before its backward
    if _is_reentrant(node) and any(context is node for context in _running("backward")):
        yield node, _graph_task()


def _pack_hooks() -> list[Any]:
    """Returns the pack hooks on the stack of this thread, the top first (only that can be read)."""
    stack = []
    while (hooks := _top_hooks(False)) is not None:
        stack.append(hooks)
        _pop_hooks()
    for hooks in reversed(stack):
        _push_hooks(*hooks)
    return [pack for pack, _ in stack]


def _closure(function: Any) -> list[Any]:
    contents = []
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # an empty cell
            contents.append(cell.cell_contents)
    return contents


def _running(method: str) -> Iterator[Any]:
    """Yields the contexts of the checkpoint functions whose method runs, innermost first."""
    frame: Any = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == method and code.co_argcount:
            context = frame.f_locals.get(code.co_varnames[0])
            if _is_reentrant(context):
                yield context
        frame = frame.f_back


def _is_reentrant(node: Any) -> bool:
    return isinstance(node, BackwardCFunction) and type(node).__name__.startswith(
        "CheckpointFunction"
    )
