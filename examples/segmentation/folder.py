"""A folder of images and masks: which belong together, which are for evaluation, how many classes.

    DIR/train/images/NAME.jpg or .png    DIR/train/masks/NAME.png
    DIR/val/images/...                   DIR/val/masks/...

or DIR/images and DIR/masks, of which a part is set aside by name. A mask is a PNG, grey or with a
palette, as large as its image, whose values are the classes; 255 is no class.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from segmentation.data import IGNORED
from segmentation.launch import Refusal

SUFFIXES = {".png", ".jpg", ".jpeg"}
LAYOUT = "expected DIR/images and DIR/masks, or these two in DIR/train and in DIR/val"


class Pair(NamedTuple):
    image: Path
    mask: Path


class Pictures:
    """The images and masks of some pairs, three channels."""

    channels = 3

    def __init__(self, pairs: list[Pair], classes: int) -> None:
        self.pairs = pairs
        self.classes = classes
        self.names = [pair.image.stem for pair in pairs]

    def __len__(self) -> int:
        return len(self.pairs)

    def read(self, index: int) -> tuple[Tensor, Tensor]:
        from PIL import Image

        pair = self.pairs[index]
        with Image.open(pair.image) as opened:
            image = np.asarray(opened.convert("RGB"), dtype=np.float32)
        mask = read_mask(pair.mask)
        if image.shape[:2] != mask.shape:
            (height, width), (mask_height, mask_width) = image.shape[:2], mask.shape
            raise Refusal(
                f"{pair.mask} is {mask_width} x {mask_height} pixels, "
                f"and its image {pair.image} is {width} x {height}"
            )
        check_classes(pair.mask, mask, self.classes)
        return torch.from_numpy(image).permute(2, 0, 1) / 255 - 0.5, torch.from_numpy(mask)


def find_pairs(folder: Path, val_fraction: float) -> tuple[list[Pair], list[Pair]]:
    """Finds the images with their masks, those to train on and those to evaluate on."""
    if not folder.is_dir():
        raise Refusal(f"--data {folder}: there is no such folder")
    parts = [folder / "train", folder / "val"]
    if all(part.is_dir() for part in parts):
        training, held_out = (_pairs(part) for part in parts)
        return training, held_out
    if not (folder / "images").is_dir():
        there = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
        raise Refusal(f"--data {folder}: {LAYOUT}; there is {there}")
    pairs = _pairs(folder)
    if len(pairs) < 2:
        raise Refusal(f"--data {folder}: one image cannot be divided into training and evaluation")
    # In the order of a hash: by name, as pictures in a row are often alike; and never by chance.
    by_hash = sorted(pairs, key=lambda pair: hashlib.sha256(pair.image.stem.encode()).digest())
    count = min(max(1, round(len(pairs) * val_fraction)), len(pairs) - 1)
    return sorted(by_hash[count:]), sorted(by_hash[:count])


def _pairs(part: Path) -> list[Pair]:
    images, masks = part / "images", part / "masks"
    for folder in (images, masks):
        if not folder.is_dir():
            raise Refusal(f"there is no folder {folder}: {LAYOUT}")
    pairs = {}
    for image in sorted(images.iterdir()):
        if image.suffix.lower() not in SUFFIXES:
            continue
        mask = masks / f"{image.stem}.png"
        if not mask.is_file():
            there = ", ".join(sorted(path.name for path in masks.iterdir())[:4]) or "nothing"
            raise Refusal(f"{image} has no mask {mask}; in that folder there is {there}")
        if image.stem in pairs:
            raise Refusal(f"{image} and {pairs[image.stem].image} would share one mask, {mask}")
        pairs[image.stem] = Pair(image, mask)
    if not pairs:
        raise Refusal(f"there are no images in {images}: expected .png or .jpg")
    return list(pairs.values())


def count_classes(pairs: list[Pair]) -> int:
    """The number of classes: one more than the largest in any mask. Reads all of them."""
    largest = 0
    for pair in pairs:
        mask = read_mask(pair.mask)
        check_classes(pair.mask, mask, IGNORED)
        largest = max(largest, int(mask[mask != IGNORED].max(initial=0)))
    return largest + 1


def read_mask(path: Path) -> np.ndarray:
    from PIL import Image

    with Image.open(path) as opened:
        if opened.mode not in ("1", "L", "P", "I", "I;16"):
            raise Refusal(
                f"{path} is a picture in {opened.mode}: expected a mask, grey or with a palette, "
                "whose values are the classes"
            )
        return np.array(opened, dtype=np.int64)


def check_classes(path: Path, mask: np.ndarray, classes: int) -> None:
    wrong = (mask != IGNORED) & ((mask >= classes) | (mask < 0))
    if wrong.any():
        raise Refusal(
            f"{path} has class {mask[wrong].max()}: expected 0 to {classes - 1}, "
            f"or {IGNORED} for what is no class"
        )


def write_masks(folder: Path, names: list[str], masks: list[Tensor]) -> None:
    """Writes masks as PNG files whose values are the classes."""
    from PIL import Image

    folder.mkdir(exist_ok=True)
    for name, mask in zip(names, masks, strict=True):
        Image.fromarray(mask.numpy()).save(folder / f"{name}.png")
