"""All five operators over a few shapes, types and layouts: what compute-sanitizer watches.

    python tests/gpu_steps.py [cuda | cpu]

initcheck sees only the writes of the kernels that it watches, and those are ours alone. So inputs
are made on the CPU and reach the GPU by plain copies, and nothing but our kernels runs there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import reference
import torch
from inputs import DENSE, DTYPES, assert_close, numpy, random
from torch import Tensor

from syncbn_cuda import _library

EPS = 1e-5

#: Odd rows and few values; short rows that are written as columns; one channel over several blocks,
#: with channels last of folded rows; with channels last also a tree of two levels
#: (csrc/cuda/plan.h), whatever the card.
SHAPES = [(3, 7, 5), (4, 16, 7, 7), (2, 3, 130, 128), (2, 64, 64, 65)]


def cases() -> Iterator[tuple[Tensor, str]]:
    for shape in SHAPES:
        for dtype in DTYPES:
            for layout in DENSE:
                yield random(shape, dtype), layout


def copied(x: Tensor, device: str) -> Tensor:
    """Copies a tensor together with the memory around it, so that it is as misaligned there."""
    room = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).to(device)
    return room.as_strided(x.shape, x.stride(), x.storage_offset())


def step(x: Tensor, dy: Tensor, device: str) -> tuple[Tensor, Tensor]:
    """One training step with all five operators; returns output and gradient on the CPU."""
    kernels = _library.kernels_for(torch.device(device))
    channels = x.shape[1]
    x, dy = copied(x, device), copied(dy, device)
    weight, bias, mean, var = (torch.full((channels,), v).to(device) for v in (1.5, 0.5, 0.0, 1.0))
    counter = torch.tensor(0).to(device)
    stats = kernels.batch_norm_stats(x)
    kernels.batch_norm_elemt(x, stats, None, None, EPS)
    y = kernels.batch_norm_elemt_running(x, stats, weight, bias, EPS, mean, var, counter, None)
    sums, *_ = kernels.batch_norm_backward_reduce(dy, x, stats, EPS, False, True)
    dx = kernels.batch_norm_backward_elemt(dy, x, stats, sums, weight, EPS)
    return y.cpu(), dx.cpu()


def main() -> None:
    device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    torch.manual_seed(0)
    all_cases = list(cases())
    for x, layout in all_cases:
        dy = random(x.shape, x.dtype)
        y, dx = step(DENSE[layout](x), DENSE[layout](dy), device)
        weight, bias = [1.5] * x.shape[1], [0.5] * x.shape[1]
        assert_close(y, reference.forward(numpy(x), weight, bias, EPS).output, x.dtype)
        assert_close(dx, reference.backward(numpy(dy), numpy(x), weight, EPS).input, x.dtype)
    print(f"{len(all_cases)} steps are right on {device}")


if __name__ == "__main__":
    main()
