"""Stand-ins for compilers and CUDA toolkits, for the tests of the build."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def toolkit(
    root: Path,
    release: str = "13.0",
    archs: str = "75 80 86 87 88 90 100 103 110 121",
    compiles: bool = True,
    says_top: bool = True,
) -> Path:
    """A CUDA toolkit whose nvcc answers questions and notes how it was asked to compile."""
    (root / "include").mkdir(parents=True)
    (root / "include" / "cuda_runtime.h").touch()
    compiling = (
        f'echo "$@" >{root}/compiled' if compiles else "echo 'x.cu(1): error: odd' >&2; exit 1"
    )
    script(
        root / "bin" / "nvcc",
        f"""case "$*" in
          --version) echo "Cuda compilation tools, release {release}, V{release}.88" ;;
          --list-gpu-arch) for arch in {archs}; do echo compute_$arch; done ;;
          --dryrun*) echo '#$ _SPACE_= ' >&2; {f"echo '#$ TOP={root}/bin/..' >&2" * says_top} ;;
          *) {compiling} ;;
        esac""",
    )
    return root


def with_path(*folders: Path, **variables: str) -> dict[str, str]:
    return {"PATH": os.pathsep.join(map(str, folders)), **variables}
