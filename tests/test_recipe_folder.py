"""The training recipe on a folder of images and masks, and what it says of a wrong one."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

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
    """A square, classes 1 and 2, on a ground of class 0, with a border that is no class."""
    image = np.zeros((height, width, 3), np.uint8)
    mask = np.zeros((height, width), np.uint8)
    image[4:12, 4:12], mask[4:12, 4:12] = (200, 90, 40), 2
    mask[4:12, 4:8] = 1
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
    assert "3 images a rank, 3 classes, 1 step an epoch" in done.stdout

    folder = example("segmentation.folder")
    held_out = folder.find_pairs(dataset, 0.3, print)[1]
    assert len(held_out) == 3
    predicted = sorted((out / "predictions").iterdir())
    assert [path.stem for path in predicted] == [pair.image.stem for pair in held_out]
    read_mask = example("segmentation.masks").read_mask
    # The same net as in best.pt, which the other script takes.
    images = [pair.image for pair in held_out]
    example("predict_segmentation").predict(out / "best.pt", images, tmp_path / "labels")
    for path, pair in zip(predicted, held_out, strict=True):
        assert read_mask(path).shape == read_mask(pair.mask).shape
        assert read_mask(path).max() < 3
        assert np.array_equal(read_mask(path), read_mask(tmp_path / "labels" / path.name))
        with optional("PIL.Image").open(path) as picture:
            assert picture.mode == "P"
            assert picture.getpalette()[:9] == [0, 0, 0, 128, 0, 0, 0, 128, 0]


def test_what_is_held_out_depends_on_the_names_alone(dataset) -> None:
    folder = example("segmentation.folder")
    training, held_out = folder.find_pairs(dataset, 0.3, print)
    assert (len(training), len(held_out)) == (7, 3)
    assert not set(training) & set(held_out)
    assert folder.find_pairs(dataset, 0.3, print) == (training, held_out)
    # One image more or less moves none of the others but the one at the border.
    write_sample(dataset, "another")
    assert len(set(held_out) - set(folder.find_pairs(dataset, 0.3, print)[1])) <= 1


def test_two_folders_tell_what_is_held_out(tmp_path) -> None:
    write_sample(tmp_path / "train", "a")
    write_sample(tmp_path / "val", "b")
    training, held_out = example("segmentation.folder").find_pairs(tmp_path, 0.5, print)
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


def load(folder: Path, classes: int | None = None) -> tuple[list, list[str]]:
    """All samples of a folder, read, and the warnings on the way."""
    warnings: list[str] = []
    args = SimpleNamespace(data=folder, val_fraction=0.3, classes=classes, crop=24)
    world = SimpleNamespace(on_rank_0=lambda function: function())
    parts = example("segmentation.folder").load(args, world, SimpleNamespace(warn=warnings.append))
    return [part.read(index) for part in parts for index in range(len(part))], warnings


def without(name: str, to: str = "elsewhere") -> Callable[[Path], None]:
    return lambda folder: next(folder.glob(name)).rename(folder / to)


def with_mask(values: np.ndarray) -> Callable[[Path], None]:
    return lambda folder: write(folder / "masks/p0.png", values)


def with_all_masks(values: dict[int, int]) -> Callable[[Path], None]:
    """With other values in the place of 0, 1, 2 and 255."""

    def change(folder: Path) -> None:
        for path in (folder / "masks").iterdir():
            mask = example("segmentation.masks").read_mask(path)
            write(path, np.vectorize(values.get)(mask).astype(np.uint8))

    return change


def truncate(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_bytes(path.read_bytes()[:-40])

    return change


def turn(name: str) -> Callable[[Path], None]:
    """As a camera does that is held on its side."""

    def change(folder: Path) -> None:
        pictures = optional("PIL.Image")
        with pictures.open(folder / name) as image:
            exif = image.getexif()
            exif[0x0112] = 6
            image.save(folder / name, exif=exif)

    return change


@pytest.mark.parametrize(
    ("spoil", "message"),
    (
        (lambda folder: folder.rename(folder.with_name("other")), "data: there is no such folder"),
        (without("images"), "expected DIR/images and DIR/masks, .* there is elsewhere, masks"),
        (without("masks"), "there is no folder .*masks"),
        (without("masks/p3.png"), r"p3.jpg has no mask .*p3.png; in that folder there is p0.png, "),
        (without("masks/p3.png", to="masks/p3.JPG"), "p3.JPG is no mask: save it as PNG, as JPG"),
        (lambda folder: nested(folder / "images"), "not in one below it; there is a$"),
        (with_mask(np.zeros((4, 5), np.uint8)), "p0.png is 5 x 4 pixels, .*p0.png is 31 x 20"),
        (turn("images/p1.jpg"), "p1.jpg is 21 x 30. .* its side: the EXIF .* of the image is 6"),
        (truncate("images/p1.jpg"), "images/p1.jpg: cannot be read .*truncated"),
        (truncate("masks/p1.png"), "masks/p1.png: cannot be read "),
        (with_mask(np.full((20, 31), 256, np.uint16)), "p0.png has class 256: expected 0 to 254"),
        (with_mask(np.zeros((20, 31, 3), np.uint8)), "in RGB: .* Convert its colours to the num"),
        (lambda folder: write_sample(folder, "p0", suffix=".jpg"), "would share one mask"),
        (with_all_masks({0: 0, 1: 255, 2: 255, 255: 255}), "only 0 and 255, .* foreground as 1"),
        (with_all_masks({0: 255, 1: 255, 2: 255, 255: 255}), "hold only 255, and 255 is no class"),
        (with_all_masks({0: 0, 1: 0, 2: 0, 255: 0}), "hold only 0: there have to be two classes"),
        (with_all_masks({0: 0, 1: 0, 2: 128, 255: 0}), "values 0, 128, .* --classes 129 to train"),
    ),
)
def test_a_folder_that_is_wrong_is_refused_by_name(spoil, message, dataset) -> None:
    spoil(dataset)
    with pytest.raises(example("segmentation.launch").Refusal, match=message):
        load(dataset)


def nested(folder: Path) -> None:
    below = folder.rename(folder.with_name("a"))
    folder.mkdir()
    below.rename(folder / "a")


@pytest.mark.parametrize(
    ("change", "samples", "warning"),
    (
        (lambda folder: write_sample(folder, ".p0"), 10, None),
        (lambda folder: write_sample(folder, "other", suffix=".PNG"), 11, None),
        (without("masks/p3.png", to="masks/p3.PNG"), 10, None),
        (without("images/p3.jpg"), 9, "masks: left out 1 that are masks without an image: p3.png"),
        (without("images/p3.jpg", to="images/x.tif"), 9, "1 that are no .png or .jpg: x.tif"),
        (lambda folder: write_sample(folder / "train", "a"), 10, "images are read there, and tra"),
        (with_all_masks({0: 0, 1: 0, 2: 2, 255: 0}), 10, "no pixel of any mask has class 1$"),
        (
            with_mask(np.repeat(np.uint8([[0], [255]]), (15, 5), 0).repeat(31, 1)),
            *(10, "^1 of 10 masks hold only 0 and 255, and 255 is no class"),
        ),
    ),
)
def test_what_is_left_out_is_told(change, samples, warning, dataset) -> None:
    change(dataset)
    read, warnings = load(dataset, classes=3)
    assert len(read) == samples
    if warning is None:
        assert warnings == []
    else:
        assert any(re.search(warning, told) for told in warnings)


def test_a_crop_larger_than_all_images_is_told(tmp_path) -> None:
    for name in "ab":
        write_sample(tmp_path, name, height=20, width=23)
    assert load(tmp_path)[1] == ["--crop 24: the longest side of all images is 23 pixels"]


def test_an_image_that_lies_on_its_side_is_taken_upright(dataset) -> None:
    turn("images/p1.jpg")(dataset)
    image = example("segmentation.folder").read_image(dataset / "images/p1.jpg")
    assert image.shape == (3, 30, 21)
    assert -0.5 <= image.min() < image.max() <= 0.5
    # The square of rows and columns 4 to 12, after a quarter turn clockwise.
    assert (image[0, 4:12, 21 - 12 : 21 - 4] > 0).float().mean() > 0.9
    assert (image[0] > 0).float().mean() < 0.2


@pytest.mark.parametrize("workers", (0, 1))
def test_a_mistake_in_the_data_is_told_once_and_without_a_traceback(
    workers, dataset, tmp_path
) -> None:
    for image, _ in example("segmentation.folder").find_pairs(dataset, 0.2, print)[0]:
        truncate(f"images/{image.name}")(dataset)
    arguments = ("--data", dataset, "--out", tmp_path / "out", "--crop", 24)
    done = run(*torchrun(2), RECIPE, *arguments, "--batch", 2, "--workers", workers, succeeds=False)
    told = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(told) == 1
    assert re.search(r"images/p\d\.\w+: cannot be read ", told[0])
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
