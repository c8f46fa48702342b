"""The tools of the build, checked before use: setuptools, torch, the C++ compiler.

Only import_torch imports torch, and nothing setuptools, so that metadata can be made without
torch.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

MIN_SETUPTOOLS = 77  # the first to read `license = "BSD-3-Clause"`
MIN_TORCH = (2, 10)

PIP_HINT = "  pip install 'torch>=2.10' 'setuptools>=77' wheel ninja\n"


class BuildError(SystemExit):
    """Ends the build with a message; pip shows it as the last line, without a traceback."""

    def __init__(self, message: str) -> None:
        super().__init__(f"\nsyncbn_cuda: {message}\n")


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
    version = run([*command, "--version"], environ).stdout.partition("\n")[0]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        source.write_text("#include <bit>\n#include <concepts>\n#include <span>\nint main() {}\n")
        probe = run([*command, "-std=c++20", "-fsyntax-only", str(source)], environ)
    if probe.returncode != 0:
        raise BuildError(
            f"the C++ compiler '{command[0]}' ({version or 'unknown version'}) does not compile"
            f" C++20: {first_error(probe)}\n{advice}"
        )
    return version


def run(command: list[str], environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    environ = {**environ, "LC_ALL": "C"}  # messages are searched
    try:
        return subprocess.run(
            command, env=environ, capture_output=True, text=True, errors="replace", check=False
        )
    except OSError as error:
        return subprocess.CompletedProcess(command, 127, "", str(error))


def first_error(result: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in (result.stderr + result.stdout).splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or [f"exit status {result.returncode}"])[0]
