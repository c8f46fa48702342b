"""What setup.py decides: which libraries are built, with which flags, and what is noted of it.

What it finds out for that is in tools.py and cuda.py. Each decision can be tested alone
(tests/test_build.py).
"""

from __future__ import annotations

import os
import pprint
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from build_support.cuda import (
    Cuda,
    CudaMissing,
    check_nvcc,
    default_archs,
    find_cuda,
    gencode_flags,
)
from build_support.reproducible import for_nvcc, forget_folders, settle_modes, settle_time
from build_support.tools import (
    BuildError,
    check_compiler,
    check_setuptools,
    import_torch,
    version_pair,
)

__all__ = [
    "BuildError",
    "CudaMissing",
    "check_compiler",
    "check_setuptools",
    "find_cuda",
    "flags_for",
    "for_nvcc",
    "forget_folders",
    "import_torch",
    "plan_cuda",
    "settle_modes",
    "settle_time",
    "version_note",
    "write_config",
]


@dataclass(frozen=True)
class Flags:
    cxx: list[str]
    nvcc: list[str]
    link_cpu: list[str]
    link_cuda: list[str]


def flags_for(platform: str) -> Flags | None:
    """The flags on `platform` (as sys.platform), or None where no library is built."""
    if platform not in ("linux", "darwin"):
        return None  # csrc uses the vector extensions of GCC and Clang
    cxx = [
        "-std=c++20",
        "-O3",
        "-g0",  # Python's own flags may ask for -g, which makes the wheel ten times larger
        "-fvisibility=hidden",
        # C++20 alone lets a*b+c become one instruction, and the bits would differ from CUDA's.
        "-ffp-contract=off",
        # Or square roots may have to set errno, and GCC vectorises no loop that holds one.
        "-fno-math-errno",
        # Only what torch 2.10 has: the library runs with every later one.
        "-DTORCH_TARGET_VERSION=0x020a000000000000",
    ]
    if platform == "darwin":
        return Flags(cxx, [], ["-ltorch", "-ltorch_cpu"], [])
    host = "-fvisibility=hidden,-ffp-contract=off"
    nvcc = ["-std=c++20", "-O3", f"--compiler-options={host}", cxx[-1], "-DUSE_CUDA"]
    nvcc.append("-Xfatbin=-compress-all")  # a fifth of the size, in no more time
    # nvcc puts a hash of this path, and its own of the file's name, into names of symbols.
    nvcc.append("-Xcudafe=--orig_src_path_name=syncbn_cuda")
    # libtorch brings libtorch_cuda where there is one. Naming that would tie the library to a CUDA
    # build of torch at link time, and the shared CUDA runtime to one CUDA release at run time.
    link_torch = ["-Wl,--no-as-needed", "-ltorch", "-Wl,--as-needed"]
    # Stripped, as nvcc names symbols of the host's code after its own process.
    runtime = ["-lcudart_static", "-lrt", "-lpthread", "-ldl", "-Wl,--strip-all"]
    return Flags(cxx, nvcc, link_torch, [*link_torch, *runtime])


@dataclass(frozen=True)
class CudaPlan:
    cuda: Cuda | None
    reason: str | None  # why it is left out
    archs: list[str]
    arch_flags: list[str]


def plan_cuda(
    flags: Flags | None,
    machine: str,
    torch_hip: str | None = None,
    device_count: int = 0,
    environ: Mapping[str, str] = os.environ,
) -> CudaPlan:
    """Decides on the CUDA kernels; for want of CUDA it fails only if SYNCBN_CUDA=1 demands them."""
    switch = environ.get("SYNCBN_CUDA", "")
    if switch not in ("", "0", "1"):
        raise BuildError(f"SYNCBN_CUDA must be 0, 1 or unset, got '{switch}'")
    try:
        if switch == "0":
            raise CudaMissing("SYNCBN_CUDA=0 was set at build time")
        if flags is None or not flags.nvcc:
            raise CudaMissing("CUDA kernels are built on Linux only")
        if torch_hip:
            raise CudaMissing(f"the torch at build time is one for ROCm {torch_hip}")
        cuda = find_cuda(environ)
        check_nvcc(cuda, flags.nvcc, environ)
        listed = environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()
        if not listed or (listed == ["native"] and device_count == 0):
            archs = default_archs(cuda, machine, environ)
            return CudaPlan(cuda, None, archs, gencode_flags(archs))
        return CudaPlan(cuda, None, listed, [])  # torch reads the variable, with its named ones
    except CudaMissing as reason:
        if switch == "1":
            raise BuildError(f"SYNCBN_CUDA=1 demands the CUDA kernels, but {reason}") from None
        return CudaPlan(None, str(reason), [], [])


def version_note(nvcc: str | None, torch_cuda: str | None) -> str | None:
    """What to know where nvcc and torch are of different CUDA releases; the build takes both."""
    if nvcc is None or torch_cuda is None or version_pair(nvcc) == version_pair(torch_cuda):
        return None
    return (
        f"compiled by nvcc {nvcc} beside a torch for CUDA {torch_cuda}: fine as long as the driver"
        f" supports CUDA {nvcc.partition('.')[0]}"
    )


def write_config(path: Path, config: dict[str, object]) -> None:
    text = pprint.pformat(config, sort_dicts=False, width=100)
    path.write_text(
        "# Written by the build for syncbn_cuda.build_info(); not a source.\n"
        f"from typing import Any\n\nCONFIG: dict[str, Any] = {text}\n"
    )
