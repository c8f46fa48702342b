"""Compiles the kernels for the host and loads them as a Python module."""

from __future__ import annotations

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

HERE = Path(__file__).resolve().parent
CSRC = HERE.parent.parent / "csrc"
FLAGS = "-std=c++20 -fPIC -fvisibility=hidden -ffp-contract=off -Wall -Wno-unknown-pragmas".split()


def _compiler() -> list[str]:
    import pybind11

    torch = importlib.util.find_spec("torch")
    assert torch is not None and torch.submodule_search_locations is not None
    return [
        *shlex.split(os.environ.get("CXX", "g++")),
        *FLAGS,
        *shlex.split(os.environ.get("SYNCBN_EMULATOR_FLAGS", "-O1")),
        "-DSYNCBN_EMULATOR",
        "-DSYNCBN_MODULE=syncbn_emulator",
        *(f"-I{folder}" for folder in (HERE, CSRC / "cuda")),
        *(f"-isystem{torch.submodule_search_locations[0]}/include",),
        *(
            f"-isystem{folder}"
            for folder in (pybind11.get_include(), sysconfig.get_path("include"))
        ),
    ]


def load() -> ModuleType:
    """Returns the module of module.cpp, built again only where a source or flag has changed."""
    command = _compiler()
    sources = (path for folder in (HERE, CSRC) for path in folder.rglob("*"))
    files = [path for path in sources if path.suffix in {".h", ".cuh", ".cu", ".cpp"}]
    target = cached.folder("emulator", (command, sys.version), files) / "syncbn_emulator.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            parts = [HERE / f"{part}.cpp" for part in ("module", "emulator", "fiber")]
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
            cached.run([*command, "-shared", *objects, "-o", built])
            os.replace(built, target)  # at once, as another process may be building too
    loader = importlib.machinery.ExtensionFileLoader("syncbn_emulator", str(target))
    spec = importlib.util.spec_from_loader("syncbn_emulator", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
