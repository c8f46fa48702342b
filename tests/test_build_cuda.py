"""What the build finds of CUDA, and what it decides then."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from toolkits import script, toolkit, with_path


@pytest.fixture
def no_usual_places(support, monkeypatch):
    monkeypatch.setattr(support.cuda, "USUAL_PLACES", [])


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
    monkeypatch.setattr(support.cuda, "USUAL_PLACES", [f"{tmp_path}/local/cuda-*"])
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
    monkeypatch.setattr(support.cuda, "USUAL_PLACES", [f"{tmp_path}/local/cuda"])
    with pytest.raises(support.CudaMissing, match=rf"no nvcc on PATH.*{tmp_path}/local/cuda"):
        support.find_cuda(with_path(tmp_path))


def test_an_nvcc_without_cpp20_is_refused(support, no_usual_places, tmp_path):
    root = toolkit(tmp_path / "cuda", "11.8")
    with pytest.raises(support.CudaMissing, match=r"is CUDA 11\.8, but C\+\+20 needs 12\.0"):
        support.find_cuda(with_path(root / "bin"))


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
