"""What tells one dataset from another without loading a sample of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from torch.utils.data import Dataset, Subset, TensorDataset

#: How many values of the first and the last sample tell one tensor from another.
_COMPARED = 1000


def identity(dataset: Any, holders: tuple[Any, ...] = ()) -> str:
    """Returns a text that differs where datasets are seen to differ, or those that they hold."""
    text = f"{type(dataset).__name__} of {length(dataset)} samples"
    told = [identity(held, (*holders, dataset)) for held in _held_datasets(dataset, holders)]
    if isinstance(dataset, Subset):
        told += map(str, dataset.indices)
    elif isinstance(dataset, TensorDataset):
        for tensor in dataset.tensors:
            ends = [end.flatten()[:_COMPARED].tolist() for end in (tensor[:1], tensor[-1:])]
            told.append(repr((tensor.shape, ends)))
    else:
        told += _listed_samples(dataset)
    return f"{text} ({hashlib.sha1(' '.join(told).encode()).hexdigest()[:8]})" if told else text


def _held_datasets(dataset: Any, holders: tuple[Any, ...]) -> Iterator[Any]:
    """Yields the datasets in attributes, or in lists there, as ConcatDataset and wrappers do."""
    if isinstance(dataset, Subset):
        yield dataset.dataset  # of any class
        return
    for value in getattr(dataset, "__dict__", {}).values():
        for held in value if isinstance(value, list | tuple) else (value,):
            if not isinstance(held, Dataset):
                break  # nor will others be, of a list of samples
            if not any(held is holder for holder in (*holders, dataset)):
                yield held


def _listed_samples(dataset: Any) -> Iterator[str]:
    """Yields the first and the last of what a dataset lists for each sample, as names of files."""
    for value in getattr(dataset, "__dict__", {}).values():
        if isinstance(value, list | tuple) and len(value) == length(dataset) and _is_plain(value):
            yield repr((value[:_COMPARED], value[-_COMPARED:]))


def _is_plain(value: Any) -> bool:
    """Whether a text of it says what it is, and no more; of a list, the first item tells."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value[:1]))
    return isinstance(value, str | int | float | PurePath)


def length(sized: Any) -> int | None:
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None
