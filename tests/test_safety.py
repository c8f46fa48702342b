"""Importing reaches for no network; no code loads pickles, or runs a text as code or in a shell."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hazards import CODE, NETWORK, PEERS, PICKLES, SHELL, hazards
from toolkits import ROOT

import syncbn_cuda

PACKAGE = Path(syncbn_cuda.__file__).resolve().parent
#: Ranks of one job trust each other, as torch has them do. The package asks them in one place.
ALLOWED = {(PACKAGE / "_exchange.py", "torch.distributed.all_gather_object", PEERS)}

IMPORT_EVERYTHING = """
import importlib, pkgutil, socket, sys
import torch, torch.distributed, numpy  # what they do is theirs

reached = []
def audit(event, arguments):
    if event.startswith(("socket.", "urllib.", "http.", "ftplib.", "smtplib.")):
        reached.append(event)
sys.addaudithook(audit)

import syncbn_cuda
libraries = ("syncbn_cuda._cpu", "syncbn_cuda._cuda")  # hold no module
found = pkgutil.walk_packages(syncbn_cuda.__path__, "syncbn_cuda.")
names = [module.name for module in found if module.name not in libraries]
for name in names:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "timm":  # which not every environment has
            raise
layer = syncbn_cuda.FastSyncBatchNorm(3)
layer(torch.randn(2, 3, 4, requires_grad=True)).sum().backward()
print(len(names), "modules", *reached)

del reached[:]
with socket.socket() as probe:
    probe.connect_ex(("127.0.0.1", 9))
assert "socket.connect" in reached, reached
"""


def test_importing_and_computing_reach_for_no_network():
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_EVERYTHING], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    count, *words = done.stdout.split()
    assert int(count) >= len(list(PACKAGE.glob("*.py"))) - 1
    assert words == ["modules"]


def scanned() -> list[Path]:
    beside = [ROOT / name for name in ("build_support", "examples", "benchmarks")]
    files = [path for folder in (PACKAGE, *beside) for path in folder.rglob("*.py")]
    return sorted(path for path in (ROOT / "setup.py", *files) if path.is_file())


def test_no_code_loads_pickles_or_runs_texts():
    files = scanned()
    assert len(files) > 20
    found = {(path, name, why) for path in files for _, name, why in hazards(path.read_text())}
    found = {each for each in found if each[-1] != PEERS or PACKAGE in each[0].parents}
    assert found == ALLOWED


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("eval(text)", CODE),
        ("import builtins\nbuiltins.exec(text)", CODE),
        ("import pickle\npickle.load(file)", PICKLES),
        ("from pickle import loads as read\nread(data)", PICKLES),
        ("import torch\ntorch.load(path)", PICKLES),
        ("import torch\ntorch.load(path, weights_only=False)", PICKLES),
        ("import torch\ntorch.load(path, weights_only=flag)", PICKLES),
        ("import numpy as np\nnp.load(path, allow_pickle=True)", PICKLES),
        ("import os\nos.system(text)", SHELL),
        ("from os import popen\npopen(text)", SHELL),
        ("import subprocess\nsubprocess.run(text, shell=True)", SHELL),
        ("import subprocess as sp\nsp.Popen(text, shell=flag)", SHELL),
        ("import urllib.request", NETWORK),
        ("from http import client", NETWORK),
        ("import torch\ntorch.hub.load('a', 'b')", NETWORK),
        ("import torch.distributed as dist\ndist.broadcast_object_list(x)", PEERS),
    ],
)
def test_a_hazard_is_found_under_any_name(source, why):
    assert [found[2] for found in hazards(source)] == [why]


@pytest.mark.parametrize(
    "source",
    [
        "net.eval()",
        "import torch\ntorch.load(path, weights_only=True)",
        "import subprocess\nsubprocess.run(['ls'], shell=False)",
        "import numpy as np\nnp.load(path)",
        "from local import load\nload(path)",
    ],
)
def test_what_is_safe_is_left_alone(source):
    assert hazards(source) == []
