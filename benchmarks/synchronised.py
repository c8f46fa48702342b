"""torch's SyncBatchNorm and ours where their modules would not synchronise, to compare them there.

In a group of one rank both modules leave the synchronised path; the classes here stay on it. And
torch's SyncBatchNorm refuses the CPU, for want of five kernels. Here these are made of the ATen
kernels that the CPU has, so that torch's own autograd function runs there, line by line, over Gloo:
the collectives, the masks and the shape work are torch's. Only the kernels are stand-ins (the last
of them passes over memory twice more than on CUDA): they say nothing of torch's CUDA kernels.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules._functions import SyncBatchNorm as TorchFunction

import syncbn_cuda

#: Also the exact types that `convert` swaps.
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class TorchSynchronised(nn.SyncBatchNorm):
    """nn.SyncBatchNorm that also synchronises a group of one rank, and on the CPU."""

    def forward(self, input: Tensor) -> Tensor:
        group = dist.group.WORLD
        world_size = dist.get_world_size(group)
        if input.is_cuda and world_size > 1:
            return super().forward(input)
        self.num_batches_tracked.add_(1)
        return TorchFunction.apply(
            input, self.weight, self.bias, self.running_mean, self.running_var,
            self.eps, self.momentum, group, world_size,
        )  # fmt: skip


class OursSynchronised(syncbn_cuda.FastSyncBatchNorm):
    """FastSyncBatchNorm that also synchronises a group of one rank."""

    def forward(self, input: Tensor) -> Tensor:
        if not dist.is_initialized() or dist.get_world_size() > 1:
            return super().forward(input)
        return syncbn_cuda.functional.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, True,
            self.momentum, self.eps, self.num_batches_tracked, dist.group.WORLD, self,
        )  # fmt: skip


#: What is compared, by the names in tables; what a batch norm becomes, None where it stays.
PLAIN, TORCH, OURS = "nn.BatchNorm", "torch SyncBN", "ours"
KINDS: dict[str, type[nn.Module] | None] = {
    PLAIN: None,
    TORCH: TorchSynchronised,
    OURS: OursSynchronised,
}


def convert(model: nn.Module, kind: type[nn.Module] | None) -> nn.Module:
    """Gives the batch norms of a model another class, in place, and returns the model."""
    if kind is None:
        return model
    found = [layer for layer in model.modules() if type(layer) in BATCH_NORMS]
    if not found:
        raise ValueError(f"expected a model with batch norms, got {type(model).__name__}")
    if kind is TorchSynchronised:
        lend_cpu_kernels()
    for layer in found:
        layer.__class__ = kind
        layer.process_group = None
    return model


@functools.cache
def lend_cpu_kernels() -> torch.library.Library:
    """Registers the five kernels of torch's SyncBatchNorm for the CPU (once; they stay)."""
    library = torch.library.Library("aten", "IMPL")
    for kernel in (
        batch_norm_stats,
        batch_norm_gather_stats_with_counts,
        batch_norm_elemt,
        batch_norm_backward_reduce,
        batch_norm_backward_elemt,
    ):
        library.impl(kernel.__name__, kernel, "CPU")
    return library


def batch_norm_stats(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and 1/std of a channel: ``(C,)`` each, of the accumulation type."""
    buffers = (None, None)
    if input.dtype in (torch.float16, torch.bfloat16):
        # Buffers of float32, else written nowhere: they make the statistics float32, as on CUDA.
        buffers = tuple(input.new_empty(2, input.shape[1], dtype=torch.float32))
    mean, var = torch.batch_norm_update_stats(input, *buffers, 0.0)
    return mean, var.add_(eps).rsqrt_()


def batch_norm_gather_stats_with_counts(
    input: Tensor,
    mean: Tensor,  # [ranks, C]
    invstd: Tensor,  # [ranks, C]
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,  # [ranks]
) -> tuple[Tensor, Tensor]:
    """Combines the statistics of all ranks and moves the running buffers."""
    count = counts.sum()
    share = (counts / count).unsqueeze(1)
    total_mean = (share * mean).sum(0)
    # Within the ranks and between them; about the mean, so that a large mean cancels nothing.
    var = (share * (invstd.pow(-2) - eps + (mean - total_mean).square())).sum(0)
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(total_mean.to(running_mean.dtype), momentum)
        unbiased = var * (count / (count - 1).clamp(min=1))
        running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    return total_mean, (var + eps).rsqrt()


def batch_norm_elemt(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    eps: float,
) -> Tensor:
    """Normalises in one pass: evaluation with these statistics."""
    var = invstd.pow(-2) - eps
    return torch.native_batch_norm(input, weight, bias, mean, var, False, 0.0, eps)[0]


def batch_norm_backward_reduce(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sum dy, sum dy (x - mean), and the gradients of weight and bias, in one pass."""
    _, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
        grad_out, input, weight, None, None, mean, invstd, True, 0.0, (False, True, True)
    )
    return grad_bias, grad_weight / invstd, grad_weight, grad_bias


def batch_norm_backward_elemt(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    """dx, which is ``a dy + b x + c`` with a, b and c of a channel."""
    total = count.sum()
    a: Any = invstd if weight is None else invstd * weight
    b = -a * invstd.square() * sum_dy_xmu / total
    c = -a * sum_dy / total - b * mean
    shape = (1, -1, *(1,) * (input.dim() - 2))
    a, b, c = (vector.to(input.dtype).view(shape) for vector in (a, b, c))
    return torch.addcmul(torch.addcmul(c, input, b), grad_out, a)
