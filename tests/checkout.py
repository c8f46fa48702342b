"""The checkout that a check is of: what the package is built from, and which commit it is."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: What the package is built from.
SOURCES = (
    *("pyproject.toml", "setup.py", "README.md", "LICENSE"),
    *("build_support", "csrc", "syncbn_cuda"),
)


def output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def commit() -> str:
    git = ("git", "-c", "safe.directory=*", "-C", str(ROOT))
    root, _, head = output(*git, "rev-parse", "--show-toplevel", "HEAD").partition("\n")
    if head and Path(root) == ROOT:  # and no other repository, which the checkout lies in
        return head + ("+changes" if output(*git, "status", "--porcelain") else "")
    digest = hashlib.sha256()
    for path in sorted(path for name in SOURCES[4:] for path in (ROOT / name).rglob("*.[chp]*")):
        if "__pycache__" not in path.parts and path.name != "_build_config.py":
            digest.update(path.read_bytes())
    return f"unknown; sources {digest.hexdigest()[:12]}"
