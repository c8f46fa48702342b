"""``nn.SyncBatchNorm`` on the CPU: torch's own function over kernels that it lacks there.

Its five operators exist for GPUs alone. Here they are registered for the CPU as well, from their
formulas in plain torch, so that what becomes of the layer under a compiler or in a second backward
is what its own code does.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules._functions import SyncBatchNorm


def _dims(x):
    return [0, *range(2, x.dim())]


def _spread(v, x):
    return v.view(1, -1, *[1] * (x.dim() - 2))


def _stats(x, eps):
    return x.mean(_dims(x)), (x.var(_dims(x), correction=0) + eps).rsqrt()


def _gather(x, means, invstds, running_mean, running_var, momentum, eps, counts):
    count, weights = counts.sum(), counts.view(-1, 1)
    mean = (means * weights).sum(0) / count
    var = ((invstds**-2 - eps + means**2) * weights).sum(0) / count - mean**2
    for running, value in ((running_mean, mean), (running_var, var * count / (count - 1))):
        if running is not None:
            running.mul_(1 - momentum).add_(value, alpha=momentum)
    return mean, (var + eps).rsqrt()


def _elemt(x, weight, bias, mean, invstd, eps):
    scale = invstd if weight is None else invstd * weight
    y = (x - _spread(mean, x)) * _spread(scale, x)
    return y if bias is None else y + _spread(bias, x)


def _backward_reduce(dy, x, mean, invstd, weight, *_):
    sum_dy = dy.sum(_dims(x))
    sum_dy_xmu = (dy * (x - _spread(mean, x))).sum(_dims(x))
    return sum_dy, sum_dy_xmu, sum_dy_xmu * invstd, sum_dy.clone()


def _backward_elemt(dy, x, mean, invstd, weight, sum_dy, sum_dy_xmu, count):
    scale = invstd if weight is None else invstd * weight
    slope = _spread(sum_dy_xmu * invstd**2 / count.sum(), x)
    centred = dy - _spread(sum_dy / count.sum(), x)
    return (centred - (x - _spread(mean, x)) * slope) * _spread(scale, x)


@functools.cache  # once a process
def _library():
    library = torch.library.Library("aten", "IMPL", "CPU")
    for name, kernel in (
        ("batch_norm_stats", _stats),
        ("batch_norm_gather_stats_with_counts", _gather),
        ("batch_norm_elemt", _elemt),
        ("batch_norm_backward_reduce", _backward_reduce),
        ("batch_norm_backward_elemt", _backward_elemt),
    ):
        library.impl(name, kernel)
    return library


class TorchsSyncBatchNorm(nn.BatchNorm2d):
    """Calls torch's function as ``nn.SyncBatchNorm`` does, which refuses the CPU itself."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        _library()

    def forward(self, x):
        if not self.training:
            return super().forward(x)
        factor = self.momentum
        self.num_batches_tracked.add_(1)
        if factor is None:
            factor = 1.0 / self.num_batches_tracked.item()
        return SyncBatchNorm.apply(
            *(x, self.weight, self.bias, self.running_mean, self.running_var, self.eps, factor),
            *(dist.group.WORLD, dist.get_world_size()),
        )
