"""Four ways to a batch norm over ranks, each a step of training with momentum 1.

A form takes the batches of all ranks, in one process, and returns what accuracy_reference.py names:
``(C, values)`` of all ranks side by side, and vectors ``(C, 1)``. The gradients of weight and bias
are summed over the ranks.

* ours: the package's operators for each rank, and the sum of their messages between;
* torch BatchNorm: one ``nn.BatchNorm`` on the whole batch;
* torch SyncBatchNorm: what its CUDA kernels do (ATen/native/cuda/Normalization.cuh), step by step
  in NumPy: Welford's statistics in blocks of 512 threads, combined over the ranks; sums of the
  backward by the same threads. Fused multiply-adds, which a compiler may or may not make, are not
  in it.
* textbook: sums and sums of squares in the accumulation type, and E[x^2] - E[x]^2.

Sums and statistics of the last two are float32, or float64 for float64 input.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.accuracy_cells import Cell
from syncbn_cuda._library import kernels_for

EPS = 1e-5
THREADS, WARP = 512, 32

Batch = tuple[Tensor, Tensor, Tensor, Tensor]  # x and dy (C, values), weight and bias (C)
Results = dict[str, np.ndarray]


def _shard(values: Tensor, layout: str) -> Tensor:
    """(C, n) as a batch of n rows, or of one sample (none where n is 0)."""
    if layout == "rows":
        return values.t().contiguous()
    return values.unsqueeze(0)[: values.shape[1]].contiguous()


def _values(shard: Tensor) -> Tensor:
    return shard.movedim(1, 0).flatten(1)


def _split(values: Tensor, cell: Cell) -> list[Tensor]:
    return [_shard(part, cell.layout) for part in values.split(cell.counts(), dim=1)]


def _joined(shards: list[Tensor]) -> np.ndarray:
    return torch.cat([_values(shard) for shard in shards], dim=1).detach().double().numpy()


def _column(vector: Any) -> np.ndarray:
    return vector.double().numpy()[:, None]


def ours(batch: Batch, cell: Cell) -> Results:
    """The package's kernels, with what all_reduce does in between."""
    x, dy, weight, bias = batch
    kernels = kernels_for(x.device)
    inputs, grads = _split(x, cell), _split(dy, cell)
    stats = reduce(torch.add, [kernels.batch_norm_stats(input) for input in inputs])
    outputs = []
    for input in inputs:  # each rank moves its own buffers, to the same bits
        mean, var = torch.zeros_like(weight), torch.ones_like(weight)
        outputs.append(
            kernels.batch_norm_elemt_running(
                input, stats, weight, bias, EPS, mean, var, None, 1.0, False
            )
        )
    like_input = cell.type == torch.float64
    partial = [
        kernels.batch_norm_backward_reduce(grad, input, stats, EPS, like_input, like_input)
        for grad, input in zip(grads, inputs, strict=True)
    ]
    sums, dweight, dbias = (reduce(torch.add, each) for each in zip(*partial, strict=True))
    grad_inputs = [
        kernels.batch_norm_backward_elemt(grad, input, stats, sums, weight, EPS)
        for grad, input in zip(grads, inputs, strict=True)
    ]
    return {
        "y": _joined(outputs),
        "dx": _joined(grad_inputs),
        "running_mean": _column(mean),
        "running_var": _column(var),
        "dweight": _column(dweight),
        "dbias": _column(dbias),
    }


def batch_norm(batch: Batch, cell: Cell) -> Results:
    """torch's layer in one process."""
    x, dy, weight, bias = batch
    layer = nn.BatchNorm1d(len(weight), eps=EPS, momentum=1.0, dtype=weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    input = _shard(x, cell.layout).requires_grad_()
    output = layer(input)
    output.backward(_shard(dy, cell.layout))
    return {
        "y": _joined([output]),
        "dx": _joined([input.grad]),
        "running_mean": _column(layer.running_mean),
        "running_var": _column(layer.running_var),
        "dweight": _column(layer.weight.grad),
        "dbias": _column(layer.bias.grad),
    }


def _threads(values: np.ndarray) -> np.ndarray:
    """(C, n) as (rows, C, threads): row r is the r-th value of each thread; NaN past the end."""
    channels, count = values.shape
    rows = -(-count // THREADS)
    padded = np.full((channels, rows * THREADS), np.nan, values.dtype)
    padded[:, :count] = values
    return np.ascontiguousarray(padded.reshape(channels, rows, THREADS).swapaxes(0, 1))


def _merged(avg: np.ndarray, var_n: np.ndarray, n: np.ndarray) -> tuple[np.ndarray, ...]:
    """What WARP lanes, the last axis, have after their exchanges."""
    while avg.shape[-1] > 1:
        (a, other), (v, w), (k, o) = ((each[..., ::2], each[..., 1::2]) for each in (avg, var_n, n))
        factor = 1 / np.maximum(k + o, 1)
        var_n = v + (w + (a - other) * (a - other) * k * o * factor)
        avg = (k * a + o * other) * factor
        n = k + o
    return avg[..., 0], var_n[..., 0], n[..., 0]


def _welford(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """batch_norm_stats of one rank: mean and invstd (C)."""
    acc = values.dtype.type
    avg = np.zeros((len(values), THREADS), acc)
    var_n, n = np.zeros_like(avg), np.zeros_like(avg)
    for index, row in enumerate(_threads(values)):
        # All threads have a value in all rows but the last.
        width = min(THREADS, values.shape[1] - index * THREADS)
        a, v, k, row = avg[:, :width], var_n[:, :width], n[:, :width], row[:, :width]
        delta = row - a
        k += 1
        a += delta / k
        v += delta * (row - a)
    lanes = (each.reshape(len(values), -1, WARP) for each in (avg, var_n, n))
    warps = _merged(*lanes)
    pad = ((0, 0), (0, WARP - THREADS // WARP))
    mean, var_n, _ = _merged(*(np.pad(each, pad) for each in warps))
    return mean, 1 / np.sqrt(var_n / acc(values.shape[1]) + acc(EPS))


def _gathered(
    means: list[np.ndarray], invstds: list[np.ndarray], counts: list[int]
) -> tuple[np.ndarray, ...]:
    """batch_norm_gather_stats_with_counts: mean, invstd and unbiased variance (C)."""
    acc = means[0].dtype.type
    avg, var_n, n = np.zeros_like(means[0]), np.zeros_like(means[0]), acc(0)
    for mean, invstd, number in zip(means, invstds, counts, strict=True):
        count = acc(number)
        v = 1 / invstd
        v = (v * v - acc(EPS)) * count
        factor = 1 / (n + count)
        var_n = var_n + (v + (avg - mean) * (avg - mean) * n * count * factor)
        avg = n * factor * avg + count * factor * mean
        n = n + count
    return avg, 1 / np.sqrt(var_n / n + acc(EPS)), var_n / (n - 1)


def _block_sum(values: np.ndarray) -> np.ndarray:
    """The sum of (C, n) by THREADS threads, and over them by halves."""
    sums = np.add.reduce(np.nan_to_num(_threads(values)), axis=0)  # row by row
    sums = sums.reshape(len(values), -1, WARP)
    for axis in (2, 1):
        while sums.shape[axis] > 1:
            left, right = np.split(sums, 2, axis=axis)
            sums = left + right
    return sums[:, 0, 0]


class _Narrow:
    """A batch in the accumulation type, in parts of the ranks that have any value."""

    def __init__(self, batch: Batch, cell: Cell) -> None:
        acc = cell.parameters
        self.x, self.dy = (values.to(acc).numpy() for values in batch[:2])
        self.weight, self.bias = (vector.numpy()[:, None] for vector in batch[2:])
        self.counts = [count for count in cell.counts() if count > 0]
        self.ends = list(accumulate(self.counts))[:-1]
        self.dtype = cell.type

    def parts(self, values: np.ndarray) -> list[np.ndarray]:
        return np.split(values, self.ends, axis=1)

    def rounded(self, values: np.ndarray) -> np.ndarray:
        """To the type of the input."""
        return torch.from_numpy(values).to(self.dtype).double().numpy()

    def results(
        self,
        mean: np.ndarray,  # (C)
        invstd: np.ndarray,  # (C)
        unbiased: np.ndarray,  # (C)
        sum_of: Callable[[np.ndarray], np.ndarray],
    ) -> Results:
        """The element-wise steps: batch_norm_elemt and the two of the backward."""
        norm = 1 / self.x.dtype.type(self.x.shape[1])
        mean, invstd = mean[:, None], invstd[:, None]
        centred = self.x - mean
        y = self.weight * centred * invstd + self.bias
        sum_dy = sum(sum_of(part) for part in self.parts(self.dy))[:, None]
        sums_dy_xmu = [sum_of(part)[:, None] for part in self.parts(self.dy * centred)]
        sum_dy_xmu = sum(sums_dy_xmu)
        slope = invstd * invstd * sum_dy_xmu * norm
        dx = (self.dy - sum_dy * norm - centred * slope) * (self.weight * invstd)
        return {
            "y": self.rounded(y),
            "dx": self.rounded(dx),
            "running_mean": mean,
            "running_var": unbiased[:, None],
            "dweight": sum(part * invstd for part in sums_dy_xmu),
            "dbias": sum_dy,
        }


def sync_batch_norm(batch: Batch, cell: Cell) -> Results:
    """torch's SyncBatchNorm, as its CUDA kernels compute it."""
    narrow = _Narrow(batch, cell)
    stats = [_welford(part) for part in narrow.parts(narrow.x)]
    means, invstds = (list(each) for each in zip(*stats, strict=True))
    return narrow.results(*_gathered(means, invstds, narrow.counts), _block_sum)


def textbook(batch: Batch, cell: Cell) -> Results:
    """Sums and sums of squares, added up over the ranks."""
    narrow = _Narrow(batch, cell)
    acc = narrow.x.dtype.type
    count = acc(narrow.x.shape[1])
    mean = sum(part.sum(1) for part in narrow.parts(narrow.x)) / count
    mean_sq = sum(np.square(part).sum(1) for part in narrow.parts(narrow.x)) / count
    var = np.maximum(mean_sq - mean * mean, 0)
    unbiased = var * (count / max(count - 1, acc(1)))
    return narrow.results(mean, 1 / np.sqrt(var + acc(EPS)), unbiased, lambda part: part.sum(1))


OURS = "ours"
PLAIN, SYNC, TEXTBOOK = "torch BatchNorm", "torch SyncBatchNorm", "textbook"
FORMS: dict[str, Callable[[Batch, Cell], Results]] = {
    OURS: ours,
    PLAIN: batch_norm,
    SYNC: sync_batch_norm,
    TEXTBOOK: textbook,
}
