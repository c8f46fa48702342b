"""What a layer is called in an error: by itself, and by its place in a model.

A layer does not know its place. It is looked for among all living modules, which takes a moment:
only for an error that is about to be raised, or by a debug mode.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor, nn

#: What wrappers call the module that they wrap; of the first kind only where they are the parent.
_WRAPPERS = ("DistributedDataParallel", "DataParallel")
_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")

#: How autograd nodes hold the layer that they are of: they may outlive it, and it may hold them.
Layer = weakref.ref[nn.Module]

#: By the id of a module those that hold it, and what they call it.
Parents = dict[int, list[tuple[Any, str]]]


def caller(owner: Any | None) -> str:
    """Returns how errors begin: with the layer, or the function where there is none."""
    return "sync_batch_norm" if owner is None else f"{type(owner).__name__}({owner.num_features})"


def qualified_name(layer: nn.Module) -> str:
    """Returns the longest dotted path that leads to a layer, without wrappers; empty if none does.

    Of several as long it is the first in the order of the alphabet, the same on every rank.
    """
    return ".".join(_path(layer, _parents(), ()))


def qualified_names(kind: type[nn.Module]) -> dict[nn.Module, str]:
    """Returns the names of all living modules of a class, those with an empty one left out."""
    parents = _parents()
    names = {}
    for held in list(parents.values()):
        parent, name = held[0]
        module = parent._modules.get(name)
        if isinstance(module, kind):
            names[module] = ".".join(_path(module, parents, ()))
    return names


def _parents() -> Parents:
    parents: Parents = {}
    for found in gc.get_objects():
        if issubclass(type(found), nn.Module):  # isinstance would wake what stands for another
            for name, child in list(vars(found).get("_modules", {}).items()):
                parents.setdefault(id(child), []).append((found, name))
    return parents


def _path(module: Any, parents: Parents, below: tuple[int, ...]) -> tuple[str, ...]:
    paths = [
        _path(parent, parents, (*below, id(module))) + _step(parent, name)
        for parent, name in parents.get(id(module), ())
        if id(parent) not in below
    ]
    return min(paths, key=lambda path: (-len(path), path), default=())


def _step(parent: Any, name: str) -> tuple[str, ...]:
    wraps = name in _WRAPPED or (name == "module" and type(parent).__name__ in _WRAPPERS)
    return () if wraps else (name,)


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
