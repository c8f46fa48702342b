"""Compiles the kernels for the host, and loads them as a Python module that holds the operators."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import os
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
PARTS = ("module", "faults", "operators", "runtime", "emulator", "memory", "fiber")
FLAGS = (
    "-std=c++20 -fPIC -fvisibility=hidden -ffp-contract=off -Wall -Wno-unknown-pragmas"
    " -DSYNCBN_EMULATOR -DSYNCBN_MODULE=syncbn_emulator -DTORCH_TARGET_VERSION=0x020a000000000000"
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


@functools.cache
def load() -> ModuleType:
    """Returns the module of module.cpp, built again only where a source or flag has changed."""
    command = _compiler()
    sources = (path for folder in (HERE, CSRC) for path in folder.rglob("*"))
    files = [path for path in sources if path.suffix in {".h", ".cuh", ".cu", ".cpp"}]
    target = (
        cached.folder("emulator", (command, sys.version, torch.__version__), files)
        / "syncbn_emulator.so"
    )
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            parts = [HERE / f"{part}.cpp" for part in PARTS]
            objects = [str(Path(scratch) / f"{part.stem}.o") for part in parts]
            with ThreadPoolExecutor() as pool:
                list(
                    pool.map(
                        lambda part, out: cached.run([*command, "-c", str(part), "-o", out]),
                        parts,
                        objects,
                    )
                )
            built = str(Path(scratch) / target.name)
            cached.run([*command, "-shared", *objects, *LIBRARIES, "-o", built])
            os.replace(built, target)  # at once, as another process may be building too
    loader = importlib.machinery.ExtensionFileLoader("syncbn_emulator", str(target))
    spec = importlib.util.spec_from_loader("syncbn_emulator", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
