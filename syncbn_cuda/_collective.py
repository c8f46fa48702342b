"""The collective between the kernels: which group a layer talks to, and its one sum over ranks."""

from __future__ import annotations

import os
import warnings
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from syncbn_cuda._compiler import compiled_with_its_caller, raise_in_python
from syncbn_cuda._names import Layer, fail_collective

_AVAILABLE = dist.is_available()
_OPTIONS: Any = dist.AllreduceOptions() if _AVAILABLE else None
#: What ``new_group`` gives to ranks outside of the new group.
_NO_MEMBER: Any = dist.GroupMember.NON_GROUP_MEMBER if _AVAILABLE else object()
# Not public, and asked first as they are quick.
_modes = torch._C._len_torch_dispatch_stack
_included = torch._C._dispatch_tls_is_dispatch_key_included
_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch
if _AVAILABLE:
    import torch.distributed._functional_collectives as _functional  # what compilers know
    import torch.distributed.distributed_c10d as c10d

    _OPTIONS.asyncOp = False  # True would be a hop between streams


class HeldGroup:
    """A process group as a layer holds it: copies of the layer share it, pickles drop it."""

    __slots__ = ("group", "key")

    def __init__(self, group: Any, key: str) -> None:
        self.group = group
        #: Which group it is; empty where this process is outside of it. Compiled code is guarded
        #: by this text, as newer compilers take one group for another.
        self.key = key

    def __deepcopy__(self, memo: dict[int, Any]) -> HeldGroup:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        warnings.warn(
            "a process group cannot be pickled: the loaded layers will normalise over the world; "
            "give them their group again by layer.process_group = group, or all of them by "
            "convert_sync_batchnorm(model, group)",
            stacklevel=2,
        )
        return type(None), ()


def hold_group(process_group: Any | None) -> HeldGroup | None:
    """Returns what a layer keeps of the ``process_group`` that it was given.

    Args:
        process_group: a ``torch.distributed`` process group, a one-dimensional ``DeviceMesh`` for
            its group, or None for the world, which is not kept but looked up at each forward.

    Raises:
        TypeError: it is something else.
        ValueError: the mesh has several dimensions.
    """
    if process_group is None:
        return None
    if _AVAILABLE and isinstance(process_group, dist.DeviceMesh):
        if process_group.ndim != 1:
            raise ValueError(
                f"process_group: expected a DeviceMesh of one dimension, got {process_group}: "
                "give one of its dimensions, mesh['name']"
            )
        process_group = process_group.get_group()
    if process_group is _NO_MEMBER:
        return HeldGroup(process_group, "")
    if _AVAILABLE and isinstance(process_group, dist.ProcessGroup):
        return HeldGroup(process_group, f"{process_group.group_name} of {process_group.size()}")
    if hasattr(process_group, "allreduce") and not isinstance(process_group, type):
        return HeldGroup(process_group, "of another kind")
    raise TypeError(
        "process_group: expected a torch.distributed process group, a DeviceMesh or None, got "
        f"{type(process_group).__name__}: torch.distributed.new_group(ranks) makes a group"
    )


def resolve_group(held: HeldGroup | None) -> Any | None:
    """Returns the group to reduce over, looked up now, or None where one process acts alone.

    Args:
        held: the group that was given, or None for the world.

    Raises:
        ValueError: this rank is not a member of the group.
    """
    # Not by dist.is_initialized(): compiled, its answer would stay what it was. Nor by the world's
    # public name: torch 2.11 compiles a world that is None as a group.
    if not _AVAILABLE or c10d._world.default_pg is None:
        return None
    if held is None:
        group: Any = dist.group.WORLD
    elif held.key:
        group = held.group
    else:
        raise_in_python(
            ValueError,
            "process_group: this rank is not a member of the group it was given; "
            "give each rank the group that holds it",
        )
    return group if group.size() > 1 else None


#: Whether a group has a backend for CPU tensors: asking takes longer than the collective's call.
_serves_cpu: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def serves_cpu(group: Any) -> bool:
    """Whether the group has a backend for tensors on the CPU (asks no peer)."""
    serves = _serves_cpu.get(group)
    if serves is None:
        try:
            serves = any(served.type == "cpu" for served in group._device_types)
        except (AttributeError, RuntimeError):
            serves = True  # a group of another kind: its own collective will tell
        _serves_cpu[group] = serves
    return serves


#: The world of the process that this one was forked from.
_inherited: Any = None


def _inherit() -> None:
    global _inherited
    _inherited = c10d._world.default_pg


if _AVAILABLE and hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_inherit)


def is_fork() -> bool:
    """Whether this process was forked from a rank, and is none itself."""
    return _inherited is not None and c10d._world.default_pg is _inherited


def _refuse_inherited(
    group: Any, layer: Layer | None, direction: str | None, input: Tensor | None
) -> None:
    """Raises in a fork of a rank, whose connections it shares without the threads behind them."""
    if not is_fork():
        return
    refusal = RuntimeError(
        "this process was forked from a rank, such as a DataLoader's worker, and is none itself: "
        "it would wait for ever, or mix its sums into those of the rank; call model.eval() in it, "
        "or start it with multiprocessing_context='spawn'"
    )
    fail_collective(refusal, group, layer, direction or "sum", input)


#: What layers tell before they call on their peers; None, unless ``syncbn_cuda.set_debug`` is on.
watch: Any = None


def is_traced() -> bool:
    """Whether ``make_fx`` or the like writes down what is called."""
    return (_modes() > 0 or _included(_PRE_DISPATCH)) and get_proxy_mode() is not None


def all_reduce(
    tensor: Tensor,
    group: Any,
    compiling: bool,
    layer: Layer | None = None,
    direction: str | None = None,
    input: Tensor | None = None,
) -> Tensor:
    """Returns the sum of a tensor over the ranks of a group, which may take the tensor's place.

    Args:
        tensor: dense.
        group: the ranks.
        compiling: whether ``torch.compile`` makes a graph of it.
        layer: the layer that it is for, for errors; None for a call of the function.
        direction: the part of a step that it is for, for errors; None outside of steps.
        input: what is normalised, likewise.

    Raises:
        RuntimeError: the backend's own type and text, after the layer and the group; or this
            process is a fork of a rank; or, in debug mode, ranks are about to do different things.
    """
    if compiling or is_traced():
        # A graph would hold the group's own method without the wait for it.
        return _functional.all_reduce(tensor, "sum", group)  # type: ignore[no-any-return]
    if _inherited is not None:  # before a debug mode talks to the store of the rank
        _refuse_inherited(group, layer, direction, input)
    if watch is not None and direction is not None:
        watch.agree(tensor, group, layer, direction, input)
    try:
        # The group's own method: half the host time of the wrapper.
        work = group.allreduce([tensor], _OPTIONS)
        if work is not None:
            work.wait()
    except RuntimeError as error:
        if direction is None:
            raise
        fail_collective(error, group, layer, direction, input)
    return tensor


class Sender:
    """Whose sum :class:`AllReduce` makes: the group, and for errors the layer and the direction."""

    __slots__ = ("direction", "group", "layer")

    def __init__(self, group: Any, layer: Layer | None, direction: str) -> None:
        self.group = group
        self.layer = layer
        self.direction = direction

    def derivative(self) -> Sender:
        """Returns whose sum the backward of this one makes."""
        return Sender(self.group, self.layer, f"derivative of its {self.direction}")


class AllReduce(torch.autograd.Function):
    """The differentiable sum over ranks: the gradient of a sum is the sum of the gradients.

    ``apply(sender, tensor, *others)`` returns the sum of the first and the others as they are.
    Their derivative takes part in its collective, whichever of all of them a rank goes on with.
    """

    @staticmethod
    def forward(sender: Sender, tensor: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        own = tensor.clone(memory_format=torch.contiguous_format)
        compiling = torch.compiler.is_compiling()
        total = all_reduce(own, sender.group, compiling, sender.layer, sender.direction)
        return total, *(other.clone() for other in others)  # which may be written in place

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.sender = inputs[0]

    @staticmethod
    @compiled_with_its_caller
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *AllReduce.apply(ctx.sender.derivative(), *grads)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor) -> tuple[Tensor, ...]:
        if is_traced():
            # It folds what does not depend on tangents, and with it a sum without the wait for it.
            raise RuntimeError(
                "FastSyncBatchNorm: torch.func.linearize does not work across ranks: use "
                "torch.func.jvp, which gives the same derivative"
            )
        return tuple(AllReduce.apply(ctx.sender.derivative(), *tangents))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
        return AllReduce.apply(*inputs), in_dims[1:]
