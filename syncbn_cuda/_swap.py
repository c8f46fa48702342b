"""The swap of a layer's class, also where torch has put a class of its own between."""

from __future__ import annotations

import sys
from typing import TypeVar

from torch import nn
from torch.nn.utils import parametrize

Layer = TypeVar("Layer", bound=nn.Module)


def class_of(layer: Layer) -> type[Layer]:
    """Returns the class of a layer as it is without its parametrizations."""
    return parametrize.type_before_parametrizations(layer)


def swap_class(layer: nn.Module, cls: type[nn.Module]) -> None:
    """Gives a layer another class; a parametrized one gets a parametrized class over it.

    The old parametrized class is left as it is: a copy of the layer has the very same one.
    """
    if parametrize.is_parametrized(layer):
        own = {k: v for k, v in vars(type(layer)).items() if k not in ("__dict__", "__weakref__")}
        cls = type(f"Parametrized{cls.__name__}", (cls,), own)
    object.__setattr__(layer, "__class__", cls)  # whatever its own __setattr__ does


def reason_to_stay(layer: nn.Module) -> str | None:
    """Returns why another class would do nothing or lose something; None where it would not."""
    if "forward" in vars(layer):
        return "has a forward of its own, which its class does not reach"
    # Where anything is sharded, its module is there.
    if isinstance(layer, getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())):
        return "fully_shard, applied to it, made a class of its own: convert or revert before that"
    return None
