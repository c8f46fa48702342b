"""What setup.py has to find out and decide: the compiler, CUDA, the architectures, the flags.

Only import_torch imports torch, and nothing setuptools, so that metadata can be made without
torch and each decision can be tested alone (tests/test_build.py).
"""

from __future__ import annotations

import glob
import os
import pprint
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

MIN_SETUPTOOLS = 77  # the first to read `license = "BSD-3-Clause"`
MIN_TORCH = (2, 10)
MIN_NVCC = (12, 0)  # the first with -std=c++20
MIN_ARCH = (7, 5)

# Chips of boards on which neither x86-64 hosts nor discrete cards occur.
EMBEDDED_ARCHS = {(8, 7), (8, 8), (11, 0)}

# Where toolkits lie that are not on PATH.
USUAL_PLACES = ["/usr/local/cuda", "/usr/local/cuda-*", "/opt/cuda", "/opt/cuda-*"]

PIP_HINT = "  pip install 'torch>=2.10' 'setuptools>=77' wheel ninja\n"


class BuildError(SystemExit):
    """Ends the build with a message; pip shows it as the last line, without a traceback."""

    def __init__(self, message: str) -> None:
        super().__init__(f"\nsyncbn_cuda: {message}\n")


class CudaMissing(Exception):
    """Why the CUDA kernels cannot be built here."""


# --- Tools of the build ---------------------------------------------------------------------------


def check_setuptools(version: str) -> None:
    if int(version.split(".")[0]) < MIN_SETUPTOOLS:
        raise BuildError(
            f"the build needs setuptools>={MIN_SETUPTOOLS}, found {version}. Run\n{PIP_HINT}"
            "and repeat, or leave out --no-build-isolation."
        )


def import_torch():
    """The torch to build against, with a message that says what to do where there is none."""
    remedy = (
        f"For --no-build-isolation (recommended), run\n{PIP_HINT}and repeat;"
        " or leave out --no-build-isolation, and pip fetches a torch of its own for the build."
    )
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise BuildError(f"the torch installed here cannot be imported: {error}") from error
        raise BuildError(f"the build needs torch, which is not installed. {remedy}") from None
    except (ImportError, OSError) as error:
        raise BuildError(f"the torch installed here cannot be imported: {error}") from error
    if version_pair(torch.__version__) < MIN_TORCH:
        raise BuildError(f"the build needs torch>=2.10, found {torch.__version__}. {remedy}")
    return torch


def version_pair(text: str) -> tuple[int, int]:
    major, minor = re.findall(r"\d+", text)[:2]
    return int(major), int(minor)


def check_compiler(environ: Mapping[str, str] = os.environ) -> str:
    """Returns the first line of the C++ compiler's version; raises BuildError if it lacks C++20."""
    command = shlex.split(environ.get("CXX", "c++"))
    advice = (
        "Install GCC 11 or newer (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++) or"
        " Clang 14 or newer, and name it in CXX if it is not the default."
    )
    if shutil.which(command[0], path=environ.get("PATH")) is None:
        raise BuildError(f"the C++ compiler '{command[0]}' was not found. {advice}")
    version = _run([*command, "--version"], environ).stdout.partition("\n")[0]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        source.write_text("#include <bit>\n#include <concepts>\n#include <span>\nint main() {}\n")
        probe = _run([*command, "-std=c++20", "-fsyntax-only", str(source)], environ)
    if probe.returncode != 0:
        raise BuildError(
            f"the C++ compiler '{command[0]}' ({version or 'unknown version'}) does not compile"
            f" C++20: {_first_error(probe)}\n{advice}"
        )
    return version


# --- CUDA -----------------------------------------------------------------------------------------


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
    answer = _run([str(root / "bin" / "nvcc"), "--version"], environ)
    found = re.search(r"release (\d+\.\d+)", answer.stdout)
    if found is None:
        raise CudaMissing(f"{root}/bin/nvcc --version names no release: {_first_error(answer)}")
    if version_pair(found[1]) < MIN_NVCC:
        raise CudaMissing(f"{root}/bin/nvcc is CUDA {found[1]}, but C++20 needs 12.0 or newer")
    return Cuda(root, found[1])


def _candidate_roots(environ: Mapping[str, str]) -> Iterator[Path]:
    nvcc = shutil.which("nvcc", path=environ.get("PATH", os.defpath))
    if nvcc is not None:
        yield Path(nvcc).resolve().parent.parent  # a link in a bin folder
        dryrun = _run([nvcc, "--dryrun", "probe.cu"], environ)  # compiles nothing, needs no file
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
        probe = _run([*command, str(source), "-o", f"{folder}/probe.so"], environ)
    if probe.returncode != 0:
        raise CudaMissing(f"{cuda.nvcc} does not compile a small kernel: {_first_error(probe)}")


def default_archs(cuda: Cuda, machine: str, environ: Mapping[str, str] = os.environ) -> list[str]:
    """7.5 to the newest that nvcc knows, and PTX of the newest for the cards that come after it."""
    listed = _run([str(cuda.nvcc), "--list-gpu-arch"], environ).stdout
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


# --- The plan -------------------------------------------------------------------------------------


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
    # libtorch brings libtorch_cuda where there is one. Naming that would tie the library to a CUDA
    # build of torch at link time, and the shared CUDA runtime to one CUDA release at run time.
    link_torch = ["-Wl,--no-as-needed", "-ltorch", "-Wl,--as-needed"]
    runtime = ["-lcudart_static", "-lrt", "-lpthread", "-ldl"]
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


def _run(command: list[str], environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    environ = {**environ, "LC_ALL": "C"}  # messages are searched
    try:
        return subprocess.run(
            command, env=environ, capture_output=True, text=True, errors="replace", check=False
        )
    except OSError as error:
        return subprocess.CompletedProcess(command, 127, "", str(error))


def _first_error(result: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in (result.stderr + result.stdout).splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or [f"exit status {result.returncode}"])[0]
