"""What tests compile is kept in the temporary folder, so that the next run finds it."""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path


def folder(name: str, key: object, files: Iterable[Path]) -> Path:
    """Of all that was made with `key`, from these files as they are now."""
    digest = hashlib.sha256(repr(key).encode())
    for path in sorted(files):
        digest.update(path.name.encode() + path.read_bytes())
    return Path(tempfile.gettempdir()) / f"syncbn_{name}_{os.getuid()}" / digest.hexdigest()[:16]


def run(command: list[str]) -> str:
    """Returns what the command says; raises RuntimeError with that if it fails."""
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)}\n{result.stdout}{result.stderr}")
    return result.stdout + result.stderr
