"""The five steps of a synchronised batch norm in torch operations, differentiable throughout.

They take what the compiled operators take and give what those give. They serve devices without
kernels and machines without a build; and, since autograd sees through them, the double backward.
All arithmetic is float64, so their memory is that of a few float64 copies of the input.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _reduced_dims(input: Tensor) -> list[int]:
    return [0, *range(2, input.dim())]


def _per_channel(values: Tensor, input: Tensor) -> Tensor:
    """Views C values so that they broadcast over an input of shape (N, C, *)."""
    return values.view(1, -1, *[1] * (input.dim() - 2))


def _moments(stats: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Splits the message [2C + 1] into mean and biased variance (C) and the count of values."""
    count = stats[-1]
    # Without a value in the whole group all sums are 0, and so are mean and variance.
    mean, mean_sq = (stats[:-1] / count.clamp(min=1)).view(2, -1)
    # Rounding can leave a variance of 0 slightly negative; clamp lets NaN pass.
    return mean, (mean_sq - mean * mean).clamp(min=0), count


def buffered_statistics(stats: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Splits the message into what running buffers hold, mean and unbiased variance, and count."""
    mean, var, count = _moments(stats)
    return mean, var * (count / (count - 1).clamp(min=1)), count


def _centred(input: Tensor, mean: Tensor) -> Tensor:
    return input.double() - _per_channel(mean, input)


def batch_norm_stats(input: Tensor, *_: Tensor | None) -> Tensor:
    """Returns the message: float64 [2C + 1], sums, sums of squares, and the count a channel."""
    values = input.double()
    dims = _reduced_dims(input)
    count = values.new_full((1,), input.numel() // input.shape[1])
    return torch.cat([values.sum(dims), (values * values).sum(dims), count])


def batch_norm_elemt(
    input: Tensor, stats: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Returns (input - mean) / sqrt(var + eps) * weight + bias, in the input's type and format."""
    mean, var, _ = _moments(stats)
    output = _centred(input, mean) * _per_channel((var + eps).rsqrt(), input)
    if weight is not None:
        output = output * _per_channel(weight.double(), input)
    if bias is not None:
        output = output + _per_channel(bias.double(), input)
    # Where this does nothing, torch 2.11 compiles the backward of its autograd.Function to zeros.
    return output.to(input.dtype, copy=torch.compiler.is_compiling())


def batch_norm_elemt_running(
    input: Tensor,
    stats: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    running_mean: Tensor,
    running_var: Tensor,
    num_batches_tracked: Tensor | None,
    momentum: float | None,
    skip_nonfinite: bool = False,
) -> Tensor:
    """As :func:`batch_norm_elemt`; also moves the running buffers, unless the count is 0.

    Nor with ``skip_nonfinite``, where they cannot hold the statistics of every channel.
    """
    with torch.no_grad():
        mean, unbiased, count = buffered_statistics(stats)
        moves = count > 0
        factor: Tensor | float | None = momentum
        if factor is None:
            assert num_batches_tracked is not None  # as checked before
            factor = 1.0 / (num_batches_tracked + 1).double()
        batch = ((running_mean, mean), (running_var, unbiased))
        if skip_nonfinite:
            for running, value in batch:
                moves = moves & (value.abs() <= torch.finfo(running.dtype).max).all()
        for running, value in batch:
            moved = (1 - factor) * running.double() + factor * value
            running.copy_(torch.where(moves, moved, running.double()))
        if num_batches_tracked is not None:
            num_batches_tracked.add_(moves)
    return batch_norm_elemt(input, stats, weight, bias, eps)


def batch_norm_backward_reduce(
    grad_out: Tensor,
    input: Tensor,
    stats: Tensor,
    eps: float,
    weight_like_input: bool,
    bias_like_input: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns float64 [2C] (sum dy, sum dy * (x - mean)) and the gradients of weight and bias.

    These are float32, or each of the input's type where it is asked for.
    """
    mean, var, _ = _moments(stats)
    dims = _reduced_dims(input)
    sum_dy = grad_out.double().sum(dims)
    sum_dy_xmu = (grad_out.double() * _centred(input, mean)).sum(dims)
    grad_weight = sum_dy_xmu * (var + eps).rsqrt()
    return (
        torch.cat([sum_dy, sum_dy_xmu]),
        grad_weight.to(input.dtype if weight_like_input else torch.float32),
        sum_dy.to(input.dtype if bias_like_input else torch.float32),
    )


def batch_norm_backward_elemt(
    grad_out: Tensor,
    input: Tensor,
    stats: Tensor,
    sums: Tensor,
    weight: Tensor | None,
    eps: float,
) -> Tensor:
    """Returns the gradient of the input, in its type and memory format."""
    mean, var, count = _moments(stats)
    invstd = (var + eps).rsqrt()
    mean_dy, mean_dy_xmu = (sums / count).view(2, -1)
    scale = invstd if weight is None else invstd * weight.double()
    slope = _per_channel(mean_dy_xmu * invstd * invstd, input)
    centred_dy = grad_out.double() - _per_channel(mean_dy, input)
    grad_input = (centred_dy - _centred(input, mean) * slope) * _per_channel(scale, input)
    return grad_input.to(input.dtype)
