"""The same bytes from every build of the same sources with the same tools: wherever, whenever.

What would differ otherwise: the folders of the sources and of torch, which __FILE__ writes into the
libraries; names that nvcc makes up from the path of a source; the times of files in a wheel, and
their modes, which follow the umask. (flags_for does what needs no folder.) tests/reproduce.py
builds twice and compares.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path

#: The first second that a zip file can tell: 1 January 1980.
EPOCH = "315532800"


def settle_time(environ: MutableMapping[str, str] = os.environ) -> None:
    """Gives what is built one time for all, unless the environment names one."""
    environ.setdefault("SOURCE_DATE_EPOCH", EPOCH)


def forget_folders(names: Mapping[Path, str]) -> list[str]:
    """The compiler's flags that write a name in the place of each folder."""
    return [f"-ffile-prefix-map={folder}={name}" for folder, name in names.items()]


def for_nvcc(flags: list[str]) -> list[str]:
    """The same for the compiler behind nvcc, but for folders that would end an option there."""
    return [f"--compiler-options={flag}" for flag in flags if not re.search(r"[\s,]", flag)]


def settle_modes(folder: Path) -> None:
    """Makes libraries executable and all else not, for everybody to read."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o755 if path.suffix == ".so" else 0o644)
