"""The CUDA operators on the emulator, in the place of the shipped ones."""

from __future__ import annotations

import functools

from emulator.build import load

from syncbn_cuda import _library

NAMESPACE = "syncbn_emulated"


@functools.cache
def kernels() -> _library.Kernels:
    load()
    _library.register_fakes(NAMESPACE)
    return _library.Kernels(NAMESPACE)


def use(rank: int) -> None:
    """Makes this process compute with them (a rank's ``setup``, see distributed.py)."""
    _library._available.compiled = kernels()
