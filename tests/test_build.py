"""The build: what it finds and decides, what it says where something is missing, what it installs.

The first part tests build_support.py and setup.py and needs a checkout; the second, at the end,
looks at the installed package and also runs beside a wheel.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import pytest

import syncbn_cuda

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(syncbn_cuda.__file__).resolve().parent


@pytest.fixture(scope="module")
def support():
    if not (ROOT / "setup.py").exists():
        pytest.skip("needs a checkout: setup.py is not part of an installed wheel")
    spec = importlib.util.spec_from_file_location("build_support", ROOT / "build_support.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def toolkit(
    root: Path,
    release: str = "13.0",
    archs: str = "75 80 86 87 88 90 100 103 110 121",
    compiles: bool = True,
    says_top: bool = True,
) -> Path:
    """A CUDA toolkit whose nvcc answers questions and notes how it was asked to compile."""
    (root / "include").mkdir(parents=True)
    (root / "include" / "cuda_runtime.h").touch()
    compiling = (
        f'echo "$@" >{root}/compiled' if compiles else "echo 'x.cu(1): error: odd' >&2; exit 1"
    )
    script(
        root / "bin" / "nvcc",
        f"""case "$*" in
          --version) echo "Cuda compilation tools, release {release}, V{release}.88" ;;
          --list-gpu-arch) for arch in {archs}; do echo compute_$arch; done ;;
          --dryrun*) echo '#$ _SPACE_= ' >&2; {f"echo '#$ TOP={root}/bin/..' >&2" * says_top} ;;
          *) {compiling} ;;
        esac""",
    )
    return root


@pytest.fixture
def no_usual_places(support, monkeypatch):
    monkeypatch.setattr(support, "USUAL_PLACES", [])


def with_path(*folders: Path, **variables: str) -> dict[str, str]:
    return {"PATH": os.pathsep.join(map(str, folders)), **variables}


# --- Finding CUDA ---------------------------------------------------------------------------------


def nvcc_in_its_toolkit(root: Path, tmp_path: Path) -> Path:
    return root / "bin"


def nvcc_linked(root: Path, tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").symlink_to(root / "bin" / "nvcc")
    return tmp_path / "bin"


def nvcc_wrapped(root: Path, tmp_path: Path) -> Path:
    script(tmp_path / "bin" / "nvcc", f'exec {root}/bin/nvcc "$@"')
    return tmp_path / "bin"


def nvcc_wrapped_and_linked(root: Path, tmp_path: Path) -> Path:
    script(tmp_path / "wrappers" / "bin" / "cuda-compiler", f'exec {root}/bin/nvcc "$@"')
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").symlink_to(tmp_path / "wrappers" / "bin" / "cuda-compiler")
    return tmp_path / "bin"


@pytest.mark.parametrize(
    ("place", "says_top"),
    [
        (nvcc_in_its_toolkit, False),
        (nvcc_linked, False),
        (nvcc_wrapped, True),
        (nvcc_wrapped_and_linked, True),
    ],
)
def test_finds_the_toolkit_of_the_nvcc_on_path(support, no_usual_places, tmp_path, place, says_top):
    root = toolkit(tmp_path / "opt" / "cuda-13.0", says_top=says_top)
    cuda = support.find_cuda(with_path(place(root, tmp_path)))
    assert cuda == support.Cuda(root, "13.0")
    assert cuda.include_dirs == [f"{root}/include"]


def test_finds_a_distributions_toolkit_by_the_unresolved_path(support, no_usual_places, tmp_path):
    # Debian: /usr/bin/nvcc is a link into a folder without headers, which are in /usr/include.
    elsewhere = toolkit(tmp_path / "lib" / "toolkit")
    shutil.rmtree(elsewhere / "include")
    usr = toolkit(tmp_path / "usr")
    (usr / "bin" / "nvcc").unlink()
    (usr / "bin" / "nvcc").symlink_to(elsewhere / "bin" / "nvcc")
    assert support.find_cuda(with_path(usr / "bin")).root == usr


def test_takes_the_newest_of_the_usual_places_last(support, monkeypatch, tmp_path):
    monkeypatch.setattr(support, "USUAL_PLACES", [f"{tmp_path}/local/cuda-*"])
    toolkit(tmp_path / "local" / "cuda-9.2", "9.2")
    toolkit(tmp_path / "local" / "cuda-12.8", "12.8")
    (tmp_path / "local" / "cuda-13.5").mkdir()  # empty, as an uninstalled one leaves it
    assert support.find_cuda(with_path(tmp_path)).version == "12.8"
    on_path = toolkit(tmp_path / "elsewhere", "12.4")
    assert support.find_cuda(with_path(on_path / "bin")).version == "12.4"


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_the_toolkit_named_in_the_environment_comes_first(support, tmp_path, variable):
    on_path = toolkit(tmp_path / "cuda-13.0")
    named = toolkit(tmp_path / "named", "12.6")
    found = support.find_cuda(with_path(on_path / "bin", **{variable: str(named)}))
    assert found == support.Cuda(named, "12.6")


def test_a_wrong_cuda_home_is_no_reason_to_take_another(support, tmp_path):
    on_path = toolkit(tmp_path / "cuda-13.0")
    with pytest.raises(support.CudaMissing, match=r"CUDA_HOME=/nowhere holds no bin/nvcc"):
        support.find_cuda(with_path(on_path / "bin", CUDA_HOME="/nowhere"))


def test_says_where_it_looked(support, monkeypatch, tmp_path):
    monkeypatch.setattr(support, "USUAL_PLACES", [f"{tmp_path}/local/cuda"])
    with pytest.raises(support.CudaMissing, match=rf"no nvcc on PATH.*{tmp_path}/local/cuda"):
        support.find_cuda(with_path(tmp_path))


def test_an_nvcc_without_cpp20_is_refused(support, no_usual_places, tmp_path):
    root = toolkit(tmp_path / "cuda", "11.8")
    with pytest.raises(support.CudaMissing, match=r"is CUDA 11\.8, but C\+\+20 needs 12\.0"):
        support.find_cuda(with_path(root / "bin"))


# --- What is decided ------------------------------------------------------------------------------


def plan(support, environ, machine="x86_64", platform="linux", **torch):
    return support.plan_cuda(support.flags_for(platform), machine, environ=environ, **torch)


def test_cuda_is_built_where_it_is_found(support, no_usual_places, tmp_path):
    root = toolkit(tmp_path / "cuda")
    for switch in ("", "1"):
        planned = plan(support, with_path(root / "bin", SYNCBN_CUDA=switch))
        assert planned.cuda.root == root
        assert planned.reason is None
    assert "-std=c++20" in (root / "compiled").read_text()  # tried with the flags of the build


def test_no_cuda_is_no_error_unless_demanded(support, no_usual_places, tmp_path):
    planned = plan(support, with_path(tmp_path))
    assert planned.cuda is None
    assert "no CUDA toolkit found" in planned.reason
    with pytest.raises(support.BuildError, match="SYNCBN_CUDA=1 demands .* no CUDA toolkit found"):
        plan(support, with_path(tmp_path, SYNCBN_CUDA="1"))


def test_an_nvcc_that_does_not_work_is_as_good_as_none(support, no_usual_places, tmp_path):
    root = toolkit(tmp_path / "cuda", compiles=False)
    planned = plan(support, with_path(root / "bin"))
    assert planned.cuda is None
    assert planned.reason.endswith("does not compile a small kernel: x.cu(1): error: odd")
    with pytest.raises(support.BuildError, match="error: odd"):
        plan(support, with_path(root / "bin", SYNCBN_CUDA="1"))


def test_cuda_can_be_left_out(support, tmp_path):
    root = toolkit(tmp_path / "cuda")
    planned = plan(support, with_path(root / "bin", SYNCBN_CUDA="0"))
    assert (planned.cuda, planned.reason) == (None, "SYNCBN_CUDA=0 was set at build time")
    with pytest.raises(support.BuildError, match="must be 0, 1 or unset, got 'yes'"):
        plan(support, with_path(root / "bin", SYNCBN_CUDA="yes"))


def test_no_cuda_beside_a_torch_for_rocm(support, tmp_path):
    root = toolkit(tmp_path / "cuda")
    assert "ROCm 7.1" in plan(support, with_path(root / "bin"), torch_hip="7.1").reason


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_cuda_is_for_linux(support, tmp_path, platform):
    root = toolkit(tmp_path / "cuda")
    assert "on Linux only" in plan(support, with_path(root / "bin"), platform=platform).reason


def test_default_architectures(support, no_usual_places, tmp_path):
    root = toolkit(tmp_path / "cuda", archs="50 60 70 75 80 86 87 88 90 100 103 110 120 121")
    environ = with_path(root / "bin")
    discrete = plan(support, environ, machine="x86_64").archs
    assert discrete == ["7.5", "8.0", "8.6", "9.0", "10.0", "10.3", "12.0", "12.1+PTX"]
    boards = {"8.7", "8.8", "11.0"}
    assert set(plan(support, environ, machine="aarch64").archs) == {*discrete, *boards}


def test_architectures_follow_nvcc(support, no_usual_places, tmp_path):
    old, new = (
        toolkit(tmp_path / "old", archs="75 80 90"),
        toolkit(tmp_path / "new", archs="75 999"),
    )
    assert plan(support, with_path(old / "bin")).archs[-1] == "9.0+PTX"
    # One that no torch knows yet: so the flags cannot be torch's.
    planned = plan(support, with_path(new / "bin"))
    assert planned.arch_flags == [
        "-gencode=arch=compute_75,code=sm_75",
        "-gencode=arch=compute_999,code=sm_999",
        "-gencode=arch=compute_999,code=compute_999",
    ]


def test_architectures_of_the_environment_are_left_to_torch(support, no_usual_places, tmp_path):
    root = toolkit(tmp_path / "cuda")
    for named in ("8.0;9.0+PTX", "8.0 9.0+PTX"):
        planned = plan(support, with_path(root / "bin", TORCH_CUDA_ARCH_LIST=named))
        assert (planned.archs, planned.arch_flags) == (["8.0", "9.0+PTX"], [])


def test_native_needs_a_gpu(support, no_usual_places, tmp_path):
    root = toolkit(tmp_path / "cuda")
    environ = with_path(root / "bin", TORCH_CUDA_ARCH_LIST="native")
    assert plan(support, environ, device_count=1).archs == ["native"]
    assert (
        plan(support, environ, device_count=0).archs == plan(support, with_path(root / "bin")).archs
    )


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_flags_that_results_depend_on(support, platform):
    flags = support.flags_for(platform)
    assert {"-std=c++20", "-ffp-contract=off", "-fvisibility=hidden"} <= set(flags.cxx)
    assert "-DTORCH_TARGET_VERSION=0x020a000000000000" in flags.cxx
    assert not any("fast-math" in flag for flag in flags.cxx + flags.nvcc)


def test_flags_of_linux(support):
    flags = support.flags_for("linux")
    assert {"-std=c++20", "-DUSE_CUDA", flags.cxx[-1]} <= set(flags.nvcc)
    assert "--compiler-options=-fvisibility=hidden,-ffp-contract=off" in flags.nvcc
    assert "-lcudart_static" in flags.link_cuda
    assert not {"-lcudart", "-ltorch_cuda", "-lc10_cuda"} & {*flags.link_cpu, *flags.link_cuda}


def test_flags_of_macos_are_its_linkers(support):
    flags = support.flags_for("darwin")
    assert flags.nvcc == []
    assert not any("as-needed" in flag for flag in flags.link_cpu)


def test_nothing_is_built_on_windows(support):
    assert support.flags_for("win32") is None


@pytest.mark.parametrize(
    ("nvcc", "torch_cuda", "noted"),
    [
        ("13.0", "13.0", False),
        ("12.6", "13.0", True),
        ("13.1", "13.0", True),
        ("13.0", None, False),
    ],
)
def test_notes_different_cuda_releases(support, nvcc, torch_cuda, noted):
    note = support.version_note(nvcc, torch_cuda)
    assert (note is not None) == noted
    if noted:
        assert f"nvcc {nvcc} beside a torch for CUDA {torch_cuda}" in note


# --- What is missing ------------------------------------------------------------------------------


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


# --- The whole of setup.py, with sources that compile at once -------------------------------------


@pytest.fixture
def project(support, tmp_path):
    folder = tmp_path / "project"
    (folder / "csrc" / "cpu").mkdir(parents=True)
    (folder / "syncbn_cuda").mkdir()
    for name in (
        "setup.py",
        "build_support.py",
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "MANIFEST.in",
    ):
        shutil.copy(ROOT / name, folder)
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
    assert {"csrc/ops.cpp", "csrc/part.h", "build_support.py"} <= set(sources)
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


# --- The installed package ------------------------------------------------------------------------


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
