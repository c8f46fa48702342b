"""The samples: pages of handwritten digits or a folder; whole, or cropped at random to train on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from segmentation.launch import Refusal, World, uninterrupted
from segmentation.log import counted
from segmentation.seeds import mixed, seed_worker

#: The value of a mask's pixels that are no class.
IGNORED = 255


class Samples(Protocol):
    """Images with a class for every pixel."""

    channels: int
    classes: int
    names: list[str]

    def __len__(self) -> int: ...

    def read(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns an image, float32 ``(channels, H, W)``, and its classes, int64 ``(H, W)``."""
        ...


class DigitPages:
    """Pages of handwritten digits, which scikit-learn brings along."""

    channels = 1

    def __init__(self, train: bool, count: int) -> None:
        try:
            from digits import CLASSES, Pages
        except ModuleNotFoundError as error:
            raise Refusal(
                f"handwritten digits need {error.name} (digits.py of the examples, and pip install "
                "scikit-learn): give --data DIR to train on images of your own"
            ) from None
        self.classes = CLASSES
        self.names = [f"page_{number:04}" for number in range(count)]
        self.images, self.masks = Pages(train).draw(seed=0, step=0, pages=range(count))

    def __len__(self) -> int:
        return len(self.images)

    def read(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.masks[index]


class Crops(Dataset):
    """Samples to train on: a part of each, anywhere, and mirrored or not.

    Args:
        size: of a crop. An image that is not larger is moved about on a page by a tenth of it.
        flip: whether left and right may be exchanged.
    """

    def __init__(self, samples: Samples, size: int, flip: bool) -> None:
        self.samples, self.size, self.flip = samples, size, flip

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, mask = self.samples.read(index)
        room = self.size + self.size // 10
        height, width = (max(0, room - side) for side in mask.shape)
        above, left = _below(height + 1), _below(width + 1)
        image, mask = _padded(image, mask, (left, width - left, above, height - above))
        top, left = (_below(side - self.size + 1) for side in mask.shape)
        image = image[:, top : top + self.size, left : left + self.size]
        mask = mask[top : top + self.size, left : left + self.size]
        if self.flip and _below(2):
            image, mask = image.flip(-1), mask.flip(-1)
        return image, mask


class Whole(Dataset):
    """Samples to evaluate on: whole, padded to what the net can take, with their own size.

    Args:
        multiple: of which the net needs the sides to be.
    """

    def __init__(self, samples: Samples, multiple: int) -> None:
        self.samples, self.multiple = samples, multiple

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, tuple[int, int]]:
        image, mask = self.samples.read(index)
        height, width = mask.shape
        below, right = -height % self.multiple, -width % self.multiple
        image, mask = _padded(image, mask, (0, right, 0, below))
        return image, mask, (height, width)


def _below(limit: int) -> int:
    return int(torch.randint(limit, ()))


def _padded(image: Tensor, mask: Tensor, pad: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    return F.pad(image, pad), F.pad(mask, pad, value=IGNORED)


def batches_of(loader: DataLoader) -> Iterator:
    """Iterates over a loader; its workers start when the first batch is asked for."""
    with uninterrupted():
        batches = iter(loader)
    yield from batches


class TrainingLoader:
    """The batches of one rank, in another order each epoch.

    Args:
        batch: images a batch of this rank.
        seed: of the run; rank, worker and epoch are mixed into it.
    """

    def __init__(
        self, dataset: Dataset, world: World, *, batch: int, workers: int, seed: int
    ) -> None:
        self.seed, self.rank = seed, world.rank
        images = len(dataset)
        if images < world.size:
            raise Refusal(
                f"there are {counted(images, 'training image')} for {world.size} ranks: start "
                "fewer ranks"
            )
        # drop_last, twice: all ranks have equally many batches, all of them full. Without it the
        # sampler repeats samples, and a rank could be left with a single one to normalise over.
        self.sampler: DistributedSampler = DistributedSampler(
            dataset, world.size, world.rank, shuffle=True, seed=seed, drop_last=True
        )
        self.loader: DataLoader = DataLoader(
            dataset,
            batch,
            sampler=self.sampler,
            drop_last=True,
            num_workers=workers,
            worker_init_fn=seed_worker,
            generator=torch.Generator(),
            pin_memory=world.device.type == "cuda",
        )
        if not len(self.loader):
            raise Refusal(
                f"a rank has {counted(len(self.sampler), 'training image')}, too few for one batch "
                f"of {batch}: give a smaller --batch, or start fewer ranks"
            )

    def __len__(self) -> int:
        return len(self.loader)

    def epoch(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        self.sampler.set_epoch(number)  # or every epoch has the order of the first
        self.loader.generator.manual_seed(mixed(self.seed, self.rank, number))
        yield from batches_of(self.loader)
