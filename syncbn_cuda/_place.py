"""Where a layer is in the model that runs: what ranks know it by in debug mode.

It is looked for below the modules whose methods are on the stack, as these are the same on all
ranks. Who else holds the layer is not: a rank may have made a copy or a part of the model for its
own use. So all living modules are searched only where no such module leads to the layer.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any, NamedTuple

from torch import nn

from syncbn_cuda._names import leads_on, outermost


class Place(NamedTuple):
    """Of a layer in a model."""

    model: nn.Module
    #: The dotted path, without wrappers; empty where the layer is the model.
    name: str
    #: Which layer it is, in the order of registration, of how many of its class.
    number: str


#: Of layers that a search has found: a search takes a moment.
_found: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()


def running_place(layer: nn.Module) -> Place | None:
    """Returns where a layer is in the outermost module that runs in this thread and leads to it."""
    for module in _running():
        place = _place_in(_unwrapped(module), layer)
        if place is not None and place.name:
            return place
    return None


def searched_place(layer: nn.Module) -> Place:
    """Returns where a layer is in the outermost of all living modules, as first looked for."""
    known = _found.get(layer)
    model = None if known is None else known()
    if model is None:
        model = _unwrapped(outermost(layer))
        _found[layer] = weakref.ref(model)
    return _place_in(model, layer) or Place(layer, "", "")


def _running() -> list[nn.Module]:
    modules: list[nn.Module] = []
    frame = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and code.co_varnames[0] == "self":
            found: Any = frame.f_locals.get("self")
            # isinstance would wake what stands for another; a call of a module has several frames
            if issubclass(type(found), nn.Module) and not (modules and modules[-1] is found):
                modules.append(found)
        frame = frame.f_back  # type: ignore[assignment]
    return modules[::-1]


def _unwrapped(module: nn.Module) -> nn.Module:
    for name, child in module._modules.items():
        if child is not None and not leads_on(module, name):
            return _unwrapped(child)
    return module


def _place_in(model: nn.Module, layer: nn.Module) -> Place | None:
    path, position, count = None, 0, 0
    seen: set[int] = set()
    rest: list[tuple[tuple[str, ...], Any]] = [((), model)]
    while rest:
        steps, module = rest.pop()
        if module is None or id(module) in seen:
            continue
        seen.add(id(module))
        if type(module) is type(layer):
            count += 1
            if module is layer:
                path, position = steps, count
        children = list(module._modules.items())
        rest += [(steps + leads_on(module, name), child) for name, child in reversed(children)]
    return None if path is None else Place(model, ".".join(path), f"{position} of {count}")
