"""The steps of running.py: which layers are meant, and what is read from and written to them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parallel import DistributedDataParallel

from syncbn_cuda._checks import check, lacks_float64
from syncbn_cuda._collective import all_reduce, serves_cpu
from syncbn_cuda._composite import buffered_statistics
from syncbn_cuda._library import kernels_for
from syncbn_cuda._lockstep import Lockstep
from syncbn_cuda._tensors import dense

#: A layer as ranks compare it: its name, its channels, and whether it counts batches.
Signature = tuple[str, int, bool]

_NONE_LEFT = object()


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the model without the wrappers that compile it, or spread or broadcast buffers."""
    while True:
        if isinstance(model, DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif "_orig_mod" in model._modules:  # torch.compile
            model = model._modules["_orig_mod"]  # type: ignore[assignment]
        else:
            return model


def tracking(caller: str, net: nn.Module) -> dict[str, _BatchNorm]:
    """Returns the batch norms that have running buffers, by name.

    Raises:
        ValueError: a layer does not know its shapes yet.
    """
    layers = {}
    for name, layer in net.named_modules():
        if isinstance(layer, LazyModuleMixin) and layer.has_uninitialized_params():  # type: ignore[misc]
            raise ValueError(
                f"{caller}: expected {name or 'the module'!r} to know its shapes, got "
                f"{type(layer).__name__}: run one batch through the model first"
            )
        if isinstance(layer, _BatchNorm) and all(b is not None for b in buffers_of(layer)):
            layers[name] = layer
    return layers


def buffers_of(layer: _BatchNorm) -> tuple[Any, Any]:
    """Returns running mean and variance."""
    return layer.running_mean, layer.running_var


def signatures(layers: Mapping[str, _BatchNorm]) -> list[Signature]:
    """Returns what has to be the same on every rank."""
    return [
        (name, layer.num_features, layer.num_batches_tracked is not None)
        for name, layer in layers.items()
    ]


def check_alike(caller: str, told: Mapping[int, list[Signature]]) -> None:
    """Checks that every rank has the same layers.

    Raises:
        ValueError: names the first difference.
    """
    first = min(told)
    for rank, layers in told.items():
        for pair in zip_longest(told[first], layers):
            if pair[0] != pair[1]:
                ours, theirs = map(_shown, pair)
                raise ValueError(
                    f"{caller}: expected the same batch norms on every rank, got {ours} on rank "
                    f"{first} and {theirs} on rank {rank}"
                )


def _shown(layer: Signature | None) -> str:
    if layer is None:
        return "no more"
    name, channels, counts = layer
    return f"{name!r} of {channels} channels {'with' if counts else 'without'} a counter"


def sum_over(group: Any | None, parts: list[Tensor]) -> list[Tensor]:
    """Returns the sums of vectors over the ranks of a group, by one message on a device of its."""
    if group is None or not parts:
        return parts
    device = torch.device("cpu")
    if not serves_cpu(group):
        elsewhere = [part.device for part in parts if not part.is_cpu]
        device = elsewhere[0] if elsewhere else torch.accelerator.current_accelerator()  # type: ignore[assignment]
    message = torch.cat([part.to(device) for part in parts])
    return list(all_reduce(message, group, False).split([part.numel() for part in parts]))


@contextmanager
def unmarked(net: nn.Module) -> Iterator[None]:
    """Brings every module's flag and buffers back, the very tensors with their values."""
    modules = [(module, module.training) for module in net.modules()]
    buffers = [
        (module, name, buffer, None if buffer is None or _overlaps(buffer) else buffer.clone())
        for module in net.modules()
        for name, buffer in module._buffers.items()
    ]
    try:
        yield
    finally:
        for module, training in modules:
            module.training = training
        for module, name, buffer, value in buffers:
            module._buffers[name] = buffer
            if buffer is not None and value is not None:
                buffer.copy_(value)


def _overlaps(buffer: Tensor) -> bool:
    """Whether it is expanded: nothing can have been written to it."""
    pairs = zip(buffer.shape, buffer.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in pairs)


def record(layer: _BatchNorm, totals: dict[_BatchNorm, Tensor]) -> Callable[[], None]:
    """Adds the message of every input of a layer to its total; returns what ends it."""

    def add(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert isinstance(layer, _BatchNorm)
        input = args[0] if args else next(iter(kwargs.values()))
        check(input, None, None, None, None, layer)
        if lacks_float64(input):
            input = input.cpu()
        message = kernels_for(input.device).batch_norm_stats(dense(input))
        if getattr(layer, "skip_nonfinite_update", False):
            message = torch.where(message.isfinite().all(), message, 0.0)
        totals[layer] = message if layer not in totals else totals[layer] + message

    return layer.register_forward_pre_hook(add, with_kwargs=True).remove


def message_of_nothing(layer: _BatchNorm) -> Tensor:
    """Returns the message of a layer that has seen no input."""
    nothing = torch.empty(0, layer.num_features, device="cpu")
    return kernels_for(nothing.device).batch_norm_stats(nothing)


def write(layer: _BatchNorm, total: Tensor) -> None:
    """Makes the running buffers of a layer the statistics of a message; of an empty one, nothing.

    It asks the device nothing.
    """
    *statistics, count = buffered_statistics(total)
    for buffer, value in zip(buffers_of(layer), statistics, strict=True):
        buffer.copy_(torch.where(count > 0, value, buffer.to(total.device).double()))


def eagerly() -> AbstractContextManager[Any]:
    """Lets what is compiled run eagerly: compiled code does not see hooks that come later."""
    # Its import takes seconds. Without it nothing is compiled.
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]


def _inputs(
    caller: str,
    loader: Iterable[Any],
    device: torch.device | str | int | None,
    num_batches: int | None,
) -> Iterator[Any]:
    for batch in islice(loader, num_batches):
        input = batch[0] if isinstance(batch, list | tuple) else batch
        if device is not None and not hasattr(input, "to"):
            raise TypeError(
                f"{caller}: expected a tensor from the loader, or a list or tuple with the input "
                f"first, got {type(input).__name__}, which cannot be moved to {device}: give a "
                "generator of the inputs, as (batch['image'] for batch in loader)"
            )
        yield input if device is None else input.to(device)


def run(
    caller: str,
    net: nn.Module,
    loader: Iterable[Any],
    device: torch.device | str | int | None,
    num_batches: int | None,
    lockstep: Lockstep,
    pools: Iterable[tuple[int, ...]],
) -> None:
    """Runs the forwards of a pass, in step with the other ranks until no one has a batch.

    Raises:
        ValueError: a pool of ranks has not a single batch; or the model is sharded, and some ranks
            have run out of batches before others.
    """
    inputs = _inputs(caller, loader, device, num_batches)
    sharded = any(_is_sharded(module) for module in net.modules())
    first, error = True, None
    while True:
        input: Any = _NONE_LEFT
        if error is None:
            try:
                input = next(inputs, _NONE_LEFT)
            except Exception as raised:
                error = raised
        active = lockstep.agree(input is not _NONE_LEFT, error)
        for pool in pools:
            if first and active.isdisjoint(pool):
                where = "" if len(pool) == 1 else f" on any of the ranks {list(pool)}"
                raise ValueError(f"{caller}: expected a batch or more, the loader gave none{where}")
        first = False
        if not active:
            return
        if sharded and not active.issuperset(*pools):
            raise ValueError(
                f"{caller}: expected as many batches on every rank, as the model is sharded (FSDP) "
                f"and each forward needs all ranks; only ranks {sorted(active)} have one more"
            )
        if input is not _NONE_LEFT:
            try:
                net(input)
            except Exception as raised:
                error = raised


def _is_sharded(module: nn.Module) -> bool:
    # Where anything is sharded, its module is there.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    names = ("FSDPModule", "FullyShardedDataParallel")
    return isinstance(module, tuple(getattr(fsdp, name) for name in names if hasattr(fsdp, name)))
