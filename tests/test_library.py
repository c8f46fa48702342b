"""Loading: what is reported, what happens without a library, and that the docs' examples run."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import syncbn_cuda
from syncbn_cuda import _composite, _library

PACKAGE = Path(syncbn_cuda.__file__).parent
TRAIN = (
    "import torch, syncbn_cuda as s; l = s.FastSyncBatchNorm(3);"
    "l(torch.randn(4, 3, 5, requires_grad=True)).sum().backward(); print(s.build_info()['cpu'])"
)


def python(code, tmp_path, **environment):
    """Runs code against a copy of the package that has lost its libraries."""
    shutil.copytree(PACKAGE, tmp_path / "syncbn_cuda", ignore=shutil.ignore_patterns("*.so"))
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PATH": "", "PYTHONPATH": str(tmp_path), **environment},
        capture_output=True,
        text=True,
    )


def test_without_its_libraries_it_warns_once_and_computes(tmp_path):
    done = python(TRAIN, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("UserWarning") == 1
    assert "_cpu.abi3.so is not in" in done.stderr and "'loaded': False" in done.stdout


def test_an_environment_variable_makes_that_an_error(tmp_path):
    done = python(TRAIN, tmp_path, SYNCBN_REQUIRE_EXTENSION="1")
    assert done.returncode != 0 and "ImportError" in done.stderr
    assert "_cpu.abi3.so is not in" in done.stderr


def test_the_source_folder_says_that_it_holds_no_build(tmp_path):
    (tmp_path / "setup.py").touch()
    code = "import syncbn_cuda._library as l; l.CONFIG.clear(); print(l._load('_none'))"
    done = python(code, tmp_path)
    assert "this is the source folder, which holds no build" in done.stdout, done.stderr


def test_a_library_that_does_not_load_is_named(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "syncbn_cuda")
    (tmp_path / "syncbn_cuda" / "_cpu.abi3.so").write_bytes(b"not a library")
    done = subprocess.run(
        [sys.executable, "-c", TRAIN],
        env={"PATH": "", "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "_cpu.abi3.so does not load" in done.stderr
    assert "file too short" in done.stderr or "invalid ELF" in done.stderr, "the cause is lost"
    assert f"this is {torch.__version__}" in done.stderr


def test_the_note_of_another_package_is_not_read(tmp_path, monkeypatch):
    other = tmp_path / "_build_config.py"
    other.write_text("CONFIG = {'cpu': True}")
    spec = importlib.util.spec_from_file_location("syncbn_cuda._build_config", other)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, spec.name, module)
    assert _library._read_config() == {}


def test_build_info_says_what_is_loaded_and_why_not():
    info = syncbn_cuda.build_info()
    assert info["version"] == syncbn_cuda.__version__ and info["torch"] == torch.__version__
    assert info["cpu"] == {"loaded": True, "reason": None}
    assert info["cuda"]["loaded"] == syncbn_cuda.is_cuda_ext_available()
    assert info["cuda"]["loaded"] == (info["cuda"]["reason"] is None)
    if torch.version.cuda is None:
        assert "built without CUDA" in info["cuda"]["reason"]
    elif info["build"]["cuda"]:
        assert info["cuda"]["loaded"], info


def test_a_cuda_tensor_without_kernels_warns_once(monkeypatch):
    monkeypatch.setattr(_library._available, "driver_checked", False)
    monkeypatch.setattr(_library._available, "cuda_missing", "nvcc was not found")
    device = torch.device("cuda", 0)
    with pytest.warns(UserWarning, match="CUDA kernels are not in use: nvcc was not found"):
        assert _library.kernels_for(device) is _composite
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _library.kernels_for(device) is _composite


@pytest.mark.parametrize(
    ("built", "driver", "served"),
    [("13.0", 13020, True), ("13.2", 13000, True), ("13.0", 12080, False), ("12.4", 13000, True)],
)
def test_an_old_driver_is_found_out_at_the_first_cuda_tensor(monkeypatch, built, driver, served):
    class Driver:
        def cuDriverGetVersion(self, pointer):
            pointer._obj.value = driver
            return 0

    monkeypatch.setattr(_library.ctypes, "CDLL", lambda name: Driver())
    monkeypatch.setitem(_library.CONFIG, "nvcc_version", built)
    reason = _library._driver_too_old()
    assert (reason is None) == served
    if not served:
        assert f"CUDA {built}" in reason and "CUDA 12.8" in reason


@pytest.mark.parametrize("missing", [None, "nvcc was not found"])
def test_the_first_cuda_tensor_may_be_a_compiled_ones(monkeypatch, missing):
    monkeypatch.setattr(_library._available, "driver_checked", False)
    monkeypatch.setattr(_library._available, "cuda_missing", missing)

    @torch.compile(fullgraph=True, backend="eager")
    def uses_the_kernels(x):
        return x + (_library.kernels_for(torch.device("cuda")) is not _composite)

    assert uses_the_kernels(torch.zeros(1)) == (missing is None)
    assert not _library._available.driver_checked


def test_other_devices_use_torch_operations():
    assert _library.kernels_for(torch.device("xpu")) is _composite


def test_no_private_operator_of_torch_is_called():
    """They change between releases. What is public of batch norm is torch.nn.functional's."""
    private = re.compile(r"ops\.aten|torch\.(_?native_)?(_?cudnn_)?_?batch_norm|_VF|_VariableFun")
    files = [*PACKAGE.rglob("*.py")]
    assert len(files) > 10
    assert not [line for f in files for line in f.read_text().splitlines() if private.search(line)]


def test_import_leaves_cuda_alone():
    code = "import torch, syncbn_cuda; print(torch.cuda.is_initialized())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.parametrize(
    "name",
    [
        *("_library", "_registry", "convert", "functional", "groups", "health", "module"),
        *("report", "running"),
    ],
)
def test_examples_in_docstrings_run(name):
    module = importlib.import_module(f"syncbn_cuda.{name}")
    names = {n: getattr(syncbn_cuda, n) for n in syncbn_cuda.__all__}
    names |= {"torch": torch, "nn": nn, "syncbn_cuda": syncbn_cuda, **vars(module)}
    failed, attempted = doctest.testmod(module, extraglobs=names, optionflags=doctest.ELLIPSIS)
    assert attempted > 0 and failed == 0
