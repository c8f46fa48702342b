"""The benchmarks of several ranks and of the message between them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from benchmarked import CPU, TINY, assert_spreads
from toolkits import ROOT
from torch import nn

from benchmarks import collectives, message, ranks
from benchmarks.collectives import time_collectives
from benchmarks.synchronised import OursSynchronised, TorchSynchronised, convert


def test_torchrun_compares_the_implementations_over_ranks(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    options = ("--device", "cpu", "--quick", "--match", "head", "--dtypes", "float32")
    done = subprocess.run(
        [sys.executable, *torchrun, "-m", "benchmarks", *options]
        + ["--turns", "3", "--out", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    (row,) = json.loads((tmp_path / "bench-cpu.json").read_text())["rows"]
    assert (row["ranks"], row["backend"], row["layer"]) == (2, "gloo", "head 64x512 NC")
    assert row["collectives"] == {ranks.PLAIN: 0, ranks.TORCH: 2, ranks.OURS: 2}
    everyone = {ranks.PLAIN, ranks.TORCH, ranks.OURS}
    assert_spreads(row["times_us"], everyone)
    assert_spreads(row["over_ranks_us"], everyone)
    assert_spreads(row["ratios"], {"torch SyncBN / ours", "nn.BatchNorm / ours"})
    for what in ("collective_us", "latency_us"):
        assert_spreads(row[what], {ranks.TORCH, ranks.OURS})
    # Both that synchronise have the statistics of the batches of all ranks; the other one has not.
    assert row["errors"][ranks.OURS] < 1e-6 and row["errors"][ranks.TORCH] < 1e-6
    assert row["errors"][ranks.PLAIN] > 0.1
    assert done.stdout.count("| head 64x512 NC | float32 |") == 3  # rank 0 alone reports


def waiting_rank(rank: int) -> dict[str, list]:
    """Rank 1 comes 200 ms late to the collective of forward; both are on time in backward."""
    values = torch.zeros(1000)
    before = vars(dist.ProcessGroup)["allreduce"]

    def forward() -> None:
        time.sleep(0.2 * rank)
        dist.all_reduce(values)

    steps = {
        "neither": (lambda: None, lambda _: None),
        "both": (forward, lambda _: dist.all_reduce(values)),
    }
    times = time_collectives(steps, CPU, turns=5)
    assert vars(dist.ProcessGroup)["allreduce"] is before
    assert {each.shape for each in times["neither"].values()} == {(5, 0)}
    return {name: np.median(each, axis=0).tolist() for name, each in times["both"].items()}


def test_the_wait_for_a_late_rank_is_not_the_time_of_the_collective(run) -> None:
    first, late = run(2, waiting_rank)
    assert first["wait"][0] > 100e3 > late["wait"][0]
    assert first["wait"][1] < 100e3
    for each in (first, late):
        assert 0 < max(each["collective"]) < 100e3
        assert 0 < max(each["latency"]) < 100e3


def synchronised_rank(rank: int, kind: type, dtype: torch.dtype, last: bool) -> list[float]:
    """The errors of y, dx and the buffers of unequal batches, against all of them together."""
    torch.manual_seed(0)
    layout = torch.channels_last if last else torch.contiguous_format
    x, dy = (3 * torch.randn(5, 8, 4, 3, dtype=torch.float64) + 1 for _ in range(2))
    whole = nn.BatchNorm2d(8, dtype=torch.float64)
    layer = convert(nn.Sequential(nn.BatchNorm2d(8)), kind)[0]
    for each in (whole, layer):
        nn.init.constant_(each.weight, 1.5)
        nn.init.constant_(each.bias, 0.5)
    mine = (slice(0, 2), slice(2, 5))[rank]
    results = []
    for each, part, kept in ((whole, slice(None), torch.float64), (layer, mine, dtype)):
        input = x[part].to(kept).contiguous(memory_format=layout).requires_grad_()
        output = each(input)
        (grad,) = torch.autograd.grad(output, input, dy[part].to(kept))
        assert output.is_contiguous(memory_format=layout)
        results.append([output, grad, each.running_mean, each.running_var])
    (y, dx, *buffers), found = results
    assert layer.num_batches_tracked == 1
    exact = [y[mine], dx[mine], *buffers]
    return [(a.double() - b).abs().max().item() for a, b in zip(found, exact, strict=True)]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_own_function_on_lent_kernels_is_right(run, dtype, last) -> None:
    eps = torch.finfo(dtype).eps
    for errors in run(2, synchronised_rank, TorchSynchronised, dtype, last):
        assert max(errors[:2]) < 10 * eps
        assert max(errors[2:]) < (1e-6 if dtype == torch.float32 else 2e-2)  # x is rounded


def test_both_synchronise_a_group_of_one_rank(run) -> None:
    for kind in (TorchSynchronised, OursSynchronised):
        assert run(1, collectives_alone, kind) == [2]


def collectives_alone(rank: int, kind: type) -> int:
    layer = convert(nn.Sequential(nn.BatchNorm2d(4)), kind)[0]
    input = torch.randn(2, 4, 3, 3, requires_grad=True)
    halves = (lambda: layer(input), lambda y: torch.autograd.grad(y.sum(), input))
    return time_collectives({"step": halves}, CPU, turns=1)["step"]["collective"].shape[1]


def test_a_model_without_batch_norms_is_not_converted_in_silence() -> None:
    with pytest.raises(ValueError, match="expected a model with batch norms, got Linear"):
        convert(nn.Linear(2, 2), OursSynchronised)


def test_the_message_of_a_sum_does_not_grow_with_the_ranks(compiled) -> None:
    x = torch.randn(2, 64, 3, 3)
    real = compiled.batch_norm_stats(x).nbytes
    sizes = {r: message.traffic(64, r) for r in (1, 2, 4, 8, 64)}
    assert {size[message.SUM]["message"] for size in sizes.values()} == {real}
    assert {size[message.SUM]["held"] for size in sizes.values()} == {real}
    assert [size[message.GATHER]["held"] for size in sizes.values()] == [
        4 * 129 * r for r in (1, 2, 4, 8, 64)
    ]
    sent = {
        r: (size[message.SUM]["sent"], size[message.GATHER]["sent"]) for r, size in sizes.items()
    }
    assert sent[1] == (0, 0)
    assert sent[2] == (real, 516)
    assert sent[4] == (1.5 * real, 1548)
    assert sent[8] == (1.75 * real, 3612)
    assert sent[64][0] < 2 * real < sent[64][1]


def test_both_forms_of_the_message_are_timed_on_ranks_of_their_own() -> None:
    (row,) = message.measure(replace(TINY, match="2 ranks 64 channels"))
    assert (row["question"], row["ranks"], row["channels"]) == ("message", 2, 64)
    assert row["traffic"] == message.traffic(64, 2)
    assert_spreads(row["times_us"], {message.SUM, message.GATHER, message.COMBINE})
    assert row["difference_of_means"] < 1e-6
    ours = f"{message.summed(64)[0].nbytes:,}"
    assert f"| 2 | 64 | {ours} | 1,032 | {ours} | 516 | 2, 1 |" in message.table([row])


def test_events_of_a_gpu_become_microseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def __init__(self, at_ms: float) -> None:
            self.at_ms = at_ms

        def elapsed_time(self, end: Event) -> float:
            return end.at_ms - self.at_ms

    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    moments = [[Event(at) for at in (5.0, 5.25, 5.5, 6.0)], [Event(7.0)] * 4]
    found = collectives._microseconds(moments, torch.device("cuda", 0))
    assert found.tolist() == [[250, 250, 500], [0, 0, 0]]
    assert waited == [torch.device("cuda", 0)]
