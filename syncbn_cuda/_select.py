"""Which layers of a model are meant: by a predicate, or by patterns of their names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

#: A predicate over a layer's name and the layer, one pattern of names, or several.
Select = Callable[[str, _BatchNorm], bool] | str | Iterable[str]

_SHOWN = 5  # names in an error


def select_batch_norms(module: nn.Module, select: Select | None) -> dict[str, _BatchNorm]:
    """Returns the batch norms that are meant, by the first of their names.

    Raises:
        TypeError: ``select`` is of another kind.
        ValueError: there is no pattern, or a pattern matches no batch norm.
    """
    names: dict[_BatchNorm, list[str]] = {}
    for name, layer in module.named_modules(remove_duplicate=False):
        if isinstance(layer, _BatchNorm):
            names.setdefault(layer, []).append(name)
    chosen = _chooser(select, [name for several in names.values() for name in several])
    return {several[0]: layer for layer, several in names.items() if chosen(several, layer)}


def _chooser(select: Select | None, names: list[str]) -> Callable[[list[str], _BatchNorm], bool]:
    """Returns what tells whether a layer, by all of its names, is meant."""
    if select is None:
        return lambda several, layer: True
    if not isinstance(select, str | type | nn.Module) and callable(select):
        predicate = select
        return lambda several, layer: any(predicate(name, layer) for name in several)
    patterns = [select] if isinstance(select, str) else _strings(select)
    if not patterns:
        raise ValueError("select: expected a pattern or more, got none")
    for pattern in patterns:
        if not any(_matches(name, pattern.removeprefix("!")) for name in names):
            raise ValueError(
                f"select: {pattern!r} matches no batch norm; this model has {_some(names)}"
            )
    without = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    taken = [pattern for pattern in patterns if not pattern.startswith("!")] or ["*"]
    return lambda several, layer: (
        any(_matches(name, pattern) for name in several for pattern in taken)
        and not any(_matches(name, pattern) for name in several for pattern in without)
    )


def _strings(select: object) -> list[str]:
    patterns: list[str] = []
    for pattern in select if isinstance(select, Iterable) else [select]:
        if not isinstance(pattern, str):
            raise TypeError(
                "select: expected a predicate (name, layer) -> bool, a pattern of names, or "
                f"several, got {type(pattern).__name__}"
            )
        patterns.append(pattern)
    return patterns


def _matches(name: str, pattern: str) -> bool:
    """Whether the name is matched itself, or that of a module that holds the layer."""
    ends = [i for i, character in enumerate(name) if character == "."]
    glob = pattern.replace("[", "[[]")  # no set of characters: some names have brackets
    return any(fnmatchcase(name[:end], glob) for end in (*ends, len(name)))


def _some(names: list[str]) -> str:
    if not names:
        return "none at all"
    shown = ", ".join(repr(name) for name in names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
