"""What the training recipe tells, refuses at once, and makes of arguments and net."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from optional import optional
from scripts import example, needs
from test_recipe import RECIPE
from torch import nn

pytestmark = needs(RECIPE)

for package in ("sklearn", "tqdm"):
    optional(package)

#: As far as the recipe asks while it is made.
LEADS = SimpleNamespace(
    rank=0, size=1, leads=True, device=torch.device("cpu"), on_rank_0=lambda function: function()
)


def parsed(*arguments: object, multiple: int = 4):
    return example("segmentation.options").parse_arguments(
        list(map(str, arguments)), multiple=multiple
    )


# The log


@pytest.mark.parametrize("terminal", (True, False))
def test_the_progress_bar_is_for_a_terminal(terminal, monkeypatch, tmp_path) -> None:
    screen = io.StringIO()
    screen.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", screen)
    with example("segmentation.log").Log(tmp_path / "log", LEADS).bar("title", 2) as bar:
        assert bar.disable is not terminal


@pytest.mark.parametrize(("epochs", "kept"), ((0, 0), (1, 2)))
def test_a_log_goes_on_after_the_last_whole_epoch(epochs, kept, tmp_path, capsys) -> None:
    path = tmp_path / "log.jsonl"
    log = example("segmentation.log").Log(path, LEADS)
    log.begin(epochs)  # where there is none
    for line in ({"epoch": 1, "step": 1}, {"epoch": 1}, {"epoch": 2, "step": 1}):
        log.say("told", **line)
    before = path.read_text().splitlines()
    path.write_text(path.read_text() + '{"epoch": 1, "cut')
    log.begin(epochs)
    log.say("told", epoch=9)
    assert path.read_text().splitlines() == [*before[:kept], json.dumps({"epoch": 9})]


def test_one_is_no_plural() -> None:
    counted = example("segmentation.log").counted
    found = [counted(number, noun) for noun in ("rank", "class") for number in (1, 2)]
    assert found == ["1 rank", "2 ranks", "1 class", "2 classes"]


def test_other_arguments_than_those_of_the_checkpoint_are_told() -> None:
    differences = example("segmentation.checkpoint").differences
    before = {"lr": "0.01", "no_flip": "False", "crop": "40"}
    assert differences(before, before) == ""
    now = before | {"lr": "0.1", "no_flip": "True", "new": "1"}
    assert differences(now, before) == (
        " Other arguments than before: --lr 0.1 (was 0.01), --no-flip True (was False)."
    )


# What is refused before anything is done


def as_file(out: Path) -> None:
    out.write_text("")


def below_a_file(out: Path) -> None:
    out.parent.rmdir()
    out.parent.write_text("")


@pytest.mark.parametrize(
    ("spoil", "message"),
    (
        (as_file, "out: that is a file; give a folder"),
        (below_a_file, "out: cannot be made .Not a directory"),
    ),
)
def test_an_output_folder_that_cannot_be_is_refused(spoil, message, tmp_path) -> None:
    out = tmp_path / "runs" / "out"
    out.parent.mkdir()
    spoil(out)
    args = parsed("--pages", 8, "--batch", 2, "--out", out)
    with pytest.raises(example("segmentation.launch").Refusal, match=message):
        example("train_segmentation").Recipe(args, LEADS)


def test_no_output_folder_is_made_where_the_data_are_wrong(tmp_path) -> None:
    args = parsed("--data", tmp_path / "missing", "--out", tmp_path / "out")
    with pytest.raises(example("segmentation.launch").Refusal, match="there is no such folder"):
        example("train_segmentation").Recipe(args, LEADS)
    assert list(tmp_path.iterdir()) == []


def test_digits_that_were_not_copied_are_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "digits", None)
    with pytest.raises(example("segmentation.launch").Refusal, match="digits.* give --data DIR"):
        example("segmentation.data").DigitPages(True, 1)


def test_a_net_that_needs_other_sizes_is_told_what_to_say() -> None:
    evaluation, data = example("segmentation.evaluation"), example("segmentation.data")
    net = torch.nn.Unflatten(-1, (-1, 16))  # of a width that is a multiple of 16
    pages = data.Whole(data.DigitPages(True, 1), 4)
    with pytest.raises(RuntimeError, match=r"images \(1, 1, 40, 40\): .* say in Net.multiple"):
        evaluation.evaluate(net, pages, range(1), classes=11, device=torch.device("cpu"))


# Arguments


def test_the_home_folder_is_known_in_all_paths(monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    args = parsed("--data=~/data", "--out=~/out", "--resume=~/checkpoint.pt")
    home = Path("/home/someone")
    assert (args.data, args.out) == (home / "data", home / "out")
    assert args.resume == "/home/someone/checkpoint.pt"
    assert parsed("--resume", "auto").resume == "auto"


@pytest.mark.parametrize(("multiple", "crop"), ((4, 40), (32, 64)))
def test_a_crop_is_what_the_net_can_take(multiple, crop, capsys) -> None:
    assert parsed(multiple=multiple).crop == crop
    with pytest.raises(SystemExit):
        parsed("--crop", crop + 2, multiple=multiple)
    assert f"expected a multiple of {multiple}, got {crop + 2}" in capsys.readouterr().err


# The net


class Wrapped(nn.Conv2d):
    """Returns more than logits, as nets of torchvision do."""

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": super().forward(images)}


@pytest.mark.parametrize(
    ("net", "found"),
    (
        (nn.Conv2d(3, 5, 2, stride=2), r"\(1, 5, 16, 32\)"),
        (nn.Conv2d(3, 4, 1), r"\(1, 4, 32, 64\)"),
        (Wrapped(3, 5, 1), "a dict"),
    ),
    ids=("half the size", "other classes", "a dict"),
)
def test_a_net_that_does_not_label_every_pixel_is_refused(net, found) -> None:
    samples = [(torch.zeros(3, 20, 40), torch.zeros(20, 40, dtype=torch.int64))]
    whole = example("segmentation.data").Whole(SimpleNamespace(read=samples.__getitem__), 32)
    expected = rf"makes {found} of images \(1, 3, 32, 64\): .* here \(1, 5, 32, 64\)"
    with pytest.raises(example("segmentation.launch").Refusal, match=expected):
        example("segmentation.evaluation").evaluate(
            net, whole, [0], classes=5, device=torch.device("cpu")
        )


def test_a_net_is_tried_out_before_the_first_epoch() -> None:
    """Also where the layers are plain, and no health check is made."""
    tried = []
    recipe = SimpleNamespace(label=tried.append, args=SimpleNamespace(sync_bn="off"))
    example("train_segmentation").Recipe.check(recipe)
    assert tried == [range(1)]


@pytest.mark.parametrize(
    ("state", "message"),
    (
        ({"optimizer": {}}, "no best.pt of train_segmentation.py"),
        ({"classes": 2, "channels": 1}, "trained on handwritten digits"),
        ({"classes": 2, "channels": 3, "model": {}}, "of another net than UNet .*Missing key"),
    ),
)
def test_images_are_not_labelled_with_what_is_no_such_net(state, message, tmp_path) -> None:
    torch.save(state, tmp_path / "best.pt")
    with pytest.raises(example("segmentation.launch").Refusal, match=re.compile(message, re.S)):
        example("predict_segmentation").predict(tmp_path / "best.pt", [], tmp_path / "labels")
    assert not (tmp_path / "labels").exists()
