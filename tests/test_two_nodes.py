"""Ranks on two nodes are one process on the whole batch, and end soon where the link is cut."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from inputs import assert_close, numpy
from optional import optional
from scripts import LIMIT_S, environment
from toolkits import ROOT
from two_nodes import DEVICE, Node, two_nodes

optional("sklearn")
import two_nodes_ranks  # noqa: E402

#: Seconds: the timeout of the process group, and what may pass beyond it until a process is gone.
PATIENCE, MARGIN = 5.0, 10.0


def files(folder: Path, what: str) -> list[Path]:
    """What each rank leaves."""
    return [folder / f"{what} {rank}" for rank in range(4)]


def begin(nodes: tuple[Node, Node], *arguments: object) -> list[subprocess.Popen]:
    """Starts two ranks on each node."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 2)
    master = ("--master-addr", nodes[0].address, "--master-port", 29500)
    script = (ROOT / "tests/two_nodes_ranks.py", *arguments)
    return [
        subprocess.Popen(
            node.inside(*torchrun, *master, "--node-rank", number, *script),
            cwd=ROOT,
            env=environment(GLOO_SOCKET_IFNAME=DEVICE, TP_SOCKET_IFNAME=DEVICE),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number, node in enumerate(nodes)
    ]


def train(folder: Path, link: str) -> list[dict[str, torch.Tensor]]:
    """Trains on two nodes; returns the state of the net on each rank."""
    with two_nodes(link) as nodes:
        for process in begin(nodes, folder, 60):
            told, _ = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0, told[-4000:]
    return [torch.load(file, weights_only=True) for file in files(folder, "net")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train(tmp_path_factory.mktemp("good"), "good")


def test_two_nodes_are_one_process_on_the_whole_batch(trained) -> None:
    alone = two_nodes_ranks.train(lambda net: net, slice(None))
    for state in trained:
        assert state.keys() == alone.keys()
        for name, value in state.items():
            assert torch.equal(value, trained[0][name]), f"{name} differs between ranks"
            assert_close(value, numpy(alone[name]), torch.float64)


@pytest.mark.parametrize("link", ["netem", "relay"])
def test_a_link_that_delays_and_loses_changes_no_bit(link, trained, tmp_path) -> None:
    for state in train(tmp_path, link):
        for name, value in state.items():
            assert torch.equal(value, trained[0][name]), name


def test_without_a_link_all_ranks_end_in_time_and_name_the_layer(tmp_path) -> None:
    """One node has no link any more, the other one that leads nowhere."""
    with two_nodes() as nodes:
        agents = begin(nodes, tmp_path, PATIENCE, "waits")
        two_nodes_ranks.wait_for(*files(tmp_path, "waits"), limit_s=LIMIT_S)
        nodes[1].cut()
        began = time.monotonic()
        (tmp_path / "go on").touch()
        told = [agent.communicate(timeout=LIMIT_S)[0] for agent in agents]
        assert time.monotonic() - began < PATIENCE + MARGIN
        assert [node.processes() for node in nodes] == [[], []]
    for number, agent in enumerate(agents):
        assert agent.returncode == 1
        assert told[number].count("ChildFailedError: ") == 1, told[number][-4000:]
    for file in files(tmp_path, "error"):
        assert re.match(
            r"FastSyncBatchNorm\(8\) at '4': the all_reduce of its forward over ranks 0-3 "
            r"\(.*gloo.*\) failed: ",
            file.read_text(),
        ), file.read_text()
