"""How does the message between ranks scale: one sum over ranks, or a gathering of all of them?

A layer's forward needs mean and variance over all ranks. Ours sums float64 values (all_reduce): the
message of a rank, and what it holds afterwards, is as long however many ranks there are. torch's
SyncBatchNorm gathers float32 ``[2C+1]`` of every rank (all_gather) and combines them: a shorter
message, but a rank ends up with one of every rank. In backward both sum.

By the ring algorithm, which moves the least that is possible, each of R ranks sends and receives
``2 (R-1)/R`` messages for the sum, in ``2 (R-1)`` steps, and ``R-1`` messages for the gathering, in
``R-1`` steps. So gathering is the quicker one while the latency of a step decides, and loses once
bytes do. (NCCL sums short messages along trees, in about ``2 log2(R)`` steps.)

Starts its own ranks, on the CPU over Gloo, which follows the ring, whatever the device: the times
are those of this machine's loopback, and more ranks than cores also wait for a core.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

from benchmarks.groups import ranks as launched
from benchmarks.harness import Spread, interleave, progress, ratio
from benchmarks.options import Options
from benchmarks.report import as_table
from benchmarks.synchronised import lend_cpu_kernels
from syncbn_cuda._library import kernels_for

RANKS = (2, 4, 8)
CHANNELS = (64, 256, 1024, 2048)
QUICK_CHANNELS = (64, 2048)

SUM, GATHER, COMBINE = "all_reduce", "all_gather", "all_gather and combine"


def measure(options: Options) -> list[dict]:
    """Times both forms for each number of ranks; returns a row for each of the channels."""
    if launched() > 1:
        raise SystemExit("message: for one process, which starts ranks of its own")
    channels = QUICK_CHANNELS if options.quick else CHANNELS
    rows = []
    for ranks in progress(RANKS, "group"):
        wanted = [c for c in channels if options.match in _name(ranks, c)]
        if wanted:
            rows += on_ranks(ranks, wanted, options.turns)
    return rows


def _name(ranks: int, channels: int) -> str:
    return f"{ranks} ranks {channels} channels"


def summed(channels: int) -> tuple[Tensor, Tensor]:
    """What our operators have summed over ranks, forward and backward, without its values."""
    input = torch.empty(2, channels, 1, device="meta")
    kernels = kernels_for(input.device)
    forward = kernels.batch_norm_stats(input)
    backward, *_ = kernels.batch_norm_backward_reduce(input, input, forward, 1e-5, False, False)
    return forward, backward


def gathered(channels: int) -> Tensor:
    """What torch's SyncBatchNorm gathers of each rank in forward, without its values."""
    return torch.empty(2 * channels + 1, device="meta")


def traffic(channels: int, ranks: int) -> dict[str, dict[str, int]]:
    """Bytes of either form: a rank's message, what it then holds, what it sends in how many steps.

    The last two by the ring algorithm; a rank receives as much as it sends.
    """
    ours, theirs = summed(channels)[0].nbytes, gathered(channels).nbytes
    return {
        SUM: {
            "message": ours,
            "held": ours,
            "sent": math.ceil(2 * (ranks - 1) / ranks * ours),
            "steps": 2 * (ranks - 1),
        },
        GATHER: {
            "message": theirs,
            "held": ranks * theirs,
            "sent": (ranks - 1) * theirs,
            "steps": ranks - 1,
        },
    }


def on_ranks(ranks: int, channels: list[int], turns: int) -> list[dict]:
    """Starts ranks; returns a row for each of the channels."""
    # Ranks are forks of a server that has imported torch: importing it on each takes far longer.
    multiprocessing.get_context("forkserver").set_forkserver_preload(["benchmarks.message"])
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            _rank_main,
            args=(ranks, channels, turns, folder),
            nprocs=ranks,
            start_method="forkserver",
        )
        return json.loads((Path(folder) / "rows").read_text())


def _rank_main(rank: int, ranks: int, channels: list[int], turns: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    rows = [_row(rank, ranks, c, turns) for c in channels]
    if rank == 0:
        (Path(folder) / "rows").write_text(json.dumps(rows))
    dist.destroy_process_group()


def _row(rank: int, ranks: int, channels: int, turns: int) -> dict:
    zeros = torch.zeros_like(summed(channels)[0], device="cpu")
    calls = {
        SUM: lambda: dist.all_reduce(zeros),
        GATHER: _gathering(torch.zeros_like(gathered(channels), device="cpu"), ranks),
        COMBINE: _combining(torch.ones(2 * channels + 1), ranks),
    }
    times = interleave(calls, torch.device("cpu"), turns)
    return {
        "question": "message",
        "name": _name(ranks, channels),
        "ranks": ranks,
        "channels": channels,
        "traffic": traffic(channels, ranks),
        "times_us": {name: asdict(Spread.of(each)) for name, each in times.items()},
        "ratios": {
            f"{form} / {SUM}": asdict(ratio(times, SUM, form)) for form in (GATHER, COMBINE)
        },
        "difference_of_means": difference_of_means(rank, ranks, channels),
    }


def _gathering(message: Tensor, ranks: int) -> Callable[[], list[Tensor]]:
    def gather() -> list[Tensor]:
        parts = [torch.empty_like(message) for _ in range(ranks)]
        dist.all_gather(parts, message)
        return parts

    return gather


def _combining(message: Tensor, ranks: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """The gathering, and mean and 1/std of it as torch's SyncBatchNorm takes them."""
    lend_cpu_kernels()
    gather = _gathering(message, ranks)
    channels = len(message) // 2
    running = torch.zeros(channels), torch.ones(channels)

    def combine() -> tuple[Tensor, Tensor]:
        mean, invstd, count = torch.stack(gather()).split(channels, dim=1)
        mask = count.squeeze(-1) >= 1  # leaves out ranks without data
        return torch.batch_norm_gather_stats_with_counts(
            message, mean[mask], invstd[mask], *running, 0.1, 1e-5, count[mask].view(-1)
        )

    return combine


def difference_of_means(rank: int, ranks: int, channels: int) -> float:
    """Both forms on the same data, of unequal batches: the largest difference of their means."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(channels, 8 + rank, generator=generator, dtype=torch.float64)
    count = torch.full((1,), values.shape[1], dtype=torch.float64)
    message = torch.cat([values.sum(1), values.square().sum(1), count])
    dist.all_reduce(message)
    local = [values.mean(1), values.var(1, correction=0).add(1e-5).rsqrt(), count]
    mean, _ = _combining(torch.cat(local).float(), ranks)()
    return (message[:channels] / message[-1] - mean).abs().max().item()


def table(rows: list[dict]) -> str:
    """Formats the rows as one table."""
    lines = []
    for row in rows:
        ours, theirs = row["traffic"][SUM], row["traffic"][GATHER]
        numbers = (row["ranks"], row["channels"], ours["held"], theirs["held"], ours["sent"])
        cells = [f"{number:,}" for number in (*numbers, theirs["sent"])]
        cells += [f"{ours['steps']}, {theirs['steps']}"]
        cells += [str(Spread(**row["times_us"][name])) for name in (SUM, GATHER, COMBINE)]
        lines.append(cells + [str(Spread(**each)) for each in row["ratios"].values()])
    header = ["ranks", "C", "held: sum", "gather", "sent: sum", "gather", "steps"]
    header += [f"{name} us" for name in (SUM, GATHER, COMBINE)]
    header += [f"{form} / {SUM}" for form in (GATHER, COMBINE)]
    return (
        "A sum over ranks of our message (float64) and a gathering of float32 [2C+1] of every rank "
        "(torch). Bytes that a rank holds when done, and sends by the ring algorithm (it receives "
        "as many), in how many steps. Above a ratio of 1 the sum is faster.\n\n"
        + as_table(header, lines, texts=0)
    )
