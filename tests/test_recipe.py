"""The training recipe, run as its users run it."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from optional import optional
from scripts import needs, run, torchrun
from toolkits import ROOT
from torch.utils._pytree import tree_leaves_with_path

for package in ("sklearn", "tqdm"):
    optional(package)

RECIPE = "examples/train_segmentation.py"
FAULTS = ROOT / "tests/recipe_faults.py"
pytestmark = needs(RECIPE)

#: Some steps an epoch for up to 4 ranks, of which the last has fewer batches than the others, and
#: pages to evaluate on that 2 or 4 ranks do not divide.
SMALL = ("--pages", "92", "--batch", "4", "--accumulate", "2", "--log-every", "3")


def lines(out: Path, of: str) -> list[dict[str, Any]]:
    """The lines of a log that tell something."""
    told = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [line for line in told if of in line]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Runs of two epochs, by the number of ranks."""

    @cache
    def train(ranks: int) -> Path:
        out = tmp_path_factory.mktemp(f"ranks_{ranks}")
        done = run(*torchrun(ranks), RECIPE, *SMALL, "--epochs", 2, "--out", out)
        (out / "stdout").write_text(done.stdout)
        (out / "stderr").write_text(done.stderr)
        return out

    return train


def test_rank_0_alone_tells_what_happens(undisturbed) -> None:
    out = undisturbed(2)
    told = (out / "stdout").read_text()
    assert told.startswith("2 ranks on cpu, 46 images a rank, 11 classes, 6 steps an epoch\n")
    reports = re.findall(r"^epoch \d step \d: loss .*images/s.* collective -?\d+$", told, re.M)
    assert len(reports) == len(lines(out, "ms")) == 4
    assert re.findall(r"^epoch \d/2: mean IoU", told, re.M) == [
        "epoch 1/2: mean IoU",
        "epoch 2/2: mean IoU",
    ]
    assert not re.search("step/s|warning|Warning", (out / "stderr").read_text())
    told_last = (
        r"IoU of each class in epoch \d: 0: 0\.\d{3}, 1: .*\nBest mean IoU 0\.\d{4}, in .*\n$"
    )
    assert re.search(told_last, told)
    losses = [line["loss"] for line in lines(out, "loss")]
    assert losses[-1] < 0.9 * losses[0]  # it learns


def test_the_best_net_is_kept_without_what_wraps_it(undisturbed) -> None:
    best = torch.load(undisturbed(2) / "best.pt", weights_only=True)
    scores = [line["mean_iou"] for line in lines(undisturbed(2), "mean_iou")]
    assert best["mean_iou"] == max(scores)
    assert scores[best["epoch"] - 1] == best["mean_iou"]
    assert "head.weight" in best["model"]
    assert not any(name.startswith("module.") for name in best["model"])


def assert_same_run(out: Path, undisturbed: Path) -> None:
    """Asserts that a run ended as another one, and told the same of each epoch."""
    expected, found = (
        tree_leaves_with_path(torch.load(path / "checkpoint.pt", weights_only=True))
        for path in (undisturbed, out)
    )
    assert len(found) == len(expected)
    for (where, value), (there, other) in zip(expected, found, strict=True):
        assert where == there
        same = torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other
        assert same, where
    told, expected = (lines(path, "epoch") for path in (out, undisturbed))
    assert [line.get("ious") for line in told] == [line.get("ious") for line in expected]


@pytest.mark.parametrize("ranks", (2, 4))
def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(ranks, undisturbed, tmp_path) -> None:
    arguments = (*SMALL, "--epochs", 2, "--out", tmp_path)
    died = run(*torchrun(ranks), FAULTS, "dies", ranks - 1, *arguments, succeeds=False)
    # Of the others, torchrun ends some, and some lose the connection.
    assert "The checkpoint of epoch 1 is whole; to go on from it" in died.stderr
    assert "failed, which ends the run" not in died.stderr
    checkpoint = tmp_path / "checkpoint.pt"
    assert torch.load(checkpoint, weights_only=True)["epoch"] == 1
    done = run(*torchrun(ranks), RECIPE, *arguments, "--resume", "auto")
    assert f"Going on from {checkpoint}, after epoch 1.\n" in done.stdout
    assert_same_run(tmp_path, undisturbed(ranks))


@pytest.mark.parametrize(
    "faults", ("killed_in_forward,killed_in_backward", "killed_between,raises_in_forward")
)
def test_a_run_that_torchrun_starts_again_is_the_undisturbed_one_bit_for_bit(
    faults, undisturbed, tmp_path
) -> None:
    starts = (*torchrun(2), "--max-restarts", 2, FAULTS, faults, 1)
    done = run(*starts, *SMALL, "--epochs", 2, "--out", tmp_path, "--resume", "auto")
    assert done.stdout.count("2 ranks on cpu") == 3
    assert done.stdout.count(f"Going on from {tmp_path / 'checkpoint.pt'}, after epoch 1.\n") == 2
    assert_same_run(tmp_path, undisturbed(2))


def test_a_run_goes_on_with_another_number_of_ranks(undisturbed, tmp_path) -> None:
    checkpoint = undisturbed(2) / "checkpoint.pt"
    arguments = (*SMALL, "--epochs", 3, "--out", tmp_path, "--resume", checkpoint)
    done = run(RECIPE, *arguments)
    assert "Warning" not in done.stderr
    assert "Other arguments than before: --epochs 3 (was 2). It was made by" in done.stdout
    assert "made by 2 ranks and there are 1: random numbers begin anew" in done.stdout
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert state["epoch"] == 3
    assert len(state["random"]) == 1
    # The best net of this folder, as that of the other run is not in it.
    assert torch.load(tmp_path / "best.pt", weights_only=True)["mean_iou"] == state["best"]
    # 92 images make 23 batches, and these 12 steps an epoch.
    assert state["scheduler"]["last_epoch"] == 3 * 12
    # The rate falls to nothing by the last step, from that of 8 images a step.
    assert state["optimizer"]["param_groups"][0]["initial_lr"] == pytest.approx(0.01 * 0.5**0.5)
    assert state["optimizer"]["param_groups"][0]["lr"] == 0


def test_a_run_with_no_epoch_left_says_so(undisturbed, tmp_path) -> None:
    checkpoint = undisturbed(2) / "checkpoint.pt"
    arguments = (*SMALL, "--epochs", 1, "--out", tmp_path, "--predictions")
    done = run(RECIPE, *arguments, "--resume", checkpoint)
    told = "Nothing is left to train: after 2 epochs, with --epochs 1.\n"
    assert done.stdout.endswith(told)  # and not how good a net is that is not in this folder
    assert len(list((tmp_path / "predictions").iterdir())) == 23


@pytest.mark.parametrize("more", ((), ("--resume", "other.pt")), ids=("new", "resumed elsewhere"))
def test_a_run_is_not_overwritten_by_the_next(more, undisturbed) -> None:
    before = (undisturbed(2) / "checkpoint.pt").read_bytes()
    done = run(RECIPE, *SMALL, "--out", undisturbed(2), *more, succeeds=False)
    assert "there is a run already. Give --resume auto to go on with it" in done.stderr
    assert "Traceback" not in done.stderr
    assert (undisturbed(2) / "checkpoint.pt").read_bytes() == before


def test_mixed_precision_groups_and_evaluation_on_rank_0_work_together(tmp_path) -> None:
    """And the evaluation takes longer than the timeout of the process group."""
    arguments = (*SMALL, "--epochs", 1, "--out", tmp_path, "--amp", "bf16", "--sync-bn", "group:2")
    slow = ("evaluates_slowly", 0, "--timeout", 5, "--eval", "rank0")
    done = run(*torchrun(4), FAULTS, *slow, *arguments, "--lr-scale", "linear", "--decay", "poly")
    assert "epoch 1/1: mean IoU" in done.stdout
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["epoch"] == 1


@pytest.mark.parametrize(
    ("fault", "rank", "expected"),
    # In milliseconds, the mean over 2 ranks. One is late by 200 a forward, or 50 for each of the
    # 4 images of a batch, and the other waits as long.
    (
        ("computes_slowly", 1, {"data": 0, "compute": 100, "waiting": 100}),
        ("reads_slowly", 0, {"data": 100, "compute": 0, "waiting": 100}),
    ),
)
def test_a_step_is_divided_into_what_it_was_spent_on(fault, rank, expected, tmp_path) -> None:
    arguments = (*SMALL, "--accumulate", 1, "--epochs", 1, "--out", tmp_path)
    run(*torchrun(2), FAULTS, fault, rank, *arguments)
    reports = [line["ms"] for line in lines(tmp_path, "ms")]
    for report in reports:
        parts = sum(report[part] for part in ("data", "compute", "waiting", "collective"))
        assert parts == pytest.approx(report["step"])
    assert median(report["slowest"] for report in reports) == rank
    for part, planted in expected.items():
        # A step itself takes some 30 ms, and several times that where other processes take turns.
        assert planted - 50 < median(report[part] for report in reports) < planted + 300, part
