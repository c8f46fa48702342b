"""Training under function transforms: ``torch.func`` (grad, jvp, vmap, ...) and forward-mode AD.

An ``autograd.Function`` with a backward of its own serves neither. There the layer is made of torch
operations and a sum over ranks that all transforms know, so that any nesting of them is right.
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from syncbn_cuda import _checks, _composite
from syncbn_cuda._checkpoint import Passage
from syncbn_cuda._collective import AllReduce, Sender

try:
    _in_torch_func = torch._C._are_functorch_transforms_active
    _ = forward_ad._current_level
    _KNOWN = True
except AttributeError:  # neither name is public; without them torch says that it has no rule
    _KNOWN = False


def active() -> bool:
    """Whether a call is inside of a transform of ``torch.func`` or a level of forward-mode AD."""
    return _KNOWN and (_in_torch_func() or forward_ad._current_level >= 0)


def train(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float | None,
    eps: float,
    skip_nonfinite: bool,
    group: Any | None,
    owner: torch.nn.Module | None,
    passage: Passage | None,
) -> Tensor:
    """Normalises by the batch of all ranks, and moves the buffers.

    As those of ``nn.BatchNorm``, they have to be arguments of what is transformed.
    """
    if group is not None and torch.compiler.is_compiling():
        _checks.fail(
            owner,
            "torch.compile has no rule for a sum over ranks in torch.func or forward-mode "
            "AD: leave the transformed function uncompiled",
            RuntimeError,
        )
    stats = _composite.batch_norm_stats(input)
    if group is not None:
        layer = None if owner is None else weakref.ref(owner)
        (stats,) = AllReduce.apply(Sender(group, layer, "forward"), stats)
        if input.numel() <= input.shape[1]:
            with suppress(RuntimeError):  # under vmap there is no single value to read
                _checks.check_global_count(input, stats, owner)
    if passage is not None:
        passage.keep(stats.detach())
    if running_mean is None or running_var is None:
        return _composite.batch_norm_elemt(input, stats, weight, bias, eps)
    return _composite.batch_norm_elemt_running(
        *(input, stats, weight, bias, eps, running_mean, running_var),
        *(num_batches_tracked, momentum, skip_nonfinite),
    )
