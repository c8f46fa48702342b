"""Builds, tests, sanitizes and times the package on this machine's GPU, within seven minutes.

    python tests/gpu_check.py OUT        # or: make gpu-check OUT=folder

Needs torch, numpy, pytest, setuptools, wheel, ninja and nvcc, but no network and no environment of
its own. Nothing is installed and the checkout stays as it is. OUT gets at most eight files, among
them report.md. Without a GPU it goes the same way as far as it leads, so that it cannot rot.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from checkout import ROOT, SOURCES, commit
from stages import (
    Done,
    Failed,
    Report,
    Skipped,
    Stage,
    carry_out,
    end_at_signals,
    last_line,
    require,
    run,
)

TESTS = Path(__file__).resolve().parent
#: Seconds a stage may take on 16 cores.
LIMITS_S = {"build": 100, "tests": 140, "sanitizer": 75, "benchmark": 80}
#: All that a check may leave in OUT.
FILES = (
    *("report.md", "report.json", *(f"{stage}.log" for stage in LIMITS_S)),
    *(f"bench-{device}.{kind}" for device in ("cpu", "cuda") for kind in ("md", "json")),
)
CORES = 16
DRY_ARCH = "9.0"

PROBE = """
import json, platform, torch
found = torch.cuda.is_available()
print(json.dumps({
    "GPU": torch.cuda.get_device_name() if found else None,
    "arch": "{}.{}".format(*torch.cuda.get_device_capability()) if found else None,
    "torch": torch.__version__, "CUDA": torch.version.cuda, "Python": platform.python_version(),
}))
"""
LOADED = """
import json, syncbn_cuda
print(json.dumps([syncbn_cuda.__file__, syncbn_cuda.build_info()]))
"""

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
SANITIZER_OPTIONS = ("--kernel-name", "kns=syncbn", "--error-exitcode", "1")
#: What torch asks of the driver may be refused; torch sees to that itself.
TOOL_OPTIONS = {"memcheck": ("--report-api-errors", "no")}
#: What compute-sanitizer says where the machine, and not a kernel, is at fault.
REFUSAL = "Device not supported"

OUTCOME = re.compile(r"::.* (PASSED|FAILED|ERROR|SKIPPED)\b")


class Machine(NamedTuple):
    """Where the stages run: folders, environment, and the architecture of the GPU, if any."""

    out: Path
    scratch: Path
    environment: dict[str, str]
    driver: str
    arch: str | None
    no_torch: str = ""  # why Python cannot import it

    def run(self, log: str, limit_s: float, **commands: list[str]) -> dict[str, Done]:
        return run(commands, self.out / log, limit_s, self.environment, self.scratch)


def build(machine: Machine, limit_s: float) -> str:
    if machine.no_torch:
        raise Failed(machine.no_torch)
    if machine.driver and not machine.arch:
        raise Failed("here is a GPU, as nvidia-smi says, but torch finds none")
    source, site = machine.scratch / "source", machine.scratch / "site"
    source.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            built = shutil.ignore_patterns("*.so", "_build_config.py", "__pycache__")
            shutil.copytree(ROOT / name, source / name, ignore=built)
        else:
            shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "install", "--root-user-action=ignore", "--no-index"]
    pip += ["--no-build-isolation", "--no-deps", "-v", "--target", str(site), str(source)]
    require(machine.run("build.log", limit_s, pip=pip)["pip"], limit_s)
    python = [sys.executable, "-c", LOADED]
    told = require(machine.run("build.log", 60, python=python)["python"], 60)
    path, info = json.loads(told.splitlines()[-1])
    if not Path(path).is_relative_to(site):
        raise Failed(f"Python imports {path} instead of what was built")
    if machine.arch and not info["cuda"]["loaded"]:
        raise Failed(f"no CUDA kernels: {info['cuda']['reason']}")
    if info["build"]["cuda"]:
        return f"with CUDA {info['build']['nvcc_version']} for {', '.join(info['build']['archs'])}"
    return f"without CUDA kernels: {info['build']['cuda_reason']}"


def pytest_command(file: Path) -> list[str]:
    quiet = ["-p", "no:cacheprovider", "-o", "faulthandler_timeout=60", "--tb=short", "-rfE", "-v"]
    return [sys.executable, "-m", "pytest", "-m", "gpu", *quiet, str(file)]


def failures(machine: Machine, done: dict[str, Done]) -> list[str]:
    """Returns pytest's one line for each test that failed, as many as a report can bear."""
    tests = f"{os.path.relpath(TESTS, machine.scratch)}/"
    lines = [line for d in done.values() for line in d.output.splitlines()]
    wrong = [line for line in lines if re.match("(FAILED|ERROR) ", line)]
    return [line.replace(tests, "")[:300] for line in wrong[:60]]


def test(machine: Machine, report: Report, limit_s: float) -> str:
    """Runs the files of GPU tests side by side: those with ranks wait for processes mostly."""
    files = [file for file in sorted(TESTS.glob("test_gpu*.py")) if file.stem != "test_gpu_check"]
    commands = {file.stem: pytest_command(file) for file in files}
    done = machine.run("tests.log", limit_s, **commands)
    counts = Counter(word.lower() for d in done.values() for word in OUTCOME.findall(d.output))
    detail = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    report.sections["Tests"] = "\n".join(f"* {k}: {last_line(d.output)}" for k, d in done.items())
    if wrong := failures(machine, done):
        report.sections["Failures"] = "\n".join(["```", *wrong, "```"])
    stopped = [f"{name} in {last_line(d.output)}" for name, d in done.items() if d.code is None]
    if stopped:
        raise Failed(f"{detail}; stopped after {limit_s:.0f} s: {'; '.join(stopped)}")
    if any(d.code != 0 for d in done.values()) or not counts:
        raise Failed(detail or "no test was collected")
    if set(counts) == {"skipped"}:
        raise Skipped(f"no GPU; {detail}")
    return detail


def compute_sanitizer() -> str | None:
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), nvcc and Path(nvcc).resolve().parents[1]]
    folders = [os.environ["PATH"], *(f"{home}/bin" for home in (*homes, "/usr/local/cuda") if home)]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


def verdict(tool: str, done: Done) -> str | None:
    """Returns what a tool found, or None where it watched everything and found nothing."""
    if done.code is None:
        return f"{tool} was stopped"
    summary = [line for line in done.output.splitlines() if " SUMMARY: " in line]
    if done.code == 0 and summary and "steps are right" in done.output:
        return None
    return f"{tool}: {last_line(summary[-1] if summary else done.output)}"


def sanitize(machine: Machine, limit_s: float) -> str:
    selection = [sys.executable, str(TESTS / "gpu_steps.py")]
    if machine.arch is None:
        done = machine.run("sanitizer.log", limit_s, cpu=[*selection, "cpu"])["cpu"]
        raise Skipped(f"no GPU; without the tools, {last_line(require(done, limit_s))}")
    path = compute_sanitizer()
    if path is None:
        raise Skipped("no compute-sanitizer found")
    # Every tensor an allocation of its own, or an access past one would land in the next.
    machine.environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    commands = {
        tool: [path, "--tool", tool, *SANITIZER_OPTIONS, *TOOL_OPTIONS.get(tool, ()), *selection]
        for tool in TOOLS
    }
    done = machine.run("sanitizer.log", limit_s, **commands)
    del machine.environment["PYTORCH_NO_CUDA_MEMORY_CACHING"]
    if any(REFUSAL in d.output for d in done.values()):
        raise Skipped(f"compute-sanitizer does not run on this machine: {REFUSAL}")
    findings = [finding for tool in TOOLS if (finding := verdict(tool, done[tool]))]
    if findings:
        raise Failed("; ".join(findings))
    return f"nothing found by {', '.join(TOOLS)}"


def benchmark(machine: Machine, report: Report, limit_s: float) -> str:
    device = "cuda" if machine.arch else "cpu"
    command = [sys.executable, "-m", "benchmarks", "layers", "--device", device, "--quick"]
    command += ["--no-plots", "--out", str(machine.out)]
    # Rather some layers than none; and a start takes its time.
    command += ["--seconds", f"{0.7 * limit_s:.0f}"] if machine.arch else ["--turns", "3"]
    require(machine.run("benchmark.log", limit_s, benchmark=command)["benchmark"], limit_s)
    table = (machine.out / f"bench-{device}.md").read_text()
    report.sections["Benchmark"] = table.split("\n", 1)[1].replace("## ", "### ")
    rows = json.loads((machine.out / f"bench-{device}.json").read_text())["rows"]
    return f"{len(rows)} rows" + ("" if machine.arch else " on the CPU: no GPU")


def survey(out: Path, scratch: Path) -> tuple[Machine, dict[str, str]]:
    """Returns the machine, and what the report says of it."""
    paths = [str(scratch / "site"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",  # the checkout stays as it is
        "COLUMNS": "250",
        "SYNCBN_REQUIRE_EXTENSION": "1",
        "TMPDIR": str(scratch / "tmp"),  # for what the killed cannot remove
    }
    environment.pop("PYTEST_ADDOPTS", None)
    (scratch / "tmp").mkdir()
    commands = {"probe": [sys.executable, "-c", PROBE]}
    if shutil.which("nvidia-smi"):
        commands["driver"] = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = run(commands, out / "build.log", 60, environment, scratch)
    told = {name: d.output.splitlines() for name, d in done.items() if d.code == 0 and d.output}
    answer = next((line for line in told.get("probe", ()) if line.startswith("{")), "{}")
    about: dict[str, Any] = json.loads(answer)
    no_torch = ""
    if not about:
        why = last_line(done["probe"].output) or "no answer"
        no_torch = f"torch cannot be imported in this Python, {sys.executable}: {why}"
    arch = about.pop("arch", None)
    driver = told["driver"][0] if "driver" in told else ""
    about |= {
        "GPU": about.get("GPU") or "none found",
        "driver": driver or "none found",
        "commit": commit(),
        "cores": os.cpu_count(),
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
    }
    environment["TORCH_CUDA_ARCH_LIST"] = arch or DRY_ARCH
    if arch:
        environment |= {"SYNCBN_CUDA": "1", "SYNCBN_REQUIRE_GPU": "1"}
    machine = Machine(out, scratch, environment, driver, arch, no_torch)
    return machine, {key: str(value) for key, value in about.items()}


def plan(machine: Machine, report: Report) -> list[Stage]:
    # A dry run is in no hurry, and runs on whatever there is.
    slack = 1.0 if machine.arch else max(1.0, min(4.0, CORES / (os.cpu_count() or 1)))
    actions: dict[str, Callable[[float], str]] = {
        "build": partial(build, machine),
        "tests": partial(test, machine, report),
        "sanitizer": partial(sanitize, machine),
        "benchmark": partial(benchmark, machine, report),
    }
    return [
        Stage(name, slack * LIMITS_S[name], action, None if name == "build" else "build")
        for name, action in actions.items()
    ]


def main() -> int:
    if len(sys.argv) != 2:
        sys.exit("usage: python tests/gpu_check.py OUT")
    end_at_signals()
    out = Path(sys.argv[1]).resolve()
    out.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        (out / name).unlink(missing_ok=True)
    # What a process that cannot be killed still writes there must not cost the table.
    with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as folder:
        machine, about = survey(out, Path(folder).resolve())
        report = Report(out, about)
        succeeded = carry_out(plan(machine, report), report)
    print(f"\n{about['GPU']}; report in {out}\n\n{report.table()}")
    return 0 if succeeded else 1


if __name__ == "__main__":
    sys.exit(main())
