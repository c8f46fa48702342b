"""torch's own SyncBatchNorm on the CPU, which it refuses: its Python as it is, other kernels.

The module and the autograd function are those of the torch that is installed, so that their calls,
checks and collectives are what a user pays for on the host. Their five kernels exist for GPUs
alone; one ATen operator of the CPU stands in for each, with about the same work to do. Results are
not those of a synchronised batch norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor


def _stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.batch_norm_update_stats(x, None, None, 0.0)


def _gather_stats_with_counts(
    x: Tensor, mean: Tensor, invstd: Tensor, running_mean: Any, running_var: Any, momentum: float,
    *_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return torch.batch_norm_update_stats(mean, running_mean, running_var, momentum)


def _elemt(x: Tensor, weight: Any, bias: Any, mean: Tensor, invstd: Tensor, eps: float) -> Tensor:
    return torch.native_batch_norm(x, weight, bias, mean, invstd, False, 0.0, eps)[0]


def _backward_reduce(
    dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Any, *_: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, grad_weight, grad_bias = _native_backward(
        dy, x, weight, None, None, mean, invstd, True, 1e-5, [False, True, True]
    )
    return grad_bias, grad_weight, grad_weight, grad_bias


def _backward_elemt(
    dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Any, *_: Tensor
) -> Tensor:
    return _native_backward(
        dy, x, weight, mean, invstd, None, None, False, 1e-5, [True, False, False]
    )[0]


_native_backward = torch.ops.aten.native_batch_norm_backward.default


#: The collective that torch's function calls; older versions know it by the second name alone.
_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_gather = getattr(dist, _GATHER)


def _all_gather(output: Tensor, input: Tensor, group: Any, async_op: bool = False) -> None:
    # The fake backend cannot gather into the (1, world size * length) that it is given here.
    _gather(output.view(-1), input, group, async_op)


#: What stands in for each kernel of ``torch``.
KERNELS: dict[str, Callable[..., Any]] = {
    "batch_norm_stats": _stats,
    "batch_norm_gather_stats_with_counts": _gather_stats_with_counts,
    "batch_norm_elemt": _elemt,
    "batch_norm_backward_reduce": _backward_reduce,
    "batch_norm_backward_elemt": _backward_elemt,
}


@contextmanager
def torch_on_cpu(wanted: bool = True) -> Iterator[None]:
    """Lets ``nn.SyncBatchNorm`` train on the CPU, where that is wanted."""
    with ExitStack() as patched:
        if wanted:
            patched.enter_context(patch.multiple(torch, **KERNELS))
            patched.enter_context(patch.object(dist, _GATHER, _all_gather))
            # Its list of devices ends with that of an extension, if there is one.
            patched.enter_context(
                patch.object(torch._C, "_get_privateuse1_backend_name", lambda: "cpu")
            )
        yield
