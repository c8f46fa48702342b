"""What became of each layer of a model that normalises."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from syncbn_cuda._swap import class_of
from syncbn_cuda.convert import origin_of, replacement_or_reason
from syncbn_cuda.module import FastSyncBatchNorm

_OF_A_SAMPLE = (_InstanceNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.LocalResponseNorm)

#: The reason of a layer that conversion would take.
NOT_CONVERTED = "not converted yet, or not selected"

_STATUSES = ("converted", "synchronised", "left", "needs none")


class LayerReport(NamedTuple):
    """One layer that normalises.

    Attributes:
        name: its dotted name, the first where it has several; "" for the model itself.
        class_name: its class, as it would be without parametrizations.
        status: "converted"; "synchronised", but not by conversion; "left", a batch norm that
            normalises over the batch of its own rank; or "needs none".
        reason: what it was converted from, or why it was not.
    """

    name: str
    class_name: str
    status: str
    reason: str


class ConversionReport(tuple[LayerReport, ...]):
    """The layers that normalise, in the order of the model; ``str`` makes a table of them."""

    def __str__(self) -> str:
        rows = [(row.name or "(the model)", *row[1:]) for row in self]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        widths[-1:] = [0]  # nothing follows
        lines = ["  ".join(map(str.ljust, row, widths)) for row in rows]
        counts = Counter(row.status for row in self)
        sums = [f"{counts[status]} {status}" for status in _STATUSES if counts[status]]
        return "\n".join([*lines, f"{len(self)} normalise: {', '.join(sums) or 'nothing to do'}"])


def conversion_report(module: nn.Module) -> ConversionReport:
    """Says of each layer that normalises whether it was converted, and if not, why.

    Args:
        module: the model, or a single layer. Nothing is changed.

    Returns:
        A tuple with a :class:`LayerReport` (name, class_name, status, reason) for each layer; its
        ``str`` is a table with a sum below.

    Example::

        >>> model = nn.Sequential(nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.BatchNorm2d(8))
        >>> print(conversion_report(convert_sync_batchnorm(model, select="0")))
        0  FastSyncBatchNorm  converted   from BatchNorm2d
        1  GroupNorm          needs none  normalises each sample by itself
        2  BatchNorm2d        left        not converted yet, or not selected
        3 normalise: 1 converted, 1 left, 1 needs none
        >>> [row.name for row in conversion_report(model) if row.status == "left"]
        ['2']
    """
    return ConversionReport(
        LayerReport(name, class_of(layer).__name__, *row)
        for name, layer in module.named_modules()
        if (row := _status_and_reason(layer)) is not None
    )


def is_synchronized(module: nn.Module) -> bool:
    """Says whether a layer is a batch norm that normalises over ranks in training.

    Checks by ``isinstance(layer, nn.SyncBatchNorm)`` miss FastSyncBatchNorm; this one does not.

    Args:
        module: a layer. Of a container, which itself normalises nothing, the answer is False,
            whatever is in it: ask for each of its ``modules()``.

    Returns:
        True for :class:`FastSyncBatchNorm`, ``nn.SyncBatchNorm``, apex's ``SyncBatchNorm``, and
        subclasses of these, in whatever mode and with whatever group.

    Example::

        >>> is_synchronized(convert_sync_batchnorm(nn.BatchNorm2d(8)))
        True
        >>> is_synchronized(nn.BatchNorm2d(8))
        False
    """
    return isinstance(module, FastSyncBatchNorm | nn.SyncBatchNorm) or any(
        cls.__name__ == "SyncBatchNorm" and cls.__module__.startswith("apex.parallel.")
        for cls in type(module).__mro__
    )


def _status_and_reason(layer: nn.Module) -> tuple[str, str] | None:
    """Returns what the report says of a layer; None for one that does not normalise."""
    if isinstance(layer, FastSyncBatchNorm):
        origin = origin_of(layer)
        if origin is None:
            return "synchronised", "made as it is"
        return "converted", f"from {origin.__name__}"
    if isinstance(layer, _BatchNorm):
        status = "synchronised" if is_synchronized(layer) else "left"
        if isinstance(layer, _LazyNormBase):
            return status, "does not know its number of channels yet"
        replacement = replacement_or_reason(layer)
        reason = replacement if isinstance(replacement, str) else None
        return status, reason or NOT_CONVERTED
    if isinstance(layer, _OF_A_SAMPLE):
        return "needs none", "normalises each sample by itself"
    if "running_var" in layer._buffers:
        if all(name in layer._buffers for name in ("running_mean", "weight", "bias")):
            return "needs none", "frozen: its statistics do not come from the batch"
        return "left", "keeps running statistics, but is none of torch's batch norms"
    return None
