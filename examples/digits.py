"""Pages of real handwritten digits, with a class for every pixel.

The digits are the 1,797 scans of 8 x 8 pixels (Alpaydin & Kaynak, UCI 1998) that scikit-learn ships
in its package, so nothing is downloaded. A page shows several of them, enlarged, at random places
that do not overlap; pages differ in paper, ink and grain, as photographs of pages do.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

#: Class 0 is the paper, class d + 1 the digit d.
CLASSES = 11

#: Side of a square page in pixels.
PAGE = 40

#: How many digits a page shows, and their least and largest side in pixels.
DIGITS = 5
SIDES = (10, 14)

#: Where a digit is darker than this (paper 0, ink 1), the pixel belongs to the digit.
INK = 0.35


class Pages:
    """Draws pages from one part of the digits, so that no test digit is seen in training.

    Args:
        train: draw from the training digits (three quarters of them), else from the held-out ones.
    """

    def __init__(self, train: bool) -> None:
        scans, values = load_digits(return_X_y=True)
        # The split does not follow the seed of a run: every run is judged by the same digits.
        scans_train, scans_test, values_train, values_test = train_test_split(
            scans, values, test_size=0.25, random_state=0, stratify=values
        )
        self.values = values_train if train else values_test
        scans = scans_train if train else scans_test
        self.ink = torch.tensor(scans, dtype=torch.float32).view(-1, 1, 8, 8) / 16

    def draw(self, seed: int, step: int, pages: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Draws some pages of a step.

        A page depends on (seed, step, its number in the global batch) alone. So the ranks together
        draw the very batch that one process draws by itself.

        Args:
            seed: of the run.
            step: of the training.
            pages: the numbers of the pages in the global batch.

        Returns:
            Images, float32 ``(len(pages), 1, PAGE, PAGE)``, and their classes, int64
            ``(len(pages), PAGE, PAGE)``.
        """
        drawn = [self._page(np.random.default_rng((seed, step, page))) for page in pages]
        images, classes = zip(*drawn, strict=True)
        return torch.stack(images), torch.stack(classes)

    def _page(self, random: np.random.Generator) -> tuple[Tensor, Tensor]:
        ink = torch.zeros(1, PAGE, PAGE)
        classes = torch.zeros(PAGE, PAGE, dtype=torch.int64)
        taken = np.zeros((PAGE, PAGE), dtype=bool)
        for which in random.integers(len(self.ink), size=DIGITS):
            side = int(random.integers(SIDES[0], SIDES[1] + 1))
            place = _free_place(random, taken, side)
            if place is None:
                continue  # a crowded page has a digit less
            digit = F.interpolate(self.ink[which, None], size=(side, side), mode="bilinear")[0, 0]
            ink[0][place] = digit
            classes[place] = torch.where(digit > INK, int(self.values[which]) + 1, 0)
            # With a margin, or two digits of one kind could look like a third.
            top, left = place[0].start, place[1].start
            taken[max(0, top - 1) : top + side + 1, max(0, left - 1) : left + side + 1] = True
        paper, strength = random.uniform(0.0, 0.4), random.uniform(0.5, 1.0)
        grain = torch.from_numpy(random.normal(0.0, 0.08, ink.shape).astype(np.float32))
        return paper + strength * ink + grain, classes


def _free_place(
    random: np.random.Generator, taken: np.ndarray, side: int
) -> tuple[slice, slice] | None:
    for _ in range(100):
        top, left = random.integers(PAGE - side + 1, size=2)
        place = slice(top, top + side), slice(left, left + side)
        if not taken[place].any():
            return place
    return None
