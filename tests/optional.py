"""Packages that some tests convert the networks of, and that not every torch has."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest


def optional(name: str) -> ModuleType:
    """Imports a module, or skips the test or file where it is missing or of another torch."""
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:  # RuntimeError: torchvision, without its operators
        pytest.skip(f"{name}: {error}", allow_module_level=True)
