"""Compiles kernels to machine code, takes it apart and reads it (sass.py)."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import cached
import torch
from compiled import sass

HERE = Path(__file__).resolve().parent
CSRC = HERE.parent.parent / "csrc"
PLANTED = HERE / "planted.cu"


def find_nvdisasm(toolkit: Path) -> str | None:
    """On PATH, in the toolkit, or from the package nvidia-cuda-nvdisasm."""
    nvidia = importlib.util.find_spec("nvidia")
    places = map(Path, nvidia.submodule_search_locations or () if nvidia else ())
    packages = [folder for place in places for folder in sorted(place.glob("cu*/bin"))]
    folders = [os.environ.get("PATH", os.defpath), toolkit / "bin", *packages]
    return shutil.which("nvdisasm", path=os.pathsep.join(map(str, folders)))


@dataclass(frozen=True)
class Tools:
    nvcc: str
    nvdisasm: str
    flags: list[str]  # of the build

    def kernels(self, units: Sequence[tuple[Path, str]]) -> list[list[sass.Kernel]]:
        """The kernels of each pair of a source and the flag that names an architecture."""
        # One call for all architectures would share nothing but the preprocessing.
        cache = self._cache()
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            return list(pool.map(lambda unit: self._kernels(cache, *unit), units))

    def _command(self) -> list[str]:
        host = ["-ccbin", os.environ["CC"]] if os.environ.get("CC") else []
        includes = ["-I", f"{CSRC}/cuda", "-isystem", f"{Path(torch.__file__).parent}/include"]
        # Line numbers leave the code as it is.
        return [self.nvcc, *self.flags, *host, *includes, "-lineinfo", "-Xptxas=-v", "-cubin"]

    def _cache(self) -> Path:
        versions = [cached.run([tool, "--version"]) for tool in (self.nvcc, self.nvdisasm)]
        sources = (path for folder in (HERE, CSRC) for path in folder.rglob("*"))
        files = [path for path in sources if path.suffix in {".py", ".cu", ".cuh", ".h"}]
        return cached.folder("compiled", (self._command(), versions, torch.__version__), files)

    def _kernels(self, cache: Path, source: Path, arch: str) -> list[sass.Kernel]:
        target = cache / f"{source.stem}{arch.rpartition('=')[2]}.json"
        if not target.exists():
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache) as scratch:
                cubin, built = f"{scratch}/cubin", f"{scratch}/json"
                ptxas = cached.run([*self._command(), arch, str(source), "-o", cubin])
                kernels = sass.read(ptxas, cached.run([self.nvdisasm, "-c", "-gi", cubin]))
                Path(built).write_text(json.dumps([dataclasses.asdict(k) for k in kernels]))
                os.replace(built, target)  # at once, as another process may be at it too
        return [sass.Kernel(**fields) for fields in json.loads(target.read_text())]
