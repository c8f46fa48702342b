"""Compiles the kernels for the host, and loads them as a Python module that holds the operators."""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

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


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)}\n{result.stdout}{result.stderr}")


@functools.cache
def load() -> ModuleType:
    """Returns the module of module.cpp, built again only where a source or flag has changed."""
    command = _compiler()
    sources = sorted(
        path for folder in (HERE, CSRC) for path in folder.rglob("*") if path.is_file()
    )
    digest = hashlib.sha256(repr((command, sys.version)).encode())
    for path in sources:
        if path.suffix in {".h", ".cuh", ".cu", ".cpp"}:
            digest.update(path.name.encode() + path.read_bytes())
    cache = Path(tempfile.gettempdir()) / f"syncbn_emulator_{os.getuid()}"
    target = cache / digest.hexdigest()[:16] / "syncbn_emulator.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            parts = [HERE / f"{part}.cpp" for part in PARTS]
            objects = [str(Path(scratch) / f"{part.stem}.o") for part in parts]
            with ThreadPoolExecutor() as pool:
                list(
                    pool.map(
                        lambda part, out: _run([*command, "-c", str(part), "-o", out]),
                        parts,
                        objects,
                    )
                )
            built = str(Path(scratch) / target.name)
            _run([*command, "-shared", *objects, *LIBRARIES, "-o", built])
            os.replace(built, target)  # at once, as another process may be building too
    loader = importlib.machinery.ExtensionFileLoader("syncbn_emulator", str(target))
    spec = importlib.util.spec_from_loader("syncbn_emulator", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
