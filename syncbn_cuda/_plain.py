"""What torch's own batch norm serves: evaluation, and training alone where float64 is lacking."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from syncbn_cuda._checkpoint import Passage


def train_alone(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float | None,
    eps: float,
    skip_nonfinite: bool,
    passage: Passage | None,
) -> Tensor:
    """Serves one process on a device without float64, and so without the message, by torch."""
    if passage is not None:
        passage.keep(None)
        if passage.is_recompute and running_mean is not None and running_var is not None:
            # As many tensors saved as in the first pass, which has moved the buffers.
            running_mean, running_var = running_mean.clone(), running_var.clone()
            num_batches_tracked = None
    buffers = [b for b in (running_mean, running_var, num_batches_tracked) if b is not None]
    before = [buffer.clone() for buffer in buffers] if skip_nonfinite else []
    if input.numel() == 0:
        running_mean = running_var = None
    elif running_mean is not None and num_batches_tracked is not None:
        num_batches_tracked.add_(1)
        if momentum is None:
            momentum = 1.0 / num_batches_tracked.item()
    output = F.batch_norm(
        input, running_mean, running_var, weight, bias, True, momentum or 0.0, eps
    )
    if before and running_var is not None:
        batch = input.to(running_var.dtype)
        statistics = torch.var_mean(batch, [0, *range(2, batch.dim())], correction=0)
        finite = torch.stack(statistics).isfinite().all()
        for buffer, old in zip(buffers, before, strict=True):
            buffer.copy_(torch.where(finite, buffer, old))
    return output


def evaluate(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    owner: torch.nn.Module | None,
) -> Tensor:
    """Normalises with the running buffers, or for a layer without any with the batch's statistics.

    Raises:
        ValueError: a buffer is missing.
    """
    alone = running_mean is None and running_var is None and owner is not None
    if not alone and (running_mean is None or running_var is None):
        raise ValueError("sync_batch_norm: expected running buffers in evaluation, got None")
    vectors = (running_mean, running_var, weight, bias)
    kinds = {v.dtype for v in vectors if v is not None}
    # torch's kernels take vectors of the input's type, or all of float32 beside a narrower input.
    if kinds != {input.dtype} and (kinds != {torch.float32} or input.dtype == torch.float64):
        wide = torch.float64 if input.dtype == torch.float64 else torch.float32
        vectors = tuple(v if v is None else v.to(wide) for v in vectors)  # type: ignore[assignment]
    return F.batch_norm(input, *vectors, alone, 0.0, eps)  # type: ignore[arg-type]
