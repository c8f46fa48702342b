"""The build without what it needs, and the whole of setup.py with sources that compile at once."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import pytest
from toolkits import ROOT, script, with_path


def test_the_compiler_of_this_machine_will_do(support):
    assert re.search(r"\d+\.\d+", support.check_compiler())


def test_a_missing_compiler(support, tmp_path):
    with pytest.raises(support.BuildError, match=r"'c\+\+' was not found. Install GCC 11 or newer"):
        support.check_compiler(with_path(tmp_path))


def test_a_compiler_without_cpp20(support, tmp_path):
    old = script(
        tmp_path / "g++-8",
        """case "$*" in
          --version) echo "g++-8 (Debian) 8.3.0"; echo "Copyright" ;;
          *) echo "g++: error: unrecognized command line option '-std=c++20'" >&2; exit 1 ;;
        esac""",
    )
    with pytest.raises(support.BuildError) as error:
        support.check_compiler(with_path(CXX=str(old)))
    message = str(error.value)
    assert "g++-8 (Debian) 8.3.0) does not compile C++20" in message
    assert "unrecognized command line option" in message
    assert "name it in CXX" in message


def test_an_old_setuptools(support):
    support.check_setuptools("77.0.1")
    with pytest.raises(support.BuildError, match="needs setuptools>=77, found 65.5.0"):
        support.check_setuptools("65.5.0")


@pytest.mark.parametrize(
    ("torch", "message"),
    [
        (None, "needs torch, which is not installed"),
        (types.SimpleNamespace(__version__="2.9.1+cu128"), r"needs torch>=2\.10, found 2\.9\.1"),
    ],
)
def test_a_missing_torch(support, monkeypatch, torch, message):
    monkeypatch.setitem(sys.modules, "torch", torch)
    with pytest.raises(support.BuildError, match=message) as error:
        support.import_torch()
    assert "pip install 'torch>=2.10' 'setuptools>=77' wheel ninja" in str(error.value)
    assert "leave out --no-build-isolation" in str(error.value)


@pytest.mark.parametrize("version", ["2.10.0", "2.13.0+cpu", "2.15.0a0+git1234", "3.0.0"])
def test_torch_versions_that_will_do(support, monkeypatch, version):
    torch = types.SimpleNamespace(__version__=version)
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert support.import_torch() is torch


@pytest.fixture
def project(support, tmp_path):
    folder = tmp_path / "project"
    (folder / "csrc" / "cpu").mkdir(parents=True)
    (folder / "syncbn_cuda").mkdir()
    for name in (
        "setup.py",
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "MANIFEST.in",
    ):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "build_support", folder / "build_support")
    (folder / "syncbn_cuda" / "__init__.py").write_text('__version__ = "1.2.3"\n')
    (folder / "csrc" / "ops.cpp").write_text("int stand_in() { return 0; }\n")
    (folder / "csrc" / "part.h").touch()
    return folder


def setup(
    project: Path, *arguments: str, script: str = "setup.py", **variables: str
) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != "SYNCBN_CUDA"}
    return subprocess.run(
        [sys.executable, script, *arguments],
        cwd=project,
        env={**environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def without_torch(tmp_path):
    script(tmp_path / "shadow" / "torch.py", 'raise ModuleNotFoundError("none", name="torch")')
    return {"PYTHONPATH": str(tmp_path / "shadow")}


def test_metadata_and_sdist_need_no_torch(project, without_torch):
    result = setup(project, "sdist", **without_torch)
    assert result.returncode == 0, result.stderr
    sources = (project / "syncbn_cuda.egg-info" / "SOURCES.txt").read_text().splitlines()
    assert {"csrc/ops.cpp", "csrc/part.h", "build_support/cuda.py"} <= set(sources)
    metadata = (project / "syncbn_cuda.egg-info" / "PKG-INFO").read_text()
    assert "\nVersion: 1.2.3\n" in metadata
    assert "\nRequires-Dist: torch>=2.10\n" in metadata


def test_a_build_without_torch_ends_with_the_remedy(project, without_torch):
    result = setup(project, "bdist_wheel", **without_torch)
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    assert "pip install 'torch>=2.10'" in result.stderr


def config_of(text: str) -> dict[str, object]:
    scope: dict[str, dict[str, object]] = {}
    exec(text, scope)
    return scope["CONFIG"]


def test_a_wheel_holds_what_was_built_and_why(project):
    # Left by an earlier build with CUDA: must not get into a wheel without.
    stale = project / "lib" / "syncbn_cuda" / "_cuda.abi3.so"
    stale.parent.mkdir(parents=True)
    stale.touch()
    result = setup(project, "build", "--build-lib", "lib", "bdist_wheel", SYNCBN_CUDA="0")
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = (project / "dist").iterdir()
    assert re.fullmatch(r"syncbn_cuda-1\.2\.3-cp310-abi3-\w+\.whl", path.name)
    with zipfile.ZipFile(path) as wheel:
        names = {name for name in wheel.namelist() if name.startswith("syncbn_cuda/")}
        config = config_of(wheel.read("syncbn_cuda/_build_config.py").decode())
    assert names == {
        f"syncbn_cuda/{n}" for n in ("__init__.py", "_build_config.py", "_cpu.abi3.so")
    }
    assert config["version"] == "1.2.3"
    assert (config["cpu"], config["cuda"]) == (True, False)
    assert config["cuda_reason"] == "SYNCBN_CUDA=0 was set at build time"
    assert not (project / "syncbn_cuda" / "_build_config.py").exists()


def test_a_build_in_place_writes_into_the_source_folder(project):
    result = setup(project, "build_ext", "--inplace", SYNCBN_CUDA="0")
    assert result.returncode == 0, result.stdout + result.stderr
    package = project / "syncbn_cuda"
    assert (package / "_cpu.abi3.so").stat().st_size > 0
    assert config_of((package / "_build_config.py").read_text())["cpu"] is True


def test_windows_gets_a_wheel_without_libraries_that_says_so(project, without_torch):
    (project / "windows.py").write_text(
        "import setuptools.command.build_ext, sys  # which look into the real platform's settings\n"
        "sys.platform = 'win32'\n"
        "exec(open('setup.py').read())\n"
    )
    result = setup(project, "build", "--build-lib", "lib", script="windows.py", **without_torch)
    assert result.returncode == 0, result.stderr
    package = project / "lib" / "syncbn_cuda"
    assert {path.name for path in package.iterdir()} == {"__init__.py", "_build_config.py"}
    config = config_of((package / "_build_config.py").read_text())
    assert (config["cpu"], config["cuda"]) == (False, False)
    assert config["cpu_reason"] == "no libraries are built on win32"
