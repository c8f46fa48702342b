"""What a collective takes by NCCL's own model, from which NCCL chooses its algorithms.

The formulas and constants are those of NCCL 2.30 for nodes whose GPUs talk over NVLink and whose
NICs are InfiniBand's: https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc. Left out are
its algorithms that add up in switches (NVLS, CollNet), a correction for long messages along rings,
and PAT, which is for one GPU a node.

A model, not a measurement. docs/scaling.md puts published measurements beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

TREE, RING = "tree", "ring"
REDUCE, GATHER = "all_reduce", "all_gather"
#: Which algorithms each collective has.
ALGORITHMS = {REDUCE: (TREE, RING), GATHER: (RING,)}

#: Microseconds in the order of NCCL's protocols.
LL, LL128, SIMPLE = range(3)
PROTOCOLS = (LL, LL128, SIMPLE)
BASE = {TREE: (6.8, 14.0, 8.4), RING: (6.6, 14.0, 8.4)}
NVLINK = {TREE: (0.6, 1.25, 4.0), RING: (0.6, 1.9, 3.4)}
NET = {TREE: (5.0, 8.5, 14.0), RING: (2.7, 4.0, 14.0)}

#: What trees reach of their bandwidth, for messages of 64 bytes and each power of two above.
TREE_REACHES = {
    LL: (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
    LL128: (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9),
    SIMPLE: (*7 * (0.9,), 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7),
}


@dataclass(frozen=True)
class Cluster:
    """Nodes of GPUs, and what is known of them.

    Args:
        name: in tables.
        node_gigabytes_s: bus bandwidth among the GPUs of a node.
        net_gigabytes_s: bus bandwidth among nodes, of all NICs together.
        ll_gigabytes_s: the most of protocol LL in one node, two, and more.
        host_us: of the host, for each step of a ring over several nodes.
        slower: how many times as long as the model says.
        per_node: GPUs a node.
    """

    name: str
    node_gigabytes_s: float
    net_gigabytes_s: float
    ll_gigabytes_s: tuple[float, float, float]
    host_us: float
    slower: float = 1.0
    per_node: int = 8


def microseconds(
    cluster: Cluster, world: int, collective: str, nbytes: int, algorithm: str | None = None
) -> float:
    """What a collective takes, by the quickest protocol.

    Args:
        cluster: where.
        world: how many GPUs take part: those of one node, or whole nodes.
        collective: REDUCE or GATHER.
        nbytes: of what a rank ends up with.
        algorithm: TREE or RING, or None for the quicker one.

    Raises:
        ValueError: the GPUs do not fill their nodes.
    """
    if world > cluster.per_node and world % cluster.per_node:
        raise ValueError(f"expected whole nodes of {cluster.per_node} GPUs, got {world} GPUs")
    if world == 1:
        return 0.0
    algorithms = ALGORITHMS[collective] if algorithm is None else (algorithm,)
    return cluster.slower * min(
        latency(cluster, world, collective, each, protocol)
        + nbytes / (1e3 * bandwidth(cluster, world, collective, nbytes, each, protocol))
        for each in algorithms
        for protocol in PROTOCOLS
    )


def latency(cluster: Cluster, world: int, collective: str, algorithm: str, protocol: int) -> float:
    """Microseconds of a collective of no bytes."""
    nodes = math.ceil(world / cluster.per_node)
    inside, between = NVLINK[algorithm][protocol], NET[algorithm][protocol]
    if algorithm == TREE:  # a chain in each node, a binary tree over nodes, up and down
        hops = (world // nodes - 1) * inside + int(math.log2(nodes)) * between
        return BASE[TREE][protocol] + 2 * hops
    if nodes > 1:
        inside = max(inside, cluster.host_us * (3 if protocol == SIMPLE else 1))
    rounds = 2 if collective == REDUCE else 1
    crossing = rounds * (nodes - 1)
    rest = rounds * (world - 1) - crossing
    return BASE[RING][protocol] + rest * inside + crossing * between


def bandwidth(
    cluster: Cluster, world: int, collective: str, nbytes: int, algorithm: str, protocol: int
) -> float:
    """GB/s, of the bytes that a rank ends up with."""
    nodes = math.ceil(world / cluster.per_node)
    bus = cluster.node_gigabytes_s
    if nodes > 1:
        bus = min(bus, cluster.net_gigabytes_s)
    most = cluster.ll_gigabytes_s[min(nodes, 3) - 1]
    if algorithm == RING:
        share = {LL: min(bus / 2, most), LL128: 0.92 * bus, SIMPLE: bus}[protocol]
        return share * world / ((world - 1) * (2 if collective == REDUCE else 1))
    bus *= 0.92
    wide = bus * (7 / 9 if nodes == 1 else 120 / 128)
    share = 0.85 * {LL: min(bus / 3.8, most), LL128: wide, SIMPLE: bus}[protocol]
    reaches = TREE_REACHES[protocol]
    power = nbytes.bit_length() - 7  # 64 bytes are 0
    return share / 2 * (reaches[min(power, len(reaches) - 1)] if power >= 0 else 1)
