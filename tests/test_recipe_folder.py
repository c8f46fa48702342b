"""The training recipe on a folder of images and masks, and what it says of a wrong one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from optional import optional
from scripts import example, needs, run, torchrun
from test_recipe import RECIPE

pytestmark = needs(RECIPE)

for package in ("tqdm", "PIL"):
    optional(package)


def write(path: Path, values: np.ndarray, mode: str | None = None) -> None:
    image = optional("PIL.Image").fromarray(values)
    path.parent.mkdir(parents=True, exist_ok=True)
    (image.convert(mode) if mode else image).save(path)


def write_sample(part: Path, name: str, height: int = 20, width: int = 26, suffix=".png") -> None:
    """A square, class 2, on a ground of class 0, with a border that is no class."""
    image = np.zeros((height, width, 3), np.uint8)
    mask = np.zeros((height, width), np.uint8)
    image[4:12, 4:12], mask[4:12, 4:12] = (200, 90, 40), 2
    mask[0] = 255
    write(part / "images" / f"{name}{suffix}", image)
    write(part / "masks" / f"{name}.png", mask)


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    for number in range(10):
        suffix = ".jpg" if number % 2 else ".png"
        write_sample(folder, f"p{number}", height=20 + number, width=31 - number, suffix=suffix)
    return folder


def test_it_trains_on_a_folder_and_labels_what_was_held_out(dataset, tmp_path) -> None:
    out = tmp_path / "out"
    small = ("--crop", 24, "--batch", 2, "--workers", 1, "--epochs", 2, "--val-fraction", 0.3)
    done = run(*torchrun(2), RECIPE, "--data", dataset, "--out", out, *small, "--predictions")
    assert "3 images a rank, 3 classes, 1 steps an epoch" in done.stdout

    folder = example("segmentation.folder")
    held_out = folder.find_pairs(dataset, 0.3)[1]
    assert len(held_out) == 3
    predicted = sorted((out / "predictions").iterdir())
    assert [path.stem for path in predicted] == [pair.image.stem for pair in held_out]
    for path, pair in zip(predicted, held_out, strict=True):
        assert folder.read_mask(path).shape == folder.read_mask(pair.mask).shape
        assert folder.read_mask(path).max() < 3


def test_what_is_held_out_depends_on_the_names_alone(dataset) -> None:
    folder = example("segmentation.folder")
    training, held_out = folder.find_pairs(dataset, 0.3)
    assert (len(training), len(held_out)) == (7, 3)
    assert not set(training) & set(held_out)
    assert folder.find_pairs(dataset, 0.3) == (training, held_out)
    # One image more or less moves none of the others but the one at the border.
    write_sample(dataset, "another")
    assert len(set(held_out) - set(folder.find_pairs(dataset, 0.3)[1])) <= 1


def test_two_folders_tell_what_is_held_out(tmp_path) -> None:
    write_sample(tmp_path / "train", "a")
    write_sample(tmp_path / "val", "b")
    training, held_out = example("segmentation.folder").find_pairs(tmp_path, 0.5)
    assert [pair.image.stem for pair in training] == ["a"]
    assert [pair.image.stem for pair in held_out] == ["b"]


@pytest.mark.parametrize("mode", (None, "P", "1"), ids=("grey", "palette", "bits"))
def test_the_values_of_a_mask_are_its_classes(mode, tmp_path) -> None:
    classes = np.array([[0, 1], [1, 0]], np.uint8)
    if mode == "P":
        picture = optional("PIL.Image").fromarray(classes)
        picture.putpalette([9, 9, 9, 200, 0, 0])  # turns it into mode P: the colours are no classes
        picture.save(tmp_path / "mask.png")
    else:
        write(tmp_path / "mask.png", classes * (255 if mode else 1), mode)
    assert (
        example("segmentation.folder").read_mask(tmp_path / "mask.png").tolist() == classes.tolist()
    )


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: next(folder.glob(name)).rename(folder / "elsewhere")


def with_mask(values: np.ndarray) -> Callable[[Path], None]:
    return lambda folder: write(folder / "masks/p0.png", values)


@pytest.mark.parametrize(
    ("spoil", "message"),
    (
        (lambda folder: folder.rename(folder.with_name("other")), "data: there is no such folder"),
        (without("images"), "expected DIR/images and DIR/masks, .* there is elsewhere, masks"),
        (without("masks"), "there is no folder .*masks"),
        (without("masks/p3.png"), r"p3.jpg has no mask .*p3.png; in that folder there is p0.png, "),
        (with_mask(np.zeros((4, 5), np.uint8)), "p0.png is 5 x 4 pixels, .*p0.png is 31 x 20"),
        (with_mask(np.full((20, 31), 7, np.uint8)), "p0.png has class 7: expected 0 to 2, or 255"),
        (with_mask(np.zeros((20, 31, 3), np.uint8)), "p0.png is a picture in RGB: expected a mask"),
        (lambda folder: write_sample(folder, "p0", suffix=".jpg"), "would share one mask"),
    ),
    ids=("folder", "images", "masks", "mask", "size", "class", "colour", "twice"),
)
def test_a_folder_that_is_wrong_is_refused_by_name(spoil, message, dataset) -> None:
    folder, launch = example("segmentation.folder"), example("segmentation.launch")
    spoil(dataset)
    with pytest.raises(launch.Refusal, match=message):
        pairs = sum(folder.find_pairs(dataset, 0.3), [])
        samples = folder.Pictures(pairs, classes=3)
        for index in range(len(samples)):
            samples.read(index)


@pytest.mark.parametrize("workers", (0, 1))
def test_a_mistake_in_the_data_is_told_once_and_without_a_traceback(
    workers, dataset, tmp_path
) -> None:
    arguments = ("--data", dataset, "--out", tmp_path / "out", "--classes", 2, "--crop", 24)
    done = run(*torchrun(2), RECIPE, *arguments, "--batch", 2, "--workers", workers, succeeds=False)
    told = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(told) == 1
    assert "png has class 2: expected 0 to 1, or 255 for what is no class" in told[0]
    assert "segmentation/" not in done.stderr.replace(RECIPE, "")


def test_crops_are_moved_and_mirrored_with_their_masks() -> None:
    data = example("segmentation.data")

    class Ramp:
        """Each pixel has its own value, and the mask tells which."""

        channels, classes = 1, 250

        def __len__(self) -> int:
            return 1

        def read(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            mask = torch.arange(1, 1 + 12 * 20).view(12, 20)
            return mask[None].float(), mask

    seen = set()
    for flip in (False, True):
        crops = data.Crops(Ramp(), size=16, flip=flip)
        for _ in range(40):
            image, mask = crops[0]
            assert image.shape == (1, 16, 16)
            assert mask.shape == (16, 16)
            inside = mask != data.IGNORED
            assert image[0][inside].equal(mask[inside].float())
            assert not image[0][~inside].any()  # padding
            row = mask[inside].view(-1, inside.any(0).sum())[0]
            seen.add((flip, bool(row[0] > row[-1]), int(mask[8, 8])))
    assert {(flip, mirrored) for flip, mirrored, _ in seen} == {
        (False, False),
        (True, False),
        (True, True),
    }
    assert len(seen) > 10
