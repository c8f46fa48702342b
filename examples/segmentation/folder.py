"""A folder of images and masks: which belong together, and which are for evaluation.

    DIR/train/images/NAME.jpg or .png    DIR/train/masks/NAME.png
    DIR/val/images/...                   DIR/val/masks/...

or DIR/images and DIR/masks, of which a part is set aside by name. A mask is a PNG, grey or with a
palette, as large as its image, whose values are the classes; 255 is no class.

What a net is given (``read_image``): red, green and blue from -0.5 to 0.5, of the image as viewers
show it, which is upright also where a camera has stored it on its side (EXIF).
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from segmentation.launch import Refusal, World
from segmentation.log import Log
from segmentation.masks import (
    check_classes,
    check_size,
    count_classes,
    opened,
    read_mask,
    survey,
    unreadable,
)

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
        image_path, mask_path = self.pairs[index]
        image, mask = read_image(image_path), read_mask(mask_path)
        # Again, as files may have changed since all masks were read.
        if image.shape[1:] != mask.shape:
            check_size(image_path, mask_path, mask.shape)
        check_classes(mask_path, mask, self.classes)
        return image, torch.from_numpy(mask)


def read_image(path: Path) -> Tensor:
    """Reads an image as a net is given it: float32 ``(3, H, W)``, from -0.5 to 0.5, upright."""
    with opened(path) as picture:
        from PIL import ImageOps

        try:
            upright = ImageOps.exif_transpose(picture).convert("RGB")
        except (OSError, SyntaxError, ValueError) as error:
            raise unreadable(path, error) from None
        image = np.array(upright, dtype=np.float32)
    return torch.from_numpy(image).permute(2, 0, 1) / 255 - 0.5


def load(args: argparse.Namespace, world: World, log: Log) -> tuple[Pictures, Pictures]:
    """The pictures to train on and those to evaluate on, once all masks are known to be right."""
    pairs = find_pairs(args.data, args.val_fraction, log.warn)
    # That reads all masks, which may take longer than the timeout.
    found = world.on_rank_0(lambda: survey([*pairs[0], *pairs[1]], args.classes))
    classes = count_classes(found, args.classes, log.warn)
    if args.crop > found["longest"]:
        log.warn(f"--crop {args.crop}: the longest side of all images is {found['longest']} pixels")
    training, held_out = (Pictures(part, classes) for part in pairs)
    return training, held_out


def find_pairs(
    folder: Path, val_fraction: float, warn: Callable[[str], None]
) -> tuple[list[Pair], list[Pair]]:
    """Finds the images with their masks, those to train on and those to evaluate on.

    Args:
        warn: told of what is left out.
    """
    if not folder.is_dir():
        raise Refusal(f"--data {folder}: there is no such folder")
    parts = [folder / "train", folder / "val"]
    divided = all(part.is_dir() for part in parts)
    if (folder / "images").is_dir() and any(part.is_dir() for part in parts):
        used, unused = ("train and val", "images") if divided else ("images", "train or val alone")
        warn(f"--data {folder}: {used} are read there, and {unused} not")
    if divided:
        training, held_out = (_pairs(part, warn) for part in parts)
        return training, held_out
    if not (folder / "images").is_dir():
        raise Refusal(f"--data {folder}: {LAYOUT}; there is {_some(folder)}")
    pairs = _pairs(folder, warn)
    if len(pairs) < 2:
        raise Refusal(f"--data {folder}: one image cannot be divided into training and evaluation")
    # In the order of a hash: by name, as pictures in a row are often alike; and never by chance.
    by_hash = sorted(pairs, key=lambda pair: hashlib.sha256(pair.image.stem.encode()).digest())
    count = min(max(1, round(len(pairs) * val_fraction)), len(pairs) - 1)
    return sorted(by_hash[count:]), sorted(by_hash[:count])


def visible(folder: Path) -> list[Path]:
    """What is in a folder, but hidden files, which systems and editors leave behind."""
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def find_images(folder: Path) -> list[Path]:
    """The images in a folder, not in those below it."""
    found = [path for path in visible(folder) if path.suffix.lower() in SUFFIXES]
    if not found:
        raise Refusal(
            f"there are no images in {folder}: expected .png or .jpg, in the folder itself, not in "
            f"one below it; there is {_some(folder)}"
        )
    return found


def _some(folder: Path) -> str:
    return ", ".join(path.name for path in visible(folder)[:8]) or "nothing"


def _pairs(part: Path, warn: Callable[[str], None]) -> list[Pair]:
    images, masks = part / "images", part / "masks"
    for folder in (images, masks):
        if not folder.is_dir():
            raise Refusal(f"there is no folder {folder}: {LAYOUT}")
    by_suffix = sorted(visible(masks), key=lambda path: path.suffix.lower() == ".png")
    there = {path.stem: path for path in by_suffix}  # of one name the PNG, as it comes last
    pairs: dict[str, Pair] = {}
    for image in find_images(images):
        name = image.stem
        if name not in there:
            raise Refusal(
                f"{image} has no mask {masks / name}.png; in that folder there is {_some(masks)}"
            )
        if there[name].suffix.lower() != ".png":
            raise Refusal(
                f"{there[name]} is no mask: save it as PNG, as JPG changes the values of pixels"
            )
        if name in pairs:
            raise Refusal(f"{image} and {pairs[name].image} would share one mask, {there[name]}")
        pairs[name] = Pair(image, there[name])
    for folder, unused in (
        (images, [path for path in visible(images) if path.suffix.lower() not in SUFFIXES]),
        (masks, [path for stem, path in there.items() if stem not in pairs]),
    ):
        if unused:
            names = ", ".join(path.name for path in unused[:4])
            what = "no .png or .jpg" if folder == images else "masks without an image"
            warn(f"{folder}: left out {len(unused)} that are {what}: {names}")
    return list(pairs.values())
