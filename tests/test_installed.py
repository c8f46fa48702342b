"""The installed package: what is in it, what it says of its build, which symbols it needs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

import syncbn_cuda

PACKAGE = Path(syncbn_cuda.__file__).resolve().parent


@pytest.fixture(scope="module")
def config():
    from syncbn_cuda._build_config import CONFIG

    return CONFIG


def test_version_is_one(config):
    assert importlib.metadata.version("syncbn-cuda") == syncbn_cuda.__version__
    assert config["version"] == syncbn_cuda.__version__


def test_build_config_is_true_of_the_package(config):
    assert config["cpu"] is (PACKAGE / "_cpu.abi3.so").exists()
    assert config["cuda"] is (PACKAGE / "_cuda.abi3.so").exists()
    assert (config["cuda_reason"] is None) is config["cuda"]
    assert (config["nvcc_version"] is not None) is config["cuda"]
    assert bool(config["archs"]) is config["cuda"]
    assert re.match(r"\d+\.\d+", config["torch"])
    assert syncbn_cuda.build_info()["build"] == config


def test_the_cpu_library_is_built_and_loaded(config):
    assert config["cpu"] is True
    assert syncbn_cuda.build_info()["cpu"] == {"loaded": True, "reason": None}


@pytest.mark.parametrize("library", ["_cpu", "_cuda"])
def test_libraries_use_only_the_stable_abi(config, library):
    if not config[library[1:]]:
        pytest.skip(f"{library} was left out of this build: {config[f'{library[1:]}_reason']}")
    path = PACKAGE / f"{library}.abi3.so"
    symbols = subprocess.run(
        ["nm", "-D", "-C", path], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    undefined = [line.split(maxsplit=1)[1] for line in symbols if line.split()[0] in "Uw"]
    assert any(
        name.startswith(("aoti_torch_", "torch_")) for name in undefined
    )  # torch's C functions
    assert not [name for name in undefined if re.search(r"\b(at|c10|torch|caffe2)::", name)]
    # The CUDA runtime is inside: a shared one would be one release's.
    assert not [name for name in undefined if re.match(r"cuda[A-Z]|__cuda", name)]
    # Nothing of ours can clash with another library's.
    assert not [line for line in symbols if re.search(r" [TDB] .*\bsyncbn", line)]
