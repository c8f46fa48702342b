"""What a rank knows by itself of its model, its device and its launch, in a form that travels."""

from __future__ import annotations

import os
import socket
import sys
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from syncbn_cuda._collective import hold_group
from syncbn_cuda._exchange import is_distributed
from syncbn_cuda.health.loader import LoaderFacts
from syncbn_cuda.module import FastSyncBatchNorm
from syncbn_cuda.report import NOT_CONVERTED, LayerReport, conversion_report, is_synchronized

#: Under these names wrappers keep what they wrap; DDP and DataParallel under "module".
_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")

#: Which variable says how many processes a launcher has started, the innermost launcher first.
#: Slurm's is that of a step: that of the allocation stands in its interactive shell as well.
_LAUNCHERS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


class GroupFacts(NamedTuple):
    """A process group as one rank sees it.

    Attributes:
        name: its name in torch, the same on all of its ranks.
        ranks: its ranks in the world; None on a rank outside of it, empty where not known.
        served: the types of devices that it has a backend for; empty where not known.
    """

    name: str
    ranks: tuple[int, ...] | None
    served: tuple[str, ...] = ()


class LayerFacts(NamedTuple):
    """A layer that normalises, as one rank has it; without a group where it is by itself."""

    name: str
    class_name: str
    reason: str
    group: GroupFacts | None
    ours: bool
    device: str  # its type
    dtype: str
    channels: int | None
    eps: float | None
    momentum: float | None
    affine: bool
    track_running_stats: bool
    mode: str  # "training" or "evaluation"
    frozen: bool  # in evaluation while the model trains
    over_batch: bool  # rather than over each sample
    convertible: bool


class RankFacts(NamedTuple):
    """All that one rank tells."""

    rank: int
    world: int
    launched: tuple[str, int] | None
    gpus: tuple[str, ...]
    data_parallel: tuple[str, ...]
    replicas: tuple[int, ...]  # the ranks that share the data with this one; none: not known
    layers: tuple[LayerFacts, ...]
    loader: LoaderFacts | None


def rank_facts(model: nn.Module, loader: LoaderFacts | None) -> RankFacts:
    """Describes this rank; nothing is changed and no peer is asked."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if is_distributed() else (0, 1)
    modules = named_modules(model)
    groups: dict[Any, GroupFacts] = {}  # each described once: in large worlds they are long
    return RankFacts(
        rank,
        world,
        _launched(),
        gpus_of(model),
        tuple(name for name, module in modules if isinstance(module, DataParallel)),
        _replicas(modules, world),
        tuple(_layer_facts(*found, model, groups) for found in layers_of(model)),
        loader,
    )


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the modules by their names without the parts that are wrappers'."""
    modules = dict(model.named_modules())
    clean = {"": ""}
    for name in list(modules)[1:]:
        parent, _, own = name.rpartition(".")
        wrapper = isinstance(modules[parent], DataParallel | DistributedDataParallel)
        if own in _WRAPPED or (wrapper and own == "module"):
            clean[name] = clean[parent]
        else:
            clean[name] = f"{clean[parent]}.{own}" if clean[parent] else own
    return [(clean[name], module) for name, module in modules.items()]


def layers_of(model: nn.Module) -> list[tuple[str, nn.Module, LayerReport]]:
    """Returns the layers that normalise, by names without wrappers, and the report's rows."""
    found = dict(zip(dict(model.named_modules()), named_modules(model), strict=True))
    return [(*found[row.name], row) for row in conversion_report(model)]


def _layer_facts(
    name: str, layer: Any, row: LayerReport, model: nn.Module, groups: dict[Any, GroupFacts]
) -> LayerFacts:
    group = getattr(layer, "process_group", None)
    if is_synchronized(layer) and group not in groups:
        groups[group] = group_facts(group)
    tensors = _tensors(layer)
    types = dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)
    return LayerFacts(
        name,
        row.class_name,
        row.reason,
        groups[group] if is_synchronized(layer) else None,
        isinstance(layer, FastSyncBatchNorm),
        device_of(layer, model).type,
        " and ".join(types) or "float32",
        getattr(layer, "num_features", None),
        getattr(layer, "eps", None),
        getattr(layer, "momentum", None),
        bool(getattr(layer, "affine", True)),
        bool(getattr(layer, "track_running_stats", True)),
        "training" if layer.training else "evaluation",
        model.training and not layer.training,
        row.status != "needs none",
        row.reason == NOT_CONVERTED,
    )


def _tensors(layer: nn.Module) -> list[torch.Tensor]:
    """Returns parameters and buffers; of parametrizations the originals, as they compute."""
    return [t for t in chain(layer.parameters(), layer.buffers()) if t.is_floating_point()]


def device_of(layer: nn.Module, model: nn.Module) -> torch.device:
    """Returns where a layer is; one without tensors is where its model begins."""
    first = next(chain(_tensors(layer), model.parameters()), None)
    return torch.device("cpu") if first is None else first.device


def dtype_of(layer: nn.Module) -> torch.dtype:
    """Returns the type of a layer's first tensor."""
    tensors = _tensors(layer)
    return tensors[0].dtype if tensors else torch.float32


def group_facts(group: Any | None) -> GroupFacts:
    """Describes the group of a layer; None stands for the world."""
    if not is_distributed():
        return GroupFacts("", (0,))
    held = hold_group(dist.group.WORLD if group is None else group)
    assert held is not None
    if not held.key:
        return GroupFacts("", None)
    if not isinstance(held.group, dist.ProcessGroup):
        return GroupFacts(held.key, ())
    return GroupFacts(
        held.group.group_name,
        tuple(dist.get_process_group_ranks(held.group)),
        tuple(sorted(served.type for served in held.group._device_types)),
    )


def gpus_of(model: nn.Module) -> tuple[str, ...]:
    """Returns what tells the GPUs of a model's tensors from all others, on any host."""
    tensors = chain(model.parameters(), model.buffers())
    indices = {tensor.device.index for tensor in tensors if tensor.is_cuda}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if visible.startswith("MIG"):  # a slice: its uuid may be that of the whole GPU
        return (f"{socket.gethostname()} {visible}",) if indices else ()
    return tuple(
        f"{socket.gethostname()} GPU {torch.cuda.get_device_properties(index).uuid}"
        for index in sorted(indices)
    )


def _launched() -> tuple[str, int] | None:
    """Returns how many processes the launcher has started, and which variable says so."""
    for variable in _LAUNCHERS:
        if os.environ.get(variable, "").isdecimal():
            return variable, int(os.environ[variable])
    return None


def _replicas(modules: list[tuple[str, nn.Module]], world: int) -> tuple[int, ...]:
    """Returns the ranks that share the data; none where it is not known who does."""
    for _, module in modules:
        if isinstance(module, DistributedDataParallel):
            return tuple(dist.get_process_group_ranks(module.process_group))
    own = [p for _, module in modules for p in module.parameters(recurse=False)]
    meshes = [p.device_mesh for p in own if hasattr(p, "device_mesh")]
    # Sharded by other means than FSDP, ranks have to see the same data.
    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    if meshes and not any(isinstance(module, sharded) for _, module in modules):
        return ()
    if any(mesh.ndim > 1 or mesh.size() < world for mesh in meshes):
        return ()
    return tuple(range(world))
