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


def _upper(values: Tensor) -> Tensor:
    """Returns the upper 26 bits as constants, whose products are exact; 0 for NaN and Inf."""
    values = values.detach()
    scaled = values * (2.0**27 + 1)  # Veltkamp's splitting
    upper = scaled - (scaled - values)
    return torch.where(upper.isfinite(), upper, 0.0)


def _two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a sum and what its rounding has lost."""
    total = a + b
    of_b = total - a
    lost = (a - (total - of_b)) + (b - of_b)
    return total, torch.where(total.isfinite(), lost, 0.0)


def _split(exact: Tensor, rest: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns exact + rest, a sum of some values, as the high and low part of csrc/message.h."""
    grid = exact / max(count, 1) * 2.0**32
    high = (exact + grid) - grid
    high = torch.where(high.isfinite(), high, exact)
    return high, (exact - high) + rest


def _moments(stats: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Splits the message into mean, as a pair to be added, and biased variance (C), and count."""
    count = stats[-1]
    # Without a value in the whole group all sums are 0, and so are mean and variance.
    divisor = count.clamp(min=1)
    high, low = stats[:-1].view(2, 2, -1)
    (total, square), (total_low, square_low) = _two_sum(high, low)
    mean = _upper(total / divisor)
    upper_count, upper_total = _upper(divisor), _upper(total)
    # The sums about this mean, so near to the mean that they lose nothing. The products are exact,
    # and the first differences (nearly) cancel.
    first = total - upper_count * mean - (divisor - upper_count) * mean + total_low
    rest = square_low - mean * (total_low + first)
    second = square - upper_total * mean - (total - upper_total) * mean + rest
    offset = first / divisor
    var = second / divisor - offset * offset
    # Rounding can leave a variance of 0 slightly negative. (A clamp of the variance itself has no
    # gradient at 0.) NaN stays NaN.
    return mean, offset, var - var.detach().clamp(max=0), count


def buffered_statistics(stats: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Splits the message into what running buffers hold, mean and unbiased variance, and count."""
    mean, offset, var, count = _moments(stats)
    return mean + offset, var * (count / (count - 1).clamp(min=1)), count


def _centred(input: Tensor, mean: Tensor, offset: Tensor) -> Tensor:
    return input.double() - _per_channel(mean, input) - _per_channel(offset, input)


def batch_norm_stats(input: Tensor, *_: Tensor | None) -> Tensor:
    """Returns the message: float64 [4C + 1], see csrc/message.h.

    High parts of the sums and of the sums of squares, their low parts, and the count a channel.
    """
    values = input.double()
    dims = _reduced_dims(input)
    count = input.numel() // input.shape[1]
    # The sums about an origin that has few bits and is near the mean.
    origin = _upper(values.mean(dims))
    centred = values - _per_channel(origin, input)
    first = centred.sum(dims)
    square = origin * origin
    upper = _upper(square)
    rest = count * (square - upper) + 2 * origin * first + (centred * centred).sum(dims)
    sum_high, sum_low = _split(count * origin, first, count)
    square_high, square_low = _split(count * upper, rest, count)
    return torch.cat([sum_high, square_high, sum_low, square_low, values.new_full((1,), count)])


def batch_norm_elemt(
    input: Tensor, stats: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Returns (input - mean) / sqrt(var + eps) * weight + bias, in the input's type and format."""
    mean, offset, var, _ = _moments(stats)
    output = _centred(input, mean, offset) * _per_channel((var + eps).rsqrt(), input)
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
    mean, offset, var, _ = _moments(stats)
    dims = _reduced_dims(input)
    sum_dy = grad_out.double().sum(dims)
    sum_dy_xmu = (grad_out.double() * _centred(input, mean, offset)).sum(dims)
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
    mean, offset, var, count = _moments(stats)
    invstd = (var + eps).rsqrt()
    mean_dy, mean_dy_xmu = (sums / count).view(2, -1)
    scale = invstd if weight is None else invstd * weight.double()
    slope = _per_channel(mean_dy_xmu * invstd * invstd, input)
    centred_dy = grad_out.double() - _per_channel(mean_dy, input)
    centred = _centred(input, mean, offset)
    grad_input = (centred_dy - centred * slope) * _per_channel(scale, input)
    return grad_input.to(input.dtype)
