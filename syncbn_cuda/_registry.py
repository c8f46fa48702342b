"""Which class replaces which batch norm at conversion, and how users add theirs."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from syncbn_cuda.module import FastSyncBatchNorm

Replacement = TypeVar("Replacement", bound=type[FastSyncBatchNorm])

#: From exact classes: a subclass may compute something of its own.
_replacements: dict[type[_BatchNorm], type[FastSyncBatchNorm]] = {
    nn.BatchNorm1d: FastSyncBatchNorm,
    nn.BatchNorm2d: FastSyncBatchNorm,
    nn.BatchNorm3d: FastSyncBatchNorm,
    nn.SyncBatchNorm: FastSyncBatchNorm,
}

#: Forwards that normalise and do nothing else.
_TORCHS = (_BatchNorm.forward, nn.SyncBatchNorm.forward)

#: What a forward that normalises by itself names, and what one that leads on to ours does.
_NORMALISES = {"batch_norm", "_BatchNorm", *(cls.__name__ for cls in _replacements)}
_LEADS_ON = {"super", "FastSyncBatchNorm"}


def replacement_of(original: type[_BatchNorm]) -> type[FastSyncBatchNorm] | None:
    """Returns the class that a layer of exactly this class gets at conversion, if any."""
    _load_shipped()
    return _replacements.get(original)


def original_of(replacement: type[_BatchNorm]) -> type[_BatchNorm] | None:
    """Returns the one class that this class replaces; None where there are several or none."""
    originals = [old for old, new in _replacements.items() if new is replacement]
    return originals[0] if len(originals) == 1 else None


def register_converter(original: type[_BatchNorm]) -> Callable[[Replacement], Replacement]:
    """Names the class that :func:`~syncbn_cuda.convert_sync_batchnorm` makes of another class.

    Conversion gives a layer of exactly the class ``original`` the decorated class and keeps its
    attributes, without a call of any ``__init__``. A batch norm whose ``forward`` normalises by
    ``super().forward`` needs no more than the two classes as bases, in this order::

        @register_converter(BatchNormRelu)
        class SyncBatchNormRelu(BatchNormRelu, FastSyncBatchNorm):
            pass

    One that calls ``F.batch_norm`` itself gets a ``forward`` that does the rest of it around
    ``FastSyncBatchNorm.forward(self, input)``.

    Args:
        original: one of torch's batch norms or a subclass of one. Its own subclasses are not meant;
            each is registered for itself.

    Returns:
        A decorator for a subclass of FastSyncBatchNorm, which it returns as it is.

    Raises:
        TypeError: ``original`` is no batch norm; or the decorated class is no FastSyncBatchNorm,
            is a ``nn.SyncBatchNorm`` (which ``DistributedDataParallel`` refuses on the CPU), has a
            ``forward`` that normalises without FastSyncBatchNorm or leaves out that of
            ``original``, or differs in its slots.
        ValueError: the class is converted to another one already. The same class defined anew, as
            when a notebook cell runs twice, replaces the older one, and so does any class one
            that comes with this package.

    Example::

        >>> class BatchNormRelu(nn.BatchNorm2d):
        ...     def forward(self, input):
        ...         return super().forward(input).relu()
        >>> @register_converter(BatchNormRelu)
        ... class SyncBatchNormRelu(BatchNormRelu, FastSyncBatchNorm):
        ...     pass
        >>> type(convert_sync_batchnorm(BatchNormRelu(8))).__name__
        'SyncBatchNormRelu'
    """
    if not is_torchs(original):
        raise TypeError(
            "register_converter: expected a subclass of torch's batch norms that is no "
            f"FastSyncBatchNorm, got {_name(original)}"
        )

    def register(replacement: Replacement) -> Replacement:
        _check(original, replacement)
        _load_shipped()
        known = _replacements.get(original)
        if known is not None and not _may_replace(known, replacement):
            raise ValueError(
                f"register_converter({original.__qualname__}): {_name(known)} is registered for it "
                f"already, got {_name(replacement)}"
            )
        _replacements[original] = replacement
        return replacement

    return register


def _load_shipped() -> None:
    """Registers the converters for libraries that are in use here, and imports none of these."""
    if "timm.layers" in sys.modules:
        importlib.import_module("syncbn_cuda._timm")


def _may_replace(known: type, replacement: type) -> bool:
    shipped = known.__module__.partition(".")[0] == __package__
    return shipped or _name(known) == _name(replacement)


def _check(original: type[_BatchNorm], replacement: type) -> None:
    problem = None
    if not _is_class(replacement, FastSyncBatchNorm):
        problem = "expected a subclass of FastSyncBatchNorm"
    elif issubclass(replacement, nn.SyncBatchNorm):
        problem = (
            "expected no subclass of nn.SyncBatchNorm, which DistributedDataParallel refuses on "
            "the CPU"
        )
    elif _leaves_out(original, replacement):
        problem = (
            f"{original.__qualname__}.forward would never be called: expected it as the first base,"
            f" class {replacement.__name__}({original.__name__}, FastSyncBatchNorm), or a forward"
        )
    elif (culprit := _unsynchronised_forward(replacement)) is not None:
        problem = (
            f"{culprit.__qualname__}.forward normalises without FastSyncBatchNorm: expected a "
            "forward that does the rest of it around FastSyncBatchNorm.forward(self, input)"
        )
    else:
        try:  # on a layer of no consequence: at conversion it would be too late
            probe: Any = object.__new__(original)
            probe.__class__ = replacement
        except TypeError as error:
            problem = f"a layer cannot change its class: {error}"
    if problem:
        raise TypeError(
            f"register_converter({original.__qualname__}): {problem}, got {_name(replacement)}"
        )


def _leaves_out(original: Any, replacement: Any) -> bool:
    """Whether ours is all of the new forward, where the original's was more than torch's."""
    return replacement.forward is FastSyncBatchNorm.forward and original.forward not in _TORCHS


def _unsynchronised_forward(replacement: type) -> type | None:
    """Returns the class whose forward normalises instead of ours, as far as its names tell."""
    for cls in replacement.__mro__:
        names = _names_in(vars(cls).get("forward"))
        if names is None:
            continue  # has none, or one that cannot be looked into
        if cls is FastSyncBatchNorm or "FastSyncBatchNorm" in names:
            return None
        if names & _NORMALISES and not names & _LEADS_ON:
            return cls
        if "super" not in names:  # it leads on by other methods, or not at all
            return None if any(map(_leads_on, _methods(replacement))) else cls
    return None


def _methods(replacement: type) -> Iterator[Any]:
    """Yields what the classes before ours define, besides the forward."""
    for cls in replacement.__mro__:
        if cls is FastSyncBatchNorm:
            return
        yield from (value for name, value in vars(cls).items() if name != "forward")


def _leads_on(method: Any) -> bool:
    names = _names_in(method) or set()
    return "forward" in names and bool(names & _LEADS_ON)


def _names_in(function: Any) -> set[str] | None:
    """Returns the names that a function uses; None where it has no code to look into."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return None if code is None else set(code.co_names)


def is_torchs(cls: object) -> bool:
    """Whether this is one of torch's batch norms, or a subclass that is none of ours."""
    return _is_class(cls, _BatchNorm) and not _is_class(cls, FastSyncBatchNorm)


def _is_class(cls: object, base: type) -> bool:
    return isinstance(cls, type) and issubclass(cls, base)


def _name(cls: object) -> str:
    return f"{cls.__module__}.{cls.__qualname__}" if isinstance(cls, type) else repr(cls)
