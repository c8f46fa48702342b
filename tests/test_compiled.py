"""What the compiler made of the kernels: what is in the machine code, without a GPU to run it."""

from __future__ import annotations

import os
import platform
import re
import sys
from typing import NoReturn

import pytest
import torch
from compiled import build, sass
from compiled.table import MULTIPROCESSORS, table
from toolkits import script

SOURCES = ["elemt", "backward_reduce", "backward_elemt", "stats"]  # what takes longest first
every_arch = pytest.mark.parametrize("arch", MULTIPROCESSORS)


def lacks(what: str) -> NoReturn:
    """Skips; but where CUDA is demanded, as CI does, nothing may be skipped for want of a tool."""
    if os.environ.get("SYNCBN_CUDA") == "1":
        pytest.fail(what)
    pytest.skip(what)


@pytest.fixture(scope="module")
def cuda(support):
    flags = support.flags_for(sys.platform)
    try:
        plan = support.plan_cuda(flags, platform.machine(), torch.version.hip)
    except support.BuildError as error:  # a SystemExit, which pytest takes badly
        lacks(str(error))
    return plan.cuda or lacks(plan.reason)


@pytest.fixture(scope="module")
def archs(support, cuda) -> dict[str, str]:
    """The flags for those architectures that this nvcc knows."""
    known = {a.removesuffix("+PTX") for a in support.cuda.default_archs(cuda, platform.machine())}
    return {a: support.cuda.gencode_flags([a])[0] for a in MULTIPROCESSORS if a in known}


@pytest.fixture(scope="module")
def tools(support, cuda) -> build.Tools:
    nvdisasm = build.find_nvdisasm(cuda.root)
    if nvdisasm is None:
        lacks("no nvdisasm found: pip install nvidia-cuda-nvdisasm")
    return build.Tools(str(cuda.nvcc), nvdisasm, support.flags_for(sys.platform).nvcc)


@pytest.fixture(scope="module")
def kernels(tools, archs) -> dict[str, list[sass.Kernel]]:
    units = [(build.CSRC / "cuda" / f"{name}.cu", archs[a]) for a in archs for name in SOURCES]
    found = iter(tools.kernels(units))
    return {a: [kernel for _ in SOURCES for kernel in next(found)] for a in archs}


def instances() -> set[str]:
    """Those that dispatch.h makes."""
    widths = {
        (scalar, layout, vec)
        for scalar, size in sass.SIZES.items()
        for layout, vecs in {"contiguous": [16, size], "channels-last": [16, 8, 4, 2]}.items()
        for vec in (bytes // size for bytes in vecs)
        if vec > 0
    }
    return {f"{name}_kernel<{', '.join(map(str, w))}>" for name in SOURCES for w in widths}


@every_arch
def test_nothing_is_wrong_with_any_instance(kernels, arch):
    if arch not in kernels:
        pytest.skip(f"this nvcc does not know {arch}")
    assert {str(kernel) for kernel in kernels[arch]} == instances()
    assert [fault for kernel in kernels[arch] for fault in sass.faults(kernel)] == []


def test_what_each_instance_takes(kernels, report):
    report("compiled kernels", table(kernels))


@pytest.fixture(scope="module")
def planted(tools, archs) -> dict[str, list[str]]:
    [found] = tools.kernels([(build.PLANTED, next(iter(archs.values())))])
    return {str(kernel): sass.faults(kernel) for kernel in found}


NARROW = r"%s packs of 128 bits, does \d+ x 32 bits$"


@pytest.mark.parametrize(
    ("kernel", "faults"),
    [
        ("sound_elemt_kernel<float, channels-last, 4>", []),
        ("sound_elemt_kernel<double, channels-last, 2>", []),
        (
            "spilling_kernel<float, channels-last, 4>",
            [r"a stack frame of \d+", r"spills \d+ bytes", r"\d+ x STL.* \d+ x LDL"],
        ),
        (
            "indexing_kernel<float, channels-last, 4>",
            [r"a stack frame of 64 bytes", r"\d+ x LDL.* \d+ x STL"],
        ),
        ("float64_kernel<float, channels-last, 4>", [r"float64 .* \d+ x F2F\.F64.* \d+ x DADD"]),
        ("waiting_kernel<float, channels-last, 4>", ["loads 1 packs at once, not 4"]),
        ("dividing_kernel<float, channels-last, 4>", [r"divides .*: \d+ x MUFU\.RCP"]),
        ("loopless_kernel<float, channels-last, 4>", ["load packs of 128 bits, does none"]),
        ("mixed_kernel<float, contiguous, 4>", [r"load packs of 128 bits, does \d+ x 32 bits, "]),
        ("split_elemt_kernel<float, contiguous, 4>", [NARROW % "store", NARROW % "stream"]),
        (
            "narrow_elemt_kernel<float, channels-last, 4>",
            [NARROW % "load", NARROW % "store", NARROW % "stream"],
        ),
    ],
)
def test_planted_faults_are_found(planted, kernel, faults):
    assert len(planted[kernel]) == len(faults), planted[kernel]
    for says, pattern in zip(planted[kernel], faults, strict=True):
        assert re.search(pattern, says)


@pytest.mark.parametrize(
    ("arch", "registers", "shared", "blocks"),
    [
        ("7.5", 16, 20, 4),  # as many as there may be threads
        ("7.5", 64, 17921, 3),  # as fit into the shared memory
        ("7.5", 128, 17921, 2),  # as there are registers for
        ("8.0", 48, 20, 5),
        ("9.0", 49, 20, 4),  # registers come by the eight: 56
        ("10.0", 80, 40000, 3),
    ],
)
def test_occupancy_is_that_of_the_toolkits_calculator(arch, registers, shared, blocks):
    multiprocessor = MULTIPROCESSORS[arch]
    occupancy = multiprocessor.occupancy(registers, shared)
    assert occupancy == blocks * 256 / multiprocessor.threads


def test_nvdisasm_is_looked_for_on_path_and_in_the_toolkit(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    in_toolkit = script(tmp_path / "cuda" / "bin" / "nvdisasm", "")
    assert build.find_nvdisasm(tmp_path / "cuda") == str(in_toolkit)
    on_path = script(tmp_path / "bin" / "nvdisasm", "")
    assert build.find_nvdisasm(tmp_path / "cuda") == str(on_path)


@pytest.mark.parametrize(
    ("switch", "outcome"), [("1", pytest.fail.Exception), ("", pytest.skip.Exception)]
)
def test_missing_tools_are_a_failure_where_cuda_is_demanded(monkeypatch, switch, outcome):
    monkeypatch.setenv("SYNCBN_CUDA", switch)
    with pytest.raises(outcome, match="no nvdisasm"):
        lacks("no nvdisasm")
