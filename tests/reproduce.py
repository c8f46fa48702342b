"""Builds the wheel in two folders, under different umasks, and compares the two: make reproduce.

They must be the same file, byte for byte. Environment: that of the build (setup.py). The second
build comes later by at least two seconds, the grain of time in a zip file.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path

from checkout import ROOT, SOURCES

WHEEL = ("-m", "pip", "wheel", "--quiet", "--no-index", "--no-build-isolation", "--no-deps")
GRAIN_S = 2.1
IGNORED = shutil.ignore_patterns("__pycache__", "*.so", "_build_config.py")


def copy(source: Path, target: Path) -> Path:
    """Copies what a wheel is built from, with the modes that the umask of this process gives."""
    umask = os.umask(0)
    os.umask(umask)
    for name in (*SOURCES, "MANIFEST.in"):
        whole = source / name
        if whole.is_dir():
            shutil.copytree(whole, target / name, ignore=IGNORED)
        elif whole.is_file():
            target.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(whole, target / name)
    for path in target.rglob("*"):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)
    return target


def build(folder: Path, variables: Mapping[str, str], prefix: tuple[str, ...] = ()) -> Path:
    """Builds the wheel of the sources in a folder, and returns it.

    Args:
        folder: holds setup.py.
        variables: for the build.
        prefix: of the command: what runs it.
    """
    done = subprocess.run(
        [*prefix, sys.executable, *WHEEL, "--wheel-dir", "dist", "."],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{folder}: {done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


def build_twice(source: Path, folder: Path, variables: Mapping[str, str]) -> tuple[Path, Path]:
    """Builds two copies of the sources below a folder; returns both wheels."""
    wheels = []
    for name, umask in (("one", 0o022), ("another-folder", 0o002)):
        before = os.umask(umask)
        try:
            wheels.append(build(copy(source, folder / name), variables))
        finally:
            os.umask(before)
        time.sleep(GRAIN_S)
    return wheels[0], wheels[1]


def differences(one: Path, other: Path) -> list[str]:
    """Says in what two wheels differ; nothing where they are the same file."""
    if one.read_bytes() == other.read_bytes():
        return []
    with zipfile.ZipFile(one) as a, zipfile.ZipFile(other) as b:
        first, second = ({i.filename: i for i in each.infolist()} for each in (a, b))
        found = [f"{name}: in one alone" for name in sorted(first.keys() ^ second.keys())]
        for name in sorted(first.keys() & second.keys()):
            pair = first[name], second[name]
            traits = {
                "contents": a.read(name) != b.read(name),
                "time": pair[0].date_time != pair[1].date_time,
                "mode": pair[0].external_attr != pair[1].external_attr,
            }
            found += [f"{name}: {trait}" for trait, differs in traits.items() if differs]
    return found or ["the order of files, or how they are compressed"]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        wheels = build_twice(ROOT, Path(folder), {})
        for wheel in wheels:
            digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
            print(f"{digest}  {wheel.relative_to(folder)}")
        found = differences(*wheels)
    sys.exit("\n".join(["Two builds differ:", *found]) if found else 0)


if __name__ == "__main__":
    main()
