"""What a measurement was made on."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch


def machine(device: torch.device) -> dict[str, Any]:
    """Says what was measured on; the part that matters goes into each row too (report.py)."""
    gpu = driver = None
    if device.type == "cuda":
        gpu = torch.cuda.get_device_name(device)
        driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "cpu": _cpu_model(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "ranks": int(os.environ.get("WORLD_SIZE", 1)),
        "gpu": gpu,
        "driver": driver.splitlines()[0] if driver else None,
        "cuda": torch.version.cuda if gpu else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "commit": _commit(),
    }


def cores() -> int | None:
    """How many this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit() -> str:
    here = str(Path(__file__).parent)
    commit = _output("git", "-C", here, "rev-parse", "--short=12", "HEAD")
    if commit is None:
        return "unknown"
    return commit + ("+changes" if _output("git", "-C", here, "status", "--porcelain") else "")


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
