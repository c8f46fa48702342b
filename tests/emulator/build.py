"""Compiles the kernels for the host, and loads them as a Python module that holds the operators."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import os
import re
import shlex
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import cached
import torch

HERE = Path(__file__).resolve().parent
CSRC = HERE.parent.parent / "csrc"
KERNELS = ("stats", "elemt", "backward_reduce", "backward_elemt")
PARTS = [*sorted(HERE.glob("*.cpp")), *(CSRC / "cuda" / f"{kernel}.cu" for kernel in KERNELS)]
FLAGS = (
    "-std=c++20 -fPIC -fvisibility=hidden -ffp-contract=off -Wall -Wno-unknown-pragmas"
    " -DSYNCBN_EMULATOR -DSYNCBN_POISON -DSYNCBN_MODULE=syncbn_emulator"
    " -DTORCH_TARGET_VERSION=0x020a000000000000"
).split()
TORCH = Path(torch.__file__).parent
LIBRARIES = [f"-L{TORCH}/lib", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu"]


def _compiler() -> list[str]:
    import pybind11

    others = (TORCH / "include", pybind11.get_include(), sysconfig.get_path("include"))
    return [
        *shlex.split(os.environ.get("CXX", "g++")),
        *FLAGS,
        *shlex.split(os.environ.get("SYNCBN_EMULATOR_FLAGS", "-O1")),
        *(f"-I{folder}" for folder in (HERE, CSRC / "cuda")),
        *(f"-isystem{folder}" for folder in others),
    ]


def _sources(path: Path, found: set[Path]) -> set[Path]:
    """Adds the file and what it includes of this project to ``found``."""
    found.add(path)
    for name in re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE):
        for folder in (path.parent, HERE, CSRC / "cuda"):
            included = (folder / name).resolve()
            if included.exists():
                if included not in found:
                    _sources(included, found)
                break
    return found


def _build(command: list[str], target: Path) -> Path:
    """Lets the command write the target, unless it exists."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            built = Path(scratch) / target.name
            cached.run([*command, "-o", str(built)])
            os.replace(built, target)  # at once, as another process may be building too
    return target


def _object(command: list[str], part: Path) -> str:
    key = (command, part.name, sys.version, torch.__version__)
    target = cached.folder("emulator", key, _sources(part, set())) / f"{part.stem}.o"
    return str(_build([*command, "-x", "c++", "-c", str(part)], target))


@functools.cache
def load() -> ModuleType:
    """Returns the module of module.cpp; what has not changed since is not compiled again."""
    command = _compiler()
    with ThreadPoolExecutor() as pool:
        objects = list(pool.map(lambda part: _object(command, part), PARTS))
    target = cached.folder("emulator", (command, objects), []) / "syncbn_emulator.so"
    _build([*command, "-shared", *objects, *LIBRARIES], target)
    loader = importlib.machinery.ExtensionFileLoader("syncbn_emulator", str(target))
    spec = importlib.util.spec_from_loader("syncbn_emulator", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
