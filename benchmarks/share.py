"""Which share of a training step do synchronised layers take? On paper, from 8 to 16,384 GPUs.

Of a net its batch norms count: each waits, in forward and in backward, for one message of all
ranks, and nothing else goes on meanwhile. What a message takes is NCCL's model (nccl.py); where it
is uncertain there are two clusters, and both ends are carried through. docs/scaling.md names what
is assumed and where each number is from.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.message import gathered, summed
from benchmarks.models import UNet, resnet50
from benchmarks.nccl import GATHER, REDUCE, RING, TREE, Cluster, microseconds

#: NVLink: 18 links of 20.6 GB/s. InfiniBand: eight NICs of 46 GB/s, as reached at 400 Gbit/s.
_H100 = {"node_gigabytes_s": 18 * 20.6, "net_gigabytes_s": 8 * 46.0}
#: As NCCL has it, with hosts of Intel; and with hosts of AMD, as much slower as the slowest
#: published measurement is than what NCCL says of it, 2.9 times, and some more.
SLOWER = 3.0
CLUSTERS = (
    Cluster("low", **_H100, ll_gigabytes_s=(141.0, 39.0, 20.4), host_us=1.0),
    Cluster("high", **_H100, ll_gigabytes_s=(141.0, 22.5, 19.0), host_us=2.0, slower=SLOWER),
)

WORLDS = (8, 16, 64, 256, 1024, 4096, 16384)
FLAT, NODE = "flat", "node"

#: Ours along either of NCCL's algorithms, and torch's, which gathers along rings.
SUM_TREE, SUM_RING, TORCH = "sum, tree", "sum, ring", "gather, ring"


@dataclass(frozen=True)
class Net:
    """A net and published steps of it.

    Args:
        name: in tables.
        make: returns it, or None where it is not installed.
        steps_ms: milliseconds of a step on one GPU, by what they were published of.
    """

    name: str
    make: Callable[[], nn.Module | None]
    steps_ms: dict[str, float]

    def widths(self) -> list[int] | None:
        """The channels of each batch norm."""
        with torch.device("meta"):
            net = self.make()
        return net and [m.num_features for m in net.modules() if hasattr(m, "running_mean")]


#: A batch over images a second. The U-Net's are of nnU-Net, two-dimensional, 192 x 160.
NETS = (
    Net(
        "ResNet-50",
        resnet50,
        {
            "A100, mixed, batch 256": 1e3 * 256 / 2470,
            "A100, TF32, batch 256": 1e3 * 256 / 938,
            "V100, mixed, batch 256": 1e3 * 256 / 1200,
        },
    ),
    Net(
        "U-Net",
        functools.partial(UNet, 2, 3, 8, width=64, depth=4),
        {
            "A100, mixed, batch 64": 1e3 * 64 / 856.34,
            "A100, TF32, batch 64": 1e3 * 64 / 565.62,
            "V100, mixed, batch 64": 1e3 * 64 / 524.13,
        },
    ),
)
#: Steps of faster and slower GPUs, and of smaller and larger batches.
STEPS_MS = (10, 25, 50, 100, 200, 400)


def group_of(world: int, groups: str, per_node: int = 8) -> int:
    """How many ranks normalise together."""
    return world if groups == FLAT else min(world, per_node)


def layer_us(cluster: Cluster, ranks: int, channels: int, form: str) -> float:
    """Microseconds that a layer's messages take, forward and backward."""
    forward, backward = summed(channels)
    if form == TORCH:  # which sums two float32 values of a channel in backward, as NCCL sees fit
        return microseconds(
            cluster, ranks, GATHER, ranks * gathered(channels).nbytes
        ) + microseconds(cluster, ranks, REDUCE, 2 * channels * 4)
    algorithm = {SUM_TREE: TREE, SUM_RING: RING}[form]
    return sum(
        microseconds(cluster, ranks, REDUCE, message.nbytes, algorithm)
        for message in (forward, backward)
    )


def added_ms(cluster: Cluster, ranks: int, widths: list[int], form: str) -> float:
    """Milliseconds that the layers of a net add to a step."""
    times = {channels: layer_us(cluster, ranks, channels, form) for channels in set(widths)}
    return 1e-3 * sum(times[channels] for channels in widths)


def share(added: float, step: float) -> float:
    """Of a step that takes so long without it, the share of what is added."""
    return added / (step + added)


def held(ranks: int, channels: int, form: str) -> int:
    """Bytes that a rank holds of a layer's forward message when it is done."""
    return ranks * gathered(channels).nbytes if form == TORCH else summed(channels)[0].nbytes


def rows() -> list[dict]:
    """A row for each net, number of GPUs, and kind of groups."""
    found = []
    for net in NETS:
        widths = net.widths()
        if widths is None:
            print(f"{net.name}: not installed, so not predicted")
            continue
        for groups in (FLAT, NODE):
            for world in WORLDS:
                ranks = group_of(world, groups)
                forms = (SUM_TREE, SUM_RING, TORCH)
                found.append(
                    {
                        "part": "predicted",
                        "net": net.name,
                        "layers": len(widths),
                        "channels": sum(widths),
                        "groups": groups,
                        "gpus": world,
                        "added_ms": {
                            form: {c.name: added_ms(c, ranks, widths, form) for c in CLUSTERS}
                            for form in forms
                        },
                        "held": {form: held(ranks, max(widths), form) for form in forms},
                        "steps_ms": net.steps_ms,
                    }
                )
    return found
