"""Masks: PNG files, grey or with a palette, whose values are the classes; 255 is no class."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from segmentation.data import IGNORED
from segmentation.launch import Refusal


def opened(path: Path) -> Any:
    """Opens a picture; reads no more than its header."""
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise Refusal("images need Pillow: pip install pillow") from None
    try:
        return Image.open(path)
    except OSError as error:
        raise unreadable(path, error) from None


def unreadable(path: Path, error: Exception) -> Refusal:
    return Refusal(f"{path}: cannot be read ({error})")


def upright_size(picture: Any) -> tuple[int, int]:
    """Width and height of a picture as viewers show it; a camera may have stored it on its side."""
    width, height = picture.size
    return (height, width) if orientation(picture) >= 5 else (width, height)


def orientation(picture: Any) -> int:
    """How a picture is stored, 1 where upright and from 5 where on its side."""
    # Without that question getexif() would read all of a PNG.
    return picture.getexif().get(0x0112, 1) if "exif" in picture.info else 1


def read_mask(path: Path) -> np.ndarray:
    with opened(path) as picture:
        if picture.mode not in ("1", "L", "P", "I", "I;16"):
            raise Refusal(
                f"{path} is a picture in {picture.mode}: expected a mask, grey or with a palette, "
                "whose values are the classes. Convert its colours to the numbers of the classes"
            )
        try:
            return np.array(picture, dtype=np.int64)
        except (OSError, SyntaxError, ValueError) as error:
            raise unreadable(path, error) from None


def check_classes(path: Path, mask: np.ndarray, classes: int) -> None:
    wrong = (mask != IGNORED) & ((mask >= classes) | (mask < 0))
    if wrong.any():
        raise Refusal(
            f"{path} has class {mask[wrong].max()}: expected 0 to {classes - 1}, "
            f"or {IGNORED} for what is no class"
        )


def check_size(image: Path, mask: Path, mask_shape: tuple[int, ...]) -> tuple[int, int]:
    """Refuses a mask that is not as large as its image; returns their width and height."""
    with opened(image) as picture:
        size, stored = upright_size(picture), orientation(picture)
    height, width = mask_shape
    if (width, height) == size:
        return size
    told = f"{mask} is {width} x {height} pixels, and its image {image} is {size[0]} x {size[1]}"
    if (height, width) == size:
        told += (
            f". One of them lies on its side: the EXIF orientation of the image is {stored}, and "
            "images are taken upright, as viewers show them"
        )
    raise Refusal(told)


def survey(pairs: Iterable[tuple[Path, Path]], classes: int | None) -> dict[str, Any]:
    """Reads all masks; returns their values but 255, and the longest side of all images.

    And how many masks there are, and how many with 0 and 255 alone.

    Refuses by name a mask that is no mask, has another size than its image, or has a value that is
    no class.
    """

    def look(pair: tuple[Path, Path]) -> tuple[np.ndarray, int]:
        image, mask = pair
        values = read_mask(mask)
        check_classes(mask, values, classes or IGNORED)
        return np.unique(values), max(check_size(image, mask, values.shape))

    found: set[int] = set()
    longest = count = doubtful = 0
    with ThreadPoolExecutor() as threads:
        for values, side in threads.map(look, pairs):
            found.update(values.tolist())
            longest = max(longest, side)
            count += 1
            doubtful += values.tolist() == [0, IGNORED]
    return {
        "values": sorted(found - {IGNORED}),
        "ignored": IGNORED in found,
        "longest": longest,
        "count": count,
        "doubtful": doubtful,
    }


def count_classes(found: dict[str, Any], classes: int | None, warn: Callable[[str], None]) -> int:
    """How many classes there are, as given or as found by ``survey``; refuses what makes no sense.

    Args:
        classes: how many the user expects, if that was said.
        warn: told of classes that do not occur, and of masks that look as if 255 were one.
    """
    values = found["values"]
    if len(values) < 2:
        held = " and ".join(map(str, [*values, *[IGNORED] * found["ignored"]]))
        remedy = (
            f", and {IGNORED} is no class: save the foreground as 1" if found["ignored"] else ""
        )
        raise Refusal(
            f"the masks hold only {held}{remedy or ': there have to be two classes or more'}"
        )
    if found["doubtful"]:
        warn(
            f"{found['doubtful']} of {found['count']} masks hold only 0 and {IGNORED}, and "
            f"{IGNORED} is no class: where it means a foreground, save that as its class"
        )
    missing = sorted(set(range(classes or values[-1] + 1)) - set(values))
    if missing and classes is None:
        raise Refusal(
            f"the masks hold the values {_few(values)}, and classes are 0, 1, 2, ...: save them "
            f"so, or give --classes {values[-1] + 1} to train with classes that do not occur"
        )
    if missing:
        warn(f"no pixel of any mask has class {_few(missing)}")
    return classes or len(values)


def _few(numbers: list[int]) -> str:
    told = ", ".join(map(str, numbers[:8]))
    return told if len(numbers) <= 8 else f"{told}, ... {numbers[-1]}"


def write_mask(path: Path, mask: np.ndarray) -> None:
    """Writes a PNG whose values are the classes and whose palette makes them visible."""
    from PIL import Image

    picture = Image.fromarray(mask)
    picture.putpalette([part for value in range(256) for part in _colour(value)])
    picture.save(path)


def _colour(value: int) -> list[int]:
    """The colour of a class in PASCAL VOC, whose bits are dealt to red, green and blue in turn."""
    return [
        sum((value >> (3 * bit + part) & 1) << (7 - bit) for bit in range(3)) for part in range(3)
    ]
