"""The benchmarks of several ranks, of their message and of training steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from toolkits import ROOT
from torch import nn

if not (ROOT / "benchmarks").is_dir():
    pytest.skip("no benchmarks beside tests/", allow_module_level=True)
sys.path.append(str(ROOT))

from benchmarks import message, models, ranks, steps
from benchmarks.collectives import time_collectives
from benchmarks.options import Options
from benchmarks.synchronised import OursSynchronised, TorchSynchronised, convert

CPU = torch.device("cpu")
TINY = Options(CPU, quick=True, turns=3, dtypes=(torch.float32,))


def assert_spreads(spreads: dict[str, dict], names: set[str]) -> None:
    assert spreads.keys() == names
    for spread in spreads.values():
        assert 0 < spread["p20"] <= spread["p50"] <= spread["p80"]


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
    """Rank 1 comes 50 ms late to the collective of forward; both are on time in backward."""
    values = torch.zeros(1000)
    before = vars(dist.ProcessGroup)["allreduce"]

    def forward() -> None:
        time.sleep(0.05 * rank)
        dist.all_reduce(values)

    times = time_collectives(forward, lambda _: dist.all_reduce(values), CPU, turns=5)
    assert vars(dist.ProcessGroup)["allreduce"] is before
    return {name: each.min(axis=0).tolist() for name, each in times.items()}


def test_the_wait_for_a_late_rank_is_not_the_time_of_the_collective(run) -> None:
    first, late = run(2, waiting_rank)
    assert first["wait"][0] > 40e3 > late["wait"][0]
    assert first["wait"][1] < 40e3
    for each in (first, late):
        assert 0 < max(each["collective"]) < 40e3
        assert 0 < max(each["latency"]) < 40e3


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
    times = time_collectives(
        lambda: layer(input), lambda y: torch.autograd.grad(y.sum(), input), CPU, turns=1
    )
    return times["collective"].shape[1]


def test_a_model_without_batch_norms_is_not_converted_in_silence() -> None:
    with pytest.raises(ValueError, match="expected a model with batch norms, got Linear"):
        convert(nn.Linear(2, 2), OursSynchronised)


def test_the_message_of_a_sum_does_not_grow_with_the_ranks(compiled) -> None:
    x = torch.randn(2, 64, 3, 3)
    real = compiled.batch_norm_stats(x).nbytes
    sizes = {r: message.traffic(64, r) for r in (1, 2, 4, 8, 64)}
    assert {size[message.SUM]["message"] for size in sizes.values()} == {real} == {8 * 129}
    assert {size[message.SUM]["held"] for size in sizes.values()} == {real}
    assert [size[message.GATHER]["held"] for size in sizes.values()] == [
        4 * 129 * r for r in (1, 2, 4, 8, 64)
    ]
    sent = {
        r: (size[message.SUM]["sent"], size[message.GATHER]["sent"]) for r, size in sizes.items()
    }
    assert sent[1] == (0, 0)
    assert sent[2] == (1032, 516)
    assert sent[4] == (1548, 1548)
    assert sent[8] == (1806, 3612)
    assert sent[64][0] < 2 * real < sent[64][1]


def test_both_forms_of_the_message_are_timed_on_ranks_of_their_own() -> None:
    (row,) = message.measure(replace(TINY, match="2 ranks 64 channels"))
    assert (row["question"], row["ranks"], row["channels"]) == ("message", 2, 64)
    assert row["traffic"] == message.traffic(64, 2)
    assert_spreads(row["times_us"], {message.SUM, message.GATHER, message.COMBINE})
    assert row["difference_of_means"] < 1e-6
    assert "| 2 | 64 | 1,032 | 1,032 | 1,032 | 516 | 2, 1 |" in message.table([row])


@pytest.mark.parametrize("dimensions", [2, 3])
def test_unet_keeps_the_sides_and_sees_all_of_its_input(dimensions: int) -> None:
    net = models.UNet(dimensions, channels=3, classes=5, width=4, depth=2)
    norms = [m for m in net.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    assert [m.num_features for m in norms] == [4, 4, 8, 8, 16, 16, 8, 8, 4, 4]
    images = torch.randn(2, 3, *(8,) * dimensions)
    logits = net(images)
    assert logits.shape == (2, 5, *(8,) * dimensions)
    F.cross_entropy(logits, torch.zeros(2, *(8,) * dimensions, dtype=torch.long)).backward()
    assert all(p.grad is not None and p.grad.any() for p in net.parameters())


def test_resnet50_is_the_one_that_is_installed() -> None:
    net = models.resnet50()
    if net is None:
        pytest.skip("neither torchvision nor timm is installed")
    assert sum(type(m) is nn.BatchNorm2d for m in net.modules()) == 53


@pytest.fixture
def small_unet(monkeypatch: pytest.MonkeyPatch) -> Iterator[models.Task]:
    """The only net to train, on one thread: several that wait for a busy core take far longer."""
    task = models.Task("unet", lambda: models.UNet(2, 3, 4, 4, 1), (2, 3, 16, 16), 4, dense=True)
    monkeypatch.setitem(steps.TASKS, "cpu", (task,))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield task
    torch.set_num_threads(threads)


def test_training_steps_are_timed_and_weighed(small_unet: models.Task) -> None:
    both = {steps.PLAIN, steps.OURS}
    rows = steps.measure(replace(TINY, dtypes=(torch.float32, torch.bfloat16)))
    assert [(row["dtype"], row["layout"], row["mode"]) for row in rows] == [
        ("float32", "contiguous", "eager"),
        ("bfloat16", "channels last", "eager"),
    ]
    for row in rows:
        assert_spreads(row["times_us"], both)
        assert_spreads(row["ratios"], {"nn.BatchNorm / ours"})
        for name in both:
            images_a_step = row["images_per_s"][name]["p50"] * row["times_us"][name]["p50"] / 1e6
            assert images_a_step == pytest.approx(2)
        # Beside what nn.BatchNorm keeps, ours keeps its message.
        more = row["saved_bytes"][steps.OURS] - row["saved_bytes"][steps.PLAIN]
        norms = [m for m in small_unet.make().modules() if isinstance(m, nn.BatchNorm2d)]
        assert more <= sum(8 * (2 * m.num_features + 1) for m in norms)
        assert row["saved_bytes"][steps.PLAIN] > 4 * 2 * 16 * 16 * 4
    assert steps.table(rows).count("| unet 2x3x16x16 |") == 4


def test_saved_bytes_are_counted_once_and_without_the_models_own() -> None:
    layer = nn.Linear(8, 8)
    input = torch.randn(4, 8)

    def step() -> None:
        hidden = layer(input)  # keeps its input, and the weight, which is the model's
        (hidden * hidden).sum().backward()  # keeps the same tensor twice

    assert steps.saved_bytes(step, layer) == 2 * input.nbytes


def test_what_does_not_run_is_absent_with_the_reason(
    small_unet: models.Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(model: nn.Module) -> nn.Module:
        raise RuntimeError("no compiler here\nat all")

    monkeypatch.setattr(torch, "compile", refuse)
    eager, compiled = steps.measure(replace(TINY, quick=False))
    assert eager["times_us"].keys() == {steps.PLAIN, steps.OURS}
    assert compiled["absent"][steps.OURS] == "RuntimeError: no compiler here"
    assert "absent: RuntimeError: no compiler here" in steps.table([eager, compiled])
    monkeypatch.setitem(steps.TASKS, "cpu", (replace(small_unet, make=lambda: None),))
    (row,) = steps.measure(TINY)
    assert "absent: neither torchvision nor timm is installed" in steps.table([row])


@pytest.mark.parametrize("ours", [1.01, float("nan")])
def test_a_step_that_computes_another_loss_is_an_error(ours: float) -> None:
    steps._check_loss("net", {steps.PLAIN: 1.0, steps.OURS: 1.0 + 1e-5}, 1e-4)
    with pytest.raises(RuntimeError, match="net: expected the loss of nn.BatchNorm, 1.0"):
        steps._check_loss("net", {steps.PLAIN: 1.0, steps.OURS: ours}, 1e-4)
