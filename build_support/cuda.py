"""The CUDA toolkit: where it is, whether it compiles, and for which architectures."""

from __future__ import annotations

import glob
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from build_support.tools import first_error, run, version_pair

MIN_NVCC = (12, 0)  # the first with -std=c++20
MIN_ARCH = (7, 5)

# Chips of boards on which neither x86-64 hosts nor discrete cards occur.
EMBEDDED_ARCHS = {(8, 7), (8, 8), (11, 0)}

# Where toolkits lie that are not on PATH.
USUAL_PLACES = ["/usr/local/cuda", "/usr/local/cuda-*", "/opt/cuda", "/opt/cuda-*"]


class CudaMissing(Exception):
    """Why the CUDA kernels cannot be built here."""


@dataclass(frozen=True)
class Cuda:
    root: Path
    version: str  # of nvcc, "13.0"

    @property
    def nvcc(self) -> Path:
        return self.root / "bin" / "nvcc"

    def _folders(self, *patterns: str) -> list[str]:
        return [
            path for pattern in patterns for path in sorted(glob.glob(f"{self.root}/{pattern}"))
        ]

    @property
    def include_dirs(self) -> list[str]:
        # g++ looks into /usr/include anyway, and breaks its own headers if told to.
        folders = self._folders("include", "targets/*/include")
        return [folder for folder in folders if folder != "/usr/include"]

    @property
    def library_dirs(self) -> list[str]:
        return self._folders("lib64", "lib", "targets/*/lib")


def find_cuda(environ: Mapping[str, str] = os.environ) -> Cuda:
    """Finds the CUDA toolkit; raises CudaMissing with the reason if there is none to build with."""
    named = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    if named:
        # Said outright: another toolkit than the one named would surprise.
        root = Path(named)
        if not _is_root(root):
            raise CudaMissing(f"CUDA_HOME={named} holds no bin/nvcc with include/cuda_runtime.h")
    else:
        root = next(filter(_is_root, _candidate_roots(environ)), None)
        if root is None:
            raise CudaMissing(
                "no CUDA toolkit found: no nvcc on PATH that leads to one, CUDA_HOME unset,"
                f" none in {', '.join(USUAL_PLACES)}"
            )
    answer = run([str(root / "bin" / "nvcc"), "--version"], environ)
    found = re.search(r"release (\d+\.\d+)", answer.stdout)
    if found is None:
        raise CudaMissing(f"{root}/bin/nvcc --version names no release: {first_error(answer)}")
    if version_pair(found[1]) < MIN_NVCC:
        raise CudaMissing(f"{root}/bin/nvcc is CUDA {found[1]}, but C++20 needs 12.0 or newer")
    return Cuda(root, found[1])


def _candidate_roots(environ: Mapping[str, str]) -> Iterator[Path]:
    nvcc = shutil.which("nvcc", path=environ.get("PATH", os.defpath))
    if nvcc is not None:
        yield Path(nvcc).resolve().parent.parent  # a link in a bin folder
        dryrun = run([nvcc, "--dryrun", "probe.cu"], environ)  # compiles nothing, needs no file
        if top := re.search(r"^#\$ TOP=(\S.*)$", dryrun.stderr, re.MULTILINE):
            yield Path(top[1].strip()).resolve()  # a shell wrapper; nvcc says ".../bin/.."
        yield Path(nvcc).absolute().parent.parent  # a distribution's: headers in /usr/include
    for pattern in USUAL_PLACES:
        yield from map(Path, sorted(glob.glob(pattern), key=_version_key, reverse=True))


def _is_root(root: Path) -> bool:
    headers = [root / "include", *root.glob("targets/*/include")]
    has_header = any((folder / "cuda_runtime.h").is_file() for folder in headers)
    return has_header and (root / "bin" / "nvcc").is_file()


def _version_key(path: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path)]


def check_nvcc(cuda: Cuda, flags: list[str], environ: Mapping[str, str] = os.environ) -> None:
    """Raises CudaMissing unless nvcc, headers, runtime and host compiler fit together."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cu")
        source.write_text(
            "#include <concepts>\n#include <cuda_runtime.h>\n"
            "__global__ void probe(int* p) { *p = 1; }\n"
            "void launch(int* p) { probe<<<1, 1>>>(p); }\n"
        )
        host = ["-ccbin", environ["CC"]] if environ.get("CC") else []  # what torch passes, too
        libraries = [f"-L{path}" for path in cuda.library_dirs]
        command = [str(cuda.nvcc), *flags, *host, "-shared", "-Xcompiler", "-fPIC", *libraries]
        probe = run([*command, str(source), "-o", f"{folder}/probe.so"], environ)
    if probe.returncode != 0:
        raise CudaMissing(f"{cuda.nvcc} does not compile a small kernel: {first_error(probe)}")


def default_archs(cuda: Cuda, machine: str, environ: Mapping[str, str] = os.environ) -> list[str]:
    """7.5 to the newest that nvcc knows, and PTX of the newest for the cards that come after it."""
    listed = run([str(cuda.nvcc), "--list-gpu-arch"], environ).stdout
    numbers = {divmod(int(number), 10) for number in re.findall(r"compute_(\d+)\b", listed)}
    left_out = EMBEDDED_ARCHS if machine in ("x86_64", "AMD64") else set()
    archs = [
        f"{major}.{minor}"
        for major, minor in sorted(numbers - left_out)
        if (major, minor) >= MIN_ARCH
    ]
    if not archs:
        raise CudaMissing(f"{cuda.nvcc} --list-gpu-arch names no architecture from 7.5 on")
    archs[-1] += "+PTX"
    return archs


def gencode_flags(archs: list[str]) -> list[str]:
    # Of our own, as torch refuses architectures that a newer nvcc knows and it does not. Where such
    # a flag is given, torch adds none.
    flags = []
    for arch in archs:
        number = arch.removesuffix("+PTX").replace(".", "")
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if arch.endswith("+PTX"):
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags
