"""Two nodes on one machine: network namespaces with a link between them, good or bad."""

from __future__ import annotations

import fcntl
import os
import random
import select
import signal
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

import pytest

#: What the link is called on both nodes.
DEVICE = "eth0"
#: Of a bad link, each way.
DELAY_S, LOSS = 0.005, 0.02


class Node(NamedTuple):
    name: str  # of its network namespace
    address: str

    def inside(self, *command: object) -> list[str]:
        """A command as it is run on this node."""
        return ["ip", "netns", "exec", self.name, *map(str, command)]

    def processes(self) -> list[int]:
        return [int(process) for process in _told("ip", "netns", "pids", self.name).split()]

    def cut(self) -> None:
        """Takes the link down at this end; at the other it has no carrier any more."""
        _told("ip", "-n", self.name, "link", "set", DEVICE, "down")


def _told(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _try(*command: str) -> None:
    """Runs what not every machine can, or lets us; there the test skips."""
    try:
        _told(*command)
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", "") or error
        pytest.skip(f"two nodes cannot be made here: {' '.join(command)}: {why}")


@contextmanager
def two_nodes(link: str = "good") -> Iterator[tuple[Node, Node]]:
    """Makes two nodes, and leaves nothing of them, nor of what runs on them.

    Args:
        link: "good", a veth pair; "netem", the same where the kernel delays and loses packets;
            "relay", which does so in this process, for a kernel that cannot.
    """
    nodes = tuple(Node(f"syncbn-{os.getpid()}-{number}", f"10.77.0.{number}") for number in (1, 2))
    with ExitStack() as undo:
        for node in nodes:
            undo.callback(_remove, node)
            _try("ip", "netns", "add", node.name)
        lost = undo.enter_context(LINKS[link](*nodes))
        for node in nodes:
            for command in (
                ("addr", "add", f"{node.address}/24", "dev", DEVICE),
                ("link", "set", "lo", "up"),
                ("link", "set", DEVICE, "up"),
            ):
                _try("ip", "-n", node.name, *command)
        yield nodes
        assert link == "good" or lost() > 0, "the link was too good"


def _remove(node: Node) -> None:
    with suppress(OSError, subprocess.CalledProcessError):  # where it was not made
        for process in node.processes():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        _told("ip", "netns", "del", node.name)


@contextmanager
def _pair(first: Node, second: Node):
    end = ("name", DEVICE, "netns")
    _try("ip", "link", "add", *end, first.name, "type", "veth", "peer", *end, second.name)
    yield None


@contextmanager
def _pair_with_netem(*nodes: Node):
    with _pair(*nodes):
        for node in nodes:
            how = ("delay", f"{1e3 * DELAY_S}ms", "loss", f"{100 * LOSS}%")
            _try("tc", "-n", node.name, "qdisc", "add", "dev", DEVICE, "root", "netem", *how)

        def lost() -> int:
            told = [_told("tc", "-n", node.name, "-s", "qdisc", "show") for node in nodes]
            return sum(int(text.split("dropped ")[1].split(",")[0]) for text in told)

        yield lost


@contextmanager
def _relay(*nodes: Node):
    """Each end is a TUN device, whose packets a thread carries to the other one."""
    ends = []
    lost = 0
    closed = threading.Event()

    def carry() -> None:
        nonlocal lost
        chance = random.Random(0)
        under_way: deque[tuple[float, int, bytes]] = deque()
        while not closed.is_set():
            wait = under_way[0][0] - time.monotonic() if under_way else 0.1
            for end in select.select(ends, [], [], max(0.0, wait))[0]:
                packet = os.read(end, 65536)
                if chance.random() < LOSS:
                    lost += 1
                else:
                    other = ends[1 - ends.index(end)]
                    under_way.append((time.monotonic() + DELAY_S, other, packet))
            while under_way and under_way[0][0] <= time.monotonic():
                _, end, packet = under_way.popleft()
                with suppress(OSError):  # an end that is down takes none
                    os.write(end, packet)

    thread = threading.Thread(target=carry)
    try:
        for node in nodes:
            ends.append(_tun(node))
        thread.start()
        yield lambda: lost
    finally:
        closed.set()
        if thread.ident:
            thread.join()
        for end in ends:
            os.close(end)


def _tun(node: Node) -> int:
    """Makes a TUN device on a node; returns the file of what crosses it."""
    name = f"syncbn{os.getpid()}"  # until it is in its namespace
    set_interface, tun, no_header = 0x400454CA, 0x0001, 0x1000
    try:
        file = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(file, set_interface, struct.pack("16sH22x", name.encode(), tun | no_header))
    except OSError as error:
        pytest.skip(f"needs TUN devices: {error}")
    _try("ip", "link", "set", name, "netns", node.name, "name", DEVICE)
    return file


LINKS = {"good": _pair, "netem": _pair_with_netem, "relay": _relay}
