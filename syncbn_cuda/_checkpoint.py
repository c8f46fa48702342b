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
import warnings
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils import _python_dispatch as dispatch
from torch.utils import checkpoint as torchs

try:
    _top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
    _pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
    _push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
    _graph_task = torch._C._current_graph_task_id
    _node = torch._C._current_autograd_node
    _FRAME = torchs._CheckpointFrame
    _SELECTIVE = (torchs._CachingTorchDispatchMode, torchs._CachedTorchDispatchMode)
    _modes, _no_modes = dispatch._get_current_dispatch_mode_stack, dispatch._disable_current_modes
    _KNOWN = True
except AttributeError as missing:  # none of these names is public
    _KNOWN = False
    warnings.warn(
        f"syncbn_cuda does not know the activation checkpointing of torch {torch.__version__} "
        f"({missing}): in a checkpoint, a layer moves its buffers and asks its peers once more",
        stacklevel=2,
    )


class _Region:
    """The training forwards of a checkpoint's first pass, and how far a recompute has come."""

    def __init__(self) -> None:
        self._forwards: list[tuple[Any, torch.Size, Tensor | None]] = []
        self._recompute: Any = None
        self._position = 0

    def keep(self, owner: Any, shape: torch.Size, stats: Tensor | None) -> None:
        self._forwards.append((owner, shape, stats))

    def take(self, recompute: Any, owner: Any, shape: torch.Size) -> tuple[bool, Tensor | None]:
        """Returns whether the next forward of the first pass was this one, and its message."""
        if recompute != self._recompute:  # as often as the graph is retained
            self._recompute, self._position = recompute, 0
        if self._position == len(self._forwards):
            return False, None
        was_owner, was_shape, stats = self._forwards[self._position]
        if (was_owner, was_shape) != (owner, shape):
            return False, None
        self._position += 1
        return True, stats


_regions: weakref.WeakKeyDictionary[Any, _Region] = weakref.WeakKeyDictionary()


class Passage:
    """A training forward inside of checkpoints."""

    def __init__(self, input: Tensor, owner: torch.nn.Module | None) -> None:
        self._owner = None if owner is None else weakref.ref(owner)
        self._shape = input.shape
        self._kept_for: list[_Region] = []
        self.is_recompute = False
        self.stats: Tensor | None = None  # the reduced message of the first pass, in a recompute
        for checkpoint, recompute in _checkpoints():
            region = _regions.get(checkpoint)
            if recompute is None:
                if region is None:
                    region = _regions[checkpoint] = _Region()
                self._kept_for.append(region)
            elif region is not None:
                self.is_recompute, self.stats = region.take(recompute, self._owner, self._shape)
                break

    def keep(self, stats: Tensor | None) -> None:
        """Keeps the reduced message for the recomputes of this forward."""
        for region in self._kept_for:
            region.keep(self._owner, self._shape, stats)


def may_be_around() -> bool:
    """Whether a call may be inside of a checkpoint; quick where it is not, the ordinary case."""
    return _KNOWN and (
        _top_hooks(False) is not None or not torch.is_grad_enabled() or _graph_task() != -1
    )


def selects() -> bool:
    """Whether a selective checkpoint, by a dispatch mode, saves what some operators return."""
    return any(isinstance(mode, _SELECTIVE) for mode in _modes())


def unselected() -> AbstractContextManager[Any]:
    """Hides a call from selective checkpoints.

    They number the calls of each operator, and the recompute of a layer makes fewer.
    """
    return _no_modes()


def _checkpoints() -> Iterator[tuple[Any, Any]]:
    """Yields the checkpoints around a call, each with its recompute or None for the first pass.

    A recompute comes after the first passes inside of it: those outside of it are not asked for.
    """
    if not torch.is_grad_enabled():
        yield from ((context, None) for context in _reentrant_contexts())
    for pack in _pack_hooks():
        for content in _closure(inspect.unwrap(pack)):
            if isinstance(content, _FRAME):
                yield content, None
            elif isinstance(content, weakref.ref) and isinstance(content(), _FRAME):
                yield content(), weakref.ref(pack)
    node = _node()
    if _is_reentrant(node):
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


def _reentrant_contexts() -> Iterator[Any]:
    """Yields the contexts of the checkpoint functions whose ``forward`` runs, innermost first."""
    frame: Any = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" and code.co_varnames[:1] == ("ctx",):
            context = frame.f_locals["ctx"]
            if _is_reentrant(context):
                yield context
        frame = frame.f_back


def _is_reentrant(node: Any) -> bool:
    return isinstance(node, BackwardCFunction) and type(node).__name__.startswith(
        "CheckpointFunction"
    )
