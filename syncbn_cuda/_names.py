"""What a layer is called in an error: by itself, and by its place in a model.

A layer does not know its place. It is looked for among all living modules, which takes a moment:
only for an error that is about to be raised, or where debug mode finds no other way.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn

import torch.distributed as dist
from torch import Tensor, nn

#: What wrappers call the module that they wrap; of the first kind only where they are the parent.
_WRAPPERS = ("DistributedDataParallel", "DataParallel")
_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")

#: How autograd nodes hold the layer that they are of: they may outlive it, and it may hold them.
Layer = weakref.ref[nn.Module]


def caller(owner: Any | None) -> str:
    """Returns how errors begin: with the layer, or the function where there is none."""
    return "sync_batch_norm" if owner is None else f"{type(owner).__name__}({owner.num_features})"


def qualified_name(layer: nn.Module) -> str:
    """Returns the longest dotted path that leads to a layer, without wrappers; empty if none does.

    Of several as long it is the first in the order of the alphabet, the same on every rank.
    """
    return ".".join(_Search().path(layer, ()).steps)


def outermost(layer: nn.Module) -> Any:
    """Returns where the path of :func:`qualified_name` begins; the layer if there is none."""
    return _Search().path(layer, ()).begin


def leads_on(parent: Any, name: str) -> tuple[str, ...]:
    """Returns what a module adds to the paths through one of its children: nothing in a wrapper."""
    wraps = name in _WRAPPED or (name == "module" and type(parent).__name__ in _WRAPPERS)
    return () if wraps else (name,)


class _Path(NamedTuple):
    steps: tuple[str, ...]
    begin: Any
    whole: bool  # whether no module that leads to itself has cut a path short


class _Search:
    """All living modules, and the paths to those that have been asked for."""

    def __init__(self) -> None:
        #: By the id of a module those that hold it, and what they call it.
        self._parents: dict[int, list[tuple[Any, str]]] = {}
        self._known: dict[int, _Path] = {}
        for found in gc.get_objects():
            if issubclass(type(found), nn.Module):  # isinstance would wake what stands for another
                for name, child in list(vars(found).get("_modules", {}).items()):
                    self._parents.setdefault(id(child), []).append((found, name))

    def path(self, module: Any, below: tuple[int, ...]) -> _Path:
        """Returns the best path to a module that passes none of those below it."""
        if id(module) in self._known:
            return self._known[id(module)]
        parents = self._parents.get(id(module), [])
        ahead = [(parent, name) for parent, name in parents if id(parent) not in below]
        whole = len(ahead) == len(parents)
        paths = []
        for parent, name in ahead:
            steps, begin, parents_whole = self.path(parent, (*below, id(module)))
            paths.append((steps + leads_on(parent, name), begin))
            whole = whole and parents_whole
        alone = (), module
        steps, begin = min(paths, key=lambda path: (-len(path[0]), path[0]), default=alone)
        if whole:  # or it depends on where the search came from
            self._known[id(module)] = _Path(steps, begin, whole)
        return _Path(steps, begin, whole)


def shown_ranks(ranks: Iterable[int]) -> str:
    """Returns ranks as text, in which three or more in a row are a range."""
    ordered = sorted(ranks)
    starts = [rank for before, rank in pairwise([-2, *ordered]) if rank != before + 1]
    ends = [rank for rank, after in pairwise([*ordered, -2]) if after != rank + 1]
    runs = []
    for start, end in zip(starts, ends, strict=True):
        between = ", " if end == start + 1 else "-"
        runs.append(str(start) if start == end else f"{start}{between}{end}")
    return ("rank " if len(ordered) == 1 else "ranks ") + ", ".join(runs)


def shown_group(group: Any) -> str:
    """Returns the ranks of a group, and its backend, as text."""
    try:
        ranks = shown_ranks(dist.get_process_group_ranks(group))
        return f"{ranks} ({dist.distributed_c10d.get_backend_config(group)})"
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        return f"{group.size()} ranks ({type(group).__name__})"  # a group of another kind


def fail_collective(
    error: RuntimeError, group: Any, layer: Layer | None, direction: str, input: Tensor | None
) -> NoReturn:
    """Raises the error of a collective anew, with the layer, what it was about and the group.

    Args:
        error: what the backend raised.
        group: the group of the collective.
        layer: the layer, if there is one and as far as it still exists.
        direction: what the collective was part of.
        input: the layer's input, for its channels where there is no layer.
    """
    owner = None if layer is None else layer()
    text = caller(owner)
    name = "" if owner is None else qualified_name(owner)
    if name:
        text = f"{text} at {name!r}"
    elif owner is None and input is not None:
        text = f"{text} of {input.shape[1]} channels"
    text = f"{text}: the all_reduce of its {direction} over {shown_group(group)} failed: {error}"
    try:
        raised = type(error)(text)
    except Exception:  # a type that takes something else
        raised = RuntimeError(text)
    raise raised from error
