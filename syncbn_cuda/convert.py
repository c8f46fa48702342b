"""Conversion of the batch norms of a model, in place and back."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

from syncbn_cuda._collective import HeldGroup, hold_group
from syncbn_cuda._registry import is_torchs, original_of, replacement_of
from syncbn_cuda._select import Select, select_batch_norms
from syncbn_cuda._swap import class_of, reason_to_stay, swap_class
from syncbn_cuda.module import FastSyncBatchNorm

_ORIGIN = "_syncbn_origin"


class _Origin(NamedTuple):
    """What a converted layer was, kept in the layer under ``_ORIGIN``."""

    cls: type[_BatchNorm]
    replacement: type[FastSyncBatchNorm]
    had_group: bool  # whether it had an attribute for one
    group: HeldGroup | None


def convert_sync_batchnorm(
    module: nn.Module,
    process_group: Any | None = None,
    *,
    select: Select | None = None,
    skip_nonfinite_update: bool | None = None,
) -> nn.Module:
    """Makes every ``BatchNorm1d/2d/3d`` and ``SyncBatchNorm`` of a model a FastSyncBatchNorm.

    The very modules get the new class. So parameters, buffers, their types and devices, hooks,
    parametrizations, extra attributes, ``training``, names, shared layers, and references held
    elsewhere (an optimizer's, say) all stay as they are, and :func:`revert_sync_batchnorm` is
    exact. It works before and after ``DistributedDataParallel`` and ``fully_shard``, except for a
    layer that was sharded by itself. Subclasses that compute something of their own are converted
    where there is a converter (:func:`register_converter`); those of timm come with this package.

    Args:
        module: the model, or a single layer.
        process_group: the ranks to normalise over, also for layers that are FastSyncBatchNorm
            already. None for the world, and for the group it has in a layer that was synchronised.
        select: which layers: a predicate ``(name, layer) -> bool``; or a pattern, or several, for
            the name of a layer or of a module that holds it, with ``*`` and ``?`` as in file names:
            ``"backbone"`` takes all beneath it. ``"!pattern"`` leaves out, of all layers where no
            other pattern is given. A shared layer is taken under any of its names, and left out
            under any.
        skip_nonfinite_update: the layers' switch of that name, see :class:`FastSyncBatchNorm`; None
            leaves it as it is, at first off.

    Returns:
        The same module.

    Raises:
        ValueError: a ``LazyBatchNorm`` has not seen its first input yet, a pattern matches no
            batch norm, there is no pattern, or ``process_group`` is a ``DeviceMesh`` of several
            dimensions; nothing is converted.
        TypeError: ``process_group`` or ``select`` is of another kind; nothing is converted.

    Warns:
        UserWarning: names the layers that are selected but left alone, and why: subclasses without
            a converter, and layers with a ``forward`` or a class of their own. Layers that keep
            running statistics but are none of torch's batch norms, scripted ones for example, are
            named by :func:`conversion_report` alone.

    Note:
        The converters of torch and timm know nothing of these layers: run afterwards, also by a
        framework's switch for synchronised batch norm, they put ``nn.SyncBatchNorm`` in their
        place.

        For quantisation-aware training convert after ``prepare_qat``: it makes the batch norms in
        fused modules anew, and it does not know converted ones.

    Example::

        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        >>> model = convert_sync_batchnorm(model)
        >>> model[1]
        FastSyncBatchNorm(8, eps=1e-05, momentum=0.1, affine=True, ...track_running_stats=True)
        >>> net = nn.ModuleDict({"body": nn.BatchNorm2d(8), "head": nn.BatchNorm1d(8)})
        >>> convert_sync_batchnorm(net, select="!head")["head"]
        BatchNorm1d(8, eps=1e-05, momentum=0.1, affine=True, ...track_running_stats=True)
    """
    # All that can fail comes before the first change.
    given = hold_group(process_group)
    selected = select_batch_norms(module, select)
    for name, layer in selected.items():
        if isinstance(layer, _LazyNormBase):
            raise ValueError(
                f"convert_sync_batchnorm: expected {_named(name)} to know its number of "
                f"channels, got {type(layer).__name__}: run one batch through the model first"
            )
    reasons: dict[str, str] = {}
    origins: dict[_BatchNorm, _Origin] = {}
    for name, layer in selected.items():
        if not isinstance(layer, FastSyncBatchNorm):
            replacement = replacement_or_reason(layer)
            if isinstance(replacement, str):
                reasons[name] = replacement
            else:
                origins[layer] = _origin(layer, replacement)
    _warn_of_left("convert_sync_batchnorm", reasons)  # an error, under some filters
    for layer, origin in origins.items():
        _convert(layer, origin)
    settings: dict[str, Any] = {"_group": given, "skip_nonfinite_update": skip_nonfinite_update}
    settings = {name: value for name, value in settings.items() if value is not None}
    for layer in selected.values():
        if isinstance(layer, FastSyncBatchNorm):
            vars(layer).update(settings)
    return module


def replacement_or_reason(layer: _BatchNorm) -> type[FastSyncBatchNorm] | str:
    """Returns the class that a batch norm would be converted to, or why it would be left."""
    cls = class_of(layer)
    return (
        reason_to_stay(layer)
        or replacement_of(cls)
        or f"a subclass, {cls.__name__}, that may compute something of its own: "
        f"give it a converter, by @register_converter({cls.__name__})"
    )


def origin_of(layer: FastSyncBatchNorm) -> type[_BatchNorm] | None:
    """Returns the class that a layer was converted from, if it was."""
    origin: _Origin | None = vars(layer).get(_ORIGIN)
    return None if origin is None else origin.cls


def _named(name: str) -> str:
    return repr(name) if name else "the module"


def _warn_of_left(caller: str, reasons: dict[str, str]) -> None:
    """Warns, the caller's caller, of the layers that are left alone: names by reason."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(_named(name))
    if names:
        left = "; ".join(f"{', '.join(several)} ({reason})" for reason, several in names.items())
        warnings.warn(f"{caller} left alone: {left}", stacklevel=3)


def _origin(layer: _BatchNorm, replacement: type[FastSyncBatchNorm]) -> _Origin:
    own = vars(layer)
    group = hold_group(own.get("process_group"))
    return _Origin(class_of(layer), replacement, "process_group" in own, group)


def _convert(layer: _BatchNorm, origin: _Origin) -> None:
    vars(layer).pop("process_group", None)
    vars(layer).update({_ORIGIN: origin, "_group": origin.group})
    swap_class(layer, origin.replacement)


def revert_sync_batchnorm(
    module: nn.Module, default: type[_BatchNorm] = nn.BatchNorm2d
) -> nn.Module:
    """Gives every converted layer of a model the class that it had, for export or one process.

    Args:
        module: the model, or a single layer; changed in place.
        default: the class for layers that were made as FastSyncBatchNorm and so had no other.

    Returns:
        The same module, which needs this package no more.

    Raises:
        TypeError: ``default`` is no class of torch's batch norms; nothing is changed.

    Warns:
        UserWarning: names the layers that are left alone, and why: those with a ``forward`` of
            their own, those that FSDP2 has given a class, and subclasses of FastSyncBatchNorm that
            conversion has not made.

    Example::

        >>> model = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(8)))
        >>> type(revert_sync_batchnorm(model)[0]).__name__
        'BatchNorm1d'
    """
    if not is_torchs(default):
        raise TypeError(
            "revert_sync_batchnorm: expected default to be a class of torch's batch norms, as "
            f"nn.BatchNorm2d, got {default!r}"
        )
    reasons: dict[str, str] = {}
    originals: dict[FastSyncBatchNorm, type[_BatchNorm]] = {}
    for name, layer in module.named_modules():
        if isinstance(layer, FastSyncBatchNorm):
            original = reason_to_stay(layer) or _original_or_reason(layer, default)
            if isinstance(original, str):
                reasons[name] = original
            else:
                originals[layer] = original
    _warn_of_left("revert_sync_batchnorm", reasons)
    for layer, original in originals.items():
        _revert(layer, original)
    return module


def _original_or_reason(
    layer: FastSyncBatchNorm, default: type[_BatchNorm]
) -> type[_BatchNorm] | str:
    """Returns what a layer was or, where it was made as it is, what it stands for."""
    cls = class_of(layer)
    origin: _Origin | None = vars(layer).get(_ORIGIN)
    if origin is not None and origin.replacement is cls:
        return origin.cls
    if origin is None and cls is FastSyncBatchNorm:
        return default
    return original_of(cls) or f"a subclass, {cls.__name__}, that conversion does not make"


def _revert(layer: FastSyncBatchNorm, original: type[_BatchNorm]) -> None:
    origin: _Origin | None = vars(layer).pop(_ORIGIN, None)
    for ours in ("_group", "skip_nonfinite_update"):
        vars(layer).pop(ours, None)
    swap_class(layer, original)
    if origin is not None and origin.had_group:
        vars(layer)["process_group"] = None if origin.group is None else origin.group.group
