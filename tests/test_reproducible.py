"""Two builds of the same sources are the same file, without a network; and what differs is told.

The sources stand in for the real ones, which take a minute: they hold what makes builds differ.
`make reproduce` builds the real ones.
"""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
import reproduce
from toolkits import ROOT

pytestmark = pytest.mark.skipif(
    not (ROOT / "setup.py").exists(), reason="needs a checkout: setup.py is not in a wheel"
)
#: An empty network: not even the loopback is up.
NO_NETWORK = ("unshare", "--net", "--map-root-user")


def may(*command: str) -> bool:
    return (
        shutil.which(command[0]) is not None and not subprocess.run(command, check=False).returncode
    )


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """Libraries with a path in a string, and names that nvcc makes up."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "build_support", folder / "build_support", ignore=reproduce.IGNORED)
    (folder / "syncbn_cuda").mkdir()
    (folder / "syncbn_cuda" / "__init__.py").write_text('__version__ = "1.2.3"\n')
    (folder / "syncbn_cuda" / "py.typed").touch()
    (folder / "csrc" / "cuda").mkdir(parents=True)
    told = '__attribute__((visibility("default"))) const char* {} = __FILE__;\n'
    (folder / "csrc" / "ops.cpp").write_text(told.format("path_of_ops"))
    (folder / "csrc" / "cuda" / "part.cu").write_text(
        told.format("path_of_part")
        + "namespace {\n__device__ int hidden;\n}\n"
        + "__global__ void part(int* p) { *p = hidden++; }\n"
        + "static int begun = [] { part<<<1, 1>>>(nullptr); return 1; }();\n"
    )
    return folder


@pytest.mark.parametrize("cuda", ["0", "1"])
def test_two_builds_in_two_folders_are_the_same_file(project, tmp_path, cuda):
    if cuda == "1" and shutil.which("nvcc") is None:
        pytest.skip("no nvcc")
    variables = {"SYNCBN_CUDA": cuda, "TORCH_CUDA_ARCH_LIST": "9.0"}
    one, other = reproduce.build_twice(project, tmp_path, variables)
    assert reproduce.differences(one, other) == []
    libraries = {"_cpu": "path_of_ops", "_cuda": "path_of_part"}
    with zipfile.ZipFile(one) as wheel:
        for library in list(libraries)[: 1 + int(cuda)]:
            content = wheel.read(f"syncbn_cuda/{library}.abi3.so")
            assert b"./csrc/" in content
            assert str(tmp_path).encode() not in content
        modes = {info.filename: info.external_attr >> 16 & 0o777 for info in wheel.infolist()}
    assert modes["syncbn_cuda/_cpu.abi3.so"] == 0o755
    assert modes["syncbn_cuda/py.typed"] == 0o644


@pytest.mark.skipif(not may(*NO_NETWORK, "true"), reason="may not make a network namespace")
def test_a_build_needs_no_network(project, tmp_path):
    copied = reproduce.copy(project, tmp_path / "copy")
    assert reproduce.build(copied, {"SYNCBN_CUDA": "0"}, NO_NETWORK).stat().st_size > 0


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"content": "2"}, ["a: contents"]),
        ({"date_time": (1990, 1, 1, 0, 0, 0)}, ["a: time"]),
        ({"mode": 0o600}, ["a: mode"]),
        ({"name": "b"}, ["a: in one alone", "b: in one alone"]),
        ({"compression": zipfile.ZIP_DEFLATED}, ["the order of files, or how they are compressed"]),
        ({}, []),
    ],
)
def test_tells_in_what_two_wheels_differ(tmp_path, changed, told):
    wheels = []
    for name, traits in (("one", {}), ("other", changed)):
        path = tmp_path / name
        info = zipfile.ZipInfo(
            traits.get("name", "a"), traits.get("date_time", (1980, 1, 1, 0, 0, 0))
        )
        info.external_attr = traits.get("mode", 0o644) << 16
        info.compress_type = traits.get("compression", zipfile.ZIP_STORED)
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr(info, traits.get("content", "1"))
        wheels.append(path)
    assert reproduce.differences(*wheels) == told


def test_nvcc_is_given_no_folder_that_it_would_split(support):
    flags = support.forget_folders({Path("/a"): ".", Path("/b c"): "b", Path("/d,e"): "d"})
    assert flags[1] == "-ffile-prefix-map=/b c=b"
    assert support.for_nvcc(flags) == ["--compiler-options=-ffile-prefix-map=/a=."]


def test_a_time_that_the_environment_names_stays(support):
    named, unnamed = {"SOURCE_DATE_EPOCH": "1700000000"}, {}
    for environ in (named, unnamed):
        support.settle_time(environ)
    assert named == {"SOURCE_DATE_EPOCH": "1700000000"}
    assert unnamed == {"SOURCE_DATE_EPOCH": "315532800"}
