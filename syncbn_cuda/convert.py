"""Conversion of the batch norms of a model, in place and back."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase
from torch.nn.utils import parametrize

from syncbn_cuda._collective import hold_group
from syncbn_cuda.module import FastSyncBatchNorm

#: Subclasses compute something of their own and are not in here: only these very types are swapped.
_CONVERTED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

#: Holds what a converted layer was: (its class, whether it had a process group of its own, which).
_ORIGIN = "_syncbn_origin"


def convert_sync_batchnorm(module: nn.Module, process_group: Any | None = None) -> nn.Module:
    """Makes every ``BatchNorm1d/2d/3d`` and ``SyncBatchNorm`` of a model a FastSyncBatchNorm.

    The very modules get the new class. So parameters, buffers, their types and devices, hooks,
    extra attributes, ``training``, names, shared layers, and references held elsewhere (an
    optimizer's, say) all stay as they are, and :func:`revert_sync_batchnorm` is exact. Convert
    before ``DistributedDataParallel``.

    Args:
        module: the model, or a single layer.
        process_group: the ranks to normalise over; None for the world, and for a layer that is a
            ``SyncBatchNorm`` for the group it has.

    Returns:
        The same module.

    Raises:
        ValueError: a ``LazyBatchNorm`` has not seen its first input yet; nothing is converted.

    Warns:
        UserWarning: names the layers that normalise but are left alone, and why: subclasses, and
            layers with a ``forward`` or a class of their own.

    Example::

        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        >>> model = convert_sync_batchnorm(model)
        >>> model[1]
        FastSyncBatchNorm(8, eps=1e-05, momentum=0.1, affine=True, ...track_running_stats=True)
    """
    found = {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, _BatchNorm) and not isinstance(layer, FastSyncBatchNorm)
    }
    for name, layer in found.items():
        if isinstance(layer, _LazyNormBase):
            raise ValueError(
                f"convert_sync_batchnorm: expected {name or 'the module'} to know its number of "
                f"channels, got {type(layer).__name__}: run one batch through the model first"
            )
    for layer in _swappable(found, _CONVERTED, "convert_sync_batchnorm left alone, unsynchronised"):
        _convert(layer, process_group)
    return module


def _swappable(
    found: dict[str, _BatchNorm], swapped: tuple[type, ...], left_alone: str
) -> list[_BatchNorm]:
    """Returns the layers whose class may be swapped, and warns of the others by name."""
    reasons = {name: _reason_to_leave(layer, swapped) for name, layer in found.items()}
    left = [f"{name or 'the module'} ({reason})" for name, reason in reasons.items() if reason]
    if left:
        warnings.warn(f"{left_alone}: {', '.join(left)}", stacklevel=3)
    return [layer for name, layer in found.items() if reasons[name] is None]


def _reason_to_leave(layer: _BatchNorm, swapped: tuple[type, ...]) -> str | None:
    """Why another class would lose what a layer does; None where its class may be swapped."""
    if parametrize.is_parametrized(layer):
        return "parametrized, by a class of its own that would be lost"
    if type(layer) not in swapped:
        return f"a subclass, {type(layer).__name__}, that may compute something of its own"
    if "forward" in vars(layer):
        return "has a forward of its own"
    return None


def _convert(layer: _BatchNorm, process_group: Any | None) -> None:
    had_group = "process_group" in vars(layer)
    had = hold_group(vars(layer).pop("process_group", None))
    vars(layer)[_ORIGIN] = (type(layer), had_group, had)
    layer.__class__ = FastSyncBatchNorm
    vars(layer)["_group"] = had if process_group is None else hold_group(process_group)


def revert_sync_batchnorm(
    module: nn.Module, default: type[_BatchNorm] = nn.BatchNorm2d
) -> nn.Module:
    """Gives every converted layer of a model the class that it had, for export or one process.

    Args:
        module: the model, or a single layer; changed in place.
        default: the class for layers that were made as FastSyncBatchNorm and so had no other.

    Returns:
        The same module, which needs this package no more.

    Warns:
        UserWarning: names the layers that are left alone, and why: subclasses of FastSyncBatchNorm,
            also those that a parametrization or FSDP2 has made.

    Example::

        >>> model = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(8)))
        >>> type(revert_sync_batchnorm(model)[0]).__name__
        'BatchNorm1d'
    """
    found: dict[str, _BatchNorm] = {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, FastSyncBatchNorm)
    }
    for layer in _swappable(found, (FastSyncBatchNorm,), "revert_sync_batchnorm left alone"):
        _revert(layer, default)
    return module


def _revert(layer: _BatchNorm, default: type[_BatchNorm]) -> None:
    original, had_group, group = vars(layer).pop(_ORIGIN, (default, False, None))
    layer.__class__ = original
    del layer._group
    if had_group:
        vars(layer)["process_group"] = None if group is None else group.group
