"""Checkpoints of the training recipe: whole, refused where they do not fit, and gone on from."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import distributed
import pytest
import torch
from optional import optional
from scripts import example, needs
from test_recipe import RECIPE
from torch import nn

pytestmark = needs(RECIPE)

for package in ("sklearn", "tqdm"):
    optional(package)


@pytest.fixture
def one_rank():
    """The world of this process alone."""
    launch = example("segmentation.launch")
    with distributed.fake_world(1):
        yield launch.World(0, 1, torch.device("cpu"), torch.distributed.HashStore())


def training(rate: float = 0.1, steps: int = 1, epochs: int = 1, **settings: int):
    """A training that nothing has happened in yet, whose rate falls from step to step."""
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), rate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 1 - step / (epochs * steps)
    )
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return example("segmentation.checkpoint").Training(
        net, optimizer, scheduler, scaler, steps=steps, settings=settings
    )


def test_a_checkpoint_that_fails_to_be_written_leaves_the_one_before(
    tmp_path, monkeypatch, one_rank
) -> None:
    checkpoint = example("segmentation.checkpoint")
    path = tmp_path / "checkpoint.pt"
    checkpoint.write(path, {"random": [1]})
    before = path.read_bytes()

    def save_half(state, file) -> None:
        file.write(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", save_half)
    with pytest.raises(OSError, match="no space left"):
        checkpoint.write(path, {"random": [2]})
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_run_that_ends_while_it_saves_has_the_best_net_already(
    tmp_path, monkeypatch, one_rank
) -> None:
    """Else it would never be written: the resumed run finds nothing better than the checkpoint."""
    checkpoint, recipe = example("segmentation.checkpoint"), example("train_segmentation")

    def end(*_) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "save", end)
    state = training(classes=3)
    parts = {"training": state, "net": state.net, "world": one_rank}
    with pytest.raises(KeyboardInterrupt):
        recipe.Recipe.save(SimpleNamespace(args=SimpleNamespace(out=tmp_path), **parts), [0.5])
    assert torch.load(tmp_path / "best.pt", weights_only=True)["mean_iou"] == 0.5


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def without_optimizer(path: Path) -> None:
    state = torch.load(path, weights_only=True)
    del state["optimizer"]
    torch.save(state, path)


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    (
        (without_optimizer, {"classes": 3}, "that is the net alone; give the checkpoint.pt beside"),
        (half, {"classes": 3}, "no checkpoint of this script"),
        (Path.unlink, {"classes": 3}, "there is no such file"),
        (Path.touch, {"classes": 4}, "made with classes = 3, and here it is 4"),
    ),
    ids=("net", "half", "missing", "other classes"),
)
def test_a_checkpoint_that_does_not_fit_is_refused(
    change, settings, message, tmp_path, one_rank
) -> None:
    checkpoint, launch = example("segmentation.checkpoint"), example("segmentation.launch")
    path = tmp_path / "checkpoint.pt"
    checkpoint.write(path, training(classes=3).state())
    change(path)
    with pytest.raises(launch.Refusal, match=message):
        checkpoint.resume(path, training(**settings), one_rank, seed=0)


@pytest.mark.parametrize("arguments", ({"rate": 0.5}, {"steps": 5}, {"epochs": 4}))
def test_the_rate_of_a_resumed_run_is_that_of_its_own_arguments(
    arguments, tmp_path, one_rank
) -> None:
    """As with another --lr, --batch or --epochs."""
    checkpoint = example("segmentation.checkpoint")
    done = training(steps=3, epochs=2)
    for _ in range(3):
        done.optimizer.step()
        done.scheduler.step()
    done.epoch = 1
    checkpoint.save(tmp_path / "checkpoint.pt", done, one_rank)

    now = {"rate": 0.1, "steps": 3, "epochs": 2} | arguments
    resumed = training(**now)
    checkpoint.resume(tmp_path / "checkpoint.pt", resumed, one_rank, seed=0)
    for step in range(now["steps"]):
        left = 1 - (now["steps"] + step) / (now["steps"] * now["epochs"])
        assert resumed.optimizer.param_groups[0]["lr"] == pytest.approx(now["rate"] * left)
        resumed.optimizer.step()
        resumed.scheduler.step()
